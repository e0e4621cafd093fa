"""Activations of experts, and their gradients, in plain JAX, in the type of the arguments."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jax_grouped.core.values import static_bool, static_number


@dataclasses.dataclass(frozen=True)
class SwiGLU:
    """A gated activation with numbers: `g * sigmoid(alpha * g) * (u + offset)`.

    Here `g = min(gate, limit)` and `u = clip(up, -limit, limit)`. With `clamp_result`, `g` is the gate, and what is at
    most `limit` is `g * sigmoid(alpha * g)`. `SwiGLU(7.0, alpha=1.702, offset=1.0)` is that of gpt-oss
    (arXiv:2508.10925), `SwiGLU()` is `"swiglu"`.

    Attributes:
        limit: bound of the gate from above and of the other half from both sides; None for none.
        alpha: slope of the sigmoid.
        offset: added to the other half.
        clamp_result: whether the limit is that of the gate's activation in place of the gate.

    Raises:
        TypeError: a field is no number.
        ValueError: `limit` is not positive, or another field is not finite.

    Example:
        quantized = jg.grouped_quantize(
            jnp.full((16, 64), 8.0), jnp.array([10, 4]), jg.ScalingMode.TENSOR, activation=jg.SwiGLU(limit=4.0)
        )

        assert jnp.allclose(jg.grouped_dequantize(quantized.rowwise)[0], 4 * 4 * jax.nn.sigmoid(4.0))
    """

    limit: float | None = None
    _: dataclasses.KW_ONLY
    alpha: float = 1.0
    offset: float = 0.0
    clamp_result: bool = False

    def __post_init__(self) -> None:
        for name in ("limit", "alpha", "offset"):
            if (value := getattr(self, name)) is not None or name != "limit":
                object.__setattr__(self, name, static_number(name, value))
        object.__setattr__(self, "clamp_result", static_bool("clamp_result", self.clamp_result))
        if self.limit is not None and not 0 < self.limit < math.inf:
            raise ValueError(f"limit must be a positive number, or None, got {self.limit}.")
        if not (math.isfinite(self.alpha) and math.isfinite(self.offset)):
            raise ValueError(f"alpha and offset must be finite, got {self.alpha} and {self.offset}.")


#: Activations of experts by name. Those that end in "glu" have a gate: they take twice the features, those of the gate
#: first, and multiply its activation by the others. `jax_grouped.grouped_quantize` says what each computes.
ActivationName = Literal["swiglu", "geglu", "reglu", "silu", "gelu", "relu", "relu_squared"]
#: An activation of experts: a name, or an object with numbers of its own.
Activation = ActivationName | SwiGLU
#: Values of the enumeration in csrc.
_KINDS = (None, "silu", "gelu", "relu", "relu_squared", "swiglu", "geglu", "reglu", SwiGLU)


def is_gated(activation: Activation | None) -> bool:
    """Tells whether an activation has a gate."""
    return isinstance(activation, SwiGLU) or activation in _GATED


def activation_attributes(activation: Activation | None) -> dict[str, np.generic]:
    """Returns the attributes by which a custom call gets an activation."""
    numbers = activation if isinstance(activation, SwiGLU) else _SWIGLU
    kind = activation if numbers is not activation else "swiglu" if numbers == _SWIGLU else SwiGLU
    limit = math.inf if numbers.limit is None else numbers.limit
    return {
        "activation": np.int32(_KINDS.index(kind)),
        "limit": np.float32(limit),
        "gate_limit": np.float32(math.inf if numbers.clamp_result else limit),
        "alpha": np.float32(numbers.alpha),
        "offset": np.float32(numbers.offset),
    }


def activate_xla(x: jax.Array, activation: Activation) -> jax.Array:
    """Applies an activation: `[..., F] -> [..., F]`, or `[..., 2 F] -> [..., F]` with a gate, which comes first."""
    if not is_gated(activation):
        return _PLAIN[activation](x)
    gate, up = jnp.split(x, 2, axis=-1)
    if activation == _SWIGLU:
        activation = "swiglu"
    if not isinstance(activation, SwiGLU):
        return _GATED[activation](gate) * up
    limit = jnp.inf if activation.limit is None else activation.limit
    # Comparisons keep NaN, and pass on the gradient of a number at the limit.
    up = jnp.where(up > limit, limit, jnp.where(up < -limit, -limit, up))
    if not activation.clamp_result:
        gate = jnp.where(gate > limit, limit, gate)
    gate *= jax.nn.sigmoid(activation.alpha * gate)
    if activation.clamp_result:
        gate = jnp.where(gate > limit, limit, gate)
    return gate * (up + activation.offset)


def activate_grad_xla(x: jax.Array, dy: jax.Array, activation: Activation) -> jax.Array:
    """Returns the gradient of `x` from that of `activate_xla(x, activation)`."""
    return jax.vjp(lambda x: activate_xla(x, activation), x)[1](dy)[0]


def _relu(x: jax.Array) -> jax.Array:
    # No maximum: its sign of zero depends on the platform. A NaN stays, but has no gradient, as in csrc.
    return jnp.where(x > 0, x, jax.lax.stop_gradient(jnp.where(jnp.isnan(x), x, 0)))


_PLAIN: dict[Any, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
    "relu": _relu,
    "relu_squared": lambda x: _relu(x) ** 2,
}
_SWIGLU = SwiGLU()
_GATED: dict[Any, Callable[[jax.Array], jax.Array]] = {"swiglu": jax.nn.silu, "geglu": jax.nn.gelu, "reglu": _relu}
