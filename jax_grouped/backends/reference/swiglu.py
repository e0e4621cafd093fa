"""SwiGLU and its gradient in the `xla` backend: plain JAX, for any platform."""

import jax
import jax.numpy as jnp


def swiglu(gate_up: jax.Array) -> jax.Array:
    """Computes `silu(gate) * up` in the type of `gate_up`: `[R, 2 F] -> [R, F]`, the gate's features first."""
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return jax.nn.silu(gate) * up


def swiglu_grad(gate_up: jax.Array, da: jax.Array, row_weights: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the gradient of `gate_up`, the weighted rows `[R, F]`, and inner products `[R]`, as `ops.swiglu`."""
    a, pull_back = jax.vjp(swiglu, gate_up.astype(jnp.float32))
    gradient = da.astype(jnp.float32)
    weights = row_weights[:, None]
    (dgate_up,) = pull_back(gradient * weights)
    return dgate_up.astype(gate_up.dtype), (a * weights).astype(da.dtype), jnp.sum(a * gradient, axis=1)
