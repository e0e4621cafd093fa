"""Positions of groups: row ranges from `group_sizes`.

This module has every rule of clamping, capacity and alignment on the Python side, except those of quantized arrays,
which are in `jax_grouped.fp8.layout`. The counterpart in C++ is `csrc/groups/`.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

#: Feature sizes of the 16-bit products are multiples of this, so that every row starts on a 16-byte boundary.
FEATURE_ALIGNMENT = 8

#: Feature sizes of quantized arrays are multiples of this, and so are the padded rows of columnwise data.
FP8_ALIGNMENT = 16

#: Heights of row blocks. A row block never crosses a group; a group's last one may be shorter. The position of a scale
#: follows from the number of row blocks of one height before its group.
ROW_BLOCKS = (4, 16, 32, 128, 512)

#: Up to this number of groups, each row is compared with all groups: that compiles to one operation, a search to many.
_FEW_GROUPS = 64


class Groups(NamedTuple):
    """Group sizes and group offset, as the caller gave them.

    Attributes:
        sizes: `int32[E]`, rows per group, any values.
        offset: `int32[1]`, the first local group, one whose weights are here; `int32[B]` in a batch.
    """

    sizes: jax.Array
    offset: jax.Array


class GroupRows(NamedTuple):
    """Row ranges of the local groups: group `i` is the rows `[starts[i], starts[i] + sizes[i])`. Both `int32[G]`."""

    starts: jax.Array
    sizes: jax.Array


def round_up(value: int, multiple: int) -> int:
    """Returns the smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def stack_sizes(num_groups: int, rows: int, batch: int = 1) -> jax.Array:
    """Returns the sizes of a stack's groups, `rows` each, as a constant: `int32[batch * (num_groups + 1)]`.

    Every batch element has one more group of another size, which is not local: XLA would launch a kernel to fill an
    array with equal numbers.
    """
    return jnp.asarray(np.tile(np.append(np.full(num_groups, rows), 0), batch), jnp.int32)


def clamp_offset(group_offset: jax.Array, num_groups: int, total: int) -> jax.Array:
    """Clamps the first local group. Beyond the limits none of the `num_groups` is one of all, and sums fit `int32`."""
    return jnp.clip(group_offset, -num_groups, total)


@functools.partial(jax.jit, static_argnums=(2, 3))
def group_rows(group_sizes: jax.Array, group_offset: jax.Array, num_groups: int, capacity: int) -> GroupRows:
    """Returns the row ranges of the groups `[group_offset, group_offset + num_groups)`, clamped to `capacity` rows."""
    total = group_sizes.shape[0]
    clamped = jnp.clip(group_sizes, 0, capacity).astype(jnp.uint32)
    # Element `i` is the end of group `i - 1`, and that of no group is 0.
    ends = jax.lax.reduce_window(
        clamped,
        np.uint32(0),
        _saturating_sum,
        window_dimensions=(total,),
        window_strides=(1,),
        padding=((total, 0),),
    )
    ends = jnp.minimum(ends.astype(jnp.int32), capacity)

    # Group `i` lies between elements `i` and `i + 1`.
    group = clamp_offset(group_offset[0], num_groups, total) + jnp.arange(num_groups + 1, dtype=jnp.int32)
    bounds = ends.at[group].get(mode="clip", wrap_negative_indices=False)
    return GroupRows(starts=bounds[:-1], sizes=bounds[1:] - bounds[:-1])


def part_sizes(group_sizes: jax.Array, first_row: jax.Array | int, rows: int, capacity: int) -> jax.Array:
    """Returns how many of the rows `[first_row, first_row + rows)` each group has: `int32[E]`, as `group_sizes`."""
    all_rows = group_rows(group_sizes, jnp.zeros(1, jnp.int32), group_sizes.shape[0], capacity)
    bounds = (jnp.clip(bound - first_row, 0, rows) for bound in (all_rows.starts, all_rows.starts + all_rows.sizes))
    starts, ends = bounds
    return ends - starts


def _saturating_sum(a: jax.Array, b: jax.Array) -> jax.Array:
    """Adds two `uint32` below 2^31 and clamps the sum to 2^31 - 1. Associative, and it can't wrap."""
    return jnp.minimum(a + b, np.uint32(2**31 - 1))


def row_groups(rows: GroupRows, capacity: int) -> tuple[jax.Array, jax.Array]:
    """Returns every row's local group (`int32[capacity]`), and a mask of rows that have one (`bool[capacity]`)."""
    row = jnp.arange(capacity, dtype=jnp.int32)
    ends = rows.starts + rows.sizes
    group = jnp.minimum(count_not_above(ends, row), ends.shape[0] - 1)
    return group, (row >= rows.starts[0]) & (row < ends[-1])


def count_not_above(ends: jax.Array, row: jax.Array) -> jax.Array:
    """Counts, for every row, the sorted `ends` that are at most `row`, elementwise in `row`, so that XLA fuses it."""
    count = jnp.zeros_like(row)
    for bit in reversed(range(ends.shape[0].bit_length())):
        probe = count + (1 << bit)
        fits = (probe <= ends.shape[0]) & (ends[jnp.minimum(probe, ends.shape[0]) - 1] <= row)
        count = jnp.where(fits, probe, count)
    return count


