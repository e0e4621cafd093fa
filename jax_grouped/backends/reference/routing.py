"""Routing in the `xla` backend: plain JAX, for any platform."""

import jax
import jax.numpy as jnp

from jax_grouped.backends.spec import RouteSpec
from jax_grouped.core.capacity import fit_to_capacity
from jax_grouped.core.groups import count_not_above


def route(logits: jax.Array, bias: jax.Array | None = None, *, spec: RouteSpec) -> tuple[jax.Array, ...]:
    """Returns the experts, weights and probabilities of `RouteSpec`."""
    logits = logits.astype(jnp.float32)
    scores = jax.nn.softmax(logits) if spec.score == "softmax" else jax.nn.sigmoid(logits)
    experts = _best(scores, bias, spec)
    weights = jnp.take_along_axis(scores, experts, axis=1, mode="clip")
    return (
        experts,
        _normalized(weights) if spec.normalize_weights else weights,
        scores if spec.score == "softmax" else _normalized(scores),
    )


def _best(scores: jax.Array, bias: jax.Array | None, spec: RouteSpec) -> jax.Array:
    """Returns the indices of the highest sums of score and bias, `int32[T, top_k]`, in the best groups."""
    if bias is not None:
        scores = scores + bias
    # Replace NaN and -inf: the order of NaN depends on the device, and an implementation may pad with -inf of no index.
    lowest = jnp.finfo(jnp.float32).min
    scores = jnp.nan_to_num(scores, nan=lowest, posinf=-lowest, neginf=lowest)
    if spec.top_groups < spec.expert_groups:
        scores = _in_best_groups(scores, spec.expert_groups, spec.top_groups)
    return jax.lax.top_k(scores, spec.top_k)[1]


def _in_best_groups(scores: jax.Array, expert_groups: int, top_groups: int) -> jax.Array:
    """Replaces the scores of experts outside of a token's best groups by -inf, which is below every score."""
    of_groups = scores.reshape(scores.shape[0], expert_groups, scores.shape[1] // expert_groups)
    two_best = jax.lax.top_k(of_groups, min(2, of_groups.shape[2]))[0]
    # Halves, whose sum does not overflow.
    best = jax.lax.top_k(jnp.sum(two_best * 0.5, axis=2), top_groups)[1]
    return jnp.where(jnp.any(chosen(best, expert_groups), axis=1)[..., None], of_groups, -jnp.inf).reshape(scores.shape)


def _normalized(x: jax.Array) -> jax.Array:
    """Divides nonnegative numbers `[T, n]` by their sum over `n`; returns zeros where the sum is 0."""
    # Sums of tiny numbers would lose bits, or be flushed to 0. So divide by the largest first.
    largest = jnp.max(x, axis=1, keepdims=True)
    x = x / jnp.where(largest > 0, largest, 1)
    total = jnp.sum(x, axis=1, keepdims=True)
    return x / jnp.where(total > 0, total, 1)


def chosen(experts: jax.Array, num_experts: int) -> jax.Array:
    """Compares each choice with each expert, `bool[T, k, E]`."""
    return experts[..., None] == jnp.arange(num_experts, dtype=experts.dtype)


def expert_load(experts: jax.Array, num_experts: int) -> jax.Array:
    """Counts the choices of each expert, `int32[E]`."""
    return jnp.sum(chosen(experts, num_experts), axis=(0, 1), dtype=jnp.int32)


def group_pairs(experts: jax.Array, *, num_experts: int, rows: int) -> tuple[jax.Array, ...]:
    """Returns the order, inverse, group sizes and number of dropped pairs of `ops.routing.group_pairs`."""
    pairs = experts.size
    keys = jnp.where((experts < 0) | (experts > num_experts), num_experts, experts).reshape(pairs)
    keys, sorted_pairs = jax.lax.sort((keys, jnp.arange(pairs, dtype=jnp.int32)), num_keys=1, is_stable=True)
    wanted = jnp.diff(count_not_above(keys, jnp.arange(num_experts, dtype=jnp.int32)), prepend=0)
    row = jnp.arange(rows, dtype=jnp.int32)
    if rows < pairs:
        group_sizes = fit_to_capacity(wanted, rows)
        cut = wanted - group_sizes
        group = count_not_above(jnp.cumsum(group_sizes, dtype=jnp.int32), row)
        # The sorted pairs still hold the cut pairs of earlier groups: skip them to find a row's pair.
        cut_before = jnp.cumsum(cut, dtype=jnp.int32) - cut
        sorted_pairs = sorted_pairs[row + cut_before[jnp.minimum(group, num_experts - 1)]]
    else:
        group_sizes = wanted
    used = jnp.sum(group_sizes, dtype=jnp.int32)
    # Send each pair without a row to a distinct index past the end: the scatter is told that indices are unique.
    pair = jnp.where(row < used, sorted_pairs, pairs + row)
    inverse = jnp.full((pairs,), rows, jnp.int32).at[pair].set(row, mode="drop", unique_indices=True)
    return jnp.minimum(pair, pairs), inverse.reshape(experts.shape), group_sizes, (pairs - used).reshape(1)


def route_and_group(
    logits: jax.Array, bias: jax.Array | None = None, *, spec: RouteSpec, rows: int
) -> tuple[jax.Array, ...]:
    """Returns the results of `route` and of `group_pairs`, the experts' loads, and the sums of the probabilities."""
    experts, weights, probabilities = route(logits, bias, spec=spec)
    num_experts = logits.shape[1]
    return (
        experts,
        weights,
        probabilities,
        *group_pairs(experts, num_experts=num_experts, rows=rows),
        expert_load(experts, num_experts),
        jnp.sum(probabilities, axis=0),
    )
