"""`grouped_dense`: a grouped matmul with bias, the functional form of the layer."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from jax_grouped import _checks
from jax_grouped._varying import vary_alike
from jax_grouped.arrays import KernelCache
from jax_grouped.backends.spec import MatmulSpec
from jax_grouped.bias import add_bias
from jax_grouped.dense_fp8 import checked_recipe, grouped_dense_fp8
from jax_grouped.matmul import grouped_matmul, with_gradient
from jax_grouped.recipes import Recipe


def grouped_dense(
    x: jax.Array,
    kernel: jax.Array,
    group_sizes: ArrayLike,
    bias: jax.Array | None = None,
    *,
    recipe: Recipe | None = None,
    kernel_cache: KernelCache | None = None,
    group_offset: ArrayLike | None = None,
    preferred_element_type: DTypeLike | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> jax.Array:
    """Applies a linear layer per group: row `i` becomes `x[i] @ kernel[g] + bias[g]`, `g` being the row's group.

    The product is computed in the type of `x`. Gradients come out in each argument's own type: a float32 `kernel` with
    bfloat16 `x` gets a float32 gradient straight from the matmul's accumulator. Rows outside every group are zero in
    the result and in the gradient of `x`, whatever `x` holds there.

    With a recipe, the three products are of FP8 numbers, accumulated in float32: `x`, `kernel` and the gradient of the
    result are quantized from their own types, each once. Hopper's tensor cores keep about 14 bits of a partial sum, so
    there even a float32 result has a relative error of 1e-4 to 3e-4. With `Float8BlockScaling` that is the training of
    DeepSeek-V3 (arXiv:2412.19437, section 3.3). What is kept for the backward pass is FP8 too, under the names of
    `jax_grouped.CHECKPOINT_NAMES` for the policies of `jax.checkpoint`. Gradients are straight-through: those of the
    product of the quantized numbers, as if quantization were the identity. They are of first order.

    Args:
        x: `[T, K]` tokens, bfloat16, float16 or float32; rows of group 0 first, then group 1, and so on.
        kernel: `[G, K, N]`; without a recipe, converted to the type of `x` if it has another.
        group_sizes: `[G]` (`[E]`, `E >= G`, with `group_offset`) integers, rows per group, read on the device only.
            Negative ones count as 0, and rows past `T` do not exist.
        bias: `[G, N]` or None.
        recipe: `Float8BlockScaling` or `Float8CurrentScaling`, with `K` and `N` multiples of 16; None to compute in the
            type of `x`.
        kernel_cache: `quantize_kernel(kernel, recipe)`, which microbatches share: `kernel` is then not read. Its
            gradient is that of `kernel`; the cache has none.
        group_offset: scalar or `[1]` integer: `kernel` holds the groups `[group_offset, group_offset + G)`.
        preferred_element_type: type of the result. Default: the type of `x`.
        precision: as in `jax_grouped.ragged_dot`; matters for float32 `x` only. Not with a recipe.

    Returns:
        `[T, N]`.

    Raises:
        TypeError: an argument, or the recipe, has a type that is not supported.
        ValueError: an argument has a shape that does not fit, `kernel_cache` is of another kernel or recipe, or is
            given without a recipe, or `precision` with one.
    """
    x, kernel = jnp.asarray(x), jnp.asarray(kernel)
    _checks.check_tokens("x", x)
    _checks.check_kernel("kernel", kernel, "x", x)
    out_dtype = jnp.dtype(x.dtype if preferred_element_type is None else preferred_element_type)
    _checks.check_dtype("preferred_element_type", out_dtype)
    if bias is not None:
        bias = jnp.asarray(bias)
        _checks.check_bias(bias, kernel)
    fp8_recipe = checked_recipe(recipe, kernel, kernel_cache, precision)
    sizes, offset = _checks.canonical_groups(group_sizes, group_offset, "kernel", kernel, capacity=x.shape[0])
    if fp8_recipe is not None:
        return grouped_dense_fp8(x, kernel, bias, kernel_cache, sizes, offset, fp8_recipe, out_dtype)

    spec = MatmulSpec("fprop", kernel.shape[0], out_dtype, _checks.canonical_precision(precision))
    if bias is None:
        return _product(*vary_alike(x, kernel, sizes, offset), spec, kernel.dtype)
    x, kernel, bias, sizes, offset = vary_alike(x, kernel, bias, sizes, offset)
    return add_bias(_product(x, kernel, sizes, offset, spec, kernel.dtype), bias, sizes, offset)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _product(
    x: jax.Array,
    kernel: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array,
    spec: MatmulSpec,
    kernel_dtype: jnp.dtype,
) -> jax.Array:
    return _product_forward(x, kernel, group_sizes, group_offset, spec, kernel_dtype)[0]


def _product_forward(
    x: jax.Array,
    kernel: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array,
    spec: MatmulSpec,
    kernel_dtype: jnp.dtype,
) -> tuple[jax.Array, Any]:
    del kernel_dtype
    kernel = kernel.astype(x.dtype)
    return grouped_matmul(x, kernel, group_sizes, group_offset, spec), (x, kernel, group_sizes, group_offset)


def _product_backward(spec: MatmulSpec, kernel_dtype: jnp.dtype, residuals: Any, dy: jax.Array) -> tuple[Any, ...]:
    x, kernel, group_sizes, group_offset = residuals
    dgrad = dataclasses.replace(spec, product="dgrad", out_dtype=x.dtype)
    x, kernel, dy = with_gradient(x, kernel, dy)
    wgrad = dataclasses.replace(spec, product="wgrad", out_dtype=kernel_dtype)
    dx = grouped_matmul(dy, kernel, group_sizes, group_offset, dgrad)
    dkernel = grouped_matmul(x, dy, group_sizes, group_offset, wgrad)
    return dx, dkernel, None, None


_product.defvjp(_product_forward, _product_backward)
