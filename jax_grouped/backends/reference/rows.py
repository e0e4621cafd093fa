"""Operations on rows without groups, in the `xla` backend: plain JAX, for any platform."""

import jax
import jax.numpy as jnp


def swiglu(gate_up: jax.Array) -> jax.Array:
    """Computes `silu(gate) * up` in the type of `gate_up`: `[R, 2 F] -> [R, F]`, the gate's features first."""
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return jax.nn.silu(gate) * up


def swiglu_grad(gate_up: jax.Array, da: jax.Array, row_weights: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the gradient of `gate_up`, the weighted rows `[R, F]`, and inner products `[R]`, as `ops.rows`."""
    a, pull_back = jax.vjp(swiglu, gate_up.astype(jnp.float32))
    gradient = da.astype(jnp.float32)
    weights = row_weights[:, None]
    (dgate_up,) = pull_back(gradient * weights)
    return dgate_up.astype(gate_up.dtype), (a * weights).astype(da.dtype), jnp.sum(a * gradient, axis=1)


def gather(x: jax.Array, indices: jax.Array) -> jax.Array:
    """Returns `x[indices]`, zero for an index outside of `[0, T)`, whatever any other row of `x` holds."""
    if x.shape[0] == 0:  # XLA refuses to gather from an empty array.
        x = jnp.pad(x, [(0, 1)] + [(0, 0)] * (x.ndim - 1))
    return x.at[indices].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def tokens_of(order: jax.Array, inverse: jax.Array) -> jax.Array:
    """Returns the token of each row, `int32[R]`, and `T` or more in the tail."""
    return jax.lax.div(order, jnp.full_like(order, inverse.shape[1]))


def permute(x: jax.Array, order: jax.Array, inverse: jax.Array) -> jax.Array:
    """Returns each row's token, zeros in the tail: `[T, C] -> [R, C]`."""
    return gather(x, tokens_of(order, inverse))
