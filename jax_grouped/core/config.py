"""Settings of the library, read from the environment once and changeable at run time."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterator
from typing import Any

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
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        if self.backend not in _BACKENDS:
            raise ValueError(f"backend (JAX_GROUPED_BACKEND) must be one of {_BACKENDS}, got {self.backend!r}.")
        for name in ("check", "batch_invariant"):
            object.__setattr__(self, name, static_bool(name, getattr(self, name)))

    def __str__(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in dataclasses.asdict(self).items())


# The override is part of the key of JAX's own caches. A function traced under one setting isn't reused under another.
_override = jax.make_user_context(default_value=None)


@functools.cache
def from_environment() -> _Settings:
    """Returns the settings that the process starts with, read when an operation first asks for one."""

    def flag(variable: str) -> bool:
        text = os.environ.get(variable, "").strip()
        if text and text.lower() not in _FLAGS:
            raise ValueError(f"{variable} must be 0 or 1, false or true, off or on, no or yes, got {text!r}.")
        return _FLAGS[text.lower() or "0"]

    backend = os.environ.get("JAX_GROUPED_BACKEND") or "auto"
    return _Settings(backend, flag("JAX_GROUPED_CHECK"), flag("JAX_GROUPED_BATCH_INVARIANT"))


def _setting(name: str) -> Any:
    """Returns the property of `Config` that reads and changes a setting."""

    def read(config: Config) -> Any:
        return getattr(_override.value or config._changed or from_environment(), name)

    def change(config: Config, value: Any) -> None:
        process = config._changed or from_environment()
        settings = dataclasses.replace(process, **{name: value})
        if settings != process:
            config._changed = settings
            jax.clear_caches()

    return property(read, change)


class Config:
    """Settings of all operations.

    Setting an attribute holds for the process and clears JAX's caches of compiled programs. `override` holds for a
    `with` block in its thread.

    Attributes:
        backend: `"auto"` picks the `cuda` backend when lowering for CUDA and the `xla` backend for any other
            platform; `"xla"` picks the `xla` backend everywhere. Initial value: `JAX_GROUPED_BACKEND`, or `"auto"`.
        check: whether `group_sizes` that are negative or reach past the rows raise an error on the host, and so does
            an `Fp8State` that something other than its gradient has changed. This costs a host callback in every
            operation, so it is meant for debugging. Initial value: `JAX_GROUPED_CHECK`, or False.
        batch_invariant: whether the bits of a token's result, and of its gradient, depend neither on the other tokens
            nor on their number: products of one order of sums for all sizes, in place of the fastest one for each. It
            holds for 16-bit tokens without a recipe and for `Float8BlockScaling`, and needs Hopper. Other recipes and
            room that is limited by a `capacity_factor` depend on other tokens themselves, and a router's product is
            XLA's. Gradients of kernels are sums over tokens. Initial value: `JAX_GROUPED_BATCH_INVARIANT`, or False.

    Example:
        with jg.config.override(backend="xla", check=True):
            y = jg.ragged_dot(jnp.ones((16, 32)), jnp.ones((2, 32, 16)), jnp.array([10, 4]))

        assert y.shape == (16, 16)
    """

    #: Setting any other attribute is an error.
    __slots__ = ("_changed",)
    backend: str = _setting("backend")
    check: bool = _setting("check")
    batch_invariant: bool = _setting("batch_invariant")

    def __init__(self) -> None:
        self._changed: _Settings | None = None

    def __repr__(self) -> str:
        process = self._changed or from_environment()
        if not _override.value:
            return f"<jax_grouped.config: {process}>"
        return f"<jax_grouped.config: {_override.value}, by override; the process has {process}>"

    @contextlib.contextmanager
    def override(
        self, *, backend: str | None = None, check: bool | None = None, batch_invariant: bool | None = None
    ) -> Iterator[None]:
        """Replaces the given settings inside a `with` block, in this thread."""
        given = {"backend": backend, "check": check, "batch_invariant": batch_invariant}
        now = _override.value or self._changed or from_environment()
        with _override(dataclasses.replace(now, **{name: value for name, value in given.items() if value is not None})):
            yield


config = Config()
