"""Gather of weights that the devices of a mesh axis store in parts (FSDP).

Each device quantizes its own part. A pass gathers the one orientation that it reads, and only parts wait for the
backward pass.

XLA runs one collective at a time, and would start those of all weights before the first product. An optimization
barrier makes a gather wait for another array, `after`. The caller must use the `after` that is returned in place of the
old one, or XLA removes the barrier.
"""

import dataclasses
from collections.abc import Hashable
from typing import Any

import jax

from jax_grouped.core.varying import axis_size, sum_dtype
from jax_grouped.fp8.arrays import ScaledArray
from jax_grouped.fp8.state import part_of_state
from jax_grouped.ops.dense import DenseResiduals, given_scales, quantized_kernels
from jax_grouped.ops.gather import gather_stack
from jax_grouped.ops.inputs import DenseSpec, Weights
from jax_grouped.ops.quantize import Oriented
from jax_grouped.ops.quantize_kernel import check_for_gradients


@dataclasses.dataclass(frozen=True)
class WeightGather:
    """A gather over a mesh axis whose devices have different tokens, and each `E / D` of `E` weight matrices.

    Without an axis each device has them all, and nothing is gathered.

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
        """Gathers the kernels that dgrad reads: those of `down` once `dy` is there, then those of `up`.

        The second gather runs during the products of `down`. Returns `dy` too, which the caller uses from here on.
        """
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
