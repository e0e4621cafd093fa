"""Inputs of `grouped_dense` and its halves, checked and converted to one form."""

import dataclasses
import math
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from jax_grouped.core.groups import Groups
from jax_grouped.core.values import as_array, sum_dtype, vary_alike, varying_axes
from jax_grouped.fp8.arrays import KernelCache
from jax_grouped.fp8.recipes import Recipe, check_recipe, is_recipe_class
from jax_grouped.fp8.state import Fp8State, check_state
from jax_grouped.kernels.activations import Activation
from jax_grouped.kernels.product import GemmSpec, Product
from jax_grouped.kernels.quantization import QuantizeSpec
from jax_grouped.ops import checks
from jax_grouped.ops.checks import GroupSizes
from jax_grouped.ops.quantize import check_cache, scaling_options

_E4M3, _E5M2 = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)


class Weights(NamedTuple):
    """Weights of one product, with their bias, cache, state and accumulator, as in `jax_grouped.grouped_dense`.

    Attributes:
        kernel: `[E, K, N]`.
        bias: `[E, N]` or None.
        kernel_cache: the quantized or converted kernel, which is then read instead of `kernel`; or None.
        fp8_state: state of `DelayedScaling`; None with other recipes.
        dkernel_accumulator: array to which the gradient of `kernel` is added, or None.

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

    @classmethod
    def from_cache(
        cls,
        cache: KernelCache,
        bias: jax.Array | None = None,
        fp8_state: Fp8State | None = None,
        dtype: DTypeLike = jnp.bfloat16,
    ) -> "Weights":
        """Returns weights that are there in FP8 alone, for inference.

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
    if weights.bias is not None and weights.bias.ndim > 2:
        changed["bias"] = weights.bias.reshape(weights.bias.shape[0], -1)
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
    activation's result. `expected_tokens` and `zero_other_rows` are those of `GemmSpec`. Rules of differentiation sum
    the kernel's gradient over mesh axes other than `kernel_axes`, those over which the kernel varies.
    """

    recipe: Recipe | None
    precision: jax.lax.Precision
    kernel: jax.ShapeDtypeStruct
    tokens: int
    out_dtype: DTypeLike
    x_dtype: DTypeLike
    bias_dtype: DTypeLike | None
    input_activation: Activation | None = None
    output_activation: Activation | None = None
    expected_tokens: int = 0
    zero_other_rows: bool = True
    kernel_axes: frozenset[Hashable] = frozenset()
    partitions: Partitions = dataclasses.field(default_factory=Partitions)

    def gemm(self, product: Product, out_dtype: DTypeLike) -> GemmSpec:
        """Returns the spec of one of the three products."""
        return GemmSpec(
            product,
            self.kernel.shape[0],
            out_dtype,
            self.precision,
            expected_tokens=self.expected_tokens,
            zero_other_rows=self.zero_other_rows,
        )

    def quantization(self, *, for_gradient: bool = False, **options: Any) -> QuantizeSpec:
        """Returns the quantization of the tokens, or of the gradient of the result, with options of `QuantizeSpec`."""
        recipe = self.recipe
        assert recipe is not None
        if for_gradient:
            options |= dict(columnwise=True, dbias=self.bias_dtype is not None)
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
    groups = checks.canonical_groups(group_sizes, group_offset, "kernel", weights.kernel, capacity=x.shape[0])
    partitions = Partitions(
        x=jax.typeof(x).sharding.spec,
        kernel=jax.typeof(weights.kernel).sharding.spec,
        bias=None if weights.bias is None else jax.typeof(weights.bias).sharding.spec,
        out=None if out_sharding is None else checks.canonical_out_spec(out_sharding, x, weights.kernel),
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
    kernel, bias, cache, state, accumulator = weights
    kernel = as_array(name, kernel)
    checks.check_tokens("x", x)
    checks.check_kernel(name, kernel, "x", x)
    whole = jax.ShapeDtypeStruct((parts * kernel.shape[0], *kernel.shape[1:]), kernel.dtype)
    out_dtype = x.dtype if preferred_element_type is None else preferred_element_type
    checks.check_dtype("preferred_element_type", out_dtype)
    if bias is not None:
        given: Any = bias
        if isinstance(given, Recipe) or (isinstance(given, type) and is_recipe_class(given)):
            raise TypeError("bias must be an array [G, N] or None, got a recipe: recipe is keyword-only.")
        bias = as_array("bias", bias)
        checks.check_dtype("bias's type", bias.dtype)
        if bias.shape != (expected := (whole.shape[0], whole.shape[2])):
            raise ValueError(f"bias must have shape [G, N] = {expected}, got {bias.shape}.")
        bias = bias.astype(sum_dtype(bias.dtype))
    if recipe is not None or cache is not None or state is not None:
        _check_recipe(recipe, x, name, kernel, cache, precision)
        check_state(state, recipe, whole.shape[0])
    if accumulator is not None:
        accumulator = as_array("dkernel_accumulator", accumulator)
        check_accumulator(accumulator, kernel.shape, (kernel.dtype,))
    spec = DenseSpec(
        recipe=recipe,
        precision=checks.canonical_precision(precision, x.dtype if recipe is None else recipe.fwd_dtype),
        kernel=whole,
        tokens=x.shape[0],
        out_dtype=jnp.dtype(out_dtype),
        x_dtype=x.dtype,
        bias_dtype=None if bias is None else bias.dtype,
        kernel_axes=varying_axes(kernel),
    )
    cache, accumulator = jax.lax.stop_gradient((cache, accumulator))
    return Weights(kernel, bias, cache, state, accumulator), spec


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
    check_recipe(recipe)
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
    checks.check_fp8_kernel(name, kernel.shape)
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
