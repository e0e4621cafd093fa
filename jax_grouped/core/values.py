"""Single values among public arguments, brought to one form: each error names the argument, what it is and the rule."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike


def shown(value: object) -> str:
    """A value in an error: as it is written if that is short, or else its type."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    text = repr(value)
    return text if len(text) <= 60 and "\n" not in text else f"an object of type {type(value).__name__}"


def as_array(name: str, value: Any) -> jax.Array:
    """`value` as a JAX array.

    Raises:
        TypeError: it cannot be one.
    """
    try:
        # Also of JAX's arrays: what is differentiated outside of jax.jit may hold an array of NumPy's.
        return jnp.asarray(value)
    except (OverflowError, TypeError, ValueError) as error:
        raise TypeError(f"{name} must be an array, got {shown(value)}.") from error


def check_instance(name: str, value: object, cls: type) -> None:
    """Raises TypeError unless `value` is a `cls`, a public class of `jax_grouped.moe`."""
    if not isinstance(value, cls):
        raise TypeError(f"{name} must be a jax_grouped.moe.{cls.__name__}, got {shown(value)}.")


def static_number(name: str, value: Any) -> float:
    """`value` as a float.

    Raises:
        TypeError: it is no number, or not known when the program is traced.
    """
    try:
        if isinstance(value, str):
            raise TypeError
        return float(value)
    except (OverflowError, TypeError, ValueError):
        raise TypeError(f"{name} must be a number, known when the program is traced, got {shown(value)}.") from None


def static_bool(name: str, value: Any) -> bool:
    """`value` as a bool; raises TypeError unless it is one."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, got {shown(value)}.")
    return bool(value)


def known_dtype(dtype: DTypeLike | None) -> np.dtype | None:
    """`dtype` as a NumPy type; None if it is none."""
    try:
        return None if dtype is None else jnp.dtype(dtype)
    except TypeError:
        return None


def dtype_name(dtype: DTypeLike | None) -> str:
    """A type in an error, also one that is none."""
    known = known_dtype(dtype)
    return shown(dtype) if known is None else known.name
