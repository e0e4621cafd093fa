"""Routing in the `xla` backend: plain JAX, for any platform."""

import jax
import jax.numpy as jnp
import numpy as np

from jax_grouped.backends.spec import RouteSpec
from jax_grouped.core.capacity import fit_to_capacity
from jax_grouped.core.groups import as_int32, count_not_above

_LOWEST = np.float32(np.finfo(np.float32).min)


def route(logits: jax.Array, bias: jax.Array | None = None, *, spec: RouteSpec) -> tuple[jax.Array, ...]:
    """Returns the experts, weights and probabilities of `RouteSpec`."""
    logits = logits.astype(jnp.float32)
    if spec.score == "softmax":
        scores = probabilities = jax.nn.softmax(logits)
        experts = _best(scores if bias is None else scores + bias, spec)
        weights = jnp.take_along_axis(scores, experts, axis=1, mode="clip")
        return experts, _normalized(weights) if spec.normalize_weights else weights, probabilities
    if bias is not None:
        experts = _best(_sigmoid(logits) + bias, spec)
    else:
        # The order of sigmoids is that of logits, which float32 does not round to 0 or 1. NaN stays below -inf.
        compared = _without_subnormals(jnp.maximum(logits, np.nextafter(_LOWEST, np.float32(0))))
        experts = _best(compared, spec, _without_subnormals(_relative_sigmoid(logits)))
    chosen_logits = jnp.take_along_axis(logits, experts, axis=1, mode="clip")
    weights = _normalized(_relative_sigmoid(chosen_logits)) if spec.normalize_weights else _sigmoid(chosen_logits)
    return experts, weights, _normalized(_relative_sigmoid(logits))


def _sigmoid(logits: jax.Array) -> jax.Array:
    return _without_subnormals(jax.nn.sigmoid(logits))


def _relative_sigmoid(logits: jax.Array) -> jax.Array:
    """Returns sigmoids `[T, n]`, each row divided by exp(min(its largest logit, 0)): they do not all underflow."""
    largest = jnp.max(jnp.where(jnp.isnan(logits), -jnp.inf, logits), axis=1, keepdims=True)
    shift = jnp.where(largest == -jnp.inf, 0, jnp.minimum(largest, 0))
    # The shift is 0 beside a positive logit. No exponential overflows.
    power = jnp.exp(jnp.where(logits > 0, -logits, logits - shift))
    return jnp.where(logits > 0, 1, power) / (1 + power * jnp.exp(shift))


def _without_subnormals(x: jax.Array) -> jax.Array:
    """Replaces subnormal numbers by 0 on every platform, as CPUs do."""
    return jnp.where(jnp.abs(x) < jnp.finfo(jnp.float32).tiny, 0, x)


def _best(compared: jax.Array, spec: RouteSpec, scores: jax.Array | None = None) -> jax.Array:
    """Returns the indices of the highest numbers in the best groups, `int32[T, top_k]`.

    The best groups are those with the highest sums of their two highest scores: by default the compared numbers.
    """
    compared = _limited(compared, -_LOWEST)
    if spec.top_groups < spec.expert_groups:
        scores = _limited(compared if scores is None else scores, -_LOWEST / 2)  # Sums do not overflow.
        grouped = (scores.shape[0], spec.expert_groups, scores.shape[1] // spec.expert_groups)
        two_best = jax.lax.top_k(scores.reshape(grouped), min(2, grouped[2]))[0]
        groups = jax.lax.top_k(jnp.sum(two_best, axis=2), spec.top_groups)[1]
        usable = jnp.any(chosen(groups, spec.expert_groups), axis=1)[..., None]
        compared = jnp.where(usable, compared.reshape(grouped), -jnp.inf).reshape(scores.shape)
    return jax.lax.top_k(compared, spec.top_k)[1]


def _limited(x: jax.Array, most: np.float32) -> jax.Array:
    """Returns numbers within [-most, most]. NaN counts as the lowest."""
    # The order of NaN depends on the device, and an implementation of top_k may pad with -inf of no index.
    return jnp.clip(jnp.where(jnp.isnan(x), -most, x), -most, most)


def _normalized(x: jax.Array) -> jax.Array:
    """Divides nonnegative numbers `[T, n]` by their sum over `n`; returns zeros where the sum is 0."""
    # Sums of tiny numbers would lose bits, or be flushed to 0. So divide by the largest first.
    largest = jnp.max(x, axis=1, keepdims=True)
    x = x / jnp.where(largest > 0, largest, 1)
    total = jnp.sum(x, axis=1, keepdims=True)
    return x / jnp.where(total == 0, 1, total)


def chosen(experts: jax.Array, num_experts: int) -> jax.Array:
    """Compares each choice with each expert, `bool[T, k, E]`."""
    return as_int32(experts, -1, num_experts)[..., None] == jnp.arange(num_experts, dtype=jnp.int32)


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
    group_sizes = wanted
    if rows < pairs:
        group_sizes = fit_to_capacity(wanted, rows)
        group = jnp.minimum(count_not_above(jnp.cumsum(group_sizes, dtype=jnp.int32), row), num_experts - 1)
        start, sorted_start = (jnp.cumsum(sizes, dtype=jnp.int32) - sizes for sizes in (group_sizes, wanted))
        rank = _spread(row - start[group], group_sizes[group], wanted[group])
        sorted_pairs = sorted_pairs[jnp.clip(sorted_start[group] + rank, 0, pairs - 1)]
    used = jnp.sum(group_sizes, dtype=jnp.int32)
    # Send each pair without a row to a distinct index past the end: the scatter is told that indices are unique.
    pair = jnp.where(row < used, sorted_pairs, pairs + row)
    inverse = jnp.full((pairs,), rows, jnp.int32).at[pair].set(row, mode="drop", unique_indices=True)
    return jnp.minimum(pair, pairs), inverse.reshape(experts.shape), group_sizes, (pairs - used).reshape(1)


def _spread(rank: jax.Array, count: jax.Array, size: jax.Array) -> jax.Array:
    """Returns the place of each of `count` items that stand at equal distances in `size` places.

    All are int32 below 2^30. Item `rank` stands at the last place `p` with `(p * count + size // 2) // size == rank`:
    `((rank + 1) * size - size // 2) / count`, rounded up, less one.
    """
    factor, size, count = (x.astype(jnp.uint32) for x in (rank + 1, size, jnp.maximum(count, 1)))

    # There are no 64-bit integers, so multiply and divide bit by bit. Unrolled, this would take minutes to compile.
    def with_next_bit(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        quotient, rest = carry
        bit = (factor >> (29 - i).astype(jnp.uint32)) & 1
        rest = 2 * rest + bit * (size % count)
        return 2 * quotient + rest // count, rest % count

    zeros = jnp.zeros_like(factor)
    quotient, rest = jax.lax.fori_loop(0, 30, with_next_bit, (zeros, zeros))
    quotient += factor * (size // count)
    half = size // 2
    place = quotient - half // count - jnp.where(rest > half % count, 0, 1).astype(jnp.uint32)
    return place.astype(jnp.int32)


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
