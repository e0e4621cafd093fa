"""Where each group lies: row ranges from `group_sizes`, and the sizes of buffers whose layout depends on groups.

Every rule of clamping, capacity and alignment on the Python side lives here, those of quantized arrays in
`jax_grouped.fp8.layout`; the counterpart in C++ is `csrc/groups/`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

#: Feature sizes of the 16-bit products are multiples of this, so that every row starts on a 16-byte boundary.
FEATURE_ALIGNMENT = 8

#: Feature sizes of quantized arrays are multiples of this, and so are the padded rows of columnwise data.
FP8_ALIGNMENT = 16

#: Rows that one partial sum of the bias gradient covers.
BIAS_GRAD_ROWS = 128

#: A scale is found from how many units of so many rows lie before its group.
GROUP_UNITS = (4, 16, 32, 128, 512)

#: So many groups are all compared with each row: one operation to compile, where a search is many.
_FEW_GROUPS = 64

#: A window of the quantization kernels is made for so many chunks and has room for 8 more, 48 bytes each, and 64 bytes.
_CHUNKS_PER_WINDOW = 32
_WINDOW_BYTES = 64 + 40 * 48


class Groups(NamedTuple):
    """The rows of tokens that belong to each group, as the caller gave them.

    Attributes:
        sizes: `int32[E]`, rows per group, any values.
        offset: `int32[1]`, the first of the groups whose weights are here; `int32[B]` in a batch.
    """

    sizes: jax.Array
    offset: jax.Array


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


def stack_sizes(num_groups: int, rows: int, batch: int = 1) -> jax.Array:
    """The sizes of a stack's groups, `rows` each, as a constant: `int32[batch * (num_groups + 1)]`.

    XLA would launch a kernel to fill in equal numbers, so every batch element has one more group, which is not local.
    """
    return jnp.asarray(np.tile(np.append(np.full(num_groups, rows), 0), batch), jnp.int32)


def group_rows(group_sizes: jax.Array, group_offset: jax.Array, num_groups: int, capacity: int) -> GroupRows:
    """Row ranges of the groups `[group_offset, group_offset + num_groups)`, clamped to rows that exist.

    Args:
        group_sizes: `int32[E]`, any values: negative ones count as 0, rows past `capacity` do not exist.
        group_offset: `int32[1]`; groups before the first or after the last of `group_sizes` are empty.
        num_groups: how many groups to describe.
        capacity: rows of the token array.
    """
    total = group_sizes.shape[0]
    clamped = jnp.clip(group_sizes, 0, capacity).astype(jnp.uint32)
    ends = jax.lax.reduce_window(
        clamped,
        np.uint32(0),
        _saturating_sum,
        window_dimensions=(total,),
        window_strides=(1,),
        padding=((total - 1, 0),),
    )
    ends = jnp.minimum(ends.astype(jnp.int32), capacity)

    # Group `i` lies between the ends of two neighbours, of which those before the first group are 0.
    neighbour = jnp.clip(group_offset[0], -num_groups, total) + jnp.arange(-1, num_groups, dtype=jnp.int32)
    bounds = jnp.where(neighbour < 0, 0, ends[jnp.clip(neighbour, 0, total - 1)])
    return GroupRows(starts=bounds[:-1], sizes=bounds[1:] - bounds[:-1])


def _saturating_sum(a: jax.Array, b: jax.Array) -> jax.Array:
    """The sum of two `uint32` below 2^31, at most 2^31 - 1; associative, and it can't wrap."""
    return jnp.minimum(a + b, np.uint32(2**31 - 1))


def row_groups(rows: GroupRows, capacity: int) -> tuple[jax.Array, jax.Array]:
    """The local group of every row (`int32[capacity]`) and whether the row belongs to any (`bool[capacity]`)."""
    row = jnp.arange(capacity, dtype=jnp.int32)
    ends = rows.starts + rows.sizes
    group = jnp.minimum(count_not_above(ends, row), ends.shape[0] - 1)
    return group, (row >= rows.starts[0]) & (row < ends[-1])


def count_not_above(ends: jax.Array, row: jax.Array) -> jax.Array:
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


def most_units(rows: int, num_groups: int, unit: int) -> int:
    """How many units of `unit` rows, none of which crosses a group, any sizes of so many groups can need."""
    groups = min(num_groups, rows)
    return groups + (rows - groups) // unit if groups else 0


def group_table_size(num_groups: int) -> int:
    """How many `int32` the device needs to tell where groups and their regions lie (`GroupTable` in C++)."""
    # First rows, the units of scales, and the tiles of products.
    return (2 + len(GROUP_UNITS)) * round_up(num_groups + 1, 4)


