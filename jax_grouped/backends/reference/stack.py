"""Quantization of stacks of equal groups in the `xla` backend: `reference.quantize` done by reshaping."""

import jax
import jax.numpy as jnp

from jax_grouped.backends.reference.scales import Scaling, spread
from jax_grouped.core.groups import round_up
from jax_grouped.fp8 import numerics
from jax_grouped.fp8.layout import QuantizedLayout
from jax_grouped.fp8.recipes import ScalingMode


class Stack:
    """Quantizer of a stack `[E, K, C]`."""

    def __init__(self, values: jax.Array):
        self._values = values

    def amax(self) -> jax.Array:
        """Returns the largest absolute value of each group."""
        return jnp.max(numerics.magnitude(self._values), axis=(1, 2))

    def copy(self, scaling: Scaling, layout: QuantizedLayout) -> tuple[jax.Array, jax.Array]:
        """Returns the bytes and the inverse scales of one orientation."""
        if scaling.of_groups:
            scale, scale_inv = scaling.of_groups
            scale = scale[:, None, None]
        else:
            scale, scale_inv = scaling.of_blocks(self._block_amax(layout))
            scale, scale_inv = _of_elements(scale, layout), _to_region(scale_inv, layout)
        data = numerics.cast(self._values, scale, scaling.spec.dtype)
        return _pad(data.swapaxes(1, 2), layout.data_shape) if layout.columnwise else data, scale_inv

    def _block_amax(self, layout: QuantizedLayout) -> jax.Array:
        rows, features = layout.block_shape
        groups, height, width = self._values.shape
        padded = _pad(numerics.magnitude(self._values), (groups, round_up(height, rows), round_up(width, features)))
        blocks = padded.reshape(groups, padded.shape[1] // rows, rows, padded.shape[2] // features, features)
        return blocks.max(axis=(2, 4))


def dequantize(data: jax.Array, scale_inv: jax.Array, layout: QuantizedLayout) -> jax.Array:
    """Computes `data * scale_inv` of a stack, `[E, K, C]`, in float32."""
    if layout.columnwise:
        data = data[:, :, : layout.stack_rows].swapaxes(1, 2)
    if layout.mode == ScalingMode.TENSOR:
        scale_inv = scale_inv[:, None, None]
    else:
        scale_inv = _of_elements(numerics.stored_scale(_from_region(scale_inv, layout)), layout)
    return numerics.flush(data.astype(jnp.float32) * scale_inv)


def _of_elements(per_block: jax.Array, layout: QuantizedLayout) -> jax.Array:
    """Repeats per-block values to one per element: `[E, blocks of rows, blocks of features] -> [E, K, C]`."""
    assert layout.stack_rows is not None
    rows, features = layout.block_shape
    return spread(spread(per_block, rows, layout.stack_rows, axis=1), features, layout.features, axis=2)


def _is_transposed(layout: QuantizedLayout) -> bool:
    """Tells whether the blocks of features are the first axis of a scale region."""
    return layout.columnwise != (layout.mode == ScalingMode.BLOCK_1D)


def _to_region(scale_inv: jax.Array, layout: QuantizedLayout) -> jax.Array:
    """Lays out one inverse scale per block, `[E, blocks of rows, blocks of features]`, as `QuantizedLayout` says."""
    if _is_transposed(layout):
        scale_inv = scale_inv.swapaxes(1, 2)
    if not layout.swizzled_scales:
        return _pad(scale_inv, layout.scale_shape)
    groups, outer, inner = scale_inv.shape
    tiles = _pad(scale_inv, (groups, round_up(outer, 128), round_up(inner, 4)))
    return tiles.reshape(groups, -1, 4, 32, tiles.shape[2] // 4, 4).transpose(0, 1, 4, 3, 2, 5)


def _from_region(scale_inv: jax.Array, layout: QuantizedLayout) -> jax.Array:
    """Inverts `_to_region`."""
    assert layout.stack_rows is not None
    rows, features = layout.block_shape
    blocks = -(-layout.stack_rows // rows), -(-layout.features // features)
    outer, inner = reversed(blocks) if _is_transposed(layout) else blocks
    if layout.swizzled_scales:
        tiles = scale_inv.reshape(layout.num_groups, -(-outer // 128), -(-inner // 4), 32, 4, 4)
        scale_inv = tiles.transpose(0, 1, 4, 3, 2, 5).reshape(layout.num_groups, round_up(outer, 128), -1)
    scale_inv = scale_inv[:, :outer, :inner]
    return scale_inv.swapaxes(1, 2) if _is_transposed(layout) else scale_inv


def _pad(array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Pads the ends of the axes with zeros."""
    return jnp.pad(array, [(0, wanted - size) for size, wanted in zip(array.shape, shape, strict=True)])
