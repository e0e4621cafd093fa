"""Scales in the `xla` backend."""

import jax
import jax.numpy as jnp

from jax_grouped.backends.spec import QuantizeSpec
from jax_grouped.fp8 import numerics
from jax_grouped.fp8.recipes import ScalingMode


class Scaling:
    """Scale computation: one scale per block, from the block's largest value, or one scale per group.

    Attributes:
        of_groups: scales and inverse scales of whole groups, `[G]`, if the mode has one scale per group; else None.
    """

    def __init__(self, spec: QuantizeSpec, amax: jax.Array, given: jax.Array | None):
        self.spec = spec
        self.of_groups: tuple[jax.Array, jax.Array] | None = None
        if spec.mode == ScalingMode.TENSOR:
            scale = self._from_amax(amax) if given is None else numerics.clamp_scale(given)
            self.of_groups = scale, numerics.reciprocal(scale)

    def _from_amax(self, amax: jax.Array) -> jax.Array:
        return numerics.scale_from_amax(amax, self.spec.dtype, self.spec.amax_epsilon, pow2=self.spec.pow2_scales)

    def of_blocks(self, amax: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the scales of blocks with these largest values, and the stored inverse scales (`MX`: exponents)."""
        if self.spec.mode == ScalingMode.MX:
            exponent = numerics.mx_exponent(amax, self.spec.dtype, self.spec.amax_epsilon)
            return numerics.mx_scale(exponent), exponent
        scale = self._from_amax(amax)
        return scale, numerics.reciprocal(scale)


def spread(per_block: jax.Array, block: int, size: int, *, axis: int) -> jax.Array:
    """Repeats per-block values to one per element along an axis of this size; leaves an axis of size 1 as it is."""
    if per_block.shape[axis] == 1 or block == 1:
        return per_block
    return jax.lax.slice_in_dim(jnp.repeat(per_block, block, axis=axis), 0, size, axis=axis)
