"""Gather of weights that the devices of a mesh axis store in parts (FSDP), and the sum of their gradients.

Each device quantizes its own part. A pass gathers the one orientation that it reads, and only parts wait for the
backward pass.
"""

import dataclasses
from collections.abc import Hashable

import jax

from jax_grouped.core.varying import axis_size
from jax_grouped.fp8.arrays import ScaledArray
from jax_grouped.fp8.state import part_of_state
from jax_grouped.ops.dense import Kernels, Oriented, Saved, quantized_kernels
from jax_grouped.ops.gather import gather_stack
from jax_grouped.ops.gemm import Gathered, Operand
from jax_grouped.ops.inputs import DenseSpec, Weights


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

    def kernels(self, weights: Weights, spec: DenseSpec, *, rowwise: bool) -> Kernels:
        """Returns the kernels that fprop reads, whole, and this device's part of those that dgrad reads."""
        state = weights.fp8_state
        if state is not None:
            state = part_of_state(state, self.axis_name, weights.kernel.shape[0])
        own = quantized_kernels(weights._replace(fp8_state=state), spec, rowwise=rowwise)
        amax = own.amax
        if amax is not None and state is not None:
            amax = jax.lax.all_gather(amax, self.axis_name, tiled=True)
        assert own.columnwise is not None
        return Oriented(own.rowwise, self.whole(own.columnwise), amax)

    def whole(self, kernel: Operand) -> Operand:
        """Gathers kernels as a product reads them."""
        assert not isinstance(kernel, Gathered)
        if isinstance(kernel, ScaledArray):
            return gather_stack(kernel, self.axis_name)
        return jax.lax.all_gather(kernel, self.axis_name, tiled=True)

    def for_backward(self, saved: Saved) -> Saved:
        """Gathers the kernels that dgrad reads."""
        assert saved.residuals.kernel is not None
        # Without the barrier, XLA would find that the forward pass has gathered a kernel without a recipe, and keep it.
        own = jax.lax.optimization_barrier(saved.residuals.kernel)
        return saved._replace(residuals=dataclasses.replace(saved.residuals, kernel=self.whole(own)))

    def summed(self, dkernel: jax.Array, accumulator: jax.Array | None) -> jax.Array:
        """Returns this device's part of the sum of all devices' gradients, added to the accumulator if there is one."""
        own = jax.lax.psum_scatter(dkernel, self.axis_name, tiled=True)
        return own if accumulator is None else accumulator + own
