"""Layout of the data and scales of a quantized array. The counterparts in C++ are `csrc/groups/layout.{h,cuh}`."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from jax_grouped.core.groups import (
    FP8_ALIGNMENT,
    RowPositions,
    max_row_blocks,
    quotient,
    remainder,
    round_up,
    stack_sizes,
)
from jax_grouped.fp8.recipes import ScalingMode

#: Elements along each side of a scaling block: of blocks of 128, and of the MX format.
BLOCK = 128
MX_BLOCK = 32


def feature_grain(mode: ScalingMode) -> int:
    """Returns the multiple of features that an aligned part has, if its scales are those of the whole."""
    return {ScalingMode.TENSOR: FP8_ALIGNMENT, ScalingMode.MX: MX_BLOCK}.get(mode, BLOCK)


@dataclasses.dataclass(frozen=True)
class QuantizedLayout:
    """Layout of the data and scales of one quantized array.

    Rowwise data is `[T, C]`. Columnwise data has a region `[C, round_up(m, 16)]` for each group of `m` rows; it is zero
    past the group's rows. Scales have one region per group, in the order of the groups. The size of every region is a
    multiple of 16 bytes (`TENSOR`: one number). A region is zero past its group's scales. Past the last region, arrays
    are unspecified: nothing reads these bytes, and `cuda` does not write them.

    | mode       | scales of a rowwise group                   | scales of a columnwise group                  |
    |------------|---------------------------------------------|-----------------------------------------------|
    | `TENSOR`   | one                                         | one                                           |
    | `BLOCK_1D` | `[ceil(C / 128), round_up(m, 4)]`           | `[ceil(m / 128), C]`                          |
    | `BLOCK_2D` | `[ceil(m / 128), round_up(ceil(C/128), 4)]` | `[ceil(C / 128), round_up(ceil(m/128), 4)]`   |
    | `MX`       | tiles of `[m, ceil(C / 32)]`                | tiles of `[C, ceil(m / 32)]`                  |

    `MX` scales are in the order that Blackwell's matmul reads: tiles of 128 outer by 4 inner blocks, row by row. In a
    tile, block `(r, c)` is the byte `r % 32 * 16 + r // 32 * 4 + c`. See "1D block scaling factors layout" in the
    cuBLAS documentation.

    A stack of equal groups has the same regions, and its arrays have the group axis in front.

    Attributes:
        mode: which elements share a scale.
        columnwise: the orientation.
        tokens: `T`, rows of all groups together.
        features: `C`.
        num_groups: number of groups.
        stack_rows: rows of every group of a stack; None if the device knows the sizes.
    """

    mode: ScalingMode
    columnwise: bool
    tokens: int
    features: int
    num_groups: int
    stack_rows: int | None = None

    def stack_sizes(self, batch: int = 1) -> jax.Array:
        assert self.stack_rows is not None
        return stack_sizes(self.num_groups, self.stack_rows, batch)

    def row_blocks(self, height: int) -> int:
        """Returns the most row blocks of `height` rows that any group sizes can need; none crosses a group."""
        if self.stack_rows is not None:
            return self.num_groups * -(-self.stack_rows // height)
        return max_row_blocks(self.tokens, self.num_groups, height)

    @property
    def data_shape(self) -> tuple[int, ...]:
        """`[T, C]` or flat regions; `[E, K, C]` or `[E, C, round_up(K, 16)]` for a stack."""
        if self.stack_rows is None:
            flat = (FP8_ALIGNMENT * max_row_blocks(self.tokens, self.num_groups, FP8_ALIGNMENT) * self.features,)
            return flat if self.columnwise else (self.tokens, self.features)
        if self.columnwise:
            return (self.num_groups, self.features, round_up(self.stack_rows, FP8_ALIGNMENT))
        return (self.num_groups, self.stack_rows, self.features)

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """Flat regions, or one region per group of a stack."""
        if self.mode == ScalingMode.TENSOR:
            return (self.num_groups,)
        feature_blocks = -(-self.features // BLOCK)
        # One region of a stack, or all regions of groups whose sizes only the device knows.
        rows, groups = (self.tokens, self.num_groups) if self.stack_rows is None else (self.stack_rows, 1)
        blocks = functools.partial(max_row_blocks, rows, groups)
        match self.mode, self.columnwise:
            case ScalingMode.BLOCK_1D, False:
                region: tuple[int, ...] = (feature_blocks, 4 * blocks(4))
            case ScalingMode.BLOCK_1D, True:
                region = blocks(128), self.features
            case ScalingMode.BLOCK_2D, False:
                region = blocks(128), round_up(feature_blocks, 4)
            case ScalingMode.BLOCK_2D, True:
                region = feature_blocks, 4 * blocks(512)
            case _:
                region = (512 * feature_blocks * blocks(128),)
        return (math.prod(region),) if self.stack_rows is None else (self.num_groups, *region)

    def row_scales(self, positions: RowPositions) -> jax.Array:
        """Returns the positions of the scales of rowwise data: `int32[n, blocks]`, or one with `TENSOR`."""
        positions = positions.as_column()
        block = jnp.arange(self.blocks(self.features), dtype=jnp.int32)
        feature_blocks = -(-self.features // BLOCK)
        match self.mode:
            case ScalingMode.TENSOR:
                return positions.group
            case ScalingMode.BLOCK_1D:
                return feature_blocks * 4 * positions.before(4) + block * (4 * positions.row_blocks(4)) + positions.row
            case ScalingMode.BLOCK_2D:
                return round_up(feature_blocks, 4) * positions.block(128) + block
            case ScalingMode.MX:
                tile = feature_blocks * positions.block(128) + block // 4
                return _in_tile(tile, remainder(positions.row, 128), block % 4)

    def column_scales(self, positions: RowPositions) -> jax.Array:
        """Returns the positions of the scales of columnwise data: `int32[n, C]`, or one per 128 features."""
        positions = positions.as_column()
        feature = jnp.arange(self.features, dtype=jnp.int32)
        feature_blocks = -(-self.features // BLOCK)
        match self.mode:
            case ScalingMode.TENSOR:
                return positions.group
            case ScalingMode.BLOCK_1D:
                return self.features * positions.block(128) + feature
            case ScalingMode.BLOCK_2D:
                block = jnp.arange(feature_blocks, dtype=jnp.int32)
                region = feature_blocks * positions.before(512) + block * positions.row_blocks(512)
                return 4 * region + quotient(positions.row, 128)
            case ScalingMode.MX:
                tile = feature_blocks * positions.before(128) + feature // 128 * positions.row_blocks(128)
                inner = quotient(remainder(positions.row, 128), MX_BLOCK)
                return _in_tile(tile + quotient(positions.row, 128), feature % 128, inner)

    def column_data(self, positions: RowPositions) -> tuple[jax.Array, jax.Array]:
        """Returns the chunk of 16 elements of each feature of some rows, `int32[n, C]`, and the index in it."""
        positions = positions.as_column()
        feature = jnp.arange(self.features, dtype=jnp.int32)
        chunk = quotient(positions.row, FP8_ALIGNMENT) + feature * positions.row_blocks(FP8_ALIGNMENT)
        return self.features * positions.before(FP8_ALIGNMENT) + chunk, remainder(positions.row, FP8_ALIGNMENT)

    def column_source(self, chunks: RowPositions) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the row of each element `[chunks, C, 16]`, its feature `[chunks, C, 1]`, and which rows exist."""
        # A group of `n` chunks has `C * n` runs of 16 elements, feature by feature: `C` runs for each of its chunks.
        count = jnp.maximum(chunks.row_blocks(FP8_ALIGNMENT), 1)[:, None]
        index = quotient(chunks.row, FP8_ALIGNMENT)[:, None] * self.features
        index += jnp.arange(self.features, dtype=jnp.int32)
        feature = quotient(index, count)
        chunk = index - feature * count
        row = FP8_ALIGNMENT * chunk[:, :, None] + jnp.arange(FP8_ALIGNMENT, dtype=jnp.int32)
        exists = chunks.valid[:, None, None] & (row < chunks.size[:, None, None])
        return chunks.start[:, None, None] + row, feature[:, :, None], exists

    @property
    def _features_first(self) -> bool:
        """True if the blocks of features are the first axis of a scale region."""
        return self.columnwise != (self.mode == ScalingMode.BLOCK_1D)

    def lay_out_scales(self, per_block: jax.Array) -> jax.Array:
        """Lays out one inverse scale per block of a stack, `[E, blocks of rows, blocks of features]`."""
        if self._features_first:
            per_block = per_block.swapaxes(1, 2)
        if self.mode != ScalingMode.MX:
            return pad_to(per_block, self.scale_shape)
        groups, outer, inner = per_block.shape
        tiles = pad_to(per_block, (groups, round_up(outer, 128), round_up(inner, 4)))
        return tiles.reshape(groups, -1, 4, 32, tiles.shape[2] // 4, 4).transpose(0, 1, 4, 3, 2, 5)

    def read_scales(self, scales: jax.Array) -> jax.Array:
        """Inverts `lay_out_scales`."""
        assert self.stack_rows is not None
        rows, features = self.block_shape
        blocks = -(-self.stack_rows // rows), -(-self.features // features)
        outer, inner = reversed(blocks) if self._features_first else blocks
        if self.mode == ScalingMode.MX:
            tiles = scales.reshape(self.num_groups, -(-outer // 128), -(-inner // 4), 32, 4, 4)
            scales = tiles.transpose(0, 1, 4, 3, 2, 5).reshape(self.num_groups, round_up(outer, 128), -1)
        scales = scales[:, :outer, :inner]
        return scales.swapaxes(1, 2) if self._features_first else scales

    def spread_blocks(self, per_block: jax.Array) -> jax.Array:
        """Repeats values of a stack's blocks: `[E, blocks of rows, blocks of features] -> [E, K, C]`."""
        assert self.stack_rows is not None
        rows, features = self.block_shape
        return spread(spread(per_block, rows, self.stack_rows, axis=1), features, self.features, axis=2)

    @property
    def scales_in_block_order(self) -> bool:
        """True if scales are in the order of blocks: rows of blocks one after another, with no gap between groups."""
        return self.mode == (ScalingMode.BLOCK_1D if self.columnwise else ScalingMode.BLOCK_2D)

    def blocks(self, size: int) -> int:
        """Returns the number of blocks along an axis of this size, if that is the quantized one."""
        return -(-size // (MX_BLOCK if self.mode == ScalingMode.MX else BLOCK))

    @property
    def block_shape(self) -> tuple[int, int]:
        """Numbers of rows and features that share a scale, unless the whole group does."""
        if self.mode == ScalingMode.BLOCK_2D:
            return BLOCK, BLOCK
        block = MX_BLOCK if self.mode == ScalingMode.MX else BLOCK
        return (block, 1) if self.columnwise else (1, block)


def _in_tile(tile: jax.Array, outer: jax.Array, inner: jax.Array) -> jax.Array:
    """Returns the byte of block (`outer`, `inner`) of a 128 x 4 tile of scales, counted from the first tile."""
    return 512 * tile + remainder(outer, 32) * 16 + quotient(outer, 32) * 4 + inner


def spread(per_block: jax.Array, block: int, size: int, *, axis: int) -> jax.Array:
    """Repeats per-block values to one per element along an axis of this size; leaves an axis of size 1 as it is."""
    if per_block.shape[axis] == 1 or block == 1:
        return per_block
    return jax.lax.slice_in_dim(jnp.repeat(per_block, block, axis=axis), 0, size, axis=axis)


def pad_to(array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Pads the ends of the axes with zeros."""
    return jnp.pad(array, [(0, wanted - size) for size, wanted in zip(array.shape, shape, strict=True)])
