"""Where each group lies: row ranges from `group_sizes`, and the sizes of buffers whose layout depends on groups.

Every rule of clamping, capacity and alignment on the Python side lives here; its counterpart in C++ is
`csrc/common/group_layout.h`, with `group_layout.cuh` for device code.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

#: Feature sizes of the 16-bit products are multiples of this, so that every row starts on a 16-byte boundary.
FEATURE_ALIGNMENT = 8

#: Rows that one partial sum of the bias gradient covers.
BIAS_GRAD_ROWS = 128


class GroupRows(NamedTuple):
    """Row ranges of the local groups: group `i` is the rows `[starts[i], starts[i] + sizes[i])`. Both `int32[G]`."""

    starts: jax.Array
    sizes: jax.Array


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


def canonical_sizes(group_sizes: jax.Array, capacity: int) -> jax.Array:
    """`group_sizes` of any integer type as `int32`, without wrapping values that do not fit."""
    if group_sizes.dtype == jnp.int32:
        return group_sizes
    limit = min(capacity, jnp.iinfo(group_sizes.dtype).max)
    return jnp.clip(group_sizes, 0, limit).astype(jnp.int32)


def group_rows(group_sizes: jax.Array, group_offset: jax.Array, num_groups: int, capacity: int) -> GroupRows:
    """Row ranges of the groups `[group_offset, group_offset + num_groups)`, clamped to rows that exist.

    Args:
        group_sizes: `int32[E]`, any values: negative ones count as 0, rows past `capacity` do not exist.
        group_offset: `int32[1]`; groups before the first or after the last of `group_sizes` are empty.
        num_groups: how many groups to describe.
        capacity: rows of the token array.
    """
    total = group_sizes.shape[0]
    # A sum that saturates at the capacity is associative, and in uint32 it can't wrap: both terms are below 2^31.
    clamped = jnp.clip(group_sizes, 0, capacity).astype(jnp.uint32)
    limit = jnp.uint32(capacity)
    ends = jax.lax.associative_scan(lambda a, b: jnp.minimum(a + b, limit), clamped).astype(jnp.int32)
    starts = jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])

    index = jnp.clip(group_offset[0], -num_groups, total) + jnp.arange(num_groups, dtype=jnp.int32)
    exists = (index >= 0) & (index < total)
    index = jnp.clip(index, 0, total - 1)
    starts, ends = starts[index], ends[index]
    return GroupRows(starts=jnp.where(exists, starts, 0), sizes=jnp.where(exists, ends - starts, 0))


def row_groups(rows: GroupRows, capacity: int) -> tuple[jax.Array, jax.Array]:
    """The local group of every row (`int32[capacity]`) and whether the row belongs to any (`bool[capacity]`)."""
    row = jnp.arange(capacity, dtype=jnp.int32)
    # Groups past the end of `group_sizes` start at 0, so ends, made monotonic, are searched instead of starts.
    ends = jax.lax.associative_scan(jnp.maximum, rows.starts + rows.sizes)
    group = jnp.minimum(_count_not_above(ends, row), ends.shape[0] - 1)
    start = rows.starts[group]
    return group, (row >= start) & (row < start + rows.sizes[group])


def _count_not_above(ends: jax.Array, row: jax.Array) -> jax.Array:
    """How many of the sorted `ends` are at most `row`, for every row.

    `jnp.searchsorted` would do, but fails inside a `jax.shard_map` over some of a mesh's axes. Elementwise in `row`,
    the search fuses with whatever uses it.
    """
    count = jnp.zeros_like(row)
    for bit in reversed(range(ends.shape[0].bit_length())):
        probe = count + (1 << bit)
        fits = (probe <= ends.shape[0]) & (ends[jnp.minimum(probe, ends.shape[0]) - 1] <= row)
        count = jnp.where(fits, probe, count)
    return count


def matmul_scratch_bytes(num_groups: int) -> int:
    """Bytes of device memory for the pointers, sizes and scalars of one grouped matmul (`MatmulScratch` in C++)."""
    pointers = 3 * round_up(8 * num_groups, 16)
    sizes = 9 * round_up(4 * num_groups, 16)
    scalars = 16
    return pointers + sizes + scalars


def bias_grad_tiles(capacity: int, num_groups: int) -> int:
    """How many row tiles of `BIAS_GRAD_ROWS` rows, none of which crosses a group, any group sizes can need."""
    return capacity // BIAS_GRAD_ROWS + num_groups
