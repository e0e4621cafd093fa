"""Operations on rows without groups: activations, their gradients for rows with weights, copies and sums of rows."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jax_grouped.core.values import vary_alike
from jax_grouped.kernels import activations
from jax_grouped.kernels import rows as kernel
from jax_grouped.kernels.activations import Activation
from jax_grouped.kernels.primitive import bind


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def activate(x: jax.Array, activation: Activation) -> jax.Array:
    """Applies an activation in float32: `[T, F]`, or `[T, 2 F]` with a gate, whose features are first, `-> [T, F]`.

    The backward pass computes it again from `x`. JAX's own rule would keep several float32 arrays `[T, F]` instead.
    """
    return activations.activate(x.astype(jnp.float32), activation).astype(x.dtype)


def _activate_forward(x: jax.Array, activation: Activation) -> tuple[jax.Array, jax.Array]:
    return activate(x, activation), x


def _activate_backward(activation: Activation, x: jax.Array, dy: jax.Array) -> tuple[jax.Array]:
    dx = activations.activation_grad(x.astype(jnp.float32), dy.astype(jnp.float32), activation)
    return (dx.astype(x.dtype),)


activate.defvjp(_activate_forward, _activate_backward)


@functools.partial(jax.custom_jvp, nondiff_argnums=(3,))
def activation_grad(
    x: jax.Array, da: jax.Array, weights: jax.Array, activation: Activation, order: jax.Array | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the gradient of `x`, the rows `a = activate(x)` times their weights, and `<a, da>` of each row."""
    # An index in `order` that finds no weight is for a row that nothing reads: it holds anything in all results.
    operands = vary_alike(x, da, weights, *(() if order is None else (order,)))
    if 0 in da.shape:
        return kernel.activation_gradient_xla(*operands, activation=activation)
    dx, weighted, inner_products = bind(kernel.ACTIVATION_GRAD, *operands, activation=activation)
    return dx, weighted, inner_products


@activation_grad.defjvp
def _activation_grad_jvp(activation: Activation, primals: Any, tangents: Any) -> tuple[Any, Any]:
    x, da, weights, order = primals
    orders = () if order is None else (order,)

    def differentiable(*numbers: jax.Array) -> tuple[jax.Array, ...]:
        return kernel.activation_gradient_xla(*numbers, *orders, activation=activation)

    _, derivatives = jax.jvp(differentiable, (x, da, weights), tangents[:3])
    return activation_grad(x, da, weights, activation, order), derivatives


@functools.partial(jax.custom_jvp, nondiff_argnums=(3,))
def permute_rows(x: jax.Array, order: jax.Array, inverse: jax.Array, zero_tail: bool = True) -> jax.Array:
    """Copies tokens to the rows of a `Permutation`, differentiable; without `zero_tail` the tail holds anything."""
    return kernel.permute(x, order, inverse, zero_tail=zero_tail)


@permute_rows.defjvp
def _permute_rows_jvp(zero_tail: bool, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return permute_rows(*primals, zero_tail), kernel.permute_xla(tangents[0], *primals[1:])


@jax.custom_jvp
def sum_rows(rows: jax.Array, inverse: jax.Array, weights: jax.Array | None = None) -> jax.Array:
    """Sums the rows of each token, times `weights[T, k]` if given, in float32, and rounds once; differentiable."""
    # The kernel reads nothing for a choice without a row. XLA reads some row, but can fuse the sum with other work:
    # `sum_of_choices` is for tokens whose choices nearly all have rows.
    operands = vary_alike(rows, inverse, *(() if weights is None else (weights,)))
    if 0 in (*rows.shape, *inverse.shape):
        return kernel.sum_rows_xla(*operands)
    return bind(kernel.SUM_ROWS, *operands)[0]


@sum_rows.defjvp
def _sum_rows_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    rows, inverse, weights = primals

    def differentiable(rows: jax.Array, weights: jax.Array | None) -> jax.Array:
        return kernel.sum_of_choices(rows, inverse, weights).astype(rows.dtype)

    _, derivative = jax.jvp(differentiable, (rows, weights), (tangents[0], tangents[2]))
    return sum_rows(*primals), derivative
