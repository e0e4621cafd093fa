"""Arguments of the operations, checked and converted to one form. Errors name the argument, its value and the rule."""

import contextlib
import dataclasses
import math
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from jax_grouped.core.config import config
from jax_grouped.core.groups import FEATURE_ALIGNMENT, FP8_ALIGNMENT, Groups, round_up
from jax_grouped.core.values import (
    FLOAT_TYPES,
    as_array,
    as_int32,
    canonical_dtype,
    shown,
    vary_alike,
    varying_axes,
)
from jax_grouped.fp8.arrays import KernelCache, ScaledArray
from jax_grouped.fp8.recipes import FP8_MAX, DelayedScaling, Recipe, ScalingMode, is_recipe_class, recipe_error
from jax_grouped.fp8.state import Fp8State, check_state
from jax_grouped.kernels.activations import Activation, ActivationName, SwiGLU, is_gated
from jax_grouped.kernels.product import NARROW_TYPES, GemmSpec
from jax_grouped.kernels.quantization import QuantizeSpec

#: Rows per group, as users give them: `[E]` integers.
GroupSizes = ArrayLike | Sequence[int]

#: Types of kernels that are not quantized with a recipe.
KERNEL_TYPES = (*FLOAT_TYPES, *NARROW_TYPES)
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


def check_tokens(name: str, x: jax.Array | jax.ShapeDtypeStruct, shape: str = "[T, K]") -> None:
    """Raises unless `x` is an array of two dimensions, as `shape` names them, and of a supported type."""
    canonical_dtype(f"{name}'s type", x.dtype)
    if x.ndim != 2:
        raise ValueError(f"{name} must have shape {shape}, got {x.shape}.")


def check_kernel(
    name: str,
    kernel: jax.Array | jax.ShapeDtypeStruct,
    tokens_name: str,
    tokens: jax.Array | jax.ShapeDtypeStruct,
    *,
    types: Sequence[np.dtype] = FLOAT_TYPES,
) -> None:
    """Raises unless `kernel` is `[G, K, N]` of one of these types with the `K` of the tokens."""
    canonical_dtype(f"{name}'s type", kernel.dtype, types)
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
    num_groups: int,
    capacity: int,
) -> Groups:
    """Returns `group_sizes` as `int32[E]` and `group_offset` as `int32[1]`; `config.check` reads the capacity."""
    sizes = canonical_sizes(group_sizes, capacity)
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
    offset = as_int32("group_offset", group_offset)
    if offset.shape not in ((), (1,)):
        raise ValueError(f"group_offset must be a scalar or have shape [1], got {offset.shape}.")
    return Groups(sizes, offset.reshape(1))


def canonical_sizes(group_sizes: GroupSizes, capacity: int) -> jax.Array:
    """Converts `group_sizes` to `int32[G]`."""
    sizes = as_int32("group_sizes", group_sizes)
    if sizes.ndim != 1:
        raise ValueError(f"group_sizes must have shape [E], got {sizes.shape}.")
    if config.check:
        _check_values(sizes, capacity)
    return sizes


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


def check_fp8_features(name: str, shape: tuple[int, ...], features: int, what: str = "quantized features") -> None:
    """Raises ValueError unless FP8 matmuls take a number of features, `what` for the error, that this shape gives."""
    if features % FP8_ALIGNMENT:
        raise ValueError(
            f"{what} must be a multiple of {FP8_ALIGNMENT}, got {features} from {name} {shape}; "
            "pad the feature axis with zeros."
        )


def check_scaled(scaled: ScaledArray) -> None:
    """Raises unless the arrays have the types and shapes of their layout."""
    layout = scaled.layout
    canonical_dtype("scaled.data's type", scaled.data.dtype, FP8_MAX)
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


_E4M3, _E5M2 = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)


