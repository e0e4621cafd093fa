"""Choice of the pairs of a token and an expert that are dropped where a device has no room for all of its pairs."""

from collections.abc import Hashable
from typing import Literal

import jax
import jax.numpy as jnp

from jax_grouped.backends.reference.rows import gather
from jax_grouped.core.capacity import fit_to_capacity
from jax_grouped.core.varying import vary_alike
from jax_grouped.ops.routing import group_pairs

#: Which pairs are dropped, see `moe_mlp`.
DropBy = Literal["even", "weight"]


def keep(
    experts: jax.Array,
    weights: jax.Array,
    num_experts: int,
    *,
    capacity: int,
    axis_name: Hashable | None,
    drop_by: DropBy,
) -> jax.Array:
    """Chooses the pairs that keep a row, where each device has `capacity` rows for its part of the experts.

    Args:
        experts: `int32[T, k]`, the experts of this device's tokens; other values than `[0, E)` are no pair.
        weights: `float32[T, k]`, the routing weights.
        num_experts: `E`, of all devices.
        capacity: rows of a device.
        axis_name: mesh axis that splits the experts and the tokens; None for one device.
        drop_by: as in `moe_mlp`.

    Returns:
        `bool[T, k]`; unspecified for no pair.
    """
    if drop_by == "even":
        return _keep_even(experts, num_experts, capacity, axis_name)
    me, devices = jnp.zeros((), jnp.int32), 1
    weights = jax.lax.stop_gradient(weights)
    if axis_name is not None:
        me, devices = jax.lax.axis_index(axis_name), jax.lax.axis_size(axis_name)
        experts, weights = (jax.lax.all_gather(of, axis_name, tiled=True) for of in (experts, weights))
    own = (experts >= 0) & (experts // (num_experts // devices) == me)
    if capacity >= own.size:
        return jnp.ones_like(own)
    weights = jnp.where(own & ~jnp.isnan(weights), weights, -jnp.inf)
    lowest = jnp.sort(weights, axis=None)[-capacity]
    above, equal = own & (weights > lowest), own & (weights == lowest)
    rank = jnp.cumsum(equal.reshape(-1), dtype=jnp.int32).reshape(equal.shape) - 1
    count, room = jnp.sum(equal, dtype=jnp.int32), capacity - jnp.sum(above, dtype=jnp.int32)
    kept = above | (equal & _at_stride(rank, count, jnp.minimum(count, room)))
    if axis_name is None:
        return kept
    return jax.lax.psum_scatter((own & ~kept).astype(jnp.int32), axis_name, tiled=True) == 0


def _keep_even(experts: jax.Array, num_experts: int, capacity: int, axis_name: Hashable | None) -> jax.Array:
    """Gives every source of rows the same room, and drops from each group at a fixed stride."""
    grouped = group_pairs(experts, num_experts, experts.size)
    sizes = grouped.group_sizes
    if axis_name is None:
        kept = fit_to_capacity(sizes, capacity)
    else:
        devices = jax.lax.axis_size(axis_name)
        sizes, me = vary_alike(sizes, jax.lax.axis_index(axis_name))
        chunks = jax.lax.all_gather(sizes, axis_name).reshape(devices, devices, num_experts // devices)
        fitted = jax.vmap(fit_to_capacity, in_axes=(1, None), out_axes=1)(chunks, capacity)
        kept = fitted[me].reshape(num_experts)
    starts = jnp.cumsum(sizes, dtype=jnp.int32) - sizes
    start, size, room = (gather(of, experts, fill=0) for of in (starts, sizes, kept))
    return _at_stride(grouped.inverse - start, size, room)


def _at_stride(rank: jax.Array, size: jax.Array, kept: jax.Array) -> jax.Array:
    """Tells whether item `rank` of `size` is among `kept` ones at even distances; they are fewer for large sizes.

    All arrays are int32 and broadcast. Item `r` is kept if `r * kept % size < kept`. The ratio is rounded down to 16
    bits, so that the product fits into 32: then up to 1 of 2^14 items more is dropped.
    """
    shift = jnp.maximum(16 - jax.lax.clz(size), 0)
    parts = jnp.maximum((kept >> shift) - jnp.minimum(shift, 1), 0).astype(jnp.uint32)
    period = jnp.maximum(-(-size >> shift), 1).astype(jnp.uint32)
    # Start in the middle: the first item of a period is always kept.
    position = (rank.astype(jnp.uint32) + period // 2) % period
    return (kept == size) | (position * parts % period < parts)
