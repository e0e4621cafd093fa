"""`grouped_dense` with a recipe: quantization, FP8 products and bias under one rule of differentiation."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from jax_grouped import _checks
from jax_grouped._varying import vary_alike
from jax_grouped.arrays import KernelCache, ScaledArray
from jax_grouped.backends import primitives
from jax_grouped.backends.spec import Product, QuantizeSpec, ScaledMatmulSpec
from jax_grouped.bias import add_bias
from jax_grouped.quantize import check_cache, kernel_spec, quantize_stack, quantize_tokens
from jax_grouped.recipes import Float8BlockScaling, Float8CurrentScaling, Recipe

#: Names of the quantized tokens and kernels that wait for the backward pass:
#: `jax.checkpoint_policies.save_only_these_names(*CHECKPOINT_NAMES)`.
CHECKPOINT_NAMES = ("jax_grouped_x", "jax_grouped_kernel")

_E4M3, _E5M2 = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)

_Recipe = Float8BlockScaling | Float8CurrentScaling


def checked_recipe(
    recipe: Recipe | None, kernel: jax.Array, kernel_cache: KernelCache | None, precision: jax.lax.PrecisionLike
) -> _Recipe | None:
    """`recipe`, one of those that are taken here.

    Raises:
        TypeError: it is another one, or has types that no product takes, or `kernel_cache` has another type.
        ValueError: it does not fit the kernel, the cache or the precision.
    """
    if recipe is None:
        if kernel_cache is not None:
            raise ValueError("kernel_cache needs a recipe, the one that it was made with.")
        return None
    if not isinstance(recipe, _Recipe):
        raise TypeError(f"recipe must be a Float8BlockScaling, a Float8CurrentScaling or None, got {recipe!r}.")
    if recipe.fwd_dtype != _E4M3:
        raise TypeError(
            f"recipe.fwd_dtype must be {_E4M3.name}, got {recipe.fwd_dtype} with grad_dtype {recipe.grad_dtype}: "
            f"of the two operands of a product only one may be {_E5M2.name}, and x and kernel both have fwd_dtype."
        )
    if precision is not None:
        raise ValueError(f"precision is for recipe=None; FP8 products have only one. Got {precision!r}.")
    _checks.check_fp8_features("kernel", kernel.shape, kernel.shape[1])
    _checks.check_fp8_features("kernel", kernel.shape, kernel.shape[2])
    if kernel_cache is not None:
        check_cache("kernel_cache", kernel_cache, "kernel", kernel.shape, kernel_spec(kernel.shape, recipe))
    return recipe


@dataclasses.dataclass(frozen=True)
class _Static:
    """What the backward pass has to know beside its residuals."""

    recipe: _Recipe
    num_groups: int
    out_dtype: DTypeLike
    x_dtype: DTypeLike
    kernel_dtype: DTypeLike
    bias_dtype: DTypeLike | None

    def token_spec(self, dtype: DTypeLike, *, rowwise: bool, columnwise: bool, dbias: bool = False) -> QuantizeSpec:
        """How tokens or gradients are quantized."""
        return QuantizeSpec(
            self.recipe.token_mode,
            dtype,
            self.num_groups,
            rowwise=rowwise,
            columnwise=columnwise,
            dbias=dbias,
            pow2_scales=self.recipe.pow2_scales,
            amax_epsilon=self.recipe.amax_epsilon,
        )


def grouped_dense_fp8(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None,
    kernel_cache: KernelCache | None,
    group_sizes: jax.Array,
    group_offset: jax.Array,
    recipe: _Recipe,
    out_dtype: DTypeLike,
) -> jax.Array:
    """`grouped_dense` of checked arguments."""
    bias_dtype = None if bias is None else bias.dtype
    static = _Static(recipe, kernel.shape[0], out_dtype, x.dtype, kernel.dtype, bias_dtype)
    arguments = (x, kernel, bias, jax.lax.stop_gradient(kernel_cache), group_sizes, group_offset)
    arrays, structure = jax.tree.flatten(arguments)
    return _dense(*jax.tree.unflatten(structure, vary_alike(*arrays)), static)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _dense(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None,
    cache: KernelCache | None,
    group_sizes: jax.Array,
    group_offset: jax.Array,
    static: _Static,
) -> jax.Array:
    return _fprop(x, kernel, bias, cache, group_sizes, group_offset, static=static, dgrad=False, wgrad=False)[0]


def _fprop(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None,
    cache: KernelCache | None,
    group_sizes: jax.Array,
    group_offset: jax.Array,
    *,
    static: _Static,
    dgrad: bool,
    wgrad: bool,
) -> tuple[jax.Array, ScaledArray | None, ScaledArray | None]:
    """The result, the tokens that wgrad reads and the kernels that dgrad reads, each if it will run."""
    recipe = static.recipe
    spec = static.token_spec(recipe.fwd_dtype, rowwise=True, columnwise=wgrad)
    tokens = quantize_tokens(x, group_sizes, group_offset, spec=spec)
    kernels = cache or quantize_stack(
        kernel, spec=dataclasses.replace(kernel_spec(kernel.shape, recipe), rowwise=dgrad)
    )
    y = _multiply("fprop", tokens.rowwise, kernels.columnwise, group_sizes, group_offset, static.out_dtype)
    if bias is not None:
        y = add_bias(y, bias, group_sizes, group_offset)
    return y, tokens.columnwise, kernels.rowwise if dgrad else None


def _multiply(
    product: Product,
    a: ScaledArray | None,
    b: ScaledArray | None,
    group_sizes: jax.Array,
    group_offset: jax.Array,
    out_dtype: DTypeLike,
) -> jax.Array:
    assert a is not None
    assert b is not None
    spec = ScaledMatmulSpec(product, a.layout, b.layout, out_dtype)
    return primitives.scaled_matmul(a.data, a.scale_inv, b.data, b.scale_inv, group_sizes, group_offset, spec)


def _forward(
    x: Any, kernel: Any, bias: Any, cache: Any, group_sizes: Any, group_offset: Any, static: _Static
) -> tuple[jax.Array, Any]:
    # Which arguments have gradients is known here, so that only what these need is made and kept.
    arguments = jax.tree.map(lambda primal: primal.value, (x, kernel, bias, cache, group_sizes, group_offset))
    y, tokens, kernels = _fprop(*arguments, static=static, dgrad=x.perturbed, wgrad=kernel.perturbed)
    tokens, kernels = _named(tokens, CHECKPOINT_NAMES[0]), _named(kernels, CHECKPOINT_NAMES[1])
    return y, (tokens, kernels, group_sizes.value, group_offset.value)


def _named(scaled: ScaledArray | None, name: str) -> ScaledArray | None:
    if scaled is None:
        return None
    data, scale_inv = checkpoint_name(scaled.data, name), checkpoint_name(scaled.scale_inv, name)
    return dataclasses.replace(scaled, data=data, scale_inv=scale_inv)


def _backward(static: _Static, residuals: Any, dy: Any) -> tuple[Any, ...]:
    if isinstance(dy, jax.custom_derivatives.SymbolicZero):
        return (None,) * 6
    tokens, kernels, group_sizes, group_offset = residuals
    dx = dkernel = dbias = None
    if tokens is None and kernels is None:
        if static.bias_dtype is not None:
            dbias = primitives.grouped_bias_grad(dy, group_sizes, group_offset, static.num_groups, static.bias_dtype)
        return dx, dkernel, dbias, None, None, None

    spec = static.token_spec(
        static.recipe.grad_dtype,
        rowwise=kernels is not None,
        columnwise=tokens is not None,
        dbias=static.bias_dtype is not None,
    )
    quantized = quantize_tokens(dy, group_sizes, group_offset, spec=spec)
    if kernels is not None:
        dx = _multiply("dgrad", quantized.rowwise, kernels, group_sizes, group_offset, static.x_dtype)
    if tokens is not None:
        dkernel = _multiply("wgrad", tokens, quantized.columnwise, group_sizes, group_offset, static.kernel_dtype)
    if quantized.dbias is not None:
        dbias = quantized.dbias.astype(static.bias_dtype)
    return dx, dkernel, dbias, None, None, None


_dense.defvjp(_forward, _backward, symbolic_zeros=True)
