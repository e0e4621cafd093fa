"""Products over tiles of rows, in a loop whose length depends on the number of valid rows."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_grouped.backends.spec import GemmSpec
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
    spec: GemmSpec,
) -> jax.Array:
    """Returns one of the three products of unquantized operands, accumulated in float32."""
    capacity = a.shape[0]
    tiles = _Tiles(group_rows(group_sizes, group_offset, spec.num_groups, capacity), capacity)
    contract = {"fprop": ((1,), (0,)), "dgrad": ((1,), (1,)), "wgrad": ((0,), (0,))}[spec.product]

    def dot(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return jax.lax.dot_general(
            lhs, rhs, (contract, ((), ())), precision=spec.precision, preferred_element_type=jnp.float32
        )

    def rows_of(array: jax.Array, start: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(array, start, tiles.height)

    def write_rows(tile: jax.Array, out: jax.Array) -> jax.Array:
        group, start, mask = tiles.at(tile)
        product = dot(rows_of(a, start), b[group].astype(a.dtype)).astype(out.dtype)
        return jax.lax.dynamic_update_slice_in_dim(out, jnp.where(mask, product, rows_of(out, start)), start, axis=0)

    def add_kernel(tile: jax.Array, out: jax.Array) -> jax.Array:
        group, start, mask = tiles.at(tile)
        lhs = jnp.where(mask, rows_of(a, start), jnp.zeros((), a.dtype))
        rhs = jnp.where(mask, rows_of(b, start), jnp.zeros((), b.dtype))
        return out.at[group].add(dot(lhs, rhs))

    shape = spec.out(a.shape, b.shape).shape
    if spec.product == "wgrad":
        out = jax.lax.fori_loop(0, tiles.count, add_kernel, jnp.zeros(shape, jnp.float32))
        return (out if accumulator is None else accumulator.astype(jnp.float32) + out).astype(spec.out_dtype)
    # Rows that may hold anything are NaN here, so that tests find whatever reads them.
    out = jnp.full(shape, 0.0 if spec.zero_other_rows else jnp.nan, spec.out_dtype)
    return jax.lax.fori_loop(0, tiles.count, write_rows, out)


def grouped_bias_grad(
    dy: jax.Array, group_sizes: jax.Array, group_offset: jax.Array, *, num_groups: int, out_dtype: DTypeLike
) -> jax.Array:
    """Sums each group's rows, `[T, N] -> [G, N]`, as the kernel gradient for tokens with one feature of value 1."""
    spec = GemmSpec("wgrad", num_groups, out_dtype, jax.lax.Precision.HIGHEST)
    ones = jnp.ones_like(dy[:, :1])
    return grouped_product(ones, dy, group_sizes, group_offset, spec=spec)[:, 0]
