"""Checks of public arguments at trace time. Each error names the argument, its value and the rule."""

import contextlib
from collections.abc import Sequence
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from jax_grouped.core.config import config
from jax_grouped.core.groups import FP8_ALIGNMENT, Groups, as_int32
from jax_grouped.core.values import as_array, dtype_name, known_dtype, shown
from jax_grouped.core.values import static_size as static_size
from jax_grouped.fp8.arrays import ScaledArray
from jax_grouped.fp8.recipes import Recipe, ScalingMode, canonical_fp8, is_recipe_class
from jax_grouped.kernels.activations import Activation, ActivationName, SwiGLU, is_gated
from jax_grouped.kernels.product import NARROW_TYPES

#: Rows per group, as users give them: `[E]` integers.
GroupSizes = ArrayLike | Sequence[int]

_FLOAT_TYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16), jnp.dtype(jnp.float32))
#: Dot algorithms of 16-bit and 32-bit operands. Each maps to the precision whose float32 products are as exact.
_DOT_ALGORITHMS = {
    **dict.fromkeys(["bf16_bf16_bf16", "bf16_bf16_f32"], jax.lax.Precision.DEFAULT),
    **dict.fromkeys(
        ["f16_f16_f16", "f16_f16_f32", "tf32_tf32_f32", "bf16_bf16_f32_x3"],
        jax.lax.Precision.HIGH,
    ),
    **dict.fromkeys(
        ["tf32_tf32_f32_x3", "bf16_bf16_f32_x6", "bf16_bf16_f32_x9", "f32_f32_f32"],
        jax.lax.Precision.HIGHEST,
    ),
}


def check_dtype(name: str, dtype: DTypeLike | None) -> None:
    """Raises TypeError unless `dtype` is a type that the matmuls take."""
    if known_dtype(dtype) not in _FLOAT_TYPES:
        raise TypeError(f"{name} must be bfloat16, float16 or float32, got {dtype_name(dtype)}.")


def check_kernel_type(name: str, dtype: DTypeLike) -> None:
    """Raises TypeError unless `dtype` is a type of kernels that are not quantized with a recipe."""
    if known_dtype(dtype) not in (*_FLOAT_TYPES, *NARROW_TYPES):
        narrow = ", ".join(dtype.name for dtype in NARROW_TYPES)
        raise TypeError(f"{name} must be bfloat16, float16, float32, or one of {narrow}, got {dtype_name(dtype)}.")


def check_tokens(name: str, x: jax.Array | jax.ShapeDtypeStruct) -> None:
    """Raises unless `x` is a `[T, features]` array of a supported type."""
    check_dtype(f"{name}'s type", x.dtype)
    if x.ndim != 2:
        raise ValueError(f"{name} must have shape [T, K], got {x.shape}.")


def check_kernel(
    name: str,
    kernel: jax.Array | jax.ShapeDtypeStruct,
    tokens_name: str,
    tokens: jax.Array | jax.ShapeDtypeStruct,
    *,
    may_be_narrow: bool = False,
) -> None:
    """Raises unless `kernel` is `[G, K, N]` of a supported type with the `K` of the tokens."""
    (check_kernel_type if may_be_narrow else check_dtype)(f"{name}'s type", kernel.dtype)
    if kernel.ndim != 3:
        raise ValueError(f"{name} must have shape [G, K, N], got {kernel.shape}.")
    if kernel.shape[1] != tokens.shape[1]:
        raise ValueError(
            f"{name}.shape[1] must equal {tokens_name}.shape[1] (K), "
            f"got {name} {kernel.shape} and {tokens_name} {tokens.shape}."
        )


def canonical_groups(
    group_sizes: GroupSizes,
    group_offset: ArrayLike | None,
    kernel_name: str,
    kernel: jax.Array | jax.ShapeDtypeStruct,
    capacity: int,
) -> Groups:
    """Returns `group_sizes` as `int32[E]` and `group_offset` as `int32[1]`."""
    num_groups = kernel.shape[0]
    sizes = canonical_sizes_of(group_sizes, capacity)
    total = sizes.shape[0]
    if group_offset is None and total != num_groups:
        raise ValueError(
            f"group_sizes must have one entry per group of {kernel_name}, which holds {num_groups}, "
            f"got {total} (a longer one needs group_offset)."
        )
    if total < num_groups:
        raise ValueError(f"group_sizes must have at least the {num_groups} groups of {kernel_name}, got {total}.")
    if group_offset is None:
        return Groups(sizes, jnp.zeros((1,), jnp.int32))
    offset = integers("group_offset", group_offset)
    if offset.shape not in ((), (1,)):
        raise ValueError(f"group_offset must be a scalar or have shape [1], got {offset.shape}.")
    return Groups(sizes, as_int32(offset.reshape(1), -total, total))


