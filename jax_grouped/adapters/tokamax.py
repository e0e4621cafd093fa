"""Products as an implementation for `tokamax.ragged_dot` and `tokamax.ragged_dot_general`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jax_grouped.core.groups import FP8_ALIGNMENT
from jax_grouped.core.values import promoted_type
from jax_grouped.fp8.recipes import Recipe
from jax_grouped.ops.dense import grouped_dense
from jax_grouped.ops.inputs import GroupSizes
from jax_grouped.ops.ragged_dot import ragged_dot_general

_PLAIN = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(([1], [1]), ([], [])), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
)


def ragged_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    group_sizes: GroupSizes | Any,
    ragged_dot_dimension_numbers: jax.lax.RaggedDotDimensionNumbers | None = None,
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    activation: Callable[[jax.Array], jax.Array] | None = None,
    recipe: Recipe | None = None,
) -> jax.Array:
    """Computes what an implementation of Tokamax does: `ragged_dot_general`, or with a recipe `grouped_dense`.

    Args:
        lhs: as in `jax_grouped.ragged_dot_general`.
        rhs: likewise.
        group_sizes: likewise, or Tokamax's `GroupSizes`.
        ragged_dot_dimension_numbers: likewise; None for those of `jax_grouped.ragged_dot`.
        precision: likewise. FP8 products, with a recipe, have only one.
        preferred_element_type: type of the result.
        activation: applied to the result in float32, before it is rounded.
        recipe: how to compute in FP8, as in `jax_grouped.grouped_dense`; bind it with `functools.partial`.
            `DelayedScaling` has a state, for which there is no place here.

    Returns:
        The product.

    Raises:
        NotImplementedError: an operand is no array of bfloat16, float16 or float32, such as Tokamax's quantized arrays,
            or the dimension numbers describe no product that is supported. Tokamax then tries its next implementation.
        TypeError, ValueError: as in these functions.
    """
    for name, operand in (("lhs", lhs), ("rhs", rhs)):
        is_array = isinstance(operand, jax.Array | np.ndarray)
        if not is_array or operand.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
            raise NotImplementedError(f"{name} must be an array of bfloat16, float16 or float32 for jax_grouped.")
    sizes = getattr(group_sizes, "value", group_sizes)
    dimension_numbers = _PLAIN if ragged_dot_dimension_numbers is None else ragged_dot_dimension_numbers
    result_type = promoted_type(lhs.dtype, rhs.dtype) if preferred_element_type is None else preferred_element_type
    out_dtype = result_type if activation is None else jnp.float32
    if recipe is None:
        y = ragged_dot_general(lhs, rhs, sizes, dimension_numbers, precision, preferred_element_type=out_dtype)
    elif dimension_numbers != _PLAIN:
        raise NotImplementedError("With a recipe, jax_grouped takes the dimension numbers of ragged_dot only.")
    elif any(size % FP8_ALIGNMENT for size in rhs.shape[1:]):
        raise NotImplementedError(f"With a recipe, features must be multiples of {FP8_ALIGNMENT}, got rhs {rhs.shape}.")
    else:
        y = grouped_dense(lhs, rhs, sizes, recipe=recipe, preferred_element_type=out_dtype)
    return y if activation is None else activation(y).astype(result_type)
