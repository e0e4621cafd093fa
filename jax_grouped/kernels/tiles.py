"""Products over tiles of rows, in a loop whose length depends on the number of valid rows."""

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jax_grouped.core.groups import GroupRows, group_rows


def _tile_rows(capacity: Any, num_groups: int) -> int:
    """Returns the rows per tile: about the mean group size, so that few tiles are partial and little is padding."""
    if not isinstance(capacity, int):
        return 1  # In an export the capacity may be symbolic; only one row is sure to fit.
    group_rows = max(1, capacity // num_groups)
    return min(capacity, max(16, min(256, 2 ** math.ceil(math.log2(group_rows)))))


class _Tiles:
    """Tiles of equal height that cover the rows of all groups; no tile crosses a group.

    Their number is a traced value, so a loop over tiles does work in proportion to the valid rows.
    """

    def __init__(self, rows: GroupRows, capacity: int):
        self.height = _tile_rows(capacity, rows.sizes.shape[0])
        self._rows = rows
        self._capacity = capacity
        self._counts = (rows.sizes + self.height - 1) // self.height
        self._ends = jnp.cumsum(self._counts)

    @property
    def count(self) -> jax.Array:
        return self._ends[-1]

    def at(self, tile: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the tile's group, the first row to read, and a mask (`bool[height, 1]`) of the tile's own rows."""
        group = jnp.sum(self._ends <= tile, dtype=jnp.int32)
        size = self._rows.sizes[group]
        tiles_before = self._ends[group] - self._counts[group]
        first = self._rows.starts[group] + (tile - tiles_before) * self.height
        # The last tile may reach past the array. It then reads earlier rows too, and masks them.
        start = jnp.minimum(first, self._capacity - self.height)
        row = start + jnp.arange(self.height, dtype=jnp.int32)
        mask = (row >= first) & (row < self._rows.starts[group] + size)
        return group, start, mask[:, None]


def grouped_product(
    a: jax.Array,
    b: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array,
    accumulator: jax.Array | None = None,
    *,
    product: Literal["fprop", "dgrad", "wgrad"],
    out: jax.ShapeDtypeStruct,
    num_groups: int,
    precision: jax.lax.Precision,
    zero_other_rows: bool = True,
) -> jax.Array:
    """Returns one of the three products of unquantized operands, an array like `out`, accumulated in float32."""
    capacity = a.shape[0]
    tiles = _Tiles(group_rows(group_sizes, group_offset, num_groups, capacity), capacity)
    contract = {"fprop": ((1,), (0,)), "dgrad": ((1,), (1,)), "wgrad": ((0,), (0,))}[product]

    def dot(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return jax.lax.dot_general(
            lhs, rhs, (contract, ((), ())), precision=precision, preferred_element_type=jnp.float32
        )

    def rows(array: jax.Array, start: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(array, start, tiles.height)

    def write_rows(tile: jax.Array, result: jax.Array) -> jax.Array:
        group, start, mask = tiles.at(tile)
        tile_rows = dot(rows(a, start), b[group].astype(a.dtype)).astype(result.dtype)
        return jax.lax.dynamic_update_slice_in_dim(
            result, jnp.where(mask, tile_rows, rows(result, start)), start, axis=0
        )

    def add_kernel(tile: jax.Array, result: jax.Array) -> jax.Array:
        group, start, mask = tiles.at(tile)
        lhs = jnp.where(mask, rows(a, start), jnp.zeros((), a.dtype))
        rhs = jnp.where(mask, rows(b, start), jnp.zeros((), b.dtype))
        return result.at[group].add(dot(lhs, rhs))

    if product == "wgrad":
        result = jax.lax.fori_loop(0, tiles.count, add_kernel, jnp.zeros(out.shape, jnp.float32))
        return (result if accumulator is None else accumulator.astype(jnp.float32) + result).astype(out.dtype)
    # Rows that may hold anything are NaN here, so that tests find whatever reads them.
    result = jnp.full(out.shape, 0.0 if zero_other_rows else jnp.nan, out.dtype)
    return jax.lax.fori_loop(0, tiles.count, write_rows, result)
