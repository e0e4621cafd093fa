"""Gathers of a layer: of the tokens of all devices of a mesh axis, and of weights that they store in parts (FSDP).

Without an axis a gather does nothing. XLA runs one collective at a time, and other work during it: the methods have the
optimization barriers that decide which work that is. A caller must use all that a method returns in place of what it
gave, or XLA removes the barrier.
"""

import dataclasses
import functools
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_grouped.core.values import axis_size, sum_dtype
from jax_grouped.fp8.arrays import ScaledArray
from jax_grouped.fp8.state import part_of_state
from jax_grouped.kernels.product import Gathered
from jax_grouped.kernels.rows import sum_of_choices, sum_rows
from jax_grouped.moe.wire import RowForm, Wire, dequantize_rows, quantize_stacked_rows
from jax_grouped.ops.dense import DenseResiduals, PendingWgrad, given_scales, quantized_kernels
from jax_grouped.ops.gather import exchange_stacks, gather_stack
from jax_grouped.ops.inputs import DenseSpec, Weights
from jax_grouped.ops.quantize import Oriented, check_for_gradients, grouped_dequantize

#: Rows of all devices, as they were sent.
Received = jax.Array | ScaledArray


@dataclasses.dataclass(frozen=True)
class TokenGather:
    """A gather of tokens over a mesh axis of `D` devices, and the return of the sums that each makes for them."""

    axis_name: Hashable | None = None
    wire: Wire = dataclasses.field(default_factory=Wire)

    def tokens(self, x: jax.Array) -> Received:
        """Gathers `[T, C]` to `[D T, C]` for the forward pass."""
        return self._gather(x, self.wire.tokens)

    def tokens_while(self, x: Any, received: Received | None, *others: Any) -> tuple[Any, ...]:
        """Returns the tokens of all devices, and others that do not wait for them."""
        if self.axis_name is None:
            return x, *others
        return jax.lax.optimization_barrier((received, *others))

    def dresults_while(self, dy: jax.Array, tokens: Any, spec: DenseSpec) -> tuple[Any, Any]:
        """Gathers gradients of results, as `tokens` does tokens, and returns the rows that are made meanwhile."""
        if self.axis_name is None:
            return dy, tokens
        if isinstance(tokens, Gathered):
            tokens = tokens.copied_unless_fast("wgrad", spec.kernel.shape[2], zero_tail=spec.zero_other_rows)
        return jax.lax.optimization_barrier((self._gather(dy, self.wire.dresults), tokens))

    def dtokens_while(
        self, drows: jax.Array, dweights: Any, inverse: jax.Array, pending: PendingWgrad
    ) -> tuple[jax.Array, Any, PendingWgrad]:
        """Returns gradients of tokens, which travel during wgrad, and of routing weights, which travel during dgrad."""
        if self.axis_name is None:
            return sum_of_choices(drows, inverse).astype(drows.dtype), dweights, pending
        dweights = summed(self._return(dweights, None))
        drows, dweights = jax.lax.optimization_barrier((drows, dweights))
        parts = sum_rows(drows, inverse)
        parts, (x, dy) = jax.lax.optimization_barrier((parts, (pending.x, pending.dy)))
        dx = summed(self._return(parts, self.wire.dtokens)).astype(parts.dtype)
        return dx, dweights, dataclasses.replace(pending, x=x, dy=dy)

    def routing_weights(self, weights: Any) -> Any:
        """Gathers routing weights: `[T, k]` to `[D T, k]`."""
        return weights if self.axis_name is None else jax.lax.all_gather(weights, self.axis_name, tiled=True)

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

    def _gather(self, x: jax.Array, form: RowForm | None) -> Received:
        if form is None or 0 in x.shape:
            return jax.lax.all_gather(x, self.axis_name, tiled=True)
        return gather_stack(quantize_stacked_rows(x[None], form), self.axis_name)

    def _return(self, parts: jax.Array, form: RowForm | None) -> Received:
        devices = jax.lax.axis_size(self.axis_name)
        device_rows = parts.reshape(devices, parts.shape[0] // devices, parts.shape[1])
        if form is None or 0 in parts.shape:
            return jax.lax.all_to_all(device_rows, self.axis_name, 0, 0)
        return exchange_stacks(quantize_stacked_rows(device_rows, form), self.axis_name)


def summed(parts: Received) -> jax.Array:
    """Sums over the devices in float32, as `jax.lax.psum_scatter` would not: `[D, T, C]` to `[T, C]`."""
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


@dataclasses.dataclass(frozen=True)
class WeightGather:
    """A gather over a mesh axis whose devices have different tokens, and each `E / D` of `E` weight matrices.

    Each device quantizes its own part. A pass gathers the one orientation that it reads, and only parts wait for the
    backward pass. XLA would start the gathers of all weights before the first product, so one waits for another array.

    Attributes:
        axis_name: the mesh axis, of `D` devices, or None.
    """

    axis_name: Hashable | None = None

    @property
    def parts(self) -> int:
        """Number of devices of the axis."""
        return 1 if self.axis_name is None else axis_size(self.axis_name)

    def with_biases(self, weights: Weights) -> Weights:
        """Gathers the biases of all devices, in the type in which their gradients are summed."""
        if weights.bias is None or self.axis_name is None:
            return weights
        bias = weights.bias.astype(sum_dtype(weights.bias.dtype))
        return weights._replace(bias=jax.lax.all_gather(bias, self.axis_name, tiled=True))

    def for_fprop(self, weights: Weights, spec: DenseSpec, after: Any, *, rowwise: bool) -> tuple[Oriented, Any]:
        """Gathers the kernels that fprop reads. Those that dgrad reads, made if `rowwise`, stay this device's part."""
        state = weights.fp8_state
        if self.axis_name is not None and state is not None:
            state = part_of_state(state, self.axis_name, weights.kernel.shape[0])
        own = quantized_kernels(weights, spec, given_scales(spec, state), rowwise=rowwise)
        if self.axis_name is None:
            return own, after
        if state is not None:
            assert own.amax is not None
            own = own._replace(amax=jax.lax.all_gather(own.amax, self.axis_name, tiled=True))
        columnwise, after = self._gathered(own.columnwise, after)
        return own._replace(columnwise=columnwise), after

    def for_dgrad(
        self, up: DenseResiduals, down: DenseResiduals, dy: jax.Array
    ) -> tuple[DenseResiduals, DenseResiduals, jax.Array]:
        """Gathers the kernels of `down` once `dy` is there, and during its products those of `up`. Returns `dy` too."""
        if self.axis_name is None:
            return up, down, dy
        for residuals in (up, down):
            check_for_gradients(residuals.kernel)
        down_kernel, dy = self._gathered(down.kernel, dy)
        up_kernel, down_kernel = self._gathered(up.kernel, down_kernel)
        return dataclasses.replace(up, kernel=up_kernel), dataclasses.replace(down, kernel=down_kernel), dy

    def _gathered(self, kernel: Any, after: Any) -> tuple[Any, Any]:
        kernel, after = jax.lax.optimization_barrier((kernel, after))
        if isinstance(kernel, ScaledArray):
            return gather_stack(kernel, self.axis_name), after
        return jax.lax.all_gather(kernel, self.axis_name, tiled=True), after
