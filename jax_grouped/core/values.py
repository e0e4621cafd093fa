"""Conversions of single public arguments, and helpers for differentiation rules and `jax.shard_map`.

Each error names the argument, its value and the rule. `shard_map`'s checks track the axes over which values vary.
"""

import dataclasses
import operator
from collections.abc import Callable, Collection, Hashable
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

#: Types of tokens, and of all that is computed without FP8.
FLOAT_TYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16), jnp.dtype(jnp.float32))


def shown(value: object) -> str:
    """Returns the text of a value in an error: its repr if that is short, else its type."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    text = repr(value)
    return text if len(text) <= 60 and "\n" not in text else f"an object of type {type(value).__name__}"


def repr_of_changes(options: Any) -> str:
    """Returns the call that makes this dataclass, without the fields that have their defaults: a repr of options."""
    fields = [(field, getattr(options, field.name)) for field in dataclasses.fields(options)]
    changed = [f"{field.name}={value!r}" for field, value in fields if value != field.default]
    return f"{type(options).__name__}({', '.join(changed)})"


def as_array(name: str, value: Any) -> jax.Array:
    """Converts `value` to a JAX array."""
    try:
        # Convert JAX's arrays too: a tracer of differentiation outside of jax.jit may hold a NumPy array.
        return jnp.asarray(value)
    except (OverflowError, TypeError, ValueError) as error:
        raise TypeError(f"{name} must be an array, got {shown(value)}.") from error


def as_int32(name: str, values: Any) -> jax.Array:
    """Converts integers of any type to an array of `int32`. Values beyond its range become its least or its largest."""
    on_device = [x for x in jax.tree.leaves(values) if isinstance(x, jax.Array) or hasattr(x, "__jax_array__")]
    array = as_array(name, values) if on_device else _host_array(name, values)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{name} must be of an integer type, got {array.dtype.name}.")
    if array.dtype.itemsize >= 4 and array.dtype != np.int32:
        limits = np.iinfo(np.int32)
        array = array.clip(max(limits.min, jnp.iinfo(array.dtype).min), limits.max)
    return jnp.asarray(array.astype(np.int32))


def _host_array(name: str, values: Any) -> np.ndarray:
    try:
        array = np.asarray(values)
        if array.dtype == object and all(isinstance(value, int) for value in array.flat):
            array = array.astype(np.int64)
    except OverflowError:
        raise ValueError(f"{name} must fit into 64 bits, got {shown(values)}.") from None
    except (TypeError, ValueError):
        array = np.empty((), object)
    if array.dtype.kind in "OSUMm":  # Objects, strings and times are no numbers.
        raise TypeError(f"{name} must be of an integer type, got {shown(values)}.")
    return array.astype(np.int32) if array.size == 0 and not isinstance(values, np.ndarray) else array


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


def canonical_dtype(name: str, dtype: DTypeLike | None, types: Collection[np.dtype] = FLOAT_TYPES) -> np.dtype:
    """Converts `dtype` to a NumPy type. Raises TypeError unless it is one of `types`."""
    try:
        known = None if dtype is None else jnp.dtype(dtype)
    except TypeError:
        known = None
    if known is None or known not in types:
        *names, last = [one.name for one in types]
        got = shown(dtype) if known is None else known.name
        raise TypeError(f"{name} must be {', '.join(names)} or {last}, got {got}.")
    return known


def promoted_type(*values: Any) -> np.dtype:
    """Returns the common type of arrays or types by JAX's usual promotion, also where that is set to strict."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(*values)


def axis_names(axes: Any) -> tuple[Any, ...]:
    """Returns the names of no mesh axis, None, of one, its name, or of several, a sequence."""
    return () if axes is None else (*axes,) if isinstance(axes, tuple | list) else (axes,)


def axis_size(axis_name: Hashable) -> int:
    """Returns the number of devices of the axis. Raises ValueError outside `jax.shard_map` and `jax.pmap` over it."""
    try:
        return jax.lax.axis_size(axis_name)
    except NameError:
        raise ValueError(
            f"There is no mesh axis {axis_name!r} here: call it inside jax.shard_map or jax.pmap over it."
        ) from None


def is_bound(axis_name: Hashable) -> bool:
    """Tells whether a surrounding `jax.shard_map` or `jax.pmap` maps over the axis."""
    try:
        jax.lax.axis_size(axis_name)
    except NameError:
        return False
    return True


def apply_rule(rule: Callable[..., Any], arrays: Any, spec: Hashable) -> Any:
    """Returns `rule(arrays, spec)` of a `jax.custom_vjp` function with `symbolic_zeros`."""
    try:
        return rule(arrays, spec)
    except NotImplementedError as error:
        # `jax.shard_map` outside of `jax.jit` runs no such function, unless it is a program of its own.
        if "symbolic_zeros" not in str(error):
            raise
    return jax.jit(rule, static_argnums=1)(arrays, spec)


def varying_axes(x: jax.Array) -> frozenset[Any]:
    """Returns the mesh axes over which `x` differs between devices; none outside `jax.shard_map`."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def is_tracked(axis_name: Hashable) -> bool:
    """Tells whether JAX tracks what varies over the axis: then the transpose of a sum over it is the identity."""
    return {*axis_names(axis_name)} <= varying_axes(jax.lax.axis_index(axis_name))


def added_axes(known: frozenset[Any], *arrays: Any) -> tuple[Any, ...]:
    """Returns the mesh axes over which arrays of these trees vary, without those that are known."""
    return tuple(sorted(frozenset().union(*map(varying_axes, jax.tree.leaves(arrays))) - known, key=str))


def vary_alike(*arrays: Any) -> tuple[Any, ...]:
    """Marks all arrays of these trees as varying over every mesh axis over which any of them varies.

    The transpose of the mark is a sum over the added axes. So, with split tokens, a replicated array gets the sum of
    all devices' gradients, as with every operation of JAX. The sum is in the type of the array: mark small parameters
    in their `sum_dtype`, and leave kernels to the rules that compute their gradients.
    """
    leaves, structure = jax.tree.flatten(arrays)
    axes = frozenset().union(*map(varying_axes, leaves))
    added = [tuple(sorted(axes - varying_axes(x), key=str)) for x in leaves]
    marked = [jax.lax.pcast(x, more, to="varying") if more else x for x, more in zip(leaves, added, strict=True)]
    return tuple(jax.tree.unflatten(structure, marked))


def sum_dtype(dtype: np.dtype) -> np.dtype:
    """Returns the type in which gradients of this type are summed over devices: float32 in place of narrower floats."""
    return np.dtype(np.float32) if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4 else dtype


def check_choice(name: str, value: Any, choices: Any) -> None:
    """Raises ValueError unless the value is one of a `Literal`."""
    if value not in get_args(choices):
        raise ValueError(f"{name} must be one of {get_args(choices)}, got {value!r}.")


def check_type(name: str, value: object, cls: type) -> None:
    """Raises TypeError unless `value` is a `cls`, a public class of the package that its module is in."""
    if not isinstance(value, cls):
        package = cls.__module__.rpartition(".")[0]
        raise TypeError(f"{name} must be a {package}.{cls.__name__}, got {shown(value)}.")
