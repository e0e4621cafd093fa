"""Routing: the choice of each token's experts, and the rows of the chosen pairs, sorted by expert.

The choice is a constant to derivatives, while weights and probabilities depend on the logits. Their tangents follow
from weights and probabilities themselves, so that nothing else of the forward pass waits for the backward pass, and
gradients of any order exist. The gradient of a gather would be a scatter-add, which a GPU does with atomics in any
order. So each logit's gradient compares its expert with the token's few choices instead.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jax_grouped.core.groups import count_not_above, fit_to_capacity
from jax_grouped.core.values import vary_alike
from jax_grouped.kernels.primitive import bind, define, fold, unfold

#: Function from a router's logits to scores.
Score = Literal["softmax", "sigmoid", "sqrtsoftplus"]
#: Number by which groups of experts are chosen: the sum of a group's two highest scores, or its highest.
GroupScore = Literal["top2_sum", "max"]
#: Most experts that the kernels take, most choices of a token, and most groups of experts: `kMostExperts`,
#: `kMostChoices` and `kMostExpertGroups` in csrc.
_MOST_EXPERTS, _MOST_CHOICES, _MOST_EXPERT_GROUPS = 512, 32, 32
#: Values of the enumerations in csrc.
_SCORES, _GROUP_SCORES = get_args(Score), get_args(GroupScore)
#: Most blocks of successive tokens in which the kernels count choices, and fewest tokens in one (`RoutingBlocks` in
#: csrc).
_MOST_BLOCKS, _LEAST_BLOCK_TOKENS = 128, 32
#: Pairs without a row get distinct indices past the end, so there are twice as many indices as pairs, counted in int32.
_MOST_PAIRS = 2**30
_LOWEST = np.float32(np.finfo(np.float32).min)


@dataclasses.dataclass(frozen=True)
class RouteSpec:
    """The static part of a routing `(logits, *given) -> (experts, weights, probabilities)`.

    | array              | type and shape  | contents                                                            |
    |--------------------|-----------------|---------------------------------------------------------------------|
    | `logits`           | `[T, E]`        | bfloat16, float16 or float32                                        |
    | `bias`             | `float32[E]`    | if given, what is added to the scores for the choice                |
    | `choice`           | `int32[T, k]`   | if given, the experts; any values                                   |
    | `experts`          | `int32[T, k]`   | highest sums of score and bias, best first; of equal ones, by index |
    | `weights`          | `float32[T, k]` | scores of these experts; 0 for one outside of `[0, E)`              |
    | `probabilities`    | `float32[T, E]` | softmax, or the scores divided by their sum                         |

    With a number of rows, the results of `group_pairs` for these experts follow, and then:

    | array              | type and shape  | contents                                                            |
    |--------------------|-----------------|---------------------------------------------------------------------|
    | `expert_load`      | `int32[E]`      | choices of each expert                                              |
    | `probability_sums` | `float32[E]`    | sums of the probabilities over the tokens                           |

    In the choice, a NaN counts as the lowest score. Without a bias, scores other than softmax are compared by their
    logits, and groups by scores that are divided by a common factor: float32 rounds sigmoids themselves to 0 or 1.

    A token's experts come from `top_groups` of the `expert_groups` groups of successive experts: those with the highest
    `group_score` of the numbers that the choice compares.

    Attributes:
        given: names of the operands after the logits, in the order of the table.
    """

    top_k: int
    score: Score
    normalize_weights: bool
    expert_groups: int = 1
    top_groups: int = 1
    group_score: GroupScore = "top2_sum"
    given: tuple[str, ...] = ()


def route(
    logits: jax.Array,
    bias: jax.Array | None,
    spec: RouteSpec,
    rows: int | None = None,
    choice: jax.Array | None = None,
) -> list[jax.Array]:
    """Returns the results of `RouteSpec`. Weights, probabilities and their sums are differentiable."""
    given = {name: x for name, x in (("bias", bias), ("choice", choice)) if x is not None}
    spec = dataclasses.replace(spec, given=tuple(given))
    operands = vary_alike(logits, *given.values())
    experts, weights, probabilities, *grouped = bind(ROUTE, *map(jax.lax.stop_gradient, operands), spec=spec, rows=rows)
    if rows is None:
        return [experts, *_depend_on_logits(spec, operands[0], experts, weights, probabilities)]
    *grouped, sums = grouped
    weights, probabilities, sums = _depend_on_logits(spec, operands[0], experts, weights, probabilities, sums)
    return [experts, weights, probabilities, *grouped, sums]


def group_pairs(experts: jax.Array, num_experts: int, rows: int) -> list[jax.Array]:
    """Gives every pair of `int32[T, k]` experts one of `rows` rows, as `jax_grouped.moe.group_by_expert` documents.

    Returns the order, its inverse, the group sizes, and the number of dropped pairs, `int32[1]`.
    """
    return bind(GROUP_PAIRS, experts, num_experts=num_experts, rows=rows)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _depend_on_logits(
    spec: RouteSpec, logits: jax.Array, experts: jax.Array, *constants: jax.Array
) -> tuple[jax.Array, ...]:
    """Returns the weights, the probabilities, and sums of these if given, as functions of the logits."""
    del spec, logits, experts
    return constants


@_depend_on_logits.defjvp
def _depend_on_logits_jvp(spec: RouteSpec, primals: Any, tangents: Any) -> tuple[Any, Any]:
    results = _depend_on_logits(spec, *primals)

    def tangent(
        is_for_weights: bool,
        dlogits: jax.Array,
        logits: jax.Array,
        experts: jax.Array,
        weights: jax.Array,
        probabilities: jax.Array,
    ) -> jax.Array:
        # The tangent of each score, divided by the score, up to a term that a token's scores have in common.
        relative = dlogits.astype(jnp.float32)
        if spec.score == "sigmoid":
            relative = relative * jax.nn.sigmoid(-logits.astype(jnp.float32))
        elif spec.score == "sqrtsoftplus":
            relative = relative * _sqrtsoftplus_slope(logits.astype(jnp.float32))
        if not is_for_weights or (spec.score == "softmax" and not spec.normalize_weights):
            relative = relative - jnp.sum(probabilities * relative, axis=1, keepdims=True)
        if not is_for_weights:
            return probabilities * relative
        relative = jnp.sum(jnp.where(chosen(experts, logits.shape[1]), relative[:, None], 0), axis=2)
        if spec.normalize_weights:
            relative = relative - jnp.sum(weights * relative, axis=1, keepdims=True)
        return weights * relative

    # With `jax.checkpoint`, the backward pass keeps the arguments alone: it computes comparisons and slopes again.
    dweights, dprobabilities = [
        jax.checkpoint(functools.partial(tangent, is_for_weights), prevent_cse=False)(
            tangents[0], *primals[:2], *results[:2]
        )
        for is_for_weights in (True, False)
    ]
    dsums = [jnp.sum(dprobabilities, axis=0)] * len(results[2:])
    return results, (dweights, dprobabilities, *dsums)


def route_xla(logits: jax.Array, *given: jax.Array, spec: RouteSpec, rows: int | None) -> tuple[jax.Array, ...]:
    """Returns the results of `RouteSpec`."""
    named = dict(zip(spec.given, given, strict=True))
    bias, choice = named.get("bias"), named.get("choice")
    num_experts, logits = logits.shape[1], logits.astype(jnp.float32)

    def take_chosen(values: jax.Array, experts: jax.Array, missing: float) -> jax.Array:
        values = jnp.take_along_axis(values, experts, axis=1, mode="clip")
        return values if choice is None else jnp.where((experts >= 0) & (experts < num_experts), values, missing)

    if spec.score == "softmax":
        scores = probabilities = jax.nn.softmax(logits)
        experts = choice if choice is not None else _best(scores if bias is None else scores + bias, spec)
        weights = take_chosen(scores, experts, 0)
        if spec.normalize_weights:
            weights = _normalized(weights)
    else:
        relative = _relative_sigmoid if spec.score == "sigmoid" else _relative_sqrtsoftplus

        def score(logits: jax.Array) -> jax.Array:
            return _without_subnormals(relative(logits, jnp.zeros_like(logits[:, :1])))

        if choice is not None:
            experts = choice
        elif bias is not None:
            experts = _best(score(logits) + bias, spec)
        else:
            # The order of scores is that of logits, which float32 does not round to 0 or 1. NaN stays below -inf.
            compared = _without_subnormals(jnp.maximum(logits, np.nextafter(_LOWEST, np.float32(0))))
            experts = _best(compared, spec, _without_subnormals(relative(logits, _shift(logits))))
        chosen_logits = take_chosen(logits, experts, -jnp.inf)
        if spec.normalize_weights:
            weights = _normalized(relative(chosen_logits, _shift(chosen_logits)))
        else:
            weights = score(chosen_logits)
        probabilities = _normalized(relative(logits, _shift(logits)))
    if rows is None:
        return experts, weights, probabilities
    grouped = group_pairs_xla(experts, num_experts=num_experts, rows=rows)
    load, sums = count_choices(experts, num_experts), jnp.sum(probabilities, axis=0)
    return experts, weights, probabilities, *grouped, load, sums


def _shift(logits: jax.Array) -> jax.Array:
    """Returns min(the largest logit, 0) of each row, `[T, 1]`: scores relative to it do not all underflow."""
    largest = jnp.max(jnp.where(jnp.isnan(logits), -jnp.inf, logits), axis=1, keepdims=True)
    return jnp.where(largest == -jnp.inf, 0, jnp.minimum(largest, 0))


def _relative_sigmoid(logits: jax.Array, shift: jax.Array) -> jax.Array:
    """Returns the sigmoids of logits `[T, n]`, divided by `exp(shift)`."""
    # The shift is 0 beside a positive logit. No exponential overflows.
    power = jnp.exp(jnp.where(logits > 0, -logits, logits - shift))
    return jnp.where(logits > 0, 1, power) / (1 + power * jnp.exp(shift))


#: Below this logit, softplus is the exponential in float32.
_EXPONENTIAL = -17.0


def _relative_sqrtsoftplus(logits: jax.Array, shift: jax.Array) -> jax.Array:
    """Returns `sqrt(log(1 + exp(logits)))` of logits `[T, n]`, divided by `exp(shift / 2)`."""
    root = jnp.sqrt(jnp.maximum(logits, 0) + jnp.log1p(jnp.exp(-jnp.abs(logits)))) * jnp.exp(-shift / 2)
    return jnp.where(logits < _EXPONENTIAL, jnp.exp((logits - shift) / 2), root)


def _sqrtsoftplus_slope(logits: jax.Array) -> jax.Array:
    """Returns the derivative of `sqrt(softplus(logits))`, divided by that."""
    is_small = logits < _EXPONENTIAL
    safe = jnp.where(is_small, 0, logits)
    return jnp.where(is_small, 0.5, jax.nn.sigmoid(safe) / (2 * jax.nn.softplus(safe)))


def _without_subnormals(x: jax.Array) -> jax.Array:
    """Replaces subnormal numbers by 0 on every platform, as CPUs do."""
    return jnp.where(jnp.abs(x) < jnp.finfo(jnp.float32).tiny, 0, x)


def _best(compared: jax.Array, spec: RouteSpec, scores: jax.Array | None = None) -> jax.Array:
    """Returns the indices of the highest numbers in the best groups, `int32[T, top_k]`.

    The best groups are those with the highest `group_score` of their scores: by default the compared numbers.
    """
    compared = _limited(compared, -_LOWEST)
    if spec.top_groups < spec.expert_groups:
        scores = _limited(compared if scores is None else scores, -_LOWEST / 2)  # Sums do not overflow.
        grouped = (scores.shape[0], spec.expert_groups, scores.shape[1] // spec.expert_groups)
        counted = 1 if spec.group_score == "max" else min(2, grouped[2])
        best = jax.lax.top_k(scores.reshape(grouped), counted)[0]
        groups = jax.lax.top_k(jnp.sum(best, axis=2), spec.top_groups)[1]
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
    return experts[..., None] == jnp.arange(num_experts, dtype=jnp.int32)


def count_choices(experts: jax.Array, num_experts: int) -> jax.Array:
    """Counts the choices of each expert, `int32[E]`."""
    return jnp.sum(chosen(experts, num_experts), axis=(0, 1), dtype=jnp.int32)


def group_pairs_xla(experts: jax.Array, *, num_experts: int, rows: int) -> tuple[jax.Array, ...]:
    """Returns the order, inverse, group sizes and number of dropped pairs."""
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


def _route_cuda(
    logits: jax.Array, *given: jax.Array, spec: RouteSpec, rows: int | None, batch: int
) -> tuple[jax.Array, ...]:
    num_experts = logits.shape[1]
    is_small = spec.top_k <= _MOST_CHOICES and spec.expert_groups <= _MOST_EXPERT_GROUPS
    if not is_small or not _has_kernels(logits, num_experts, batch):
        return _by_elements(functools.partial(route_xla, spec=spec, rows=rows), batch, logits, *given)
    # For each block of tokens, counts of the choices and sums of the probabilities by expert.
    blocks = batch * count_blocks(logits.shape[0] // batch), num_experts
    block_sums = [jax.ShapeDtypeStruct(blocks, dtype) for dtype in (jnp.int32, jnp.float32)]
    call = jax.ffi.ffi_call("jax_grouped_route", [*_route_results(logits, spec=spec, rows=None), *block_sums])
    experts, weights, probabilities, *sums = call(
        logits,
        *given,
        batch=np.int64(batch),
        score=np.int32(_SCORES.index(spec.score)),
        normalize_weights=spec.normalize_weights,
        expert_groups=np.int64(spec.expert_groups),
        top_groups=np.int64(spec.top_groups),
        group_score=np.int32(_GROUP_SCORES.index(spec.group_score)),
        has_bias="bias" in spec.given,
        has_choice="choice" in spec.given,
    )
    if rows is None:
        return experts, weights, probabilities
    grouped = _group_pairs_cuda(experts, *sums, num_experts=num_experts, rows=rows, batch=batch)
    return experts, weights, probabilities, *grouped


def _group_pairs_cuda(
    experts: jax.Array, *block_sums: jax.Array, num_experts: int, rows: int, batch: int
) -> tuple[jax.Array, ...]:
    """Returns the results of `group_pairs` and, with the sums of each block of tokens, those of all tokens."""
    if block_sums:
        last = jax.ShapeDtypeStruct((batch * num_experts,), jnp.float32)
    elif _has_kernels(experts, num_experts, batch):
        # Scratch memory for the counts of each block.
        last = jax.ShapeDtypeStruct((batch * count_blocks(experts.shape[0] // batch), num_experts), jnp.int32)
    else:
        function = functools.partial(group_pairs_xla, num_experts=num_experts, rows=rows)
        return _by_elements(function, batch, experts)
    load = jax.ShapeDtypeStruct((batch * num_experts,), jnp.int32)
    results = [*_pair_results(experts.shape, num_experts, rows, batch), load, last]
    outputs = jax.ffi.ffi_call("jax_grouped_group_pairs", results)(experts, *block_sums, batch=np.int64(batch))
    return tuple(outputs if block_sums else outputs[:4])


def _has_kernels(per_token: jax.Array, num_experts: int, batch: int) -> bool:
    # In an export, the number of tokens may be symbolic.
    is_known = isinstance(per_token.shape[0], int) and isinstance(batch, int)
    return is_known and per_token.size > 0 and num_experts <= _MOST_EXPERTS


def _by_elements(
    function: Callable[..., tuple[jax.Array, ...]], batch: int, *operands: jax.Array
) -> tuple[jax.Array, ...]:
    """Applies plain JAX to every batch element."""
    if batch == 1:
        return function(*operands)
    return tuple(map(fold, jax.vmap(function)(*(unfold(x, batch) for x in operands))))


def count_blocks(tokens: int) -> int:
    """Returns the number of blocks of tokens that the kernels count separately (`RoutingBlocks` in C++)."""
    return -(-tokens // max(_LEAST_BLOCK_TOKENS, -(-tokens // _MOST_BLOCKS)))


def _pair_results(experts: tuple[int, ...], num_experts: int, rows: int, batch: int = 1) -> list[jax.ShapeDtypeStruct]:
    """Returns shapes and types of the results of `group_pairs`."""
    if experts[0] * experts[1] > batch * _MOST_PAIRS:
        raise ValueError(f"experts must have at most 2^30 pairs of a token and an expert, got shape {experts}.")
    shapes = (batch * rows,), experts, (batch * num_experts,), (batch,)
    return [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]


def _route_results(logits: Any, *_: Any, spec: RouteSpec, rows: int | None) -> list[jax.ShapeDtypeStruct]:
    choices, num_experts = (logits.shape[0], spec.top_k), logits.shape[1]
    results = [
        jax.ShapeDtypeStruct(choices, jnp.int32),
        jax.ShapeDtypeStruct(choices, jnp.float32),
        jax.ShapeDtypeStruct(logits.shape, jnp.float32),
    ]
    if rows is None:
        return results
    totals = [jax.ShapeDtypeStruct((num_experts,), dtype) for dtype in (jnp.int32, jnp.float32)]
    return [*results, *_pair_results(choices, num_experts, rows), *totals]


#: `(logits, *given) -> [experts, weights, probabilities, ...]` with a `RouteSpec`, and `rows` or None.
ROUTE = define("route", _route_results, route_xla, _route_cuda)
#: `(experts) -> [order, inverse, group_sizes, dropped]` with `num_experts` and `rows`.
GROUP_PAIRS = define(
    "group_pairs",
    lambda experts, *, num_experts, rows: _pair_results(experts.shape, num_experts, rows),
    group_pairs_xla,
    _group_pairs_cuda,
)
