"""`gmm` with the signature of JAX's Megablox kernel for TPUs, which MaxText's experts call: the same code on a GPU."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from jax_grouped.core.groups import group_rows, row_groups
from jax_grouped.core.values import as_array, static_bool
from jax_grouped.fp8.recipes import Recipe
from jax_grouped.ops import inputs
from jax_grouped.ops.dense import grouped_dense
from jax_grouped.ops.ragged_dot import ragged_dot_general

#: Arguments of MaxText's version that choose among its kernels, or say what the types of the operands say.
_NOT_USED = frozenset(
    ("lhs_vma_axes", "rhs_vma_axes", "use_gmm_v2", "use_gmm_v2_heuristic_tiling", "use_tokamax_backend")
)


def gmm(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    preferred_element_type: DTypeLike = jnp.float32,
    tiling: tuple[int, int, int] | Callable[..., tuple[int, int, int]] | None = None,
    group_offset: ArrayLike | None = None,
    existing_out: jax.Array | None = None,
    transpose_rhs: bool = False,
    interpret: bool = False,
    *,
    partial_sum: jax.Array | None = None,
    recipe: Recipe | None = None,
    **options: Any,
) -> jax.Array:
    """Computes `jax_grouped.ragged_dot`, or with a recipe `grouped_dense`, into a result that may be there.

    Args:
        lhs: `[T, K]`, as in `jax_grouped.ragged_dot`.
        rhs: `[G, K, N]`, or `[G, N, K]` with `transpose_rhs`.
        group_sizes: `[G]`, or `[E]` with a `group_offset`.
        preferred_element_type: type of the result.
        tiling: not used.
        group_offset: scalar: `rhs` holds the groups `[group_offset, group_offset + G)`.
        existing_out: `[T, N]` in the type of the result: what rows of other groups have in the result, in place of
            zeros. Rings of experts, which multiply by one part of the experts at a time, hand it on.
        transpose_rhs: see `rhs`. Not with a recipe.
        interpret: not used.
        partial_sum: `[T, N]` in the type of the result, is added to the product.
        recipe: how to compute in FP8, as in `jax_grouped.grouped_dense`; bind it with `functools.partial`.
        options: more arguments of MaxText's version of the kernel. Those that choose among its kernels are not used.
            Others, such as `lhs_quantize_dtype`, must be None, False or empty.

    Returns:
        `[T, N]`.

    Raises:
        NotImplementedError: there are both `transpose_rhs` and a recipe, or one of the `options` is set.
        TypeError, ValueError: as in these functions, or `partial_sum` or `existing_out` is not like the result.
    """
    del tiling, interpret
    transpose_rhs = static_bool("transpose_rhs", transpose_rhs)
    for name, value in options.items():
        is_off = value is None or value is False or (isinstance(value, (list, tuple)) and not value)
        if name not in _NOT_USED and not is_off:
            raise NotImplementedError(f"gmm does not take {name} = {value!r}. To compute in FP8, bind a recipe.")
    lhs, rhs = as_array("lhs", lhs), as_array("rhs", rhs)
    shared: Any = dict(preferred_element_type=preferred_element_type, group_offset=group_offset)
    if recipe is None:
        numbers = jax.lax.RaggedDotDimensionNumbers(
            dot_dimension_numbers=(([1], [2 if transpose_rhs else 1]), ([], [])),
            lhs_ragged_dimensions=[0],
            rhs_group_dimensions=[0],
        )
        y = ragged_dot_general(lhs, rhs, group_sizes, numbers, **shared)
    elif transpose_rhs:
        raise NotImplementedError("With a recipe, gmm takes no transposed rhs.")
    else:
        y = grouped_dense(lhs, rhs, group_sizes, recipe=recipe, **shared)
    for name, array in {"partial_sum": partial_sum, "existing_out": existing_out}.items():
        if array is not None and (array.shape != y.shape or array.dtype != y.dtype):
            raise ValueError(
                f"{name} must be like the result, {y.dtype.name} {y.shape}, got {array.dtype.name} {array.shape}."
            )
    if partial_sum is not None:
        y += partial_sum
    if existing_out is None:
        return y
    groups = inputs.canonical_groups(group_sizes, group_offset, "rhs", rhs.shape[0], capacity=y.shape[0])
    _, is_own = row_groups(group_rows(*groups, rhs.shape[0], y.shape[0]), y.shape[0])
    return jnp.where(is_own[:, None], y, existing_out)
