"""Quantized stacks that travel between the devices of a mesh axis."""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence

import jax
import jax.numpy as jnp

from jax_grouped.fp8.arrays import ScaledArray
from jax_grouped.fp8.layout import QuantizedLayout
from jax_grouped.fp8.recipes import ScalingMode


def gather_stack(own: ScaledArray, axis_name: Hashable) -> ScaledArray:
    """Gathers the stacks of all devices of a mesh axis into one."""
    return _moved(own, functools.partial(jax.lax.all_gather, axis_name=axis_name, tiled=True))


def exchange_stacks(parts: ScaledArray, axis_name: Hashable) -> ScaledArray:
    """Sends group `i` of a stack to device `i` of the axis, and returns the groups that come from all devices."""
    return _moved(parts, lambda x: jax.lax.all_to_all(x, axis_name, 0, 0))


def gather_kernels(own: ScaledArray, storage: Sequence[tuple[str, ...]], layout: QuantizedLayout) -> ScaledArray:
    """Gathers a stack of kernels, each axis of whose data is split over the mesh axes in `storage`, in whole blocks."""

    def move(x: jax.Array) -> jax.Array:
        # Scales of whole matrices, and those of MX, have fewer axes: such kernels are stored in parts by experts, or
        # all parts have the same scales.
        for axis, names in enumerate(storage[: x.ndim]):
            x = jax.lax.all_gather(x, names, axis=axis, tiled=True) if names else x
        return x

    scale_inv = own.scale_inv
    if layout.mode == ScalingMode.BLOCK_2D:  # A row of scales may have more room than it needs.
        scale_inv = scale_inv[:, :, : own.layout.blocks(own.data.shape[2])]
    data, scale_inv = _moved_arrays(own.data, scale_inv, move)
    room = [(0, to - size) for to, size in zip(layout.scale_shape, scale_inv.shape, strict=True)]
    return ScaledArray(data, jnp.pad(scale_inv, room), None, layout)


def _moved(own: ScaledArray, move: Callable[[jax.Array], jax.Array]) -> ScaledArray:
    data, scale_inv = _moved_arrays(own.data, own.scale_inv, move)
    assert own.layout.stack_rows is not None
    layout = dataclasses.replace(own.layout, num_groups=len(data), tokens=len(data) * own.layout.stack_rows)
    return ScaledArray(data, scale_inv, None, layout)


def _moved_arrays(
    data: jax.Array, scale_inv: jax.Array, move: Callable[[jax.Array], jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Moves both arrays, the scales first: XLA runs one collective at a time, and other work during the longer one."""
    scale_inv = _move_bytes(move, scale_inv)
    data, scale_inv = jax.lax.optimization_barrier((data, scale_inv))
    return _move_bytes(move, data), scale_inv


def _move_bytes(move: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Moves an array. Not every backend sends FP8 numbers, but all send bytes."""
    if x.dtype.itemsize > 1:
        return move(x)
    return jax.lax.bitcast_convert_type(move(jax.lax.bitcast_convert_type(x, jnp.uint8)), x.dtype)