def canonical_sizes_of(group_sizes: GroupSizes, capacity: int) -> jax.Array:
    """Converts `group_sizes` to `int32[G]`."""
    sizes = integers("group_sizes", group_sizes)
    if sizes.ndim != 1:
        raise ValueError(f"group_sizes must have shape [E], got {sizes.shape}.")
    if config.check:
        _check_values(sizes, capacity)
    return as_int32(sizes, 0, capacity)


def integers(name: str, values: GroupSizes) -> jax.Array:
    """Converts integers to a JAX array. 64-bit host values that JAX would wrap become the nearest 32-bit values."""
    on_host = not isinstance(values, jax.Array) and not hasattr(values, "__jax_array__")
    if isinstance(values, list | tuple):
        on_host = not any(isinstance(value, jax.Array) for value in values)
    array = _host_integers(name, values) if on_host else as_array(name, values)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{name} must be of an integer type, got {array.dtype.name}.")
    return array


def _host_integers(name: str, values: GroupSizes) -> jax.Array:
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
    if array.size == 0 and not isinstance(values, np.ndarray):
        array = array.astype(np.int32)
    if array.dtype in (np.int64, np.uint64):
        limits = np.iinfo(np.int32)
        array = np.clip(array, max(limits.min, np.iinfo(array.dtype).min), limits.max).astype(np.int32)
    return jnp.asarray(array)


def canonical_precision(precision: jax.lax.PrecisionLike, dtype: DTypeLike) -> jax.lax.Precision:
    """Returns the precision of products of operands of type `dtype`."""
    if isinstance(precision, tuple | list) and len(precision) == 2:
        pair = [canonical_precision(one, dtype) for one in precision]
        return max(pair, key=lambda one: one.value)
    source = ""
    if precision is None:
        # JAX defines this attribute at run time.
        precision = jax.config.jax_default_matmul_precision or "default"  # type: ignore[attr-defined]
        source = " from jax_default_matmul_precision"
    if isinstance(precision, jax.lax.Precision):
        return precision
    name = precision.name if isinstance(precision, jax.lax.DotAlgorithmPreset) else precision
    if isinstance(name, str) and name.lower() in _DOT_ALGORITHMS:
        return _DOT_ALGORITHMS[name.lower()]
    if isinstance(name, str):
        with contextlib.suppress(ValueError):
            return jax.lax.Precision(name.lower())
    if source and jnp.dtype(dtype) != jnp.float32:
        # Multiply gradients of another type in full float32.
        return jax.lax.Precision.HIGHEST
    if isinstance(precision, Recipe) or is_recipe_class(precision):
        raise TypeError("precision must not be a recipe: jax_grouped.grouped_dense takes recipes, as recipe=.")
    raise ValueError(
        "precision must be DEFAULT, HIGH or HIGHEST (or a pair of these), or a DotAlgorithmPreset of 16-bit or 32-bit "
        f"operands, got {precision!r}{source}."
    )


def _check_values(group_sizes: jax.Array, capacity: int) -> None:
    """Raises ValueError on the host if a size is negative or the sizes exceed the rows, even in a traced program."""

    def check(group_sizes: jax.Array) -> None:
        sizes = np.asarray(group_sizes).astype(object)  # Python's integers can't wrap.
        total = sum(sizes)
        if min(sizes, default=0) < 0 or total > capacity:
            raise ValueError(
                f"group_sizes must not be negative and must add up to at most {capacity} rows, "
                f"got {sizes.tolist()} with sum {total}."
            )

    if isinstance(group_sizes, jax.core.Tracer):
        jax.debug.callback(check, group_sizes)
    else:
        check(group_sizes)


def canonical_out_spec(
    out_sharding: NamedSharding | PartitionSpec | None, *operands: jax.Array
) -> PartitionSpec | None:
    """Returns the spec of an `out_sharding`."""
    if out_sharding is None:
        return None
    if not isinstance(out_sharding, NamedSharding | PartitionSpec):
        raise TypeError(f"out_sharding must be a NamedSharding, a PartitionSpec or None, got {shown(out_sharding)}.")
    meshes = [jax.sharding.get_abstract_mesh(), *(jax.typeof(x).sharding.mesh for x in operands)]
    if isinstance(out_sharding, NamedSharding):
        meshes, out_sharding = [*meshes, out_sharding.mesh], out_sharding.spec
    known = {axis: None for mesh in meshes for axis in mesh.axis_names}
    parts = (axes if isinstance(axes, tuple) else (axes,) for axes in out_sharding)
    named = [axis for part in parts for axis in part if isinstance(axis, str)]
    for axis in named:
        if axis not in known or named.count(axis) > 1:
            raise ValueError(
                f"out_sharding may name each of the mesh axes {list(known)} once, got {axis!r} in {out_sharding}. An "
                "array on a mesh, or jax.set_mesh, tells what axes there are."
            )
    return out_sharding


