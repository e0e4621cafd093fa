"""Gradients of biases: the sum of each group's rows, accumulated in float32 in a fixed order."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from jax_grouped.core.groups import Groups, max_row_blocks
from jax_grouped.core.values import vary_alike
from jax_grouped.kernels.partition import GROUP_DIMENSIONS, Local, Operation, Result, Split, apply, own_groups
from jax_grouped.kernels.primitive import bind, define, group_table_size
from jax_grouped.kernels.tiles import grouped_product

#: Rows that one partial sum covers: `kBiasGradRows` in csrc. No partial sum crosses a group.
_ROWS_PER_SUM = 128


def bias_gradient(
    dy: jax.Array, groups: Groups, num_groups: int, dtype: DTypeLike, out_spec: PartitionSpec | None = None
) -> jax.Array:
    """Sums each group's rows, `[T, N] -> [num_groups, N]`; over explicit mesh axes, sharded as `out_spec` says."""
    operands = vary_alike(dy, *groups)
    if 0 in (*dy.shape, *groups.sizes.shape, num_groups):
        return vary_alike(jnp.zeros((num_groups, dy.shape[1]), dtype), operands[0])[0]
    return apply(_BiasGradient(num_groups, jnp.dtype(dtype)), *operands, like=[out_spec])[0]


@dataclasses.dataclass(frozen=True)
class _BiasGradient(Operation):
    """The sums of rows: t tokens, e groups, n features."""

    num_groups: int
    dtype: jnp.dtype
    operands = ("t n", *GROUP_DIMENSIONS)
    results = (Result("e n", over="t"),)
    splittable = ("t", "e", "n")

    def local(self, splits: Mapping[str, Split]) -> Local:
        num_groups = self.num_groups // splits["e"].parts

        def add(dy: jax.Array, sizes: jax.Array, offset: jax.Array) -> list[jax.Array]:
            groups = own_groups(Groups(sizes, offset), splits, rows=dy.shape[0], num_groups=num_groups)
            return bind(BIAS_GRAD, dy, *groups, num_groups=num_groups, out_dtype=self.dtype)

        return add


def bias_gradient_xla(
    dy: jax.Array, group_sizes: jax.Array, group_offset: jax.Array, *, num_groups: int, out_dtype: DTypeLike
) -> jax.Array:
    """Computes it as the kernel gradient for tokens with one feature of value 1."""
    ones = jnp.ones_like(dy[:, :1])
    return grouped_product(
        ones,
        dy,
        group_sizes,
        group_offset,
        product="wgrad",
        out=jax.ShapeDtypeStruct((num_groups, 1, dy.shape[1]), out_dtype),
        num_groups=num_groups,
        precision=jax.lax.Precision.HIGHEST,
    )[:, 0]


def _bias_gradient_cuda(
    dy: jax.Array, group_sizes: jax.Array, group_offset: jax.Array, *, num_groups: int, out_dtype: DTypeLike, batch: int
) -> jax.Array:
    rows, features = dy.shape
    sums = count_partial_sums(rows // batch, num_groups)
    out = jax.ShapeDtypeStruct((batch * num_groups, features), jnp.float32)
    partial_sums = jax.ShapeDtypeStruct((batch * sums, features), jnp.float32)
    tables = jax.ShapeDtypeStruct((batch, group_table_size(num_groups)), jnp.int32)
    call = jax.ffi.ffi_call("jax_grouped_bias_grad", [out, partial_sums, tables])
    return call(dy, group_sizes, group_offset)[0].astype(out_dtype)


def count_partial_sums(capacity: int, num_groups: int) -> int:
    """Returns the most partial sums that any group sizes can need (`BiasGradTiles` in C++)."""
    return max_row_blocks(capacity, num_groups, _ROWS_PER_SUM)


#: `(dy, group_sizes, group_offset) -> [dbias]` with `num_groups` and `out_dtype`.
BIAS_GRAD = define(
    "bias_grad",
    lambda dy, *_, num_groups, out_dtype: [jax.ShapeDtypeStruct((num_groups, dy.shape[1]), out_dtype)],
    bias_gradient_xla,
    _bias_gradient_cuda,
)
