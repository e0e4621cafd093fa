"""Routing: the choice of each token's experts, and the rows of the chosen pairs, sorted by expert.

The choice is a constant to derivatives, while weights and probabilities depend on the logits. Their tangents follow
from weights and probabilities themselves, so that nothing else of the forward pass waits for the backward pass, and
gradients of any order exist. The gradient of a gather would be a scatter-add, which a GPU does with atomics in any
order. So each logit's gradient compares its expert with the token's few choices instead.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_grouped.core.values import vary_alike
from jax_grouped.kernels.primitive import bind
from jax_grouped.kernels.routing import GROUP_PAIRS, ROUTE, ROUTE_AND_GROUP, RouteSpec, chosen


class Routed(NamedTuple):
    """Routing of `T` tokens to `k` of `E` experts each, as in `jax_grouped.moe.Routing`."""

    experts: jax.Array
    weights: jax.Array
    probabilities: jax.Array


class Grouped(NamedTuple):
    """Rows of pairs of a token and a choice, as in `jax_grouped.moe.Permutation`."""

    order: jax.Array
    inverse: jax.Array
    group_sizes: jax.Array
    dropped: jax.Array


class RoutedAndGrouped(NamedTuple):
    """Routing, rows of chosen pairs, `int32[E]` choices of each expert, and `float32[E]` sums of probabilities."""

    routed: Routed
    grouped: Grouped
    expert_load: jax.Array
    probability_sums: jax.Array


def route(logits: jax.Array, bias: jax.Array | None, spec: RouteSpec) -> Routed:
    """Chooses the experts of `logits [T, E]` by scores plus `bias`; weights and probabilities are differentiable."""
    operands = _operands(logits, bias)
    constant = map(jax.lax.stop_gradient, operands)
    experts, weights, probabilities = bind(ROUTE, *constant, spec=spec)
    return Routed(experts, *_depend_on_logits(spec, operands[0], experts, weights, probabilities))


def group_pairs(experts: jax.Array, num_experts: int, rows: int) -> Grouped:
    """Gives every pair of `experts [T, k]` one of `rows` rows, as `jax_grouped.moe.group_by_expert` documents."""
    order, inverse, group_sizes, dropped = bind(GROUP_PAIRS, experts, num_experts=num_experts, rows=rows)
    return Grouped(order, inverse, group_sizes, dropped[0])


def route_and_group(logits: jax.Array, bias: jax.Array | None, spec: RouteSpec, rows: int) -> RoutedAndGrouped:
    """Returns the results of `route`, and of `group_pairs` for its experts."""
    operands = _operands(logits, bias)
    constant = map(jax.lax.stop_gradient, operands)
    experts, weights, probabilities, *rest = bind(ROUTE_AND_GROUP, *constant, spec=spec, rows=rows)
    order, inverse, group_sizes, dropped, load, sums = rest
    weights, probabilities = _depend_on_logits(spec, operands[0], experts, weights, probabilities)
    return RoutedAndGrouped(
        Routed(experts, weights, probabilities),
        Grouped(order, inverse, group_sizes, dropped[0]),
        load,
        _summed(probabilities, sums),
    )


def _operands(logits: jax.Array, bias: jax.Array | None) -> tuple[jax.Array, ...]:
    return vary_alike(logits) if bias is None else vary_alike(logits, bias)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _depend_on_logits(
    spec: RouteSpec, logits: jax.Array, experts: jax.Array, weights: jax.Array, probabilities: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the weights and the probabilities, which are constants, as functions of the logits."""
    del spec, logits, experts
    return weights, probabilities


@_depend_on_logits.defjvp
def _depend_on_logits_jvp(spec: RouteSpec, primals: Any, tangents: Any) -> tuple[Any, Any]:
    logits, experts, *_ = primals
    weights, probabilities = _depend_on_logits(spec, *primals)

    # With `jax.checkpoint`, the backward pass keeps the arguments alone: it computes comparisons and slopes again.
    def linear(tangent: Callable[..., jax.Array]) -> jax.Array:
        function = jax.checkpoint(functools.partial(tangent, spec), prevent_cse=False)
        return function(tangents[0], logits, experts, weights, probabilities)

    return (weights, probabilities), (linear(_weights_tangent), linear(_probabilities_tangent))


def _weights_tangent(
    spec: RouteSpec,
    dlogits: jax.Array,
    logits: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    probabilities: jax.Array,
) -> jax.Array:
    relative = _relative_tangent(spec, dlogits, logits)
    if spec.score == "softmax" and not spec.normalize_weights:
        relative = relative - jnp.sum(probabilities * relative, axis=1, keepdims=True)
    relative = jnp.sum(jnp.where(chosen(experts, logits.shape[1]), relative[:, None], 0), axis=2)
    if spec.normalize_weights:
        relative = relative - jnp.sum(weights * relative, axis=1, keepdims=True)
    return weights * relative


def _probabilities_tangent(
    spec: RouteSpec,
    dlogits: jax.Array,
    logits: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    probabilities: jax.Array,
) -> jax.Array:
    del experts, weights
    relative = _relative_tangent(spec, dlogits, logits)
    return probabilities * (relative - jnp.sum(probabilities * relative, axis=1, keepdims=True))


def _relative_tangent(spec: RouteSpec, dlogits: jax.Array, logits: jax.Array) -> jax.Array:
    """Returns the tangent of each score, divided by the score, up to a term that a token's scores have in common."""
    dlogits = dlogits.astype(jnp.float32)
    return dlogits if spec.score == "softmax" else dlogits * jax.nn.sigmoid(-logits.astype(jnp.float32))


@jax.custom_jvp
def _summed(probabilities: jax.Array, sums: jax.Array) -> jax.Array:
    """Returns the sums over the tokens, which are a constant, as a function of the probabilities."""
    del probabilities
    return sums


@_summed.defjvp
def _summed_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return _summed(*primals), jnp.sum(tangents[0], axis=0)
