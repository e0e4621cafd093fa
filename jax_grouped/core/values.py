"""Checks and conversions of single public arguments. Each error names the argument, its value and the rule."""

import operator
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
    """Converts `value` to a JAX array."""
    try:
        # Convert JAX's arrays too: a tracer of differentiation outside of jax.jit may hold a NumPy array.
        return jnp.asarray(value)
    except (OverflowError, TypeError, ValueError) as error:
        raise TypeError(f"{name} must be an array, got {shown(value)}.") from error


def static_size(name: str, value: Any, *, least: int = 0) -> int:
    """Converts a size that shapes depend on to an int."""
    try:
        if isinstance(value, bool | np.bool_):
            raise TypeError
        size = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, known when the program is traced, got {shown(value)}.") from None
    if size < least:
        raise ValueError(f"{name} must be at least {least}, got {size}.")
    return size


def static_number(name: str, value: Any) -> float:
    """Converts `value` to a float."""
    try:
        if isinstance(value, str) or _is_bool(value) or np.ndim(value) != 0:
            raise TypeError
        return float(value)
    except (OverflowError, TypeError, ValueError):
        raise TypeError(f"{name} must be a number, known when the program is traced, got {shown(value)}.") from None


def scalar(name: str, value: Any) -> float | jax.Array:
    """Converts `value` to a float. A scalar on the device, which need not be known, stays as it is."""
    if not isinstance(value, jax.Array):
        return static_number(name, value)
    if _is_bool(value):
        raise TypeError(f"{name} must be a number, got an array of type bool.")
    if value.ndim != 0:
        raise ValueError(f"{name} must be a scalar, got shape {value.shape}.")
    return value


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool) or getattr(value, "dtype", None) == np.bool_


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


def promoted_type(*values: Any) -> np.dtype:
    """Returns the common type of arrays or types by JAX's usual promotion, also where that is set to strict."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(*values)


def dtype_name(dtype: DTypeLike | None) -> str:
    """Returns the name of a type for an error, also of a value that is not a type."""
    known = known_dtype(dtype)
    return shown(dtype) if known is None else known.name
