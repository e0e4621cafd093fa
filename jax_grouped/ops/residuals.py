"""Residuals between the passes of `grouped_dense`."""

import dataclasses

import jax

from jax_grouped.core.groups import Groups
from jax_grouped.fp8.arrays import short_repr
from jax_grouped.fp8.state import Fp8State
from jax_grouped.ops.gemm import Operand
from jax_grouped.ops.inputs import DenseSpec

#: Names of the residuals: the quantized tokens and kernels, and the input of the activation of
#: `jax_grouped.moe.grouped_mlp`. Pass them to `jax.checkpoint_policies.save_only_these_names(*CHECKPOINT_NAMES)`. An
#: array that a policy does not keep is quantized again, in the one orientation that is read. Without the kernels' name,
#: a step takes less memory, and one more pass over each kernel.
CHECKPOINT_NAMES = ("jax_grouped_x", "jax_grouped_kernel", "jax_grouped_hidden")
#: Name of the results of `jax_grouped.moe.grouped_mlp` and `jax_grouped.moe.moe_mlp`. No backward pass of the library
#: reads them, so a policy keeps them only for what else a checkpointed function computes from them.
OUTPUT_NAME = "jax_grouped_output"


@short_repr
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DenseResiduals:
    """Residuals between the forward pass and dgrad.

    Quantized arrays in it that come from a call with a `group_offset` cannot be dequantized, see `ScaledArray`.

    Attributes:
        x: the tokens, as wgrad reads them.
        kernel: the kernel, as dgrad reads it.
        groups: the sizes and the offset.
        fp8_state: the state that the forward pass used, with `DelayedScaling`.
        amax: the largest values for the next state, by tensor; None if there is no state.
        spec: everything static.

    Example:
        y, residuals = jg.grouped_dense_fwd(jnp.ones((16, 32)), jnp.ones((2, 32, 16)), jnp.array([10, 4]))

        assert isinstance(residuals, jg.DenseResiduals)
        dx, _ = jg.grouped_dense_dgrad(residuals, jnp.ones_like(y))
    """

    x: Operand | None
    kernel: Operand | None
    groups: Groups
    fp8_state: Fp8State | None
    amax: dict[str, jax.Array] | None
    spec: DenseSpec = dataclasses.field(metadata=dict(static=True), repr=False)


@short_repr
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PendingWgrad:
    """Residuals between dgrad and wgrad, FP8 with a recipe. On dequantization see `DenseResiduals`.

    Attributes:
        x, dy: the operands that wgrad reads.
        dbias: the gradient of the bias, already computed; None if there is no bias.
        fp8_state: the next state of `DelayedScaling`, already computed; None with other recipes.
        groups: the sizes and the offset.
        spec: everything static.

    Example:
        y, residuals = jg.grouped_dense_fwd(jnp.ones((16, 32)), jnp.ones((2, 32, 16)), jnp.array([10, 4]))
        dx, pending = jg.grouped_dense_dgrad(residuals, jnp.ones_like(y))

        assert isinstance(pending, jg.PendingWgrad)
        dkernel, _ = jg.grouped_dense_wgrad(pending)
    """

    x: Operand | None
    dy: Operand | None
    dbias: jax.Array | None
    fp8_state: Fp8State | None
    groups: Groups
    spec: DenseSpec = dataclasses.field(metadata=dict(static=True), repr=False)
