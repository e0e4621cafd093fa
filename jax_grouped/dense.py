"""`grouped_dense`: a grouped matmul with bias, the functional form of the layer."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from jax_grouped import _checks
from jax_grouped._varying import vary_alike
from jax_grouped.backends import primitives
from jax_grouped.backends.spec import MatmulSpec
from jax_grouped.group_layout import group_rows, row_groups
from jax_grouped.matmul import grouped_matmul, with_gradient


def grouped_dense(
    x: jax.Array,
    kernel: jax.Array,
    group_sizes: ArrayLike,
    bias: jax.Array | None = None,
    *,
    group_offset: ArrayLike | None = None,
    preferred_element_type: DTypeLike | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> jax.Array:
    """Applies a linear layer per group: row `i` becomes `x[i] @ kernel[g] + bias[g]`, `g` being the row's group.

    The product is computed in the type of `x`. Gradients come out in each argument's own type: a float32 `kernel` with
    bfloat16 `x` gets a float32 gradient straight from the matmul's accumulator. Rows outside every group are zero in
    the result and in the gradient of `x`, whatever `x` holds there.

    Args:
        x: `[T, K]` tokens, bfloat16, float16 or float32; rows of group 0 first, then group 1, and so on.
        kernel: `[G, K, N]`, converted to the type of `x` if it has another.
        group_sizes: `[G]` (`[E]`, `E >= G`, with `group_offset`) integers, rows per group, read on the device only.
            Negative ones count as 0, and rows past `T` do not exist.
        bias: `[G, N]` or None.
        group_offset: scalar or `[1]` integer: `kernel` holds the groups `[group_offset, group_offset + G)`.
        preferred_element_type: type of the result. Default: the type of `x`.
        precision: as in `jax_grouped.ragged_dot`; matters for float32 `x` only.

    Returns:
        `[T, N]`.

    Raises:
        TypeError: an argument has a type that is not supported.
        ValueError: an argument has a shape that does not fit.
    """
    x, kernel = jnp.asarray(x), jnp.asarray(kernel)
    _checks.check_tokens("x", x)
    _checks.check_kernel("kernel", kernel, "x", x)
    out_dtype = jnp.dtype(x.dtype if preferred_element_type is None else preferred_element_type)
    _checks.check_dtype("preferred_element_type", out_dtype)
    sizes, offset = _checks.canonical_groups(group_sizes, group_offset, "kernel", kernel, capacity=x.shape[0])
    spec = MatmulSpec("fprop", kernel.shape[0], out_dtype, _checks.canonical_precision(precision))
    if bias is None:
        return _product(*vary_alike(x, kernel, sizes, offset), spec, kernel.dtype)

    bias = jnp.asarray(bias)
    _checks.check_bias(bias, kernel)
    x, kernel, bias, sizes, offset = vary_alike(x, kernel, bias, sizes, offset)
    return _add_bias(_product(x, kernel, sizes, offset, spec, kernel.dtype), bias, sizes, offset)


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


@jax.custom_vjp
def _add_bias(y: jax.Array, bias: jax.Array, group_sizes: jax.Array, group_offset: jax.Array) -> jax.Array:
    """Adds each row's bias. Elementwise on purpose: XLA fuses it into whatever reads the result, and saves a pass."""
    if 0 in (*y.shape, *bias.shape):
        return y
    rows = group_rows(group_sizes, group_offset, bias.shape[0], y.shape[0])
    group, valid = row_groups(rows, y.shape[0])
    return jnp.where(valid[:, None], y + bias.astype(y.dtype)[group], jnp.zeros((), y.dtype))


def _add_bias_forward(
    y: jax.Array, bias: jax.Array, group_sizes: jax.Array, group_offset: jax.Array
) -> tuple[jax.Array, Any]:
    # The bias is kept for its shape and type only; it is small.
    return _add_bias(y, bias, group_sizes, group_offset), (bias, group_sizes, group_offset)


def _add_bias_backward(residuals: Any, dy: jax.Array) -> tuple[Any, ...]:
    bias, group_sizes, group_offset = residuals
    # Rows outside every group need no mask in dy: the product's own rule ignores them.
    return dy, _bias_grad(dy, group_sizes, group_offset, bias.shape[0], bias.dtype), None, None


_add_bias.defvjp(_add_bias_forward, _add_bias_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _bias_grad(
    dy: jax.Array, group_sizes: jax.Array, group_offset: jax.Array, num_groups: int, dtype: jnp.dtype
) -> jax.Array:
    return primitives.grouped_bias_grad(dy, group_sizes, group_offset, num_groups, dtype)


def _bias_grad_forward(
    dy: jax.Array, group_sizes: jax.Array, group_offset: jax.Array, num_groups: int, dtype: jnp.dtype
) -> tuple[jax.Array, Any]:
    zeros = jnp.zeros_like(dy)
    return _bias_grad(dy, group_sizes, group_offset, num_groups, dtype), (zeros, group_sizes, group_offset)


def _bias_grad_backward(num_groups: int, dtype: jnp.dtype, residuals: Any, gradient: jax.Array) -> tuple[Any, ...]:
    del num_groups, dtype
    zeros, group_sizes, group_offset = residuals
    return _add_bias(zeros, gradient, group_sizes, group_offset), None, None


_bias_grad.defvjp(_bias_grad_forward, _bias_grad_backward)
