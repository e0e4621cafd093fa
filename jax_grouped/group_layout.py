"""Where each group lies: row ranges from `group_sizes`, and the sizes of buffers whose layout depends on groups.

Every rule of clamping, capacity and alignment on the Python side lives here; its counterpart in C++ is
`csrc/common/group_layout.h`, with `group_layout.cuh` for device code.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_grouped.recipes import ScalingMode

#: Feature sizes of the 16-bit products are multiples of this, so that every row starts on a 16-byte boundary.
FEATURE_ALIGNMENT = 8

#: Feature sizes of quantized arrays are multiples of this, and so are the padded rows of columnwise data.
FP8_ALIGNMENT = 16

#: Rows that one partial sum of the bias gradient covers.
BIAS_GRAD_ROWS = 128

#: Elements along each side of a scaling block, and of one of the MX format.
BLOCK = 128
MX_BLOCK = 32

#: A scale is found from how many units of so many rows lie before its group.
GROUP_UNITS = (4, 16, 32, 128, 512)

#: So many groups are all compared with each row: one operation to compile, where a search is many.
_FEW_GROUPS = 64

#: A window of the quantization kernels is made for so many chunks and has room for 8 more, 48 bytes each, and 64 bytes.
_CHUNKS_PER_WINDOW = 32
_WINDOW_BYTES = 64 + 40 * 48


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


def matmul_scratch_bytes(num_groups: int) -> int:
    """Bytes of device memory for the pointers, sizes and scalars of one grouped matmul (`MatmulScratch` in C++)."""
    pointers = 3 * round_up(8 * num_groups, 16)
    sizes = 9 * round_up(4 * num_groups, 16)
    scalars = 16
    return pointers + sizes + scalars


def group_table_size(num_groups: int) -> int:
    """How many `int32` the device needs to tell where groups and their regions lie (`GroupTable` in C++)."""
    return (1 + len(GROUP_UNITS)) * round_up(num_groups + 1, 4)


def scaled_matmul_scratch_bytes(batch: int, num_groups: int) -> int:
    """Bytes of device memory for one grouped matmul of quantized operands (`ScaledMatmulScratch` in C++)."""
    groups = batch * num_groups
    scale_pointers = 2 * round_up(8 * groups, 16)
    tables = batch * 4 * group_table_size(num_groups)
    return round_up(matmul_scratch_bytes(groups), 16) + scale_pointers + tables


def quantize_scratch_bytes(capacity: int, num_groups: int) -> int:
    """Bytes of device memory for the windows and the group table of a quantization (`QuantizeScratchBytes` in C++)."""
    chunks = QuantizedLayout(ScalingMode.TENSOR, False, capacity, 0, num_groups).units(FP8_ALIGNMENT)
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
        return self.units_before[:, GROUP_UNITS.index(unit)]

    def units(self, unit: int) -> jax.Array:
        """How many units of so many rows the group has."""
        return _quotient(self.size + (unit - 1), unit)

    def block(self, unit: int) -> jax.Array:
        """In which unit of so many rows it lies, counted from the first group's first one."""
        return self.before(unit) + _quotient(self.row, unit)


class GroupTable:
    """What is looked up for groups, to find the places of rows."""

    def __init__(self, rows: GroupRows):
        self._rows = rows
        units = np.array(GROUP_UNITS, np.int32)
        self._unit_ends = jnp.cumsum(_quotient(rows.sizes[:, None] + (units - 1), units), axis=0, dtype=jnp.int32)
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


