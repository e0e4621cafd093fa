"""Quantized stacks that travel between the devices of a mesh axis."""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence

import jax
import jax.numpy as jnp

from jax_grouped.fp8.arrays import ScaledArray
from jax_grouped.fp8.layout import BLOCK, QuantizedLayout
from jax_grouped.fp8.recipes import ScalingMode


def gather_stack(own: ScaledArray, axis_name: Hashable) -> ScaledArray:
    """Gathers the stacks of all devices of a mesh axis into one."""
    return _moved(own, functools.partial(jax.lax.all_gather, axis_name=axis_name, tiled=True))


def exchange_stacks(parts: ScaledArray, axis_name: Hashable) -> ScaledArray:
    """Sends part `i` of a stack to the `i`-th of as many devices, and returns the parts from all of them."""
    return _moved(parts, lambda x: jax.lax.all_to_all(x, axis_name, 0, 0))


def gather_kernels(own: ScaledArray, storage: Sequence[tuple[str, ...]], layout: QuantizedLayout) -> ScaledArray:
    """Gathers a stack of kernels of which each device has a part, with whole blocks.

    Args:
        own: the part.
        storage: mesh axes over which each axis of the data is split.
        layout: of the whole.
    """
    scale_inv = own.scale_inv
    if layout.mode == ScalingMode.BLOCK_2D:  # A row of scales may have more room than it needs.
        scale_inv = scale_inv[:, :, : -(-own.data.shape[2] // BLOCK)]
    data = own.data
    for axis, names in enumerate(storage):
        if names:
            data = _of_bytes(functools.partial(_all_gather, names, axis), data)
            if axis < scale_inv.ndim:
                scale_inv = _of_bytes(functools.partial(_all_gather, names, axis), scale_inv)
    room = [(0, to - size) for to, size in zip(layout.scale_shape, scale_inv.shape, strict=True)]
    return ScaledArray(data, jnp.pad(scale_inv, room), None, layout)


def _moved(own: ScaledArray, move: Callable[[jax.Array], jax.Array]) -> ScaledArray:
    scale_inv = _of_bytes(move, own.scale_inv)
    # XLA runs one collective at a time. The scales go first, so that other work runs during the longer transfer.
    data, scale_inv = jax.lax.optimization_barrier((own.data, scale_inv))
    data = _of_bytes(move, data)
    assert own.layout.stack_rows is not None
    layout = dataclasses.replace(own.layout, num_groups=len(data), tokens=len(data) * own.layout.stack_rows)
    return ScaledArray(data, scale_inv, None, layout)


def _all_gather(names: tuple[str, ...], axis: int, x: jax.Array) -> jax.Array:
    return jax.lax.all_gather(x, names, axis=axis, tiled=True)


def _of_bytes(move: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Moves an array. Not every backend sends FP8 numbers, but all send bytes."""
    if x.dtype.itemsize > 1:
        return move(x)
    return jax.lax.bitcast_convert_type(move(jax.lax.bitcast_convert_type(x, jnp.uint8)), x.dtype)
