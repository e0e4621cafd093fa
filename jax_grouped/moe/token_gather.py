"""Gather of the tokens of all devices of a mesh axis, and the return of the sums that each device makes for them."""

import dataclasses
import functools
from collections.abc import Hashable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_grouped.fp8.arrays import ScaledArray
from jax_grouped.moe.wire import RowForm, Wire, dequantize_rows, quantize_rows, quantize_stacked_rows
from jax_grouped.ops.gather import exchange_stacks, gather_stack
from jax_grouped.ops.quantize import grouped_dequantize

#: Rows of all devices, as they were sent.
Received = jax.Array | ScaledArray


@dataclasses.dataclass(frozen=True)
class TokenGather:
    """A gather over a mesh axis of `D` devices.

    Attributes:
        axis_name: the mesh axis.
        wire: the form in which tokens and sums travel.
    """

    axis_name: Hashable
    wire: Wire

    def tokens(self, x: jax.Array) -> Received:
        """Gathers `[T, C]` to `[D T, C]` for the forward pass."""
        return self._gather(x, self.wire.tokens)

    def dresults(self, dy: jax.Array) -> Received:
        """Gathers gradients of results, as `tokens` does tokens."""
        return self._gather(dy, self.wire.dresults)

    def routing_weights(self, weights: jax.Array) -> jax.Array:
        """Gathers routing weights: `[T, k]` to `[D T, k]`."""
        return jax.lax.all_gather(weights, self.axis_name, tiled=True)

    def device_chunks(self, tokens: jax.Array, count: int) -> list[jax.Array]:
        """Splits `[D T, C]` into arrays that have a part of each device's tokens."""
        devices = jax.lax.axis_size(self.axis_name)
        device_rows = tokens.reshape(devices, -1, tokens.shape[1])
        return [
            chunk.reshape(-1, tokens.shape[1])
            for chunk in jnp.array_split(device_rows, count, axis=1)
            if chunk.shape[1] > 0
        ]

    def results(self, parts: jax.Array) -> Received:
        """Sends each device what this one has for its tokens: `[D T, C]` to `[D, T, C]`, the parts from all devices."""
        return self._return(parts, self.wire.results)

    def dtokens(self, parts: jax.Array) -> Received:
        """Sends each device its tokens' gradients, as `results` does sums."""
        return self._return(parts, self.wire.dtokens)

    def routing_weight_gradients(self, parts: jax.Array) -> Received:
        """Sends each device the gradients of its tokens' routing weights: `[D T, k]` to `[D, T, k]`."""
        return self._return(parts, None)

    def _gather(self, x: jax.Array, form: RowForm | None) -> Received:
        if form is None or 0 in x.shape:
            return jax.lax.all_gather(x, self.axis_name, tiled=True)
        return gather_stack(quantize_rows(x, form), self.axis_name)

    def _return(self, parts: jax.Array, form: RowForm | None) -> Received:
        devices = jax.lax.axis_size(self.axis_name)
        device_rows = parts.reshape(devices, parts.shape[0] // devices, parts.shape[1])
        if form is None or 0 in parts.shape:
            return jax.lax.all_to_all(device_rows, self.axis_name, 0, 0)
        return exchange_stacks(quantize_stacked_rows(device_rows, form), self.axis_name)


def summed(parts: Received) -> jax.Array:
    """Sums over the devices in float32: `[D, T, C]` to `[T, C]`.

    `jax.lax.psum_scatter` would send as many bytes, but sum in the type of the parts.
    """
    if isinstance(parts, ScaledArray):
        tokens = parts.data.shape[1]
        scales = jnp.swapaxes(parts.scale_inv, 1, 2)[:, :tokens]
        return functools.reduce(jnp.add, map(dequantize_rows, parts.data, scales))
    return functools.reduce(jnp.add, (part.astype(jnp.float32) for part in parts))


def restored(received: Received, dtype: DTypeLike) -> jax.Array:
    """Returns received rows as an array `[D T, C]` of this type."""
    if not isinstance(received, ScaledArray):
        return received
    return grouped_dequantize(received, dtype).reshape(-1, received.layout.features)
