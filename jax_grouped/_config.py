"""Settings of the library, read from the environment once and changeable at run time."""

import contextlib
import os
from collections.abc import Iterator

_BACKENDS = ("auto", "xla")


class Config:
    """Settings that apply to every operation traced after they are set.

    A function that `jax.jit` has already compiled keeps the settings it was traced with.

    Attributes:
        backend: `"auto"` picks the `cuda` backend when lowering for CUDA and the `xla` backend for any other
            platform; `"xla"` picks the `xla` backend everywhere. Initial value: `JAX_GROUPED_BACKEND`, or `"auto"`.
        check: whether `group_sizes` that are negative or reach past the rows raise an error on the host. This costs a
            host callback in every operation, so it is meant for debugging. Initial value: `JAX_GROUPED_CHECK`.
    """

    def __init__(self) -> None:
        self.backend = os.environ.get("JAX_GROUPED_BACKEND", "auto")
        self.check = os.environ.get("JAX_GROUPED_CHECK", "0") not in ("", "0")

    @property
    def backend(self) -> str:
        return self._backend

    @backend.setter
    def backend(self, value: str) -> None:
        if value not in _BACKENDS:
            raise ValueError(f"backend (JAX_GROUPED_BACKEND) must be one of {_BACKENDS}, got {value!r}.")
        self._backend = value

    @contextlib.contextmanager
    def override(self, *, backend: str | None = None, check: bool | None = None) -> Iterator[None]:
        """Sets the given settings inside a `with` block and restores the earlier ones after it."""
        earlier = (self.backend, self.check)
        try:
            self.backend = earlier[0] if backend is None else backend
            self.check = earlier[1] if check is None else check
            yield
        finally:
            self.backend, self.check = earlier


config = Config()