class Lora(NamedTuple):
    """An adapter of low rank `r` per group (arXiv:2106.09685): it adds `x @ a[g] @ b[g]` to the product of a kernel.

    Both products are in the type of `x`. Multiply `b` by the scale, such as `alpha / r`.

    Attributes:
        a: `[E, K, r]`.
        b: `[E, r, N]`, or with more axes of features.

    Example:
        lora = jg.Lora(jnp.ones((2, 32, 4)), 0.5 * jnp.ones((2, 4, 16)))

        y = jg.grouped_dense(jnp.ones((8, 32)), jnp.ones((2, 32, 16)), jnp.array([5, 3]), lora=lora)

        assert (y == 32 + 32 * 4 * 0.5).all()
    """

    a: jax.Array
    b: jax.Array

    def merge(self, kernel: jax.Array) -> jax.Array:
        """Returns `kernel + a @ b`, `[E, K, N]`, summed in float32 and rounded once, to the type of `kernel`."""
        a, b = (x.astype(jnp.float32) for x in self)
        product = jnp.matmul(a, b.reshape(*b.shape[:2], -1), precision=jax.lax.Precision.HIGHEST)
        return (kernel.astype(jnp.float32) + product.reshape(kernel.shape)).astype(kernel.dtype)


class Weights(NamedTuple):
    """Weights of one product, with what belongs to them: the arguments of `jax_grouped.grouped_dense` of these names.

    Attributes:
        kernel: `[E, K, N]`.
        bias: `[E, N]` or None.
        kernel_cache: the quantized or converted kernel, which is then read instead of `kernel`; or None.
        fp8_state: state of `DelayedScaling`; None with other recipes.
        dkernel_accumulator: array to which the gradient of `kernel` is added, or None.
        lora: an adapter, or None.

    Example:
        gate_up = jg.moe.Weights(jnp.ones((2, 32, 32)), bias=jnp.ones((2, 32)))

        y = jg.moe.grouped_mlp(jnp.ones((16, 32)), gate_up, jnp.ones((2, 16, 32)), jnp.array([10, 4]))

        assert y.shape == (16, 32)
    """

    kernel: jax.Array
    bias: jax.Array | None = None
    kernel_cache: KernelCache | jax.Array | None = None
    fp8_state: Fp8State | None = None
    dkernel_accumulator: jax.Array | None = None
    lora: Lora | None = None

    @classmethod
    def from_cache(
        cls,
        cache: KernelCache,
        bias: jax.Array | None = None,
        fp8_state: Fp8State | None = None,
        dtype: "DTypeLike" = jnp.bfloat16,
    ) -> "Weights":
        """Returns weights that are there in FP8 alone, for inference or below adapters.

        Their `kernel` is zeros of this type, which nothing reads: inside `jax.jit`, XLA does not make them.
        """
        if not isinstance(cache, KernelCache):
            raise TypeError(f"Without a kernel, kernel_cache must be a KernelCache, got {type(cache).__name__}.")
        return cls(jnp.zeros(cache.columnwise.shape, dtype), bias, cache, fp8_state)