def max_row_blocks(rows: int, num_groups: int, height: int) -> int:
    """Returns the most row blocks of `height` rows that any sizes of `num_groups` groups can need."""
    groups = min(num_groups, rows)
    return groups + (rows - groups) // height if groups else 0


def fit_to_capacity(sizes: jax.Array, capacity: int) -> jax.Array:
    """Cuts the largest of nonnegative sizes to one length, so that all groups fit into `capacity` rows."""
    ascending = jnp.sort(sizes.astype(jnp.int32), axis=None)
    # For each size: do all groups fit if the smaller ones stay whole and the others are cut to this size?
    before = jnp.cumsum(ascending) - ascending
    others = ascending.size - jnp.arange(ascending.size, dtype=jnp.int32)
    level = (capacity - before) // others
    first_cut = jnp.sum(ascending <= level)  # If a size does not fit, no larger one does.
    longest = jnp.where(first_cut == ascending.size, capacity, level[jnp.minimum(first_cut, ascending.size - 1)])
    return jnp.minimum(sizes, longest).astype(jnp.int32)


class RowPositions(NamedTuple):
    """Positions of `n` rows within their groups. The arrays are `int32[n]` unless given otherwise.

    Attributes:
        group: the row's local group.
        row: index of the row in its group.
        start: the group's first row, as an index into the array.
        size: number of rows of the group.
        blocks_before: `int32[n, len(ROW_BLOCKS)]`, number of row blocks of each height in the groups before it.
        valid: `bool[n]`, whether the row exists; the other fields of a row that does not are arbitrary.
    """

    group: jax.Array
    row: jax.Array
    start: jax.Array
    size: jax.Array
    blocks_before: jax.Array
    valid: jax.Array

    def before(self, height: int) -> jax.Array:
        """Returns the number of row blocks of `height` rows in the groups before the row's group."""
        return self.blocks_before[..., ROW_BLOCKS.index(height)]

    def row_blocks(self, height: int) -> jax.Array:
        """Returns the number of row blocks of `height` rows in the row's group."""
        return quotient(self.size + (height - 1), height)

    def as_column(self) -> "RowPositions":
        """Returns the same positions with arrays `[n, 1]`, which broadcast against one value per feature."""
        return RowPositions(*(array[:, None] for array in self))

    def block(self, height: int) -> jax.Array:
        """Returns the index of the row's block of `height` rows, counted from the first group on."""
        return self.before(height) + quotient(self.row, height)


@functools.partial(jax.jit, static_argnums=1)
def row_positions(rows: GroupRows, capacity: int) -> RowPositions:
    """Returns the position of every row of an array of `capacity` rows."""
    index = jnp.arange(capacity, dtype=jnp.int32)
    ends = rows.starts + rows.sizes
    group = _find_group(ends, index)
    start, size, before = _look_up(rows, _block_ends(rows), group)
    return RowPositions(group, index - start, start, size, before, (index >= rows.starts[0]) & (index < ends[-1]))


@functools.partial(jax.jit, static_argnums=(1, 2))
def block_positions(rows: GroupRows, height: int, count: int) -> RowPositions:
    """Returns the position of the first row of `count` row blocks of `height` rows, which may be more than exist."""
    index = jnp.arange(count, dtype=jnp.int32)
    block_ends = _block_ends(rows)
    ends = block_ends[:, ROW_BLOCKS.index(height)]
    group = _find_group(ends, index)
    start, size, before = _look_up(rows, block_ends, group)
    row = height * (index - before[:, ROW_BLOCKS.index(height)])
    return RowPositions(group, row, start, size, before, index < ends[-1])


def _block_ends(rows: GroupRows) -> jax.Array:
    """Returns the number of row blocks of each height up to the end of each group, `int32[G, len(ROW_BLOCKS)]`."""
    heights = np.array(ROW_BLOCKS, np.int32)
    return jnp.cumsum(quotient(rows.sizes[:, None] + (heights - 1), heights), axis=0, dtype=jnp.int32)


def _look_up(rows: GroupRows, block_ends: jax.Array, group: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the start and the size of some groups, and the row blocks before them."""
    before = jnp.pad(block_ends[:-1], ((1, 0), (0, 0)))
    table = jnp.concatenate([rows.starts[:, None], rows.sizes[:, None], before], axis=1)
    found = table.at[group].get(mode="clip", wrap_negative_indices=False)
    return found[:, 0], found[:, 1], found[:, 2:]


def _find_group(ends: jax.Array, index: jax.Array) -> jax.Array:
    """Returns the group of every index, from the groups' sorted ends; the last group for indices past all ends."""
    if ends.shape[0] <= _FEW_GROUPS:
        count = jnp.sum(ends <= index[:, None], axis=1, dtype=jnp.int32)
    else:
        count = count_not_above(ends, index)
    return jnp.minimum(count, ends.shape[0] - 1)


def quotient(value: jax.Array, divisor: jax.Array | np.ndarray | int) -> jax.Array:
    """Computes `value // divisor` of nonnegative numbers in a third of the operations: signs need no handling."""
    return jax.lax.div(*jnp.broadcast_arrays(value, jnp.asarray(divisor, jnp.int32)))


def remainder(value: jax.Array, divisor: int) -> jax.Array:
    """Computes `value % divisor` of nonnegative numbers."""
    return jax.lax.rem(value, jnp.full_like(value, divisor))
