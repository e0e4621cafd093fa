"""`ragged_dot_general`, grouped products in the form that dimension numbers describe."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from jax_grouped.core.groups import Groups
from jax_grouped.core.values import as_array, shown
from jax_grouped.kernels.product import GemmSpec, Product
from jax_grouped.ops import checks
from jax_grouped.ops.checks import GroupSizes
from jax_grouped.ops.ragged_dot import canonical_types, multiply

#: JAX's own function checks the arguments, also where a program has replaced `jax.lax.ragged_dot_general` by ours.
_JAX_RAGGED_DOT_GENERAL = jax.lax.ragged_dot_general


def ragged_dot_general(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: GroupSizes,
    ragged_dot_dimension_numbers: jax.lax.RaggedDotDimensionNumbers,
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    group_offset: ArrayLike | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
) -> jax.Array:
    """Multiplies groups as dimension numbers say; a drop-in replacement for `jax.lax.ragged_dot_general`.

    Three forms exist. The ragged dimension is `T` or, in the last one, a batch dimension; `B...` are any number of
    batch dimensions:

    | `lhs`          | `rhs`                                  | result            | each group                        |
    |----------------|----------------------------------------|-------------------|-----------------------------------|
    | `[B..., T, K]` | `[B..., G, K, N]` or `[B..., G, N, K]` | `[B..., T, N]`    | multiplies its rows by its matrix |
    | `[B..., T, K]` | `[B..., T, N]`                         | `[G, B..., K, N]` | sums over its rows                |
    | `[B..., M, K]` | `[B..., K, N]`                         | `[B..., M, N]`    | has no effect                     |

    Both orders of `K` and `N` in the first form are read as they are. Operands with another order of dimensions are
    transposed first. In the second form, the matrix of a group without rows is zero.

    In the first two forms, accumulation, rows of no group, gradients and `jax.vmap` are those of
    `jax_grouped.ragged_dot`. The third is one `jax.lax.dot_general`, which does not read the group sizes, as in JAX.

    Args:
        lhs: bfloat16, float16 or float32.
        rhs: one of these types, or of those that `jax_grouped.ragged_dot` converts; the second and the third form
            convert it whole.
        group_sizes: `[G]`, or `[B..., G]` if they differ in a batch (`[B..., E]`, `E >= G`, with `group_offset`),
            integers. Negative ones count as 0, and rows past `T` do not exist.
        ragged_dot_dimension_numbers: contracting and batch dimensions of `lhs` and `rhs`, the ragged dimension of
            `lhs`, and in the first form the group dimension of `rhs`.
        precision: as in `jax_grouped.ragged_dot`, also a `jax.lax.DotAlgorithmPreset`. In the third form XLA multiplies
            with it: on a GPU, float32 is TF32 unless it is `HIGHEST`.
        preferred_element_type: type of the result, bfloat16, float16 or float32. Default: the promoted input type.
        group_offset: scalar or `[1]` integer, in the first form only: `rhs` holds the groups
            `[group_offset, group_offset + G)`. The result is zero in the rows of other groups.
        out_sharding: how the type of the result is sharded over mesh axes of type `Explicit`: a `NamedSharding` or its
            spec. Needed where the types of the operands leave a choice.

    Returns:
        An array whose dimensions have the order of the table.

    Raises:
        NotImplementedError: the dimension numbers describe none of these forms, or there is a `group_offset` in another
            form than the first.
        TypeError: an argument has a type that is not supported, or JAX raises a TypeError for these dimension numbers
            and shapes.
        ValueError: as in `jax_grouped.ragged_dot`.

    Example:
        lhs, rhs = jnp.ones((16, 32)), jnp.ones((2, 48, 32))
        sum_over_last = jax.lax.RaggedDotDimensionNumbers((([1], [2]), ([], [])), [0], [0])

        y = jg.ragged_dot_general(lhs, rhs, jnp.array([10, 4]), sum_over_last)

        assert y.shape == (16, 48) and (y[:14] == 32).all() and not y[14:].any()
    """
    lhs, rhs = as_array("lhs", lhs), as_array("rhs", rhs)
    checks.check_dtype("lhs's type", lhs.dtype)
    checks.check_kernel_type("rhs's type", rhs.dtype)
    group_sizes = checks.integers("group_sizes", group_sizes)
    dims = ragged_dot_dimension_numbers
    _check_dimension_numbers(lhs, rhs, group_sizes, dims, group_offset)
    lhs, rhs, out_dtype, precision = canonical_types(lhs, rhs, precision, preferred_element_type)
    if not dims.rhs_group_dimensions:
        rhs = rhs.astype(lhs.dtype)
    lhs_batch, rhs_batch = dims.dot_dimension_numbers[1]
    if dims.lhs_ragged_dimensions[0] in lhs_batch:
        return jax.lax.dot_general(
            lhs, rhs, dims.dot_dimension_numbers, precision, out_dtype, out_sharding=out_sharding
        )
    form = _form_of(lhs, rhs, dims)
    out_spec = checks.canonical_out_spec(out_sharding, lhs, rhs)
    # The result begins with the batch dimensions, that of wgrad with the groups.
    batch_axis = int(form.product == "wgrad")
    spec_of_batch, spec_of_element = _split_spec(out_spec, batch_axis, batch_axis + len(lhs_batch))

    def element(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array) -> jax.Array:
        if form.product == "wgrad":
            groups = Groups(checks.canonical_sizes_of(group_sizes, lhs.shape[0]), jnp.zeros((1,), jnp.int32))
            num_groups = group_sizes.shape[0]
        else:
            groups = checks.canonical_groups(group_sizes, group_offset, "rhs", rhs, capacity=lhs.shape[0])
            num_groups = rhs.shape[0]
        return multiply(lhs, rhs, groups, GemmSpec(form.product, num_groups, out_dtype, precision), spec_of_element)

    function: Callable[..., jax.Array] = element
    for _ in lhs_batch:
        function = jax.vmap(function, (0, 0, None if group_sizes.ndim == 1 else 0), batch_axis)
    lhs, rhs = lhs.transpose(*lhs_batch, *form.lhs_order), rhs.transpose(*rhs_batch, *form.rhs_order)
    out = function(lhs, rhs, group_sizes)
    return jax.sharding.reshard(out, out_sharding) if any(spec_of_batch) else out


class _Form(NamedTuple):
    """A grouped product, and the order in which it reads the dimensions of its operands other than batch dimensions."""

    product: Product
    lhs_order: tuple[int, ...]
    rhs_order: tuple[int, ...]


def _form_of(lhs: jax.Array, rhs: jax.Array, dims: jax.lax.RaggedDotDimensionNumbers) -> _Form:
    """Returns the product of dimension numbers without a ragged batch dimension."""
    (lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch) = dims.dot_dimension_numbers
    rhs_group = dims.rhs_group_dimensions
    lhs_kept = tuple(i for i in range(lhs.ndim) if i not in (*lhs_contracting, *lhs_batch))
    rhs_kept = tuple(i for i in range(rhs.ndim) if i not in (*rhs_contracting, *rhs_batch, *rhs_group))
    if not len(lhs_contracting) == len(lhs_kept) == len(rhs_kept) == 1:
        raise NotImplementedError(
            "ragged_dot_general supports one contracting dimension, and one other dimension of each operand beside "
            f"batch and group dimensions, got {len(lhs_contracting)} contracting, {len(lhs_kept)} other dimensions of "
            f"lhs {lhs.shape} and {len(rhs_kept)} of rhs {rhs.shape} with {dims}."
        )
    if not rhs_group:
        return _Form("wgrad", (*lhs_contracting, *lhs_kept), (*rhs_contracting, *rhs_kept))
    product: Product = "fprop" if rhs_contracting[0] < rhs_kept[0] else "dgrad"
    return _Form(product, (*lhs_kept, *lhs_contracting), (*rhs_group, *sorted((*rhs_contracting, *rhs_kept))))


def _split_spec(spec: PartitionSpec | None, start: int, stop: int) -> tuple[PartitionSpec, PartitionSpec | None]:
    """Returns the spec of the dimensions from `start` to `stop`, and that of the others."""
    if spec is None:
        return PartitionSpec(), None
    return PartitionSpec(*spec[start:stop]), PartitionSpec(*spec[:start], *spec[stop:])


def _check_dimension_numbers(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    dims: jax.lax.RaggedDotDimensionNumbers,
    group_offset: ArrayLike | None,
) -> None:
    """Raises as JAX does unless the dimension numbers fit the shapes, and for an offset without a group dimension."""
    if not isinstance(dims, jax.lax.RaggedDotDimensionNumbers):
        raise TypeError(f"ragged_dot_dimension_numbers must be a jax.lax.RaggedDotDimensionNumbers, got {shown(dims)}.")
    sizes = group_sizes.shape
    if group_offset is not None:
        if not dims.rhs_group_dimensions:
            raise NotImplementedError(
                "ragged_dot_general supports group_offset only where rhs has a group dimension: nothing else tells how "
                f"many groups to compute. Got {dims}."
            )
        # There may be more sizes than groups.
        sizes = (*sizes[:-1], *(rhs.shape[i] for i in dims.rhs_group_dimensions if i in range(rhs.ndim)))
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (lhs.shape, rhs.shape)]
    shapes.append(jax.ShapeDtypeStruct(sizes, jnp.int32))
    # Only the shapes are checked: on a mesh, JAX would ask for out_sharding.
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        jax.eval_shape(functools.partial(_JAX_RAGGED_DOT_GENERAL, ragged_dot_dimension_numbers=dims), *shapes)
