"""Routing: the choice of each token's experts and their weights, and the loss that balances experts."""

import dataclasses
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from jax_grouped.core.values import as_array, static_bool, static_number
from jax_grouped.core.varying import axis_size
from jax_grouped.fp8.arrays import register_pytree
from jax_grouped.moe.instances import check_instance
from jax_grouped.ops import checks

#: Function from a router's logits to scores.
Score = Literal["softmax", "sigmoid"]


@register_pytree
@dataclasses.dataclass(frozen=True)
class Routing:
    """Routing of `T` tokens to `k` of `E` experts each.

    Attributes:
        experts: `int32[T, k]`, the chosen experts, best first; those of one token are distinct.
        weights: `float32[T, k]`, the factor of each choice's output.
        probabilities: `float32[T, E]`, the router's scores, normalised to a sum of 1 per token; for
            `load_balancing_loss`.

    Example:
        routing = jg.moe.top_k_routing(jnp.array([[1.0, 3.0, 2.0]]), 2)

        assert isinstance(routing, jg.moe.Routing)
        assert routing.experts.tolist() == [[1, 2]]
    """

    experts: jax.Array
    weights: jax.Array
    probabilities: jax.Array


def top_k_routing(
    logits: jax.Array,
    top_k: int,
    *,
    score: Score = "softmax",
    normalize_weights: bool = True,
    selection_bias: jax.Array | None = None,
    weight_scale: float = 1.0,
    expert_groups: int | None = None,
    top_groups: int | None = None,
) -> Routing:
    """Sends each token to the `top_k` experts with the highest scores; of equal ones, to those with lower indices.

    With `expert_groups` and `top_groups`, a token's experts come from few groups, as if the groups were nodes of a
    cluster (DeepSeek-V3, section 2.1.2): the groups with the highest sum of the scores of their two best experts.

    Everything is computed in float32. Gradients reach the logits through the weights and the probabilities, the same
    bits in every run. With `score="sigmoid"` and a bias that is moved after each step against the experts' loads, this
    is the auxiliary-loss-free balancing of DeepSeek-V3 (arXiv:2412.19437, section 2.1.2).

    Args:
        logits: `[T, E]`, bfloat16, float16 or float32. A NaN gives weights of NaN, but counts as the lowest score. No
            logit gives an expert outside of `[0, E)`.
        top_k: experts per token, from 1 to `E`.
        score: "softmax" over the experts, or "sigmoid" of each logit.
        normalize_weights: whether a token's weights are divided by their sum, rather than being the scores themselves.
            Scores that are all 0 stay 0.
        selection_bias: `[E]`, of the same types, added to the scores for the choice only. It has no gradient.
        weight_scale: factor that multiplies the final weights.
        expert_groups: the number of groups of successive experts, a divisor of `E`; None for no groups.
        top_groups: the number of groups that a token's experts may come from. They must have `top_k` experts.

    Returns:
        The routing. Its probabilities are the softmax, or the sigmoids divided by their sum, without bias and scale.

    Raises:
        TypeError: an argument has a type that is not supported.
        ValueError: an argument has a shape or value that does not fit.

    Example:
        logits = jnp.log(jnp.array([[0.1, 0.6, 0.3], [0.5, 0.25, 0.25]]))

        routing = jg.moe.top_k_routing(logits, 2)

        assert routing.experts.tolist() == [[1, 2], [0, 1]]
        assert jnp.allclose(routing.weights, jnp.array([[2 / 3, 1 / 3], [2 / 3, 1 / 3]]))
    """
    logits = as_array("logits", logits)
    _check_arguments(logits, top_k, score, weight_scale)
    groups = _checked_groups(expert_groups, top_groups, logits.shape[1], top_k)
    normalize_weights = static_bool("normalize_weights", normalize_weights)
    logits = logits.astype(jnp.float32)
    scores = jax.nn.softmax(logits) if score == "softmax" else jax.nn.sigmoid(logits)
    experts = _best(scores, top_k, selection_bias, groups)
    weights = _scores_of(scores, experts)
    return Routing(
        experts=experts,
        weights=(_normalized(weights) if normalize_weights else weights) * weight_scale,
        probabilities=scores if score == "softmax" else _normalized(scores),
    )


