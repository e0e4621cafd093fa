"""Activations of experts as a model in plain JAX computes them."""

import jax
import jax.numpy as jnp

from jax_grouped import SwiGLU
from jax_grouped.kernels.activations import Activation

#: Those with numbers: of gpt-oss, a bound of the gate's activation, and no bound. They share one branch of each kernel.
GPT_OSS = SwiGLU(7.0, alpha=1.702, offset=1.0)
WITH_NUMBERS = (GPT_OSS, SwiGLU(2.5, clamp_result=True), SwiGLU(alpha=-0.5, offset=0.25))


def by_jax(x: jax.Array, activation: Activation) -> jax.Array:
    """Applies an activation: `[..., F]`, or with a gate `[..., 2 F]`, `-> [..., F]`."""
    match activation:
        case "silu" | "gelu" | "relu":
            return getattr(jax.nn, activation)(x)
        case "relu_squared":
            return jax.nn.relu(x) ** 2
    gate, up = jnp.split(x, 2, axis=-1)
    if isinstance(activation, SwiGLU):
        limit = activation.limit or jnp.inf
        up = jnp.clip(up, -limit, limit) + activation.offset
        if activation.clamp_result:
            return jnp.clip(gate * jax.nn.sigmoid(activation.alpha * gate), max=limit) * up
        gate = jnp.clip(gate, max=limit)
        return gate * jax.nn.sigmoid(activation.alpha * gate) * up
    return by_jax(gate, {"swiglu": "silu", "geglu": "gelu", "reglu": "relu"}[activation]) * up
