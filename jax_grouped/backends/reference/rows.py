"""Operations on rows without groups, in the `xla` backend: plain JAX, for any platform."""

import jax
import jax.numpy as jnp

from jax_grouped.backends.reference import activations
from jax_grouped.backends.spec import Activation


def activation_grad(
    x: jax.Array, da: jax.Array, row_weights: jax.Array, *, activation: Activation
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the gradient of `x`, the weighted rows `[R, F]`, and inner products `[R]`, as `ops.rows`."""
    values, gradient, weights = x.astype(jnp.float32), da.astype(jnp.float32), row_weights[:, None]
    a = activations.activate(values, activation)
    dx = activations.activation_grad(values, gradient * weights, activation)
    return dx.astype(x.dtype), (a * weights).astype(da.dtype), jnp.sum(a * gradient, axis=1)


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
