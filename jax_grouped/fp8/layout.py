"""Where the numbers and the scales of a quantized array lie; the counterpart in C++ is `csrc/groups/layout.h`."""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jax_grouped.core.groups import FP8_ALIGNMENT, Places, most_units, quotient, remainder, round_up, stack_sizes
from jax_grouped.fp8.recipes import ScalingMode

#: Elements along each side of a scaling block, and of one of the MX format.
BLOCK = 128
MX_BLOCK = 32


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
        """Returns `jax_grouped.core.groups.stack_sizes` of this stack."""
        assert self.stack_rows is not None
        return stack_sizes(self.num_groups, self.stack_rows, batch)

    def units(self, unit: int) -> int:
        """How many units of `unit` rows, none of which crosses a group, any group sizes can need."""
        if self.stack_rows is not None:
            return self.num_groups * -(-self.stack_rows // unit)
        return most_units(self.tokens, self.num_groups, unit)

    @property
    def data_shape(self) -> tuple[int, ...]:
        """`[T, C]` or flat regions; `[E, K, C]` or `[E, C, round_up(K, 16)]` for a stack."""
        if self.stack_rows is None:
            flat = (FP8_ALIGNMENT * self.units(FP8_ALIGNMENT) * self.features,)
            return flat if self.columnwise else (self.tokens, self.features)
        if self.columnwise:
            return (self.num_groups, self.features, round_up(self.stack_rows, FP8_ALIGNMENT))
        return (self.num_groups, self.stack_rows, self.features)

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
        match self.mode, self.columnwise:
            case ScalingMode.BLOCK_1D, False:
                return self._feature_blocks, 4 * units(4)
            case ScalingMode.BLOCK_1D, True:
                return units(128), self.features
            case ScalingMode.BLOCK_2D, False:
                return units(128), round_up(self._feature_blocks, 4)
            case ScalingMode.BLOCK_2D, True:
                return self._feature_blocks, 4 * units(512)
            case _ if self.swizzled_scales:
                return (512 * self._feature_blocks * units(128),)
            case _, False:
                return 16 * units(16), -(-self.features // MX_BLOCK)
            case _:
                return self.features, units(32)

    @property
    def _feature_blocks(self) -> int:
        return -(-self.features // BLOCK)

    def row_scales(self, places: Places) -> jax.Array:
        """Positions of the scales of rowwise data in the flat array.

        Args:
            places: of some rows.

        Returns:
            `int32[n, blocks]`, a position for every block of a row: of 32 elements with `MX`, of 128 otherwise; one
            column with `TENSOR`.
        """
        places = places.as_column()
        block = jnp.arange(-(-self.features // self.block), dtype=jnp.int32)
        match self.mode:
            case ScalingMode.TENSOR:
                return places.group
            case ScalingMode.BLOCK_1D:
                return self._feature_blocks * 4 * places.before(4) + block * (4 * places.units(4)) + places.row
            case ScalingMode.BLOCK_2D:
                return round_up(self._feature_blocks, 4) * places.block(128) + block
            case _ if self.swizzled_scales:
                tile = self._feature_blocks * places.block(128) + block // 4
                return _in_tile(tile, remainder(places.row, 128), block % 4)
            case _:
                return block.shape[0] * (16 * places.before(16) + places.row) + block

    def column_scales(self, places: Places) -> jax.Array:
        """Positions of the scales of columnwise data in the flat array.

        As `row_scales`, but of the blocks that hold the given rows, for every feature (`int32[n, C]`), or for every 128
        features with `BLOCK_2D`.
        """
        places = places.as_column()
        feature = jnp.arange(self.features, dtype=jnp.int32)
        match self.mode:
            case ScalingMode.TENSOR:
                return places.group
            case ScalingMode.BLOCK_1D:
                return self.features * places.block(128) + feature
            case ScalingMode.BLOCK_2D:
                block = jnp.arange(self._feature_blocks, dtype=jnp.int32)
                region = self._feature_blocks * places.before(512) + block * places.units(512)
                return 4 * region + quotient(places.row, 128)
            case _ if self.swizzled_scales:
                tile = self._feature_blocks * places.before(128) + feature // 128 * places.units(128)
                inner = quotient(remainder(places.row, 128), MX_BLOCK)
                return _in_tile(tile + quotient(places.row, 128), feature % 128, inner)
            case _:
                return self.features * places.before(32) + feature * places.units(32) + quotient(places.row, MX_BLOCK)

    def column_data(self, places: Places) -> tuple[jax.Array, jax.Array]:
        """Where columnwise data has every feature of some rows: which 16 elements, `int32[n, C]`, and which of them."""
        places = places.as_column()
        unit, feature = FP8_ALIGNMENT, jnp.arange(self.features, dtype=jnp.int32)
        chunk = quotient(places.row, unit) + feature * places.units(unit)
        return self.features * places.before(unit) + chunk, remainder(places.row, unit)

    def column_source(self, chunks: Places) -> tuple[jax.Array, jax.Array, jax.Array]:
        """What columnwise data is made of: where its elements come from.

        Args:
            chunks: the places of all units of 16 rows.

        Returns:
            Their rows, `int32[chunks, C, 16]`, features, `int32[chunks, C, 1]`, and whether there are such rows.
        """
        # A group of `u` units has `C * u` times 16 elements, as many as so many chunks: feature by feature.
        units = jnp.maximum(chunks.units(FP8_ALIGNMENT), 1)[:, None]
        index = quotient(chunks.row, FP8_ALIGNMENT)[:, None] * self.features
        index += jnp.arange(self.features, dtype=jnp.int32)
        feature = quotient(index, units)
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
    return 512 * tile + remainder(outer, 32) * 16 + quotient(outer, 32) * 4 + inner
