"""Gather of the tokens of all devices of a mesh axis, and the return of the sums that each device makes for them."""

import dataclasses
import functools
from collections.abc import Hashable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_grouped.fp8.arrays import ScaledArray
from jax_grouped.fp8.recipes import Float8BlockScaling
from jax_grouped.moe.wire import quantize_rows
from jax_grouped.ops.quantize import grouped_dequantize

_T = TypeVar("_T")

#: Rows of all devices, as they were sent.
Received = jax.Array | ScaledArray


@dataclasses.dataclass(frozen=True)
class TokenGather:
    """A gather over a mesh axis of `D` devices.

    Attributes:
        axis_name: the mesh axis.
        recipe: tokens and gradients travel as its FP8 numbers; None to send them as they are.
    """

    axis_name: Hashable
    recipe: Float8BlockScaling | None

    def tokens(self, x: jax.Array, meanwhile: _T) -> tuple[Received, _T]:
        """Gathers `[T, C]` to `[D T, C]` for the forward pass.

        Nothing that uses the result starts before `meanwhile` has been computed, so XLA has work to do during the
        transfer.
        """
        return self._gather(x, None if self.recipe is None else self.recipe.fwd_dtype, meanwhile)

    def gradients(self, dy: jax.Array, meanwhile: _T) -> tuple[Received, _T]:
        """Gathers gradients, as `tokens` does tokens."""
        return self._gather(dy, None if self.recipe is None else self.recipe.grad_dtype, meanwhile)

    def weights(self, weights: jax.Array) -> jax.Array:
        """Gathers routing weights: `[T, k]` to `[D T, k]`."""
        return jax.lax.all_gather(weights, self.axis_name, tiled=True)

    def chunks_of_devices(self, of_tokens: jax.Array, count: int) -> list[jax.Array]:
        """Splits `[D T, C]` into arrays that have a part of each device's tokens."""
        devices = jax.lax.axis_size(self.axis_name)
        of_devices = of_tokens.reshape(devices, -1, of_tokens.shape[1])
        return [
            chunk.reshape(-1, of_tokens.shape[1])
            for chunk in jnp.array_split(of_devices, count, axis=1)
            if chunk.shape[1] > 0
        ]

    def returned(self, parts: jax.Array) -> jax.Array:
        """Sends each device what this one has for its tokens: `[D T, C]` to `[D, T, C]`, the parts from all devices."""
        devices = jax.lax.axis_size(self.axis_name)
        of_devices = parts.reshape(devices, parts.shape[0] // devices, parts.shape[1])
        return jax.lax.all_to_all(of_devices, self.axis_name, 0, 0)

    def _gather(self, x: jax.Array, dtype: DTypeLike | None, meanwhile: _T) -> tuple[Received, _T]:
        received: Received
        if self.recipe is None or dtype is None or 0 in x.shape:
            received = jax.lax.all_gather(x, self.axis_name, tiled=True)
        else:
            received = _gather_quantized(x, self.recipe, dtype, self.axis_name)
        return jax.lax.optimization_barrier((received, meanwhile))


def summed(parts: jax.Array) -> jax.Array:
    """Sums over the devices in float32: `[D, T, C]` to `[T, C]`.

    `jax.lax.psum_scatter` would send as many bytes, but sum in the type of the parts.
    """
    return functools.reduce(jnp.add, (of_device.astype(jnp.float32) for of_device in parts))


def restored(received: Received, dtype: DTypeLike) -> jax.Array:
    """Returns received rows as an array `[D T, C]` of this type."""
    if not isinstance(received, ScaledArray):
        return received
    return grouped_dequantize(received, dtype).reshape(-1, received.layout.features)


def _gather_quantized(x: jax.Array, recipe: Float8BlockScaling, dtype: DTypeLike, axis_name: Hashable) -> ScaledArray:
    """Gathers the FP8 numbers and the scales of a stack of one from each device."""
    own = quantize_rows(x, recipe, dtype)
    scale_inv = jax.lax.all_gather(own.scale_inv, axis_name, tiled=True)
    # XLA runs one collective at a time. The scales go first, so that other work runs during the longer transfer.
    data, scale_inv = jax.lax.optimization_barrier((own.data, scale_inv))
    # Not every backend gathers FP8 numbers.
    gathered = jax.lax.all_gather(jax.lax.bitcast_convert_type(data, jnp.uint8), axis_name, tiled=True)
    layout = dataclasses.replace(own.layout, num_groups=len(gathered), tokens=len(gathered) * x.shape[0])
    return ScaledArray(jax.lax.bitcast_convert_type(gathered, data.dtype), scale_inv, None, layout)
