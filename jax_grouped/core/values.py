"""Checks and conversions of single public arguments. Each error names the argument, its value and the rule."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike


def shown(value: object) -> str:
    """Returns the text of a value in an error: its repr if that is short, else its type."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    text = repr(value)
    return text if len(text) <= 60 and "\n" not in text else f"an object of type {type(value).__name__}"


def as_array(name: str, value: Any) -> jax.Array:
    """Converts `value` to a JAX array.

    Raises:
        TypeError: it cannot be converted.
    """
    try:
        # Convert JAX's arrays too: a tracer of differentiation outside of jax.jit may hold a NumPy array.
        return jnp.asarray(value)
    except (OverflowError, TypeError, ValueError) as error:
        raise TypeError(f"{name} must be an array, got {shown(value)}.") from error


def static_number(name: str, value: Any) -> float:
    """Converts `value` to a float.

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
    """Converts `value` to a bool. Raises TypeError unless it is one."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, got {shown(value)}.")
    return bool(value)


def known_dtype(dtype: DTypeLike | None) -> np.dtype | None:
    """Converts `dtype` to a NumPy type; returns None if it is not a type."""
    try:
        return None if dtype is None else jnp.dtype(dtype)
    except TypeError:
        return None


def dtype_name(dtype: DTypeLike | None) -> str:
    """Returns the name of a type for an error, also of a value that is not a type."""
    known = known_dtype(dtype)
    return shown(dtype) if known is None else known.name
