"""The grouped product that all operations share. Unquantized, it is differentiable any number of times."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from jax_grouped.backends import primitives
from jax_grouped.backends.operation import Local, Operation, Result, Split
from jax_grouped.backends.partition import apply
from jax_grouped.backends.spec import NARROW_TYPES, GemmSpec, Product
from jax_grouped.core.config import config
from jax_grouped.core.groups import Groups, part_sizes
from jax_grouped.core.values import promoted_type
from jax_grouped.core.varying import added_axes, sum_dtype, vary_alike, varying_axes
from jax_grouped.fp8.arrays import ScaledArray
from jax_grouped.ops.rows import permute_rows


class Gathered(NamedTuple):
    """Rows of tokens as an operand: `permute_rows(x, order, inverse)`, which the product itself gathers if it can."""

    x: jax.Array
    order: jax.Array
    inverse: jax.Array

    @property
    def dtype(self) -> np.dtype:
        """Type of the rows."""
        return self.x.dtype

    def astype(self, dtype: DTypeLike) -> "Gathered":
        """Returns the rows in another type."""
        return self._replace(x=self.x.astype(dtype))


#: Operand of a product: quantized with a recipe; without, a plain array, or rows of tokens for a or, in wgrad, b.
Operand = ScaledArray | jax.Array | Gathered


#: Dimensions of the arrays of `Groups`, which are not split.
GROUP_DIMENSIONS = ("g", "o")
#: Results of products. A kernel adds nothing to tokens of other groups.
RESULTS = {
    "fprop": Result("t n", over="k e"),
    "dgrad": Result("t k", over="n e"),
    "wgrad": Result("e k n", over="t"),
}


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
        return _bind(a.data, b.data, groups, spec, (a.scale_inv, b.scale_inv), accumulator)
    assert not isinstance(a, ScaledArray)
    assert not isinstance(b, ScaledArray)
    if not is_narrow(b):
        dtype = promoted_type(a.dtype, b.dtype)
        a, b = a.astype(dtype), b.astype(dtype)
    if accumulator is not None:
        return _bind(_rows(a), _rows(b), groups, spec, accumulator=accumulator, out_spec=out_spec)
    gathered: Literal["a", "b"] | None = None
    if isinstance(a, Gathered) or isinstance(b, Gathered):
        gathered = "a" if isinstance(a, Gathered) else "b"
    return _differentiable(a, b, groups, dataclasses.replace(spec, gathered=gathered), out_spec)


def is_narrow(operand: jax.Array | Gathered) -> bool:
    """Tells whether an operand has one of the types that are converted a few groups at a time."""
    return operand.dtype in NARROW_TYPES


def _rows(operand: jax.Array | Gathered) -> jax.Array:
    return permute_rows(*operand) if isinstance(operand, Gathered) else operand


def _bind(
    a: jax.Array | Gathered,
    b: jax.Array | Gathered,
    groups: Groups,
    spec: GemmSpec,
    scales: Sequence[jax.Array] = (),
    accumulator: jax.Array | None = None,
    out_spec: PartitionSpec | None = None,
) -> jax.Array:
    """Binds the primitive, unless there is nothing to multiply."""
    permutation = [array for operand in (a, b) if isinstance(operand, Gathered) for array in operand[1:]]
    a, b = (operand.x if isinstance(operand, Gathered) else operand for operand in (a, b))
    accumulators = () if accumulator is None else (accumulator,)
    operands = vary_alike(a, b, *groups, *scales, *permutation, *accumulators)
    shapes = [array.shape for array in (a, b, groups.sizes, *permutation)]
    if spec.num_groups == 0 or any(0 in shape for shape in shapes):
        out = spec.out(a.shape, b.shape, *shapes[3:4])
        nothing = jnp.zeros(out.shape, out.dtype) if accumulator is None else operands[-1]
        return vary_alike(nothing, operands[0])[0]
    spec = dataclasses.replace(spec, autotune=config.autotune)
    if spec.scaled or spec.gathered is not None:
        return _primitive(spec)(*operands)[0]
    return apply(_PlainProduct(spec, accumulator is not None), *operands, like=[out_spec])[0]


def _primitive(spec: GemmSpec) -> Callable[..., list[jax.Array]]:
    return lambda *operands: primitives.GEMM.bind(*operands, spec=spec, **primitives.common_params(operands))


@dataclasses.dataclass(frozen=True)
class _PlainProduct(Operation):
    """A product of plain arrays: t tokens, e kernels, k and n their features."""

    spec: GemmSpec
    accumulates: bool

    @property
    def operands(self) -> tuple[str, ...]:
        a, b = {"fprop": ("t k", "e k n"), "dgrad": ("t n", "e k n"), "wgrad": ("t k", "t n")}[self.spec.product]
        accumulators = ["e k n"] * self.accumulates
        return a, b, *GROUP_DIMENSIONS, *accumulators

    @property
    def results(self) -> tuple[Result, ...]:
        return (RESULTS[self.spec.product],)

    @property
    def splittable(self) -> tuple[str, ...]:
        # Dimensions of the result go before those that it is summed over, and tokens before all.
        return tuple(dict.fromkeys(["t", *self.results[0].dimensions.split(), "e", "k", "n"]))

    @property
    def added(self) -> tuple[int, int] | None:
        return (4, 0) if self.accumulates else None

    def local(self, splits: Mapping[str, Split]) -> Local:
        num_groups = self.spec.num_groups // splits["e"].parts
        # Rows of other devices' groups are added up with theirs, so they must be zero.
        zero_other_rows = self.spec.zero_other_rows or splits["e"].parts > 1
        out_dtype = part_dtype(self.spec.out_dtype, splits) if self.spec.product == "wgrad" else self.spec.out_dtype
        multiply = _primitive(
            dataclasses.replace(self.spec, num_groups=num_groups, out_dtype=out_dtype, zero_other_rows=zero_other_rows)
        )

        def product(a: jax.Array, b: jax.Array, sizes: jax.Array, offset: jax.Array, *more: jax.Array) -> Any:
            groups = own_groups(Groups(sizes, offset), splits, rows=a.shape[0], num_groups=num_groups)
            return multiply(a, b, *groups, *more)

        return product


def part_dtype(dtype: DTypeLike, splits: Mapping[str, Split]) -> np.dtype:
    """Returns the type of a device's part of the gradient of kernels, which has the type `dtype` once it is summed."""
    return sum_dtype(jnp.dtype(dtype)) if splits["t"].parts > 1 else jnp.dtype(dtype)


