"""Settings of the library, read from the environment once and changeable at run time."""

import contextlib
import dataclasses
import os
from collections.abc import Iterator

import jax

_BACKENDS = ("auto", "xla")


@dataclasses.dataclass(frozen=True)
class _Settings:
    backend: str
    check: bool
    autotune: bool

    def __post_init__(self) -> None:
        if self.backend not in _BACKENDS:
            raise ValueError(f"backend (JAX_GROUPED_BACKEND) must be one of {_BACKENDS}, got {self.backend!r}.")


# Part of the key of JAX's own caches, so that a function traced under one setting isn't reused under another.
_override = jax.make_user_context(default_value=None)


def _flag(variable: str) -> bool:
    return os.environ.get(variable, "0") not in ("", "0")


class Config:
    """Settings of all operations.

    Setting an attribute holds for the process and makes JAX forget what it has compiled. `override` holds for a `with`
    block in its thread.

    Attributes:
        backend: `"auto"` picks the `cuda` backend when lowering for CUDA and the `xla` backend for any other
            platform; `"xla"` picks the `xla` backend everywhere. Initial value: `JAX_GROUPED_BACKEND`, or `"auto"`.
        check: whether `group_sizes` that are negative or reach past the rows raise an error on the host. This costs a
            host callback in every operation, so it is meant for debugging. Initial value: `JAX_GROUPED_CHECK`.
        autotune: whether matmuls on a GPU time cuBLASLt's algorithms the first time, and use the fastest from then on,
            instead of the first that cuBLASLt names; see `jax_grouped.autotune`. Initial value: `JAX_GROUPED_AUTOTUNE`.

    Example:
        with jg.config.override(backend="xla", check=True):
            y = jg.ragged_dot(jnp.ones((16, 32)), jnp.ones((2, 32, 16)), jnp.array([10, 4]))

        assert y.shape == (16, 16)
    """

    def __init__(self) -> None:
        self._of_process = _Settings(
            backend=os.environ.get("JAX_GROUPED_BACKEND") or "auto",
            check=_flag("JAX_GROUPED_CHECK"),
            autotune=_flag("JAX_GROUPED_AUTOTUNE"),
        )

    @property
    def _settings(self) -> _Settings:
        return _override.value or self._of_process

    def _change(self, settings: _Settings) -> None:
        if settings != self._of_process:
            self._of_process = settings
            jax.clear_caches()

    @property
    def backend(self) -> str:
        return self._settings.backend

    @backend.setter
    def backend(self, value: str) -> None:
        self._change(dataclasses.replace(self._of_process, backend=value))

    @property
    def check(self) -> bool:
        return self._settings.check

    @check.setter
    def check(self, value: bool) -> None:
        self._change(dataclasses.replace(self._of_process, check=value))

    @property
    def autotune(self) -> bool:
        return self._settings.autotune

    @autotune.setter
    def autotune(self, value: bool) -> None:
        self._change(dataclasses.replace(self._of_process, autotune=value))

    @contextlib.contextmanager
    def override(
        self, *, backend: str | None = None, check: bool | None = None, autotune: bool | None = None
    ) -> Iterator[None]:
        """Replaces the given settings inside a `with` block, in this thread."""
        now = self._settings
        changed = _Settings(
            now.backend if backend is None else backend,
            now.check if check is None else check,
            now.autotune if autotune is None else autotune,
        )
        with _override(changed):
            yield


config = Config()
