"""Biases of groups: their addition to rows, and their gradient, the sum of each group's rows in a fixed order."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from jax_grouped.core.groups import Groups, group_rows, max_row_blocks, row_groups
from jax_grouped.core.values import vary_alike
from jax_grouped.kernels.partition import GROUP_DIMENSIONS, Operation, Result, Splits, apply, own_groups
from jax_grouped.kernels.primitive import bind, define, group_table_size
from jax_grouped.kernels.tiles import multiply_tiles

#: Rows that one partial sum covers: `kBiasGradRows` in csrc. No partial sum crosses a group.
_ROWS_PER_SUM = 128


@jax.custom_vjp
def add_bias(y: jax.Array, bias: jax.Array, groups: Groups) -> jax.Array:
    """Adds each row's bias. Elementwise, so that XLA fuses it into the consumer of the result and saves a pass."""
    if 0 in (*y.shape, *bias.shape):
        return y
    operands, results = ("t n", "e n", *GROUP_DIMENSIONS), (Result("t n"),)
    return apply(Operation(_add_part, None, operands, results, splittable=("t", "n")), y, bias, *groups)[0]


def _add_part(
    _: None, splits: Splits, y: jax.Array, bias: jax.Array, sizes: jax.Array, offset: jax.Array
) -> list[jax.Array]:
    groups = own_groups(Groups(sizes, offset), splits, rows=y.shape[0], num_groups=bias.shape[0])
    group, valid = row_groups(group_rows(*groups, bias.shape[0], y.shape[0]), y.shape[0])
    return [jnp.where(valid[:, None], y + bias.astype(y.dtype)[group], jnp.zeros((), y.dtype))]


def _add_bias_forward(y: jax.Array, bias: jax.Array, groups: Groups) -> tuple[jax.Array, Any]:
    # The bias is a residual for its shape and type only; it is small.
    return add_bias(y, bias, groups), (bias, groups)


def _add_bias_backward(residuals: Any, dy: jax.Array) -> tuple[Any, ...]:
    bias, groups = residuals
    # Rows outside every group need no mask in dy: the product's own rule ignores them.
    return dy, bias_gradient(dy, groups, bias.shape[0], bias.dtype, jax.typeof(bias).sharding.spec), None


add_bias.defvjp(_add_bias_forward, _add_bias_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def bias_gradient(
    dy: jax.Array, groups: Groups, num_groups: int, dtype: jnp.dtype, out_spec: PartitionSpec | None = None
) -> jax.Array:
    """Sums each group's rows, `[T, N] -> [num_groups, N]`; over explicit mesh axes, sharded as `out_spec` says."""
    arrays = vary_alike(dy, *groups)
    if 0 in (*dy.shape, *groups.sizes.shape, num_groups):
        return vary_alike(jnp.zeros((num_groups, dy.shape[1]), dtype), arrays[0])[0]
    operands, results = ("t n", *GROUP_DIMENSIONS), (Result("e n", over="t"),)
    operation = Operation(_sum_part, (num_groups, dtype), operands, results, splittable=("t", "e", "n"))
    return apply(operation, *arrays, like=[out_spec])[0]


def _sum_part(
    spec: tuple[int, jnp.dtype], splits: Splits, dy: jax.Array, sizes: jax.Array, offset: jax.Array
) -> list[jax.Array]:
    num_groups = spec[0] // splits["e"].parts
    groups = own_groups(Groups(sizes, offset), splits, rows=dy.shape[0], num_groups=num_groups)
    return bind(BIAS_GRAD, dy, *groups, num_groups=num_groups, out_dtype=spec[1])


def _bias_gradient_forward(
    dy: jax.Array, groups: Groups, num_groups: int, dtype: jnp.dtype, out_spec: PartitionSpec | None
) -> tuple[jax.Array, Any]:
    return bias_gradient(dy, groups, num_groups, dtype, out_spec), (jnp.zeros_like(dy), groups)


def _bias_gradient_backward(
    num_groups: int, dtype: jnp.dtype, out_spec: PartitionSpec | None, residuals: Any, gradient: jax.Array
) -> tuple[Any, ...]:
    del num_groups, dtype, out_spec
    zeros, groups = residuals
    return add_bias(zeros, gradient, groups), None


bias_gradient.defvjp(_bias_gradient_forward, _bias_gradient_backward)


def bias_gradient_xla(
    dy: jax.Array, group_sizes: jax.Array, group_offset: jax.Array, *, num_groups: int, out_dtype: DTypeLike
) -> jax.Array:
    """Computes it as the kernel gradient for tokens with one feature of value 1."""
    return multiply_tiles(
        jnp.ones_like(dy[:, :1]),
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
    lambda dy, *_, num_groups, out_dtype: jax.ShapeDtypeStruct((num_groups, dy.shape[1]), out_dtype),
    bias_gradient_xla,
    _bias_gradient_cuda,
)
