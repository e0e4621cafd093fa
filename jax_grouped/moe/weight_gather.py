"""Gather of weights that the devices of a mesh axis store in parts (FSDP), and the sum of their gradients.

Each device quantizes its own part. A pass gathers the one orientation that it reads, and only parts wait for the
backward pass.

XLA runs one collective at a time, and would start those of all weights before the first product. So a gather can wait
for an array: what the caller reads in place of that array keeps XLA from removing the dependence.
"""

import dataclasses
from collections.abc import Hashable
from typing import TypeVar

import jax

from jax_grouped.core.varying import axis_size
from jax_grouped.fp8.arrays import ScaledArray
from jax_grouped.fp8.state import part_of_state
from jax_grouped.ops.dense import Kernels, Oriented, Saved, quantized_kernels
from jax_grouped.ops.gather import gather_stack
from jax_grouped.ops.gemm import Gathered, Operand
from jax_grouped.ops.inputs import DenseSpec, Weights

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
        """`D`."""
        return axis_size(self.axis_name)

    def with_biases(self, weights: Weights) -> Weights:
        """Gathers the biases of all devices."""
        if weights.bias is None:
            return weights
        return weights._replace(bias=jax.lax.all_gather(weights.bias, self.axis_name, tiled=True))

    def kernels(self, weights: Weights, spec: DenseSpec, after: _T, *, rowwise: bool) -> tuple[Kernels, _T]:
        """Returns the kernels that fprop reads, whole, and this device's part of those that dgrad reads; and `after`.

        The gather starts once `after` is there.
        """
        state = weights.fp8_state
        if state is not None:
            state = part_of_state(state, self.axis_name, weights.kernel.shape[0])
        own = quantized_kernels(weights._replace(fp8_state=state), spec, rowwise=rowwise)
        amax = own.amax
        if amax is not None and state is not None:
            amax = jax.lax.all_gather(amax, self.axis_name, tiled=True)
        columnwise, after = self._whole(own.columnwise, after)
        return Oriented(own.rowwise, columnwise, amax), after

    def for_backward(self, saved: Saved, after: _T) -> tuple[Saved, _T]:
        """Gathers the kernels that dgrad reads, once `after` is there, and returns it too."""
        kernel, after = self._whole(saved.residuals.kernel, after)
        return saved._replace(residuals=dataclasses.replace(saved.residuals, kernel=kernel)), after

    def _whole(self, kernel: Operand | None, after: _T) -> tuple[Operand, _T]:
        """Gathers kernels as a product reads them."""
        kernel, after = jax.lax.optimization_barrier((kernel, after))
        assert kernel is not None
        assert not isinstance(kernel, Gathered)
        if isinstance(kernel, ScaledArray):
            return gather_stack(kernel, self.axis_name), after
        return jax.lax.all_gather(kernel, self.axis_name, tiled=True), after

    def summed(self, dkernel: jax.Array, accumulator: jax.Array | None) -> jax.Array:
        """Returns this device's part of the sum of all devices' gradients, added to the accumulator if there is one."""
        own = jax.lax.psum_scatter(dkernel, self.axis_name, tiled=True)
        return own if accumulator is None else accumulator + own
