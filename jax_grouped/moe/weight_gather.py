"""Gather of weights that the devices of a mesh axis store in parts (FSDP).

Each device quantizes its own part. A pass gathers the one orientation that it reads, and only parts wait for the
backward pass.

XLA runs one collective at a time, and would start those of all weights before the first product. An optimization
barrier makes a gather wait for another array, `after`. The caller must use the `after` that is returned in place of the
old one, or XLA removes the barrier.
"""

import dataclasses
from collections.abc import Hashable
from typing import TypeVar

import jax

from jax_grouped.core.varying import axis_size, sum_dtype
from jax_grouped.fp8.arrays import ScaledArray
from jax_grouped.fp8.state import part_of_state
from jax_grouped.kernels.product import Gathered
from jax_grouped.ops.dense import Kernels, Oriented, Saved, quantized_kernels
from jax_grouped.ops.gather import gather_stack
from jax_grouped.ops.gemm import Operand
from jax_grouped.ops.inputs import DenseSpec, Weights
from jax_grouped.ops.quantize_kernel import check_for_gradients

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class WeightGather:
    """A gather over a mesh axis whose devices have different tokens, and each `E / D` of `E` weight matrices.

    Attributes:
        axis_name: the mesh axis, of `D` devices.
    """

    axis_name: Hashable

    @property
    def parts(self) -> int:
        """Number of devices of the axis."""
        return axis_size(self.axis_name)

    def with_biases(self, weights: Weights) -> Weights:
        """Gathers the biases of all devices, in the type in which their gradients are summed."""
        if weights.bias is None:
            return weights
        bias = weights.bias.astype(sum_dtype(weights.bias.dtype))
        return weights._replace(bias=jax.lax.all_gather(bias, self.axis_name, tiled=True))

    def for_fprop(self, weights: Weights, spec: DenseSpec, after: _T, *, rowwise: bool) -> tuple[Kernels, _T]:
        """Gathers the kernels that fprop reads. Those that dgrad reads, made if `rowwise`, stay this device's part."""
        own = self._own_kernels(weights, spec, rowwise=rowwise)
        columnwise, after = self._gathered(own.columnwise, after)
        return Oriented(own.rowwise, columnwise, own.amax), after

    def _own_kernels(self, weights: Weights, spec: DenseSpec, *, rowwise: bool) -> Kernels:
        """Returns this device's part of the kernels as products read them, with the largest values of all kernels."""
        state = weights.fp8_state
        if state is None:
            return quantized_kernels(weights, spec, rowwise=rowwise)
        state = part_of_state(state, self.axis_name, weights.kernel.shape[0])
        own = quantized_kernels(weights._replace(fp8_state=state), spec, rowwise=rowwise)
        assert own.amax is not None
        return Oriented(own.rowwise, own.columnwise, jax.lax.all_gather(own.amax, self.axis_name, tiled=True))

    def for_dgrad(self, up: Saved, down: Saved, dy: jax.Array) -> tuple[Saved, Saved, jax.Array]:
        """Gathers the kernels that dgrad reads: those of `down` once `dy` is there, then those of `up`.

        The second gather runs during the products of `down`. Returns `dy` too, which the caller uses from here on.
        """
        for saved in (up, down):
            check_for_gradients(saved.residuals.kernel)
        down_kernel, dy = self._gathered(down.residuals.kernel, dy)
        up_kernel, down_kernel = self._gathered(up.residuals.kernel, down_kernel)

        def with_kernel(saved: Saved, kernel: Operand) -> Saved:
            return saved._replace(residuals=dataclasses.replace(saved.residuals, kernel=kernel))

        return with_kernel(up, up_kernel), with_kernel(down, down_kernel), dy

    def _gathered(self, kernel: Operand | None, after: _T) -> tuple[Operand, _T]:
        kernel, after = jax.lax.optimization_barrier((kernel, after))
        assert kernel is not None
        assert not isinstance(kernel, Gathered)
        if isinstance(kernel, ScaledArray):
            return gather_stack(kernel, self.axis_name), after
        return jax.lax.all_gather(kernel, self.axis_name, tiled=True), after
