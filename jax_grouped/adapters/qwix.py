"""A provider for Qwix whose grouped products are those of `jax_grouped`, in FP8 by one of its recipes."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.typing import ArrayLike, DTypeLike

from jax_grouped.fp8.recipes import DelayedScaling, Recipe, recipe_error
from jax_grouped.ops.dense import grouped_dense
from jax_grouped.ops.inputs import GroupSizes
from jax_grouped.ops.ragged_dot import ragged_dot

try:
    import qwix
except ModuleNotFoundError as error:
    raise ModuleNotFoundError('This module needs Qwix: python3 -m pip install "qwix>=0.1.8"') from error


class QtProvider(qwix.QtProvider):  # type: ignore[misc]  # Qwix has no types.
    """Qwix's provider for quantized training, which also sees `jax_grouped.ragged_dot`.

    Where a rule quantizes weights, `jax.lax.ragged_dot` and `jax_grouped.ragged_dot` are computed by the recipe: both
    passes in FP8, from tensors that are quantized once. Elsewhere both are `jax_grouped.ragged_dot`. Every other
    operation is Qwix's.

    Args:
        rules: Qwix's rules. Of a rule that matches a grouped product, only whether it has a `weight_qtype` matters.
        recipe: how the products compute; None for Qwix's own quantization. `DelayedScaling` has a state, for which
            there is no place here.
        options: of Qwix's provider.

    Raises:
        TypeError: `recipe` is no recipe.
        ValueError: it is `DelayedScaling`.
    """

    def __init__(self, rules: Sequence[Any], *, recipe: Recipe | None = None, **options: Any):
        if not isinstance(recipe, Recipe | None):
            raise recipe_error(recipe)
        if isinstance(recipe, DelayedScaling):
            raise ValueError("recipe must be one without a state, got DelayedScaling.")
        super().__init__(rules, **options)
        self._recipe = recipe

    def ragged_dot(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        group_sizes: GroupSizes,
        precision: jax.lax.PrecisionLike = None,
        preferred_element_type: DTypeLike | None = None,
        group_offset: ArrayLike | None = None,
        out_sharding: Any = None,
    ) -> jax.Array:
        """Computes a grouped product of the model, as the current rule says."""
        rule, _ = self._get_current_rule_and_op_id("ragged_dot")
        options: dict[str, Any] = dict(
            preferred_element_type=preferred_element_type, group_offset=group_offset, out_sharding=out_sharding
        )
        if rule is None or rule.weight_qtype is None:
            return ragged_dot(lhs, rhs, group_sizes, precision=precision, **options)
        if self._recipe is not None:
            return grouped_dense(lhs, rhs, group_sizes, recipe=self._recipe, **options)
        y: jax.Array = super().ragged_dot(lhs, rhs, group_sizes, precision, preferred_element_type, group_offset)
        return y

    def get_intercept_map(self) -> dict[str, Callable[..., Any]]:
        """Returns the functions in place of which those of the provider are called."""
        intercepted: dict[str, Callable[..., Any]] = super().get_intercept_map()
        return intercepted | {"jax_grouped.ragged_dot": self.ragged_dot}
