"""Activations of experts, and their gradients, in plain JAX, in the type of the arguments."""

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

#: Activations of experts. Those that end in `_mul` have a gate: they take twice the features, those of the gate first,
#: and multiply its activation by the others. `jax_grouped.grouped_quantize` says what each computes.
Activation = Literal["silu_mul", "gelu_mul", "clamped_silu_mul", "silu", "gelu", "relu", "relu_squared"]
#: Values of the enumeration in csrc.
ACTIVATIONS: tuple[Activation | None, ...] = (
    None,
    "silu",
    "gelu",
    "relu",
    "relu_squared",
    "silu_mul",
    "gelu_mul",
    "clamped_silu_mul",
)
#: Constants of "clamped_silu_mul", as in gpt-oss: the bound of gates and factors, and the slope of the sigmoid.
CLAMP_LIMIT, CLAMPED_SLOPE = 7.0, 1.702


def is_gated(activation: str | None) -> bool:
    """Returns true for an activation that has a gate."""
    return activation is not None and activation.endswith("_mul")


def activate(x: jax.Array, activation: Activation) -> jax.Array:
    """Applies an activation: `[..., F] -> [..., F]`, or `[..., 2 F] -> [..., F]` with a gate, which comes first."""
    if not is_gated(activation):
        return _PLAIN[activation](x)
    return _GATED[activation](*jnp.split(x, 2, axis=-1))


def activation_grad(x: jax.Array, dy: jax.Array, activation: Activation) -> jax.Array:
    """Returns the gradient of `x` from that of `activate(x, activation)`."""
    if activation == "relu":
        # Select instead of multiplying: an infinite gradient times a derivative of 0 would be NaN.
        return jnp.where(x > 0, dy, 0)
    if activation == "relu_squared":
        return jnp.where(x > 0, dy * (2 * x), 0)
    return jax.vjp(lambda x: activate(x, activation), x)[1](dy)[0]


def _relu(x: jax.Array) -> jax.Array:
    # No maximum: its sign of zero depends on the platform.
    return jnp.where((x > 0) | jnp.isnan(x), x, 0)


def _clamped_silu_mul(gate: jax.Array, up: jax.Array) -> jax.Array:
    # Comparisons keep NaN, and pass on the gradient of a number at the limit.
    gate = jnp.where(gate > CLAMP_LIMIT, CLAMP_LIMIT, gate)
    up = jnp.where(up > CLAMP_LIMIT, CLAMP_LIMIT, jnp.where(up < -CLAMP_LIMIT, -CLAMP_LIMIT, up))
    return gate * jax.nn.sigmoid(CLAMPED_SLOPE * gate) * (up + 1)


_PLAIN: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
    "relu": _relu,
    "relu_squared": lambda x: _relu(x) ** 2,
}
_GATED: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "silu_mul": lambda gate, up: jax.nn.silu(gate) * up,
    "gelu_mul": lambda gate, up: jax.nn.gelu(gate) * up,
    "clamped_silu_mul": _clamped_silu_mul,
}
