"""The experts of a layer, with their routing weights: on tokens, or on rows in the order of experts."""

import dataclasses

import jax
import jax.numpy as jnp

from jax_grouped.core.groups import Groups
from jax_grouped.core.varying import apply_rule, vary_alike
from jax_grouped.fp8.recipes import Recipe
from jax_grouped.kernels.activations import Activation
from jax_grouped.kernels.rows import tokens_of
from jax_grouped.moe.experts_vjp import ExpertsArrays, ExpertsSpec, apply_experts
from jax_grouped.moe.mlp import canonical_mlp
from jax_grouped.moe.permutation import Permutation, checked_shared
from jax_grouped.moe.token_gather import Received, TokenGather
from jax_grouped.moe.weight_gather import WeightGather
from jax_grouped.ops import checks
from jax_grouped.ops.bias import add_bias
from jax_grouped.ops.inputs import Inputs, Weights, vary_inputs


def routed_mlp(
    x: jax.Array,
    gate_up: Weights,
    down: Weights,
    permutation: Permutation,
    weights: jax.Array,
    activation: Activation = "swiglu",
    recipe: Recipe | None = None,
    precision: jax.lax.PrecisionLike = None,
    shared: jax.Array | None = None,
    expected_rows: int = 0,
    token_gather: TokenGather | None = None,
    received: Received | None = None,
    weight_gather: WeightGather | None = None,
) -> jax.Array:
    """Computes `unpermute(grouped_mlp(permute(x, permutation), ...), permutation, weights, shared=shared)`.

    With `token_gather`, the permutation is one of the tokens of all devices. Each token gets the sum of its results on
    all devices, of which each rounds its part to the type of `x`.
    """
    rows = jax.ShapeDtypeStruct((permutation.order.shape[0], x.shape[1]), x.dtype)
    gate_up, down, spec = _canonical(rows, gate_up, down, activation, recipe, precision, expected_rows, weight_gather)
    groups = checks.canonical_groups(permutation.group_sizes, None, "gate_up", spec.up.kernel, capacity=rows.shape[0])
    up_inputs = Inputs(x, gate_up, groups, tokens_of(permutation.order, permutation.inverse))
    if shared is not None:
        shared = checked_shared(shared, (x.shape[0], down.kernel.shape[2]))
    routing = (weights, permutation.order, permutation.inverse, down.bias, shared)
    # Only rows of groups are summed. jax.debug_nans would find NaN in the others.
    zero_other_rows = jax.debug_nans.value
    spec = spec._replace(
        token_gather=token_gather,
        shared_dtype=None if shared is None else shared.dtype,
        up=dataclasses.replace(spec.up, zero_other_rows=zero_other_rows),
        down=dataclasses.replace(spec.down, zero_other_rows=zero_other_rows),
    )
    return _vary_and_apply(up_inputs, down, routing, spec, received).astype(x.dtype)


def weighted_mlp(
    rows: jax.Array,
    gate_up: Weights,
    down: Weights,
    group_sizes: jax.Array,
    row_weights: jax.Array,
    activation: Activation = "swiglu",
    recipe: Recipe | None = None,
    precision: jax.lax.PrecisionLike = None,
    expected_rows: int = 0,
    weight_gather: WeightGather | None = None,
) -> jax.Array:
    """Computes `row_weights[:, None] * grouped_mlp(rows, ...)`: `routed_mlp` for rows that are gathered already."""
    gate_up, down, spec = _canonical(rows, gate_up, down, activation, recipe, precision, expected_rows, weight_gather)
    groups = checks.canonical_groups(group_sizes, None, "gate_up", spec.up.kernel, capacity=rows.shape[0])
    routing = (row_weights, None, None, None, None)
    weighted = _vary_and_apply(Inputs(rows, gate_up, groups), down, routing, spec)
    if down.bias is not None:
        zeros, bias, *varying_groups, _ = vary_alike(jnp.zeros_like(weighted), down.bias, *groups, weighted)
        weighted += row_weights[:, None] * add_bias(zeros, bias, Groups(*varying_groups))
    return weighted.astype(rows.dtype)


def _canonical(
    rows: jax.Array | jax.ShapeDtypeStruct,
    gate_up: Weights,
    down: Weights,
    activation: Activation,
    recipe: Recipe | None,
    precision: jax.lax.PrecisionLike,
    expected_rows: int,
    weight_gather: WeightGather | None,
) -> tuple[Weights, Weights, ExpertsSpec]:
    """Returns the checked weights, and the spec of the products without the bias of `down`."""
    parts = 1 if weight_gather is None else weight_gather.parts
    gate_up, down, spec = canonical_mlp(rows, gate_up, down, activation, recipe, precision, parts)
    up_spec = dataclasses.replace(spec.up, expected_tokens=expected_rows)
    down_spec = dataclasses.replace(spec.down, expected_tokens=expected_rows, bias_dtype=None)
    return gate_up, down, ExpertsSpec(activation, up_spec, down_spec, weight_gather)


def _vary_and_apply(
    up: Inputs,
    down: Weights,
    routing: tuple[jax.Array | None, ...],
    spec: ExpertsSpec,
    received: Received | None = None,
) -> jax.Array:
    # The second product has no tokens yet: the first product computes them.
    down_inputs = Inputs(None, down._replace(bias=None), up.groups)  # type: ignore[arg-type]
    arrays = ExpertsArrays(*vary_inputs(up, down_inputs, more=routing))
    return apply_rule(apply_experts, arrays._replace(received=received), spec, "moe_mlp")
