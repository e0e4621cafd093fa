"""The bias of every row's group, differentiable any number of times."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jax_grouped.core.groups import Groups, group_rows, row_groups
from jax_grouped.kernels.bias_gradient import bias_gradient
from jax_grouped.kernels.partition import GROUP_DIMENSIONS, Local, Operation, Result, Split, apply, own_groups


@jax.custom_vjp
def add_bias(y: jax.Array, bias: jax.Array, groups: Groups) -> jax.Array:
    """Adds each row's bias. Elementwise, so that XLA fuses it into the consumer of the result and saves a pass."""
    if 0 in (*y.shape, *bias.shape):
        return y
    return apply(_AddBias(), y, bias, *groups)[0]


def _add_bias_forward(y: jax.Array, bias: jax.Array, groups: Groups) -> tuple[jax.Array, Any]:
    # The bias is a residual for its shape and type only; it is small.
    return add_bias(y, bias, groups), (bias, groups)


def _add_bias_backward(residuals: Any, dy: jax.Array) -> tuple[Any, ...]:
    bias, groups = residuals
    # Rows outside every group need no mask in dy: the product's own rule ignores them.
    return dy, bias_grad(dy, groups, bias.shape[0], bias.dtype, jax.typeof(bias).sharding.spec), None


add_bias.defvjp(_add_bias_forward, _add_bias_backward)


@dataclasses.dataclass(frozen=True)
class _AddBias(Operation):
    """Rows plus the bias of their groups: t tokens, e groups, n features."""

    operands = ("t n", "e n", *GROUP_DIMENSIONS)
    results = (Result("t n"),)
    splittable = ("t", "n")

    def local(self, splits: Mapping[str, Split]) -> Local:
        def add(y: jax.Array, bias: jax.Array, sizes: jax.Array, offset: jax.Array) -> Sequence[jax.Array]:
            groups = own_groups(Groups(sizes, offset), splits, rows=y.shape[0], num_groups=bias.shape[0])
            rows = group_rows(*groups, bias.shape[0], y.shape[0])
            group, valid = row_groups(rows, y.shape[0])
            return [jnp.where(valid[:, None], y + bias.astype(y.dtype)[group], jnp.zeros((), y.dtype))]

        return add


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def bias_grad(
    dy: jax.Array, groups: Groups, num_groups: int, dtype: jnp.dtype, out_spec: PartitionSpec | None = None
) -> jax.Array:
    """Returns the sum of each group's rows, accumulated in float32: `[T, N] -> [num_groups, N]`.

    It is differentiable any number of times. Over mesh axes of type `Explicit`, its type is sharded as `out_spec` says.
    """
    return bias_gradient(dy, groups, num_groups, dtype, out_spec)


def _bias_grad_forward(
    dy: jax.Array, groups: Groups, num_groups: int, dtype: jnp.dtype, out_spec: PartitionSpec | None
) -> tuple[jax.Array, Any]:
    return bias_grad(dy, groups, num_groups, dtype, out_spec), (jnp.zeros_like(dy), groups)


def _bias_grad_backward(
    num_groups: int, dtype: jnp.dtype, out_spec: PartitionSpec | None, residuals: Any, gradient: jax.Array
) -> tuple[Any, ...]:
    del num_groups, dtype, out_spec
    zeros, groups = residuals
    return add_bias(zeros, gradient, groups), None


bias_grad.defvjp(_bias_grad_forward, _bias_grad_backward)
