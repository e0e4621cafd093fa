"""Flax linen layers."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_grouped.dense import grouped_dense
from jax_grouped.fp8_state import Fp8State
from jax_grouped.recipes import DelayedScaling, Recipe

try:
    import flax.linen as nn
    from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
except ModuleNotFoundError as error:
    raise ModuleNotFoundError('jax_grouped.linen needs Flax: python3 -m pip install "flax>=0.12"') from error

Initializer = Callable[..., Any]

default_kernel_init = nn.initializers.variance_scaling(
    1.0, "fan_in", "truncated_normal", in_axis=-2, out_axis=-1, batch_axis=0
)


class GroupedDense(nn.Module):
    """A linear layer per group: `flax.linen.Dense` for mixture-of-experts models.

    Parameters: `kernel` `[E, K, N]` and, with `use_bias`, `bias` `[E, N]`. Wrap the initialisers with
    `flax.linen.with_logical_partitioning` to name their axes, for example `("expert", "embed", "mlp")`.

    With `DelayedScaling` the arrays of `jax_grouped.Fp8State` are variables too, in Flax's collection
    `_overwrite_with_gradient` under the names of its fields. Their gradient is their next value: a
    `flax.training.train_state.TrainState` whose `params` are all variables, the collection `params` and this one,
    replaces them with it and shows its optimizer only the parameters. Where several microbatches, devices or uses of
    one layer each have a gradient, combine those of this collection by maximum, as `Fp8State` explains, never by a sum.

    Attributes:
        features: `N`, the size of each output row.
        num_groups: `E`, the number of groups (experts).
        use_bias: whether to add a bias per group.
        dtype: type of the computation and the result. Default: the promotion of the input's and parameters' types.
        param_dtype: type of the parameters. Their gradients have it too, straight from the matmul.
        precision: as in `jax_grouped.ragged_dot`; matters in float32 only.
        kernel_init: called with `(key, (E, K, N), param_dtype)`. The default is Dense's, with the group axis as a batch
            axis: every group is initialised as a Dense layer would be.
        bias_init: called with `(key, (E, N), param_dtype)`.
        recipe: how the products are computed in FP8, as in `jax_grouped.grouped_dense`; None to compute in `dtype`.
    """

    features: int
    num_groups: int
    use_bias: bool = True
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    precision: jax.lax.PrecisionLike = None
    kernel_init: Initializer = default_kernel_init
    bias_init: Initializer = nn.initializers.zeros_init()
    recipe: Recipe | None = None

    @nn.compact
    def __call__(self, x: jax.Array, group_sizes: jax.Array) -> jax.Array:
        """Applies each group's layer to its rows.

        Args:
            x: `[T, K]`, rows of group 0 first, then group 1, and so on.
            group_sizes: `int[E]`, rows per group.

        Returns:
            `[T, N]`; rows past `sum(group_sizes)` are zero.
        """
        kernel_shape = (self.num_groups, jnp.shape(x)[-1], self.features)
        kernel = self.param("kernel", self.kernel_init, kernel_shape, self.param_dtype)
        bias = None
        if self.use_bias:
            bias = self.param("bias", self.bias_init, (self.num_groups, self.features), self.param_dtype)
        # Only x is converted: grouped_dense computes in its type, and gives parameters gradients in theirs.
        dtype = self.dtype or jnp.result_type(x, kernel)
        return grouped_dense(
            jnp.asarray(x, dtype),
            kernel,
            group_sizes,
            bias,
            recipe=self.recipe,
            fp8_state=self._fp8_state(self.recipe) if isinstance(self.recipe, DelayedScaling) else None,
            precision=self.precision,
        )

    def _fp8_state(self, recipe: DelayedScaling) -> Fp8State:
        """The variables of delayed scaling, made by `init`."""

        def initial(name: str) -> jax.Array:
            return getattr(Fp8State.initial(recipe, self.num_groups), name)

        def variable(name: str) -> jax.Array:
            return self.variable(OVERWRITE_WITH_GRADIENT, name, initial, name).value

        return Fp8State(**{field.name: variable(field.name) for field in dataclasses.fields(Fp8State)})
