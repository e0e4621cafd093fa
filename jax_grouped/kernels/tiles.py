"""Products in plain JAX, over tiles of rows, in a loop whose length depends on the number of valid rows."""

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jax_grouped.core.groups import group_rows, quotient

#: Rows of a tile of products that are the same for any number of rows.
_INVARIANT_HEIGHT = 16


def multiply_tiles(
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
    batch_invariant: bool = False,
) -> jax.Array:
    """Returns a product of unquantized operands, an array like `out`, accumulated in float32."""
    # Tiles of equal height cover the rows of all groups; none crosses a group. Their number is a traced value, so the
    # loop does work in proportion to the valid rows. The height is about the mean group size: few tiles are partial.
    capacity: Any = a.shape[0]
    height = 1  # In an export the capacity may be symbolic; only one row is sure to fit.
    if isinstance(capacity, int):
        mean = max(1, capacity // num_groups)
        height = min(capacity, max(16, min(256, 2 ** math.ceil(math.log2(mean)))))
    padding = 0
    if batch_invariant and product != "wgrad":
        height = padding = _INVARIANT_HEIGHT
        a = jnp.pad(a, [(0, padding), (0, 0)])
    starts, sizes = group_rows(group_sizes, group_offset, num_groups, capacity)
    counts = quotient(sizes + (height - 1), height)
    ends = jnp.cumsum(counts)
    # Tile `t` of a group begins at the row `t * height` plus the first column, and the group ends at the second.
    bounds = jnp.stack([starts - (ends - counts) * height, starts + sizes], axis=1)

    def find_rows(tile: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the tile's group, the first row to read, and a mask (`bool[height, 1]`) of the tile's own rows."""
        group = jnp.sum(ends <= tile, dtype=jnp.int32)
        shift, end = element(bounds, group)
        first = shift + tile * height
        # The last tile may reach past the array. It then reads earlier rows too, and masks them.
        start = jnp.minimum(first, capacity + padding - height)
        row = start + jnp.arange(height, dtype=jnp.int32)
        mask = (row >= first) & (row < end)
        return group, start, mask[:, None]

    contract = {"fprop": ((1,), (0,)), "dgrad": ((1,), (1,)), "wgrad": ((0,), (0,))}[product]

    def dot(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return jax.lax.dot_general(
            lhs, rhs, (contract, ((), ())), precision=precision, preferred_element_type=jnp.float32
        )

    def element(array: jax.Array, index: jax.Array) -> jax.Array:
        return jax.lax.dynamic_index_in_dim(array, index, keepdims=False, allow_negative_indices=False)

    def rows(array: jax.Array, start: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(array, start, height, allow_negative_indices=False)

    def write_rows(tile: jax.Array, result: jax.Array) -> jax.Array:
        group, start, mask = find_rows(tile)
        tile_rows = dot(rows(a, start), element(b, group).astype(a.dtype)).astype(result.dtype)
        new = jnp.where(mask, tile_rows, rows(result, start))
        return jax.lax.dynamic_update_slice_in_dim(result, new, start, axis=0, allow_negative_indices=False)

    def add_kernel(tile: jax.Array, result: jax.Array) -> jax.Array:
        group, start, mask = find_rows(tile)
        lhs = jnp.where(mask, rows(a, start), jnp.zeros((), a.dtype))
        rhs = jnp.where(mask, rows(b, start), jnp.zeros((), b.dtype))
        return result.at[group].add(dot(lhs, rhs))

    if product == "wgrad":
        result = jax.lax.fori_loop(0, ends[-1], add_kernel, jnp.zeros(out.shape, jnp.float32))
        return (result if accumulator is None else accumulator.astype(jnp.float32) + result).astype(out.dtype)
    # Rows that may hold anything are NaN here, so that tests find whatever reads them.
    shape = (out.shape[0] + padding, out.shape[1])
    result = jnp.full(shape, 0.0 if zero_other_rows else jnp.nan, out.dtype)
    return jax.lax.fori_loop(0, ends[-1], write_rows, result)[: out.shape[0]]
