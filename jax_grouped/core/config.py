"""Settings of the library, read from the environment once and changeable at run time."""

import contextlib
import dataclasses
import difflib
import functools
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax

from jax_grouped.core.values import static_bool

_BACKENDS = ("auto", "xla")
#: Spellings of a boolean variable of the environment, in any case.
_FLAGS = {
    **dict.fromkeys(["0", "false", "off", "no"], False),
    **dict.fromkeys(["1", "true", "on", "yes"], True),
}


@dataclasses.dataclass(frozen=True)
class _Settings:
    backend: str
    check: bool
    autotune: bool

    def __post_init__(self) -> None:
        if self.backend not in _BACKENDS:
            raise ValueError(f"backend (JAX_GROUPED_BACKEND) must be one of {_BACKENDS}, got {self.backend!r}.")
        for name in ("check", "autotune"):
            object.__setattr__(self, name, static_bool(name, getattr(self, name)))

    def __str__(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in dataclasses.asdict(self).items())


# The override is part of the key of JAX's own caches. A function traced under one setting isn't reused under another.
_override = jax.make_user_context(default_value=None)


@functools.cache
def from_environment() -> _Settings:
    """Returns the settings that the process starts with, read when an operation first asks for one.

    Raises:
        ValueError: a variable has an unknown value; the next call raises the error again.
    """
    return _Settings(
        backend=os.environ.get("JAX_GROUPED_BACKEND") or "auto",
        check=_flag("JAX_GROUPED_CHECK"),
        autotune=_flag("JAX_GROUPED_AUTOTUNE"),
    )


def _flag(variable: str) -> bool:
    """Returns the value of a boolean variable; False if it is empty or not set."""
    text = os.environ.get(variable, "").strip()
    if text and text.lower() not in _FLAGS:
        raise ValueError(f"{variable} must be 0 or 1, false or true, off or on, no or yes, got {text!r}.")
    return _FLAGS[text.lower() or "0"]


class Config:
    """Settings of all operations.

    Setting an attribute holds for the process and clears JAX's caches of compiled programs. `override` holds for a
    `with` block in its thread. The environment variables of `check` and `autotune` are 0 or 1, false or true, off or
    on, no or yes, in upper or lower case.

    Attributes:
        backend: `"auto"` picks the `cuda` backend when lowering for CUDA and the `xla` backend for any other
            platform; `"xla"` picks the `xla` backend everywhere. Initial value: `JAX_GROUPED_BACKEND`, or `"auto"`.
        check: whether `group_sizes` that are negative or reach past the rows raise an error on the host, and so does
            an `Fp8State` that something other than its gradient has changed. This costs a host callback in every
            operation, so it is meant for debugging. Initial value: `JAX_GROUPED_CHECK`.
        autotune: whether matmuls on a GPU time cuBLASLt's algorithms the first time, and use the fastest from then on,
            instead of the first that cuBLASLt names; see `jax_grouped.autotune`. Initial value: `JAX_GROUPED_AUTOTUNE`.

    Example:
        with jg.config.override(backend="xla", check=True):
            y = jg.ragged_dot(jnp.ones((16, 32)), jnp.ones((2, 32, 16)), jnp.array([10, 4]))

        assert y.shape == (16, 16)
    """

    def __init__(self) -> None:
        self._changed: _Settings | None = None

    @property
    def _of_process(self) -> _Settings:
        return self._changed or from_environment()

    @property
    def _settings(self) -> _Settings:
        return _override.value or self._of_process

    def _change(self, settings: _Settings) -> None:
        if settings != self._of_process:
            self._changed = settings
            jax.clear_caches()

    def __repr__(self) -> str:
        overridden = f", by override; the process has {self._of_process}" if _override.value else ""
        return f"<jax_grouped.config: {self._settings}{overridden}>"

    # Hidden from type checkers, so that they accept no attribute but the settings.
    if not TYPE_CHECKING:

        def __setattr__(self, name: str, value: Any) -> None:
            if name != "_changed" and not isinstance(getattr(type(self), name, None), property):
                raise AttributeError(_unknown(name))
            super().__setattr__(name, value)

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(_unknown(name))

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


def _unknown(name: str) -> str:
    settings = [field.name for field in dataclasses.fields(_Settings)]
    hint = "".join(f" Did you mean {setting}?" for setting in difflib.get_close_matches(name, settings, n=1))
    return f"jax_grouped.config has no attribute {name!r}; its settings are {', '.join(settings)}.{hint}"


config = Config()