def flat_shape(kernel: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of a kernel `[E, K, ...]` whose features are one axis."""
    return kernel if len(kernel) < 3 else (*kernel[:2], math.prod(kernel[2:]))


def arrays_like_kernel(weights: Weights) -> dict[str, jax.Array]:
    """Returns those fields of the weights that are arrays in the shape of the kernel."""
    fields = {name: getattr(weights, name) for name in ("kernel", "kernel_cache", "dkernel_accumulator")}
    return {name: value for name, value in fields.items() if not isinstance(value, KernelCache | None)}


def flat_weights(weights: Weights) -> Weights:
    """Returns weights whose features are one axis: those of parameters `[E, K, ...]` and `[E, ...]`."""
    changed: dict[str, Any] = {
        name: x.reshape(*x.shape[:2], -1) for name, x in arrays_like_kernel(weights).items() if x.ndim > 3
    }
    if weights.bias is not None and weights.bias.ndim > 2:  # Weights in FP8 alone have a flat kernel.
        changed["bias"] = weights.bias.reshape(weights.bias.shape[0], -1)
    if weights.lora is not None and weights.lora.b.ndim > 3:
        a, b = weights.lora
        changed["lora"] = Lora(a, b.reshape(flat_shape(b.shape)))
    return weights._replace(**changed) if changed else weights


class Partitions(NamedTuple):
    """Specs of the types of plain arrays, sharded over `Explicit` mesh axes only; `out` is what the caller asks for."""

    x: PartitionSpec | None = None
    kernel: PartitionSpec | None = None
    bias: PartitionSpec | None = None
    out: PartitionSpec | None = None


@dataclasses.dataclass(frozen=True)
class DenseSpec:
    """Static part of the products of one `grouped_dense`.

    With a recipe, quantization can apply activations. `input_activation` is applied to the product's tokens.
    `output_activation` is applied to the product's result later, so the backward pass gets the gradient of that
    activation's result. Rules of differentiation sum the kernel's gradient over mesh axes other than `kernel_axes`,
    those over which the kernel varies.
    """

    recipe: Recipe | None
    #: The product of the forward pass, without the layouts of quantized operands.
    fprop: GemmSpec
    kernel: jax.ShapeDtypeStruct
    tokens: int
    x_dtype: np.dtype
    bias_dtype: np.dtype | None
    input_activation: Activation | None = None
    output_activation: Activation | None = None
    kernel_axes: frozenset[Hashable] = frozenset()
    partitions: Partitions = dataclasses.field(default_factory=Partitions)

    def quantization(self, *, for_gradient: bool = False, **options: Any) -> QuantizeSpec:
        """Returns the quantization of the tokens, or of the gradient of the result, with options of `QuantizeSpec`."""
        recipe = self.recipe
        assert recipe is not None
        if for_gradient:
            options = dict(columnwise=True, dbias=self.bias_dtype is not None) | options
        return QuantizeSpec(
            recipe.token_mode,
            recipe.grad_dtype if for_gradient else recipe.fwd_dtype,
            self.kernel.shape[0],
            activation=self.output_activation if for_gradient else self.input_activation,
            **options,
            **scaling_options(recipe),
        )


def canonical_inputs(
    x: jax.Array,
    weights: Weights,
    group_sizes: GroupSizes,
    group_offset: ArrayLike | None,
    *,
    recipe: Recipe | None,
    preferred_element_type: DTypeLike | None,
    precision: jax.lax.PrecisionLike,
    out_sharding: NamedSharding | PartitionSpec | None = None,
) -> tuple[tuple[jax.Array, Weights, Groups], DenseSpec]:
    """Converts the arguments of `jax_grouped.grouped_dense`, which documents them, to arrays that vary alike."""
    x = as_array("x", x)
    weights, spec = canonical_weights(x, weights, recipe, preferred_element_type, precision)
    groups = canonical_groups(group_sizes, group_offset, "kernel", weights.kernel.shape[0], capacity=x.shape[0])
    partitions = Partitions(
        x=jax.typeof(x).sharding.spec,
        kernel=jax.typeof(weights.kernel).sharding.spec,
        bias=None if weights.bias is None else jax.typeof(weights.bias).sharding.spec,
        out=None if out_sharding is None else canonical_out_spec(out_sharding, x, weights.kernel),
    )
    return vary_inputs(x, weights, groups), dataclasses.replace(spec, partitions=partitions)


def canonical_weights(
    x: jax.Array | jax.ShapeDtypeStruct,
    weights: Weights,
    recipe: Recipe | None,
    preferred_element_type: DTypeLike | None,
    precision: jax.lax.PrecisionLike,
    name: str = "kernel",
    parts: int = 1,
) -> tuple[Weights, DenseSpec]:
    """Returns the weights as arrays, and the static part of their product with tokens such as `x`.

    Devices store the stack of kernels in `parts` equal parts: `kernel`, its cache and its accumulator are one of them,
    bias and state are whole. The bias is returned in float32, the type in which its gradient is summed over devices.
    """
    kernel, bias, cache, state, accumulator, lora = weights
    kernel = as_array(name, kernel)
    check_tokens("x", x)
    check_kernel(name, kernel, "x", x)
    whole = jax.ShapeDtypeStruct((parts * kernel.shape[0], *kernel.shape[1:]), kernel.dtype)
    out_dtype = x.dtype if preferred_element_type is None else preferred_element_type
    out_dtype = canonical_dtype("preferred_element_type", out_dtype)
    if bias is not None:
        given: Any = bias
        if isinstance(given, Recipe):
            raise TypeError("bias must be an array [G, N] or None, got a recipe: recipe is keyword-only.")
        bias = as_array("bias", bias)
        canonical_dtype("bias's type", bias.dtype)
        if bias.shape != (expected := (whole.shape[0], whole.shape[2])):
            raise ValueError(f"bias must have shape [G, N] = {expected}, got {bias.shape}.")
        bias = bias.astype(jnp.float32)
    if recipe is not None or cache is not None or state is not None:
        _check_recipe(recipe, x, name, kernel, cache, precision)
        if state is not None or isinstance(recipe, DelayedScaling):
            check_state(state, recipe, whole.shape[0])
    if accumulator is not None:
        accumulator = as_array("dkernel_accumulator", accumulator)
        check_accumulator(accumulator, kernel.shape, (kernel.dtype,))
    if lora is not None:
        lora = _checked_lora(lora, kernel.shape)
        if accumulator is not None:
            raise ValueError("dkernel_accumulator is for kernels that are trained, and those of lora are not.")
    precision = canonical_precision(precision, x.dtype if recipe is None else recipe.fwd_dtype)
    spec = DenseSpec(
        recipe=recipe,
        fprop=GemmSpec("fprop", whole.shape[0], out_dtype, precision),
        kernel=whole,
        tokens=x.shape[0],
        x_dtype=x.dtype,
        bias_dtype=None if bias is None else bias.dtype,
        kernel_axes=varying_axes(kernel),
    )
    return Weights(kernel, bias, cache, state, accumulator, lora), spec


def _checked_lora(lora: Any, kernel: tuple[int, ...]) -> Lora:
    """Returns the adapter with a rank that products take at full speed, by zeros. Raises unless it fits the kernel."""
    if not isinstance(lora, Lora):
        raise TypeError(f"lora must be a jax_grouped.Lora, got {shown(lora)}.")
    a, b = as_array("lora.a", lora.a), as_array("lora.b", lora.b)
    b = b.reshape(flat_shape(b.shape))
    canonical_dtype("lora.a's type", a.dtype)
    canonical_dtype("lora.b's type", b.dtype)
    groups, rows, features = kernel
    rank = a.shape[-1] if a.ndim == 3 else 0
    if a.shape != (groups, rows, rank) or b.shape != (groups, rank, features):
        raise ValueError(
            f"lora must have a [G, K, r] and b [G, r, N] for a kernel {kernel}, got {a.shape} and {b.shape}."
        )
    padding = round_up(rank, FEATURE_ALIGNMENT) - rank
    return Lora(jnp.pad(a, [(0, 0), (0, 0), (0, padding)]), jnp.pad(b, [(0, 0), (0, padding), (0, 0)]))


def vary_inputs(*inputs: Any) -> Any:
    """Returns arrays, trees and `Weights` that vary alike: over every mesh axis over which any array varies.

    Kernels and states stay as they are: the rules for their gradients combine those of the devices.
    """
    leaves, structure = jax.tree.flatten(inputs)
    varying = list(jax.tree.unflatten(structure, vary_alike(*leaves)))
    for i, old in enumerate(inputs):
        if not isinstance(old, Weights):
            continue
        missing = frozenset().union(*map(varying_axes, leaves)) - varying_axes(old.kernel)
        if old.dkernel_accumulator is not None and missing:
            # The kernel's gradient would be summed over these axes, and the accumulator with it.
            raise ValueError(
                f"With dkernel_accumulator kernel {old.kernel.shape} must vary over the mesh axes "
                f"{sorted(missing, key=str)} as others do, or the accumulator is summed over them too: use "
                "jax.lax.pcast(kernel, axes, to='varying') before, and sum the gradient over these axes after the last "
                "microbatch."
            )
        varying[i] = varying[i]._replace(kernel=old.kernel, fp8_state=old.fp8_state)
    return tuple(varying)


def _check_recipe(
    recipe: Recipe | None,
    x: jax.Array | jax.ShapeDtypeStruct,
    name: str,
    kernel: jax.Array,
    kernel_cache: KernelCache | jax.Array | None,
    precision: jax.lax.PrecisionLike,
) -> None:
    """Raises unless products take the recipe's types, and the recipe fits the kernel, the cache and the precision."""
    if not isinstance(recipe, Recipe | None):
        raise recipe_error(recipe)
    if recipe is None:
        if isinstance(kernel_cache, KernelCache):
            raise ValueError("kernel_cache needs a recipe, the one that it was made with.")
        if kernel_cache is not None:
            cache = as_array("kernel_cache", kernel_cache)
            got, expected = (cache.shape, cache.dtype.name), (kernel.shape, x.dtype.name)
            if got != expected:
                raise ValueError(
                    f"Without a recipe kernel_cache must be {name} in the type of x, {expected}, got {got}."
                )
        return
    if recipe.fwd_dtype != _E4M3:
        raise TypeError(
            f"recipe.fwd_dtype must be {_E4M3.name}, got {recipe.fwd_dtype} with grad_dtype {recipe.grad_dtype}: "
            f"of the two operands of a product only one may be {_E5M2.name}, and x and kernel both have fwd_dtype."
        )
    if precision is not None:
        raise ValueError(f"precision is for recipe=None; FP8 products have only one. Got {precision!r}.")
    check_fp8_kernel(name, kernel.shape)
    if not isinstance(x.shape[0], int):
        raise ValueError(
            f"With a recipe the number of tokens must be known when the program is traced, got x {x.shape}."
        )
    if kernel_cache is not None:
        check_cache("kernel_cache", kernel_cache, name, kernel.shape, recipe)


def check_accumulator(accumulator: jax.Array, shape: tuple[int, ...], dtypes: Sequence[np.dtype]) -> None:
    """Raises unless the accumulator has the kernel's shape and one of the types."""
    if accumulator.shape != shape:
        raise ValueError(f"dkernel_accumulator must have the kernel's shape {shape}, got {accumulator.shape}.")
    if accumulator.dtype not in dtypes:
        names = " or ".join(dict.fromkeys(dtype.name for dtype in dtypes))
        raise TypeError(f"dkernel_accumulator must be {names} for this kernel, got {accumulator.dtype.name}.")


def kernel_spec(shape: tuple[int, ...], recipe: Recipe) -> QuantizeSpec:
    """Returns the spec with which `recipe` quantizes kernels `[E, K, N]`, in both orientations."""
    return QuantizeSpec(
        recipe.kernel_mode,
        recipe.fwd_dtype,
        num_groups=shape[0],
        stack_rows=shape[1],
        columnwise=True,
        **scaling_options(recipe),
    )


def scaling_options(recipe: Recipe) -> dict[str, Any]:
    """Returns a recipe's options about scales, as keyword arguments of `QuantizeSpec`."""
    return dict(
        pow2_scales=getattr(recipe, "pow2_scales", False),
        amax_epsilon=getattr(recipe, "amax_epsilon", 0.0),
    )


def check_cache(name: str, cache: Any, like: str, shape: tuple[int, ...], recipe: Recipe) -> None:
    """Raises unless `cache` is what `quantize_kernel` returns for kernels `[E, K, N]` of this shape and this recipe."""
    if not isinstance(cache, KernelCache):
        raise TypeError(f"{name} must be a KernelCache, got {type(cache).__name__}.")
    spec, made_with = kernel_spec(shape, recipe), cache.recipe
    fields: list[tuple[str, Any, Any]] = []
    if made_with is not None:
        fields.append(("recipe", type(recipe).__name__, type(made_with).__name__))
        fields += [
            (f"recipe.{field}", getattr(recipe, field, None), getattr(made_with, field, None))
            for field in ("fwd_dtype", "pow2_scales", "amax_epsilon")
        ]
    for orientation, columnwise in (("rowwise", False), ("columnwise", True)):
        got, expected = getattr(cache, orientation), spec.layout((shape[0] * shape[1], shape[2]), columnwise=columnwise)
        if got is None and not columnwise:
            continue
        fields += [(f"{orientation}.dtype", spec.dtype, got.dtype), (f"{orientation}.shape", shape, got.shape)]
        fields += [
            (f"{orientation}.layout.{field}", value, getattr(got.layout, field))
            for field, value in vars(expected).items()
        ]
    for field, wanted, got in fields:
        if got != wanted:
            raise ValueError(
                f"{name} must be of the same shape and recipe as {like}: {field} must be {wanted}, got {got}."
            )
    for scaled in filter(None, (cache.rowwise, cache.columnwise)):
        check_scaled(scaled)
    if cache.amax.shape != (spec.num_groups,) or cache.amax.dtype != jnp.float32:
        raise ValueError(f"{name}.amax must be float32[{spec.num_groups}], got {jax.typeof(cache.amax)}.")