def check_fp8_kernel(name: str, shape: tuple[int, ...]) -> None:
    """Raises ValueError unless FP8 matmuls take the feature sizes `K` and `N` of a kernel `[E, K, N]`."""
    check_fp8_features(name, shape, shape[1], "K")
    check_fp8_features(name, shape, shape[2], "N")


def check_fp8_features(name: str, shape: tuple[int, ...], features: int, size: str = "quantized features") -> None:
    """Raises ValueError unless FP8 matmuls take a feature size of `size`, which follows from this shape."""
    if features % FP8_ALIGNMENT:
        raise ValueError(
            f"{size} must be a multiple of {FP8_ALIGNMENT}, got {features} from {name} {shape}; "
            "pad the feature axis with zeros."
        )


def check_scaled(scaled: ScaledArray) -> None:
    """Raises unless the arrays have the types and shapes of their layout."""
    layout = scaled.layout
    canonical_fp8("scaled.data's type", scaled.data.dtype)
    scale_dtype = jnp.dtype(jnp.float8_e8m0fnu if layout.mode == ScalingMode.MX else jnp.float32)
    if scaled.scale_inv.dtype != scale_dtype:
        raise TypeError(
            f"scaled.scale_inv must be {scale_dtype.name} with {layout.mode}, got {scaled.scale_inv.dtype.name}."
        )
    for name, array, shape in (
        ("data", scaled.data, layout.data_shape),
        ("scale_inv", scaled.scale_inv, layout.scale_shape),
        ("group_sizes", scaled.group_sizes, (layout.num_groups,)),
    ):
        if array is not None and array.shape != shape:
            hint = ""
            if name == "group_sizes" and array.ndim == 1 and array.size > layout.num_groups:
                hint = " (residuals of a call with group_offset cannot be dequantized: they hold no offset)"
            raise ValueError(f"scaled.{name} must have shape {shape} for its layout, got {array.shape}{hint}.")


def check_activation_name(activation: Activation, more: str = "") -> None:
    """Raises ValueError unless it is an activation; `more` names other values that are permitted."""
    names = get_args(ActivationName)
    if not isinstance(activation, SwiGLU) and activation not in names:
        raise ValueError(f"activation must be one of {names}, a jax_grouped.SwiGLU{more}, got {activation!r}.")


def check_activation(activation: Activation | None, x: jax.Array, activation_input: jax.Array | None) -> None:
    """Raises ValueError or TypeError unless the activation is a known one and its operands fit each other."""
    if activation is None:
        if activation_input is not None:
            raise ValueError("activation_input needs an activation.")
        return
    check_activation_name(activation, " or None")
    if activation_input is None:
        if is_gated(activation) and x.shape[-1] % 2:
            raise ValueError(f"{activation} needs an even number of features, gate and up, got x {x.shape}.")
        return
    expected = (*x.shape[:-1], 2 * x.shape[-1] if is_gated(activation) else x.shape[-1])
    if activation_input.dtype != x.dtype:
        raise TypeError(f"activation_input must have the type of x, {x.dtype.name}, got {activation_input.dtype.name}.")
    if activation_input.shape != expected:
        raise ValueError(f"activation_input must have shape {expected} for x {x.shape}, got {activation_input.shape}.")


def canonical_scale(scale: jax.Array, num_groups: int) -> jax.Array:
    """Converts `scale` to `float32[num_groups]`."""
    scale = as_array("scale", scale)
    if scale.dtype != jnp.float32:
        raise TypeError(f"scale must be float32, got {scale.dtype.name}.")
    if scale.shape != (num_groups,):
        raise ValueError(f"scale must have one entry per group, shape ({num_groups},), got {scale.shape}.")
    return scale


def canonical_flag(name: str, flag: ArrayLike | None) -> jax.Array:
    """Converts `flag` to `bool[1]`."""
    if not isinstance(flag, bool) and not hasattr(flag, "dtype"):
        raise TypeError(f"{name} must be boolean, got {shown(flag)}.")
    # NNX variables are arrays to JAX, so convert them too.
    flag = jnp.asarray(flag)
    if flag.dtype != jnp.bool_:
        raise TypeError(f"{name} must be boolean, got {flag.dtype.name}.")
    if flag.size != 1:
        raise ValueError(f"{name} must be a scalar, got shape {flag.shape}.")
    return flag.reshape(1)