def own_groups(groups: Groups, splits: Mapping[str, Split], *, rows: int, num_groups: int) -> Groups:
    """Returns the groups of a device that has `rows` rows, a part of `t`, and `num_groups` kernels, a part of `e`."""
    sizes, offset = groups
    if splits["t"].axes:
        sizes = part_sizes(sizes, splits["t"].index() * rows, rows, splits["t"].parts * rows)
    if splits["e"].axes:
        # Beyond these limits no kernel has a group.
        offset = jnp.clip(offset, -splits["e"].parts * num_groups, sizes.shape[0]) + splits["e"].index() * num_groups
    return Groups(sizes, offset)


def gradient_type(dtype: np.dtype, dy: np.dtype) -> np.dtype:
    """Returns the type in which operands of type `dtype` are multiplied with a gradient of type `dy`.

    It is the operands' type: bfloat16 only loses digits of a float32 gradient. float16 would also lose its range, so
    with float16 operands a float32 gradient is multiplied in float32.
    """
    return jnp.dtype(jnp.float32) if dtype == jnp.float16 and dy != jnp.float16 else dtype


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _differentiable(
    a: jax.Array | Gathered, b: jax.Array | Gathered, groups: Groups, spec: GemmSpec, out_spec: PartitionSpec | None
) -> jax.Array:
    # The three products are each other's derivatives, so one rule serves all. Gradients have the types of `a` and `b`.
    return _bind(a, b, groups, spec, out_spec=out_spec)


def _forward(a: Any, b: Any, groups: Groups, spec: GemmSpec, out_spec: PartitionSpec | None) -> tuple[jax.Array, Any]:
    return _differentiable(a, b, groups, spec, out_spec), (a, b, groups)


def _backward(spec: GemmSpec, out_spec: PartitionSpec | None, residuals: Any, gradient: jax.Array) -> tuple[Any, ...]:
    del out_spec
    a, b, groups = residuals
    if spec.gathered is not None:
        spec = dataclasses.replace(spec, gathered=None)
        _, pull_back = jax.vjp(lambda a, b: _differentiable(_rows(a), _rows(b), groups, spec, None), a, b)
        return (*pull_back(gradient), None)
    like_a, like_b = (jax.typeof(of).sharding.spec for of in (a, b))
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
