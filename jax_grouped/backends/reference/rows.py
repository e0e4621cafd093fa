"""Operations on rows without groups, in the `xla` backend: plain JAX, for any platform."""

import functools

import jax
import jax.numpy as jnp

from jax_grouped.backends.reference import activations
from jax_grouped.backends.spec import Activation


def activation_grad(
    x: jax.Array, da: jax.Array, weights: jax.Array, *order: jax.Array, activation: Activation
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the gradient of `x`, the weighted rows `[R, F]`, and inner products `[R]`, as `ops.rows`.

    Rows without a weight are NaN.
    """
    values, gradient = x.astype(jnp.float32), da.astype(jnp.float32)
    row_weights = (gather(weights, order[0]) if order else weights)[:, None]
    a = activations.activate(values, activation)
    dx = activations.activation_grad(values, gradient * row_weights, activation)
    results = dx.astype(x.dtype), (a * row_weights).astype(da.dtype), jnp.sum(a * gradient, axis=1)
    if not order:
        return results
    exists = (order[0] >= 0) & (order[0] < weights.shape[0])
    dx, weighted, inner_products = (jnp.where(exists.reshape(-1, *(1,) * (of.ndim - 1)), of, jnp.nan) for of in results)
    return dx, weighted, inner_products


def gather(x: jax.Array, indices: jax.Array, fill: float = 0.0) -> jax.Array:
    """Returns `x[indices]`, `fill` for an index outside of `[0, T)`, whatever any other row of `x` holds."""
    if x.shape[0] == 0:  # XLA refuses to gather from an empty array.
        x = jnp.pad(x, [(0, 1)] + [(0, 0)] * (x.ndim - 1))
    return x.at[indices].get(mode="fill", fill_value=fill, wrap_negative_indices=False)


def tokens_of(order: jax.Array, inverse: jax.Array) -> jax.Array:
    """Returns the token of each row, `int32[R]`, and `T` or more in the tail."""
    return jax.lax.div(order, jnp.full_like(order, inverse.shape[1]))


def permute(x: jax.Array, order: jax.Array, inverse: jax.Array, *, zero_tail: bool = True) -> jax.Array:
    """Returns each row's token, zeros in the tail, or NaN where it may hold anything: `[T, C] -> [R, C]`."""
    return gather(x, tokens_of(order, inverse), fill=0.0 if zero_tail else jnp.nan)


def sum_of_choices(rows: jax.Array, inverse: jax.Array, weights: jax.Array | None = None) -> jax.Array:
    """Sums the existing rows of each token, times their weights if there are any: `[R, C] -> float32[T, C]`."""
    if weights is not None:
        # Zero the weights of dropped pairs: their rows are zero, and zero times a weight that is not finite is NaN.
        weights = jnp.where((inverse >= 0) & (inverse < rows.shape[0]), weights, 0)
    # Gather choice by choice: XLA fuses the gathers and a sum of fixed order into one kernel. XLA may materialise one
    # gather of all choices as an array `[T, k, C]`.
    terms = []
    for choice in range(inverse.shape[1]):
        term = gather(rows, inverse[:, choice]).astype(jnp.float32)
        terms.append(term if weights is None else term * weights[:, choice, None])
    return functools.reduce(jnp.add, terms)


def sum_rows(rows: jax.Array, inverse: jax.Array, *weights: jax.Array) -> jax.Array:
    """Returns the sums in the type of the rows."""
    return sum_of_choices(rows, inverse, *weights).astype(rows.dtype)
