"""Activations of experts as a model in plain JAX computes them."""

import jax
import jax.numpy as jnp


def by_jax(x: jax.Array, activation: str) -> jax.Array:
    """Applies an activation: `[..., F]`, or with a gate `[..., 2 F]`, `-> [..., F]`."""
    match activation:
        case "silu" | "gelu" | "relu":
            return getattr(jax.nn, activation)(x)
        case "relu_squared":
            return jax.nn.relu(x) ** 2
    gate, up = jnp.split(x, 2, axis=-1)
    if activation == "clamped_silu_mul":
        gate, up = jnp.clip(gate, max=7), jnp.clip(up, -7, 7)
        return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)
    return by_jax(gate, activation.removesuffix("_mul")) * up