@dataclasses.dataclass(frozen=True)
class QuantizedLayout:
    """Where the data and scales of one quantized array lie.

    Rowwise data is `[T, C]`. Columnwise data has, for each group of `m` rows, a region `[C, round_up(m, 16)]`, which is
    zero past the group's rows. Scales have one region per group in the order of the groups, every region a multiple of
    16 bytes (`TENSOR`: one number). What a region has past its group's scales is zero. Nothing reads, and `cuda` does
    not write, what the arrays have past the last region.

    | mode       | scales of a rowwise group                   | scales of a columnwise group                  |
    |------------|---------------------------------------------|-----------------------------------------------|
    | `TENSOR`   | one                                         | one                                           |
    | `BLOCK_1D` | `[ceil(C / 128), round_up(m, 4)]`           | `[ceil(m / 128), C]`                          |
    | `BLOCK_2D` | `[ceil(m / 128), round_up(ceil(C/128), 4)]` | `[ceil(C / 128), round_up(ceil(m/128), 4)]`   |
    | `MX`       | `[round_up(m, 16), ceil(C / 32)]`           | `[C, ceil(m / 32)]`                           |

    With `swizzled_scales`, `MX` scales are in the order that Blackwell's matmul reads: tiles of 128 outer by 4 inner
    blocks, row by row; in a tile, block `(r, c)` is the byte `r % 32 * 16 + r // 32 * 4 + c`. cuBLAS documentation,
    "1D block scaling factors layout".

    A stack of equal groups has the same regions, and its arrays have the group axis in front.

    Attributes:
        mode: which elements share a scale.
        columnwise: the orientation.
        tokens: `T`, rows of all groups together.
        features: `C`.
        num_groups: how many groups.
        stack_rows: rows of every group of a stack; None if the device knows the sizes.
        swizzled_scales: see above.
    """

    mode: ScalingMode
    columnwise: bool
    tokens: int
    features: int
    num_groups: int
    stack_rows: int | None = None
    swizzled_scales: bool = False

    def stack_sizes(self, batch: int = 1) -> jax.Array:
        """Rows of every group of a stack, `int32[batch * num_groups]`."""
        assert self.stack_rows is not None
        return jnp.full((batch * self.num_groups,), self.stack_rows, jnp.int32)

    def units(self, unit: int) -> int:
        """How many units of `unit` rows, none of which crosses a group, any group sizes can need."""
        if self.stack_rows is not None:
            return self.num_groups * -(-self.stack_rows // unit)
        groups = min(self.num_groups, self.tokens)
        return groups + (self.tokens - groups) // unit if groups else 0

    @property
    def data_shape(self) -> tuple[int, ...]:
        """`[T, C]` or flat regions; `[E, K, C]` or `[E, C, round_up(K, 16)]` for a stack."""
        if self.stack_rows is None:
            return (FP8_ALIGNMENT * self.units(FP8_ALIGNMENT) * self.features,) if self.columnwise else self._tokens
        if self.columnwise:
            return (self.num_groups, self.features, round_up(self.stack_rows, FP8_ALIGNMENT))
        return (self.num_groups, self.stack_rows, self.features)

    @property
    def _tokens(self) -> tuple[int, int]:
        return self.tokens, self.features

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """Flat regions, or one region per group of a stack."""
        if self.mode == ScalingMode.TENSOR:
            return (self.num_groups,)
        if self.stack_rows is None:
            return (math.prod(self._region(self.units)),)
        rows = self.stack_rows
        return (self.num_groups, *self._region(lambda unit: -(-rows // unit)))

    def _region(self, units: Callable[[int], int]) -> tuple[int, ...]:
        """The shape of a region whose group has so many units of rows."""
        feature_blocks = -(-self.features // BLOCK)
        match self.mode, self.columnwise:
            case ScalingMode.BLOCK_1D, False:
                return feature_blocks, 4 * units(4)
            case ScalingMode.BLOCK_1D, True:
                return units(128), self.features
            case ScalingMode.BLOCK_2D, False:
                return units(128), round_up(feature_blocks, 4)
            case ScalingMode.BLOCK_2D, True:
                return feature_blocks, 4 * units(512)
            case _ if self.swizzled_scales:
                return (512 * feature_blocks * units(128),)
            case _, False:
                return 16 * units(16), -(-self.features // MX_BLOCK)
            case _:
                return self.features, units(32)

    def row_scales(self, places: Places) -> jax.Array:
        """Positions of the scales of rowwise data in the flat array.

        Args:
            places: of some rows.

        Returns:
            `int32[n, blocks]`, a position for every block of a row: of 32 elements with `MX`, of 128 otherwise; one
            column with `TENSOR`.
        """
        if self.mode == ScalingMode.TENSOR:
            return places.group[:, None]
        feature_blocks = -(-self.features // BLOCK)
        row = places.row[:, None]

        def before(unit: int) -> jax.Array:
            return places.before(unit)[:, None]

        block = jnp.arange(-(-self.features // self.block), dtype=jnp.int32)
        match self.mode:
            case ScalingMode.BLOCK_1D:
                return feature_blocks * 4 * before(4) + block * (4 * places.units(4)[:, None]) + row
            case ScalingMode.BLOCK_2D:
                return round_up(feature_blocks, 4) * places.block(128)[:, None] + block
            case _ if self.swizzled_scales:
                tile = feature_blocks * places.block(128)[:, None] + block // 4
                return _in_tile(tile, _remainder(row, 128), block % 4)
            case _:
                return block.shape[0] * (16 * before(16) + row) + block

    def column_scales(self, places: Places) -> jax.Array:
        """Positions of the scales of columnwise data in the flat array.

        As `row_scales`, but of the blocks that hold the given rows, for every feature (`int32[n, C]`), or for every 128
        features with `BLOCK_2D`.
        """
        if self.mode == ScalingMode.TENSOR:
            return places.group[:, None]
        feature_blocks = -(-self.features // BLOCK)
        row = places.row[:, None]

        def before(unit: int) -> jax.Array:
            return places.before(unit)[:, None]

        def units(unit: int) -> jax.Array:
            return places.units(unit)[:, None]

        feature = jnp.arange(self.features, dtype=jnp.int32)
        match self.mode:
            case ScalingMode.BLOCK_1D:
                return self.features * places.block(128)[:, None] + feature
            case ScalingMode.BLOCK_2D:
                block = jnp.arange(feature_blocks, dtype=jnp.int32)
                return 4 * (feature_blocks * before(512) + block * units(512)) + _quotient(row, 128)
            case _ if self.swizzled_scales:
                tile = feature_blocks * before(128) + feature // 128 * units(128) + _quotient(row, 128)
                return _in_tile(tile, feature % 128, _quotient(_remainder(row, 128), MX_BLOCK))
            case _:
                return self.features * before(32) + feature * units(32) + _quotient(row, MX_BLOCK)

    def column_data(self, places: Places) -> tuple[jax.Array, jax.Array]:
        """Where columnwise data has every feature of some rows: which 16 elements, `int32[n, C]`, and which of them."""
        unit, feature = FP8_ALIGNMENT, jnp.arange(self.features, dtype=jnp.int32)
        chunk = _quotient(places.row, unit)[:, None] + feature * places.units(unit)[:, None]
        return self.features * places.before(unit)[:, None] + chunk, _remainder(places.row, unit)[:, None]

    def column_source(self, chunks: Places) -> tuple[jax.Array, jax.Array, jax.Array]:
        """What columnwise data is made of: where its elements come from.

        Args:
            chunks: the places of all units of 16 rows.

        Returns:
            Their rows, `int32[chunks, C, 16]`, features, `int32[chunks, C, 1]`, and whether there are such rows.
        """
        # A group of `u` units has `C * u` times 16 elements, as many as so many chunks: feature by feature.
        units = jnp.maximum(chunks.units(FP8_ALIGNMENT), 1)[:, None]
        index = _quotient(chunks.row, FP8_ALIGNMENT)[:, None] * self.features
        index += jnp.arange(self.features, dtype=jnp.int32)
        feature = _quotient(index, units)
        unit = index - feature * units
        row = FP8_ALIGNMENT * unit[:, :, None] + jnp.arange(FP8_ALIGNMENT, dtype=jnp.int32)
        exists = chunks.valid[:, None, None] & (row < chunks.size[:, None, None])
        return chunks.start[:, None, None] + row, feature[:, :, None], exists

    @property
    def scales_in_block_order(self) -> bool:
        """Whether scales lie as blocks do, rows of them one after another, cut at no group."""
        return self.mode == (ScalingMode.BLOCK_1D if self.columnwise else ScalingMode.BLOCK_2D)

    @property
    def block(self) -> int:
        """Elements along the quantized axis that share a scale."""
        return MX_BLOCK if self.mode == ScalingMode.MX else BLOCK

    @property
    def block_shape(self) -> tuple[int, int]:
        """Rows and features that share a scale, if it is not the whole group."""
        if self.mode == ScalingMode.BLOCK_2D:
            return BLOCK, BLOCK
        return (self.block, 1) if self.columnwise else (1, self.block)


def _in_tile(tile: jax.Array, outer: jax.Array, inner: jax.Array) -> jax.Array:
    """The byte of block (`outer`, `inner`) of a 128 x 4 tile of scales, counted from the first tile."""
    return 512 * tile + _remainder(outer, 32) * 16 + _quotient(outer, 32) * 4 + inner


def _quotient(value: jax.Array, divisor: jax.Array | np.ndarray | int) -> jax.Array:
    """`value // divisor` of numbers that are not negative: a third of the operations, for signs need none."""
    return jax.lax.div(*jnp.broadcast_arrays(value, jnp.asarray(divisor, jnp.int32)))


def _remainder(value: jax.Array, divisor: int) -> jax.Array:
    """`value % divisor` of numbers that are not negative."""
    return jax.lax.rem(value, jnp.full_like(value, divisor))