def _check_arguments(logits: jax.Array, top_k: int, score: str, weight_scale: float | jax.Array) -> None:
    checks.check_dtype("logits' type", logits.dtype)
    if logits.ndim != 2:
        raise ValueError(f"logits must have shape [T, E], got {logits.shape}.")
    if checks.static_size("top_k", top_k, least=1) > logits.shape[1]:
        raise ValueError(f"top_k must be at most the {logits.shape[1]} experts of logits {logits.shape}, got {top_k}.")
    if score not in get_args(Score):
        raise ValueError(f"score must be one of {get_args(Score)}, got {score!r}.")
    if not isinstance(weight_scale, jax.Array):
        static_number("weight_scale", weight_scale)
    elif weight_scale.ndim != 0:  # A scalar array on the device is a number, too.
        raise ValueError(f"weight_scale must be a scalar, got shape {weight_scale.shape}.")


def _checked_groups(
    expert_groups: int | None, top_groups: int | None, num_experts: int, top_k: int
) -> tuple[int, int] | None:
    """Returns the number of groups and how many of them a token may use; None if it may use all experts."""
    if expert_groups is None and top_groups is None:
        return None
    if expert_groups is None or top_groups is None:
        raise ValueError(f"expert_groups and top_groups need each other, got {expert_groups} and {top_groups}.")
    expert_groups = checks.static_size("expert_groups", expert_groups, least=1)
    top_groups = checks.static_size("top_groups", top_groups, least=1)
    if num_experts % expert_groups:
        raise ValueError(f"expert_groups must divide the {num_experts} experts, got {expert_groups}.")
    if top_groups > expert_groups:
        raise ValueError(f"top_groups must be at most the {expert_groups} groups, got {top_groups}.")
    if top_groups * (num_experts // expert_groups) < top_k:
        raise ValueError(
            f"top_groups must be groups of at least top_k = {top_k} experts together, got {top_groups} groups of "
            f"{num_experts // expert_groups}."
        )
    return expert_groups, top_groups


def _best(scores: jax.Array, top_k: int, bias: jax.Array | None, groups: tuple[int, int] | None) -> jax.Array:
    """Returns the indices of the highest sums of score and bias, `int32[T, top_k]`, in the best groups."""
    scores = jax.lax.stop_gradient(scores)
    if bias is not None:
        bias = as_array("selection_bias", bias)
        checks.check_dtype("selection_bias's type", bias.dtype)
        if bias.shape != scores.shape[1:]:
            raise ValueError(f"selection_bias must have shape [E] = {scores.shape[1:]}, got {bias.shape}.")
        scores = scores + jax.lax.stop_gradient(bias).astype(jnp.float32)
    # Replace NaN and -inf: the order of NaN depends on the device, and an implementation may pad with -inf of no index.
    lowest = jnp.finfo(jnp.float32).min
    scores = jnp.nan_to_num(scores, nan=lowest, posinf=-lowest, neginf=lowest)
    if groups is not None:
        scores = _in_best_groups(scores, *groups)
    return jax.lax.top_k(scores, top_k)[1]


def _in_best_groups(scores: jax.Array, expert_groups: int, top_groups: int) -> jax.Array:
    """Replaces the scores of experts outside of a token's best groups by -inf, which is below every score."""
    of_groups = scores.reshape(scores.shape[0], expert_groups, scores.shape[1] // expert_groups)
    two_best = jax.lax.top_k(of_groups, min(2, of_groups.shape[2]))[0]
    # Halves, whose sum does not overflow.
    best = jax.lax.top_k(jnp.sum(two_best * 0.5, axis=2), top_groups)[1]
    return jnp.where(jnp.any(_chosen(best, expert_groups), axis=1)[..., None], of_groups, -jnp.inf).reshape(
        scores.shape
    )


@jax.custom_vjp
def _scores_of(scores: jax.Array, experts: jax.Array) -> jax.Array:
    """Returns the scores `[T, k]` of the chosen experts.

    The gradient of a gather would be a scatter-add. Here each score gathers its gradient from the token's few choices:
    that is one kernel without atomics, and no array of the size of the comparisons is kept for it.
    """
    return jnp.take_along_axis(scores, experts, axis=1, mode="clip")


def _scores_of_forward(scores: jax.Array, experts: jax.Array) -> tuple[jax.Array, tuple[jax.Array, int]]:
    return _scores_of(scores, experts), (experts, scores.shape[1])


def _scores_of_backward(residuals: tuple[jax.Array, int], dweights: jax.Array) -> tuple[jax.Array, None]:
    experts, num_experts = residuals
    return jnp.sum(jnp.where(_chosen(experts, num_experts), dweights[..., None], 0), axis=1), None


_scores_of.defvjp(_scores_of_forward, _scores_of_backward)


def _chosen(experts: jax.Array, num_experts: int) -> jax.Array:
    """Compares each choice with each expert, `bool[T, k, E]`."""
    return experts[..., None] == jnp.arange(num_experts, dtype=experts.dtype)


def _normalized(x: jax.Array) -> jax.Array:
    """Divides nonnegative numbers `[T, n]` by their sum over `n`; returns zeros where the sum is 0."""
    # A quotient's gradient divides by the square of the sum, which underflows to 0 for tiny numbers. So divide by the
    # largest first. It is a constant to the gradient, because a common factor does not change the result.
    largest = jax.lax.stop_gradient(jnp.max(x, axis=1, keepdims=True))
    x = x / jnp.where(largest > 0, largest, 1)
    total = jnp.sum(x, axis=1, keepdims=True)
    return x / jnp.where(total > 0, total, 1)


def load_balancing_loss(routing: Routing, *, axis_name: str | tuple[str, ...] | None = None) -> jax.Array:
    """Measures the imbalance of the experts: 1 if tokens are spread evenly, `E` if one has all choices and probability.

    The loss is `E * sum_e share_e * probability_e`, where `share_e` is the fraction of all choices that fell on expert
    `e` and `probability_e` its mean probability. It is the loss of Switch Transformers (arXiv:2101.03961, equations 4
    to 6) for any number of choices per token. The fractions are constants to the gradient.

    Args:
        routing: of `T` tokens to `E` experts.
        axis_name: mesh axes that split the tokens of one batch, inside `jax.shard_map` or `jax.pmap`. The loss is then
            that of the whole batch, the same on every device. Unlike the mean of the devices' losses, it permits an
            uneven load on each device.

    Returns:
        `float32[]`; 0 for no tokens.

    Raises:
        TypeError: `routing` is none.
        ValueError: `axis_name` is no axis of a surrounding `jax.shard_map` or `jax.pmap`.

    Example:
        loss = jax.jit(lambda logits: jg.moe.load_balancing_loss(jg.moe.top_k_routing(logits, 1)))

        assert jnp.allclose(loss(10 * jnp.eye(4)), 1)  # each token to an expert of its own
        assert loss(jnp.tile(jnp.array([10.0, 0, 0, 0]), (4, 1))) > 3.9
    """
    check_instance("routing", routing, Routing)
    tokens, num_experts = routing.probabilities.shape
    fraction = expert_load(routing).astype(jnp.float32) / max(routing.experts.size, 1)
    probability = jnp.sum(routing.probabilities, axis=0) / max(tokens, 1)
    if axis_name is not None:
        axis_size(axis_name)  # Raises where there is no such axis.
        fraction, probability = jax.lax.pmean((fraction, probability), axis_name)
    return num_experts * jnp.sum(fraction * probability)


def expert_load(routing: Routing) -> jax.Array:
    """Counts the choices of each expert, `int32[E]`."""
    chosen = _chosen(routing.experts, routing.probabilities.shape[1])
    return jnp.sum(chosen, axis=(0, 1), dtype=jnp.int32)
