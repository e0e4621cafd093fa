"""The grouped product that all operations share, and its bias, differentiable any number of times if unquantized."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jax_grouped.core.groups import Groups, group_rows, row_groups
from jax_grouped.core.values import added_axes, promoted_type, sum_dtype, varying_axes
from jax_grouped.fp8.arrays import ScaledArray
from jax_grouped.kernels.bias_gradient import bias_gradient
from jax_grouped.kernels.partition import GROUP_DIMENSIONS, Local, Operation, Result, Split, apply, own_groups
from jax_grouped.kernels.product import NARROW_TYPES, Gathered, GemmSpec, Product, multiply
from jax_grouped.ops.rows import permute_rows

#: Operand of a product: quantized with a recipe; without, a plain array, or rows of tokens for a or, in wgrad, b.
Operand = ScaledArray | jax.Array | Gathered


def gemm(
    a: Operand,
    b: Operand,
    groups: Groups,
    spec: GemmSpec,
    accumulator: jax.Array | None = None,
    out_spec: PartitionSpec | None = None,
) -> jax.Array:
    """Returns the product that `spec` names, added to the accumulator if there is one, an array like the result.

    Unquantized operands are multiplied in the smallest type that holds both, or beside a kernel of one of the
    `NARROW_TYPES` in that of the tokens, and the product is differentiable any number of times. Quantized products and
    products with an accumulator have no derivative here. Over mesh axes of type `Explicit`, the type of a plain product
    is sharded as `out_spec` says. Inside `jax.shard_map`, operands vary alike, but a kernel may vary over fewer axes.
    """
    if isinstance(a, ScaledArray) and isinstance(b, ScaledArray):
        spec = dataclasses.replace(spec, a=a.layout, b=b.layout)
        return multiply(a.data, b.data, groups, spec, (a.scale_inv, b.scale_inv), accumulator)
    assert not isinstance(a, ScaledArray)
    assert not isinstance(b, ScaledArray)
    if b.dtype not in NARROW_TYPES:
        dtype = promoted_type(a.dtype, b.dtype)
        a, b = a.astype(dtype), b.astype(dtype)
    if accumulator is not None:
        return multiply(_rows(a), _rows(b), groups, spec, accumulator=accumulator, out_spec=out_spec)
    gathered: Literal["a", "b"] | None = None
    if isinstance(a, Gathered) or isinstance(b, Gathered):
        gathered = "a" if isinstance(a, Gathered) else "b"
    return _differentiable(a, b, groups, dataclasses.replace(spec, gathered=gathered), out_spec)


def is_narrow(operand: jax.Array | Gathered) -> bool:
    """Tells whether an operand has one of the types that are converted a few groups at a time."""
    return operand.dtype in NARROW_TYPES


def _rows(operand: jax.Array | Gathered) -> jax.Array:
    return permute_rows(*operand) if isinstance(operand, Gathered) else operand


def gradient_type(dtype: np.dtype, dy: np.dtype) -> np.dtype:
    """Returns the type of products with a gradient: that of operands, or float32 if float16 lacks its range."""
    return jnp.dtype(jnp.float32) if dtype == jnp.float16 and dy != jnp.float16 else dtype


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _differentiable(
    a: jax.Array | Gathered, b: jax.Array | Gathered, groups: Groups, spec: GemmSpec, out_spec: PartitionSpec | None
) -> jax.Array:
    # The three products are each other's derivatives, so one rule serves all. Gradients have the types of `a` and `b`.
    return multiply(a, b, groups, spec, out_spec=out_spec)


def _forward(a: Any, b: Any, groups: Groups, spec: GemmSpec, out_spec: PartitionSpec | None) -> tuple[jax.Array, Any]:
    return _differentiable(a, b, groups, spec, out_spec), (a, b, groups)


def _backward(spec: GemmSpec, out_spec: PartitionSpec | None, residuals: Any, gradient: jax.Array) -> tuple[Any, ...]:
    del out_spec
    a, b, groups = residuals
    if spec.gathered is not None:
        spec = dataclasses.replace(spec, gathered=None)
        _, pull_back = jax.vjp(lambda a, b: _differentiable(_rows(a), _rows(b), groups, spec, None), a, b)
        return (*pull_back(gradient), None)
    like_a, like_b = (jax.typeof(operand).sharding.spec for operand in (a, b))
    out_dtype = a.dtype
    b_dtype, dtype, axes_of_b = b.dtype, gradient_type(out_dtype, gradient.dtype), varying_axes(b)
    a, b, g = (array if is_narrow(array) else array.astype(dtype) for array in (a, b, gradient))

    def product(
        name: Product, lhs: jax.Array, rhs: jax.Array, like: PartitionSpec, out_dtype: np.dtype = out_dtype
    ) -> jax.Array:
        return _differentiable(lhs, rhs, groups, GemmSpec(name, spec.num_groups, out_dtype, spec.precision), like)

    def dkernel(x: jax.Array, dy: jax.Array) -> Any:
        if jnp.issubdtype(b_dtype, jnp.integer):
            return np.zeros(b.shape, jax.dtypes.float0)
        if axes := added_axes(axes_of_b, x, dy, groups):
            own = product("wgrad", x, dy, like_b, sum_dtype(out_dtype))
            return jax.lax.psum(own, axes).astype(b_dtype)
        return product("wgrad", x, dy, like_b).astype(b_dtype)

    match spec.product:
        case "fprop":
            da, db = product("dgrad", g, b, like_a), dkernel(a, g)
        case "dgrad":
            da, db = product("fprop", g, b, like_a), dkernel(g, a)
        case "wgrad":
            da, db = product("dgrad", b, g, like_a), product("fprop", a, g, like_b)
    return da, db, None


_differentiable.defvjp(_forward, _backward)


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
    """Returns the sum of each group's rows, accumulated in float32, differentiable: `[T, N] -> [num_groups, N]`."""
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