def gemm_scratch_bytes(batch: int, num_groups: int) -> int:
    """Returns the bytes of device memory that one grouped product needs beside its workspace (`GemmScratch` in C++)."""
    groups = batch * num_groups
    pointers = 5 * round_up(8 * groups, 16)  # of A, B and D, and of the scales of A and B
    sizes = 9 * round_up(4 * groups, 16)
    scalars = 16
    tables = batch * 4 * group_table_size(num_groups)
    return pointers + sizes + scalars + tables


def quantize_scratch_bytes(capacity: int, num_groups: int) -> int:
    """Bytes of device memory for the windows and the group table of a quantization (`QuantizeScratchBytes` in C++)."""
    chunks = most_units(capacity, num_groups, FP8_ALIGNMENT)
    windows = -(-chunks // _CHUNKS_PER_WINDOW)
    return windows * _WINDOW_BYTES + 4 * group_table_size(num_groups)


def bias_grad_tiles(capacity: int, num_groups: int) -> int:
    """How many row tiles of `BIAS_GRAD_ROWS` rows, none of which crosses a group, any group sizes can need."""
    return capacity // BIAS_GRAD_ROWS + num_groups


class Places(NamedTuple):
    """Where some rows lie, the arrays being `int32[n]`.

    Attributes:
        group: the local group of each.
        row: which row of the group it is.
        start: the group's first row, counted in the array.
        size: the rows of the group.
        units_before: `int32[n, len(GROUP_UNITS)]`, how many of these units the groups before it have, the last unit of
            a group cut short.
        valid: `bool[n]`, whether there is such a row; what is not valid has any place.
    """

    group: jax.Array
    row: jax.Array
    start: jax.Array
    size: jax.Array
    units_before: jax.Array
    valid: jax.Array

    def before(self, unit: int) -> jax.Array:
        """How many units of so many rows, one of `GROUP_UNITS`, the groups before have."""
        return self.units_before[..., GROUP_UNITS.index(unit)]

    def units(self, unit: int) -> jax.Array:
        """How many units of so many rows the group has."""
        return quotient(self.size + (unit - 1), unit)

    def as_column(self) -> "Places":
        """The same with arrays `[n, 1]`, to go with one value per feature."""
        return Places(*(array[:, None] for array in self))

    def block(self, unit: int) -> jax.Array:
        """In which unit of so many rows it lies, counted from the first group's first one."""
        return self.before(unit) + quotient(self.row, unit)


class GroupTable:
    """What is looked up for groups, to find the places of rows."""

    def __init__(self, rows: GroupRows):
        self._rows = rows
        units = np.array(GROUP_UNITS, np.int32)
        self._unit_ends = jnp.cumsum(quotient(rows.sizes[:, None] + (units - 1), units), axis=0, dtype=jnp.int32)
        before = jnp.pad(self._unit_ends[:-1], ((1, 0), (0, 0)))
        self._table = jnp.concatenate([rows.starts[:, None], rows.sizes[:, None], before], axis=1)

    def rows(self, capacity: int) -> Places:
        """The place of every row of the array."""
        index = jnp.arange(capacity, dtype=jnp.int32)
        ends = self._rows.starts + self._rows.sizes
        group = _group_of(ends, index)
        start, size, before = self._lookup(group)
        return Places(group, index - start, start, size, before, (index >= self._rows.starts[0]) & (index < ends[-1]))

    def units(self, unit: int, count: int) -> Places:
        """The place of the first row of every unit, for `count` units, which may be more than there are."""
        index = jnp.arange(count, dtype=jnp.int32)
        ends = self._unit_ends[:, GROUP_UNITS.index(unit)]
        group = _group_of(ends, index)
        start, size, before = self._lookup(group)
        row = unit * (index - before[:, GROUP_UNITS.index(unit)])
        return Places(group, row, start, size, before, index < ends[-1])

    def _lookup(self, group: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        found = self._table.at[group].get(mode="clip", wrap_negative_indices=False)
        return found[:, 0], found[:, 1], found[:, 2:]


def _group_of(ends: jax.Array, index: jax.Array) -> jax.Array:
    """The group of every index, from the groups' sorted ends; the last one for what lies behind."""
    if ends.shape[0] <= _FEW_GROUPS:
        count = jnp.sum(ends <= index[:, None], axis=1, dtype=jnp.int32)
    else:
        count = count_not_above(ends, index)
    return jnp.minimum(count, ends.shape[0] - 1)


def quotient(value: jax.Array, divisor: jax.Array | np.ndarray | int) -> jax.Array:
    """`value // divisor` of numbers that are not negative: a third of the operations, for signs need none."""
    return jax.lax.div(*jnp.broadcast_arrays(value, jnp.asarray(divisor, jnp.int32)))


def remainder(value: jax.Array, divisor: int) -> jax.Array:
    """`value % divisor` of numbers that are not negative."""
    return jax.lax.rem(value, jnp.full_like(value, divisor))
