"""Routing: the options of a router, the choice of each token's experts with their weights, and losses that balance.

The choice itself is `jax_grouped.kernels.routing`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from jax_grouped.core.values import (
    as_array,
    as_int32,
    axis_size,
    canonical_dtype,
    check_choice,
    check_type,
    scalar,
    static_bool,
    static_number,
    static_size,
    sum_dtype,
    vary_alike,
)
from jax_grouped.fp8.arrays import register_pytree
from jax_grouped.kernels.routing import GroupScore, RouteSpec, Score, count_choices, route
from jax_grouped.ops import inputs

#: Choice of the pairs of a token and an expert that are dropped, see `Router`.
DropBy = Literal["even", "weight"]
#: Numbers that a selection bias is added to, see `Router`.
BiasOn = Literal["scores", "logits"]
#: Side of an expert that weights multiply, see `Router`.
WeightsOn = Literal["output", "input"]


@dataclasses.dataclass(frozen=True)
class Router:
    """Options of the choice of each token's experts, of their weights, and of the room that they have.

    With `groups` and `top_groups`, a token's experts come from the best groups, as if groups were nodes of a cluster
    (DeepSeek-V3, arXiv:2412.19437, section 2.1.2). The same section's balancing without a loss is `score="sigmoid"`
    with a selection bias, see `update_selection_bias`.

    Attributes:
        top_k: experts per token, from 1 to `E`.
        score: "softmax" over the experts; "sigmoid" of each logit; or "sqrtsoftplus", the square root of
            `log(1 + exp(logit))`. Scores of the last two that float32 does not tell apart are chosen by their logits,
            unless there is a selection bias.
        normalize: whether a token's weights are divided by their sum, which is right for logits of any size; scores
            that are all 0 stay 0. With `top_k=1` the quotient is always 1, and the router gets gradients from balance
            losses only: `normalize=False` gives it those of the weights.
        scale: factor that multiplies the final weights.
        groups: the number of groups of successive experts, a divisor of `E`; None for no groups.
        top_groups: the number of groups that a token's experts may come from. They must have `top_k` experts.
        group_score: what the groups are chosen by: "top2_sum", the sum of the scores, and selection biases, of their
            two best experts (DeepSeek-V3), or "max", that of the best one (DeepSeek-V2).
        bias_on: what a selection bias is added to for the choice: the "scores", or the "logits" that they come from.
        softcap: the logits `x` become `softcap * tanh(x / softcap)` before anything else; None for no cap.
        weights_on: what a token's weight multiplies: the expert's "output", or its "input" (Llama 4), which needs
            `top_k=1`.
        capacity_factor: room for rows on each device, in multiples of `T * top_k`, the number that a device gets if all
            experts are chosen equally often. Pairs of a token and an expert without room are dropped, and counted. None
            gives room for the worst case: `T * top_k`, or `D * T * min(top_k, E / D)` with experts on `D` devices.
        drop_by: which pairs are dropped on a device with too many. "even" cuts the largest groups, of one source for
            one expert, to one length. Within a group, pairs are dropped at equal distances, so neither early nor late
            tokens are favoured. "weight" drops those with the smallest routing weights, by absolute value.
        jitter: `a < 1`, for a router that sees tokens times random numbers between `1 - a` and `1 + a`, in float32, in
            calls of a layer with a `jitter_key` (Switch Transformers, arXiv:2101.03961, section 2.2). The experts see
            the tokens.
        use_kernel: whether a layer has a router of its own, a kernel `[K, E]`; without, its calls need `routing`.
        use_bias: whether that adds a bias `[E]` to its logits. Functions get the logits.
        use_selection_bias: whether a layer keeps a `selection_bias`, `float32[E]`, which starts at 0 and has no
            gradient. Functions then need theirs.
        balance_sequences: whether a layer's balance loss is the mean of the losses of the sequences of `x`
            `[..., length, K]`, see `load_balancing_loss`. `moe_mlp` then needs `num_sequences`.

    Raises:
        TypeError, ValueError: a field has a type or a value that is not supported.

    Example:
        router = jg.moe.Router(top_k=2, score="sigmoid", scale=2.5)

        routing = jg.moe.top_k_routing(jnp.array([[0.0, 2.0, 2.0]]), router)

        assert routing.experts.tolist() == [[1, 2]] and routing.weights.tolist() == [[1.25, 1.25]]
    """

    top_k: int
    _: dataclasses.KW_ONLY
    score: Score = "softmax"
    normalize: bool = True
    scale: float = 1.0
    groups: int | None = None
    top_groups: int | None = None
    group_score: GroupScore = "top2_sum"
    bias_on: BiasOn = "scores"
    softcap: float | None = None
    weights_on: WeightsOn = "output"
    capacity_factor: float | None = None
    drop_by: DropBy = "even"
    jitter: float | None = None
    use_kernel: bool = True
    use_bias: bool = False
    use_selection_bias: bool = False
    balance_sequences: bool = False

    def __post_init__(self) -> None:
        put = functools.partial(object.__setattr__, self)
        put("top_k", static_size("top_k", self.top_k, least=1))
        check_choice("score", self.score, Score)
        check_choice("drop_by", self.drop_by, DropBy)
        check_choice("group_score", self.group_score, GroupScore)
        check_choice("weights_on", self.weights_on, WeightsOn)
        check_choice("bias_on", self.bias_on, BiasOn)
        for name in ("normalize", "use_kernel", "use_bias", "use_selection_bias", "balance_sequences"):
            put(name, static_bool(name, getattr(self, name)))
        put("scale", static_number("scale", self.scale))
        if (self.groups is None) != (self.top_groups is None):
            raise ValueError(f"groups and top_groups need each other, got {self.groups} and {self.top_groups}.")
        if self.groups is not None and self.top_groups is not None:
            put("groups", static_size("groups", self.groups, least=1))
            put("top_groups", static_size("top_groups", self.top_groups, least=1))
            if self.top_groups > self.groups:
                raise ValueError(f"top_groups must be at most the {self.groups} groups, got {self.top_groups}.")
        if self.use_bias and not self.use_kernel:
            raise ValueError("use_bias=True needs use_kernel=True.")
        if self.weights_on == "input" and self.top_k != 1:
            raise ValueError(f'weights_on="input" needs top_k=1, got {self.top_k}.')
        for name, without in (("capacity_factor", "the worst case"), ("softcap", "no cap"), ("jitter", "none")):
            if getattr(self, name) is not None:
                put(name, number := static_number(name, getattr(self, name)))
                if not 0 < number < math.inf:
                    raise ValueError(f"{name} must be a positive number, or None for {without}, got {number}.")
        if self.jitter is not None and self.jitter >= 1:
            raise ValueError(f"jitter must be below 1, got {self.jitter}.")


@register_pytree
@dataclasses.dataclass(frozen=True)
class Routing:
    """Routing of `T` tokens to `k` of `E` experts each: that of `top_k_routing`, or one of your own for `moe_mlp`.

    Attributes:
        experts: `int32[T, k]`, the chosen experts; of `top_k_routing` best first and distinct. An index outside of
            `[0, E)` stands for no expert: it costs nothing, and its weight counts for nothing.
        weights: `float32[T, k]`, the factor of each choice's output.
        probabilities: `float32[T, E]`, the router's scores, normalised to a sum of 1 per token; for
            `load_balancing_loss`. None if there are none.

    Example:
        routing = jg.moe.top_k_routing(jnp.array([[1.0, 3.0, 2.0]]), jg.moe.Router(top_k=2))

        assert isinstance(routing, jg.moe.Routing)
        assert routing.experts.tolist() == [[1, 2]]
    """

    experts: jax.Array
    weights: jax.Array
    probabilities: jax.Array | None = None


def router_logits(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Computes the logits of a linear router, `x @ kernel`, in float32 from operands in the type of `x`.

    The backward pass rounds the gradient of the logits to the type of `x` before it multiplies, as a dense layer does.
    With 16-bit tokens, products in float32 would take several times as long on a GPU.

    Args:
        x: `[T, K]` tokens, bfloat16, float16 or float32.
        kernel: `[K, E]`, of these types.

    Returns:
        `float32[T, E]`. The gradient of `kernel` has its own type.

    Raises:
        TypeError, ValueError: an argument has a type or a shape that does not fit.

    Example:
        logits = jg.moe.router_logits(jnp.ones((8, 32), jnp.bfloat16), jnp.ones((32, 4)))

        assert logits.dtype == jnp.float32 and jnp.all(logits == 32)
    """
    x, kernel = as_array("x", x), as_array("kernel", kernel)
    inputs.check_tokens("x", x)
    canonical_dtype("kernel's type", kernel.dtype)
    if kernel.ndim != 2 or kernel.shape[0] != x.shape[1]:
        raise ValueError(f"kernel must have shape [K, E] for x {x.shape}, got {kernel.shape}.")
    return _router_logits(*vary_alike(x, kernel.astype(sum_dtype(kernel.dtype))))


@jax.custom_vjp
def _router_logits(x: jax.Array, kernel: jax.Array) -> jax.Array:
    # XLA computes a GPU's product of one row by multiplications that round each result to the type of `x`.
    rows = jnp.broadcast_to(x, (2, x.shape[1])) if x.shape[0] == 1 else x
    return jnp.dot(rows, kernel.astype(x.dtype), preferred_element_type=jnp.float32)[: x.shape[0]]


def _router_logits_forward(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _router_logits(x, kernel), (x, kernel)


def _router_logits_backward(residuals: tuple[jax.Array, jax.Array], dlogits: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, kernel = residuals
    dlogits = dlogits.astype(x.dtype)
    # JAX asks where a sum over tokens or experts lies if `Explicit` axes split them.
    like_x, like_kernel = (
        sharding if AxisType.Explicit in sharding.mesh.axis_types else None
        for sharding in (jax.typeof(x).sharding, jax.typeof(kernel).sharding)
    )
    dkernel = jnp.dot(x.T, dlogits, preferred_element_type=kernel.dtype, out_sharding=like_kernel)
    return jnp.dot(dlogits, kernel.astype(x.dtype).T, out_sharding=like_x), dkernel


_router_logits.defvjp(_router_logits_forward, _router_logits_backward)


def top_k_routing(
    logits: jax.Array,
    router: Router,
    *,
    selection_bias: jax.Array | None = None,
    experts: jax.Array | None = None,
) -> Routing:
    """Sends each token to the `top_k` experts with the highest scores; of equal ones, to those with lower indices.

    It computes in float32. Gradients reach the logits through weights and probabilities, the same bits in every run. On
    the `cuda` backend it is one kernel for up to 512 experts, 32 choices and 32 groups; beyond that a slower sort.

    Args:
        logits: `[T, E]`, bfloat16, float16 or float32. A NaN gives weights of NaN, but counts as the lowest score.
        router: the options. Its `capacity_factor` and `drop_by` are for `moe_mlp`.
        selection_bias: `[E]`, of the same types, added to the scores for the choice only, where subnormal scores count
            as 0, or to the logits with `bias_on`. It has no gradient.
        experts: `[T, top_k]` integers, the choice of another pass, such as the one that generated the tokens, in place
            of one by the scores. The weights follow from these logits, with the bits that they have without `experts`
            where the choice is the same. Those of an index outside of `[0, E)` are 0.

    Returns:
        The routing. Its probabilities are the softmax, or the scores divided by their sum, without bias and scale.

    Raises:
        TypeError, ValueError: an argument has a type, a shape or a value that does not fit.

    Example:
        logits = jnp.log(jnp.array([[0.1, 0.6, 0.3], [0.5, 0.25, 0.25]]))

        routing = jg.moe.top_k_routing(logits, jg.moe.Router(top_k=2))

        assert routing.experts.tolist() == [[1, 2], [0, 1]]
        assert jnp.allclose(routing.weights, jnp.array([[2 / 3, 1 / 3], [2 / 3, 1 / 3]]))
    """
    check_type("router", router, Router)
    logits = softcapped(as_array("logits", logits), router)
    return route_and_group(logits, router, selection_bias, experts)[0]


def softcapped(logits: jax.Array, router: Router) -> jax.Array:
    """Returns the logits that a router uses, in float32 if it has a `softcap`."""
    inputs.check_tokens("logits", logits, "[T, E]")
    cap = router.softcap
    return logits if cap is None else cap * jnp.tanh(logits.astype(jnp.float32) / cap)


def route_and_group(
    logits: jax.Array,
    router: Router,
    selection_bias: jax.Array | None,
    choice: jax.Array | None,
    rows: int | None = None,
) -> tuple[Routing, list[jax.Array]]:
    """Computes `top_k_routing`. With a number of rows, the other results of `kernels.routing.route` follow."""
    experts, top_k = logits.shape[1], router.top_k
    groups, top_groups = router.groups or 1, router.top_groups or 1
    if top_k > experts:
        raise ValueError(f"top_k must be at most the {experts} experts of logits {logits.shape}, got {top_k}.")
    if experts % groups:
        raise ValueError(f"groups must divide the {experts} experts, got {groups}.")
    if top_groups * (experts // groups) < top_k:
        raise ValueError(
            f"top_groups must be groups of at least top_k = {top_k} experts together, got {top_groups} groups of "
            f"{experts // groups}."
        )
    if selection_bias is not None:
        selection_bias = as_array("selection_bias", selection_bias)
        canonical_dtype("selection_bias's type", selection_bias.dtype)
        if selection_bias.shape != (experts,):
            raise ValueError(f"selection_bias must have shape [E] = {(experts,)}, got {selection_bias.shape}.")
        selection_bias = selection_bias.astype(jnp.float32)
    elif router.use_selection_bias:
        raise ValueError("A router with use_selection_bias needs a selection_bias, float32[E], got None.")
    if choice is not None:
        choice = as_int32("experts", choice)
        if choice.shape != (logits.shape[0], top_k):
            raise ValueError(f"experts must have shape [T, top_k] = {(logits.shape[0], top_k)}, got {choice.shape}.")
    spec = RouteSpec(top_k, router.score, router.normalize, groups, top_groups, router.group_score)
    if router.bias_on == "logits" and selection_bias is not None:
        if choice is None:
            biased = jax.lax.stop_gradient(logits.astype(jnp.float32) + selection_bias)
            if router.groups is not None:
                choice = route(biased, None, spec, None, None)[0]
            else:  # Scores of logits that are far apart would be 0 for all but a few.
                choice = jax.lax.top_k(jnp.where(jnp.isnan(biased), -jnp.inf, biased), top_k)[1]
        selection_bias = None
    chosen, weights, probabilities, *grouped = route(logits, selection_bias, spec, rows, choice)
    return Routing(chosen, weights * jnp.asarray(router.scale, weights.dtype), probabilities), grouped


def load_balancing_loss(
    routing: Routing,
    *,
    mask: jax.Array | None = None,
    num_sequences: int | None = None,
    axis_name: str | tuple[str, ...] | None = None,
) -> jax.Array:
    """Measures the imbalance of the experts: 1 if tokens are spread evenly, `E` if one has all choices and probability.

    The loss is `E * sum_e share_e * probability_e`, where `share_e` is the fraction of all choices that fell on expert
    `e` and `probability_e` its mean probability. It is the loss of Switch Transformers (arXiv:2101.03961, equations 4
    to 6) for any number of choices per token. The fractions are constants to the gradient.

    Args:
        routing: of `T` tokens to `E` experts, with probabilities.
        mask: `bool[T]`, False for tokens that do not count, as those of padding; None if all count.
        num_sequences: this device's number of sequences, `T / num_sequences` successive tokens each. The loss is then
            the mean of the losses of the sequences, as in DeepSeek-V3 (arXiv:2412.19437, equations 17 to 20, with
            weight 0.0001), but of the choices with their bias and groups. A sequence of masked tokens has none. None
            for one loss of all tokens. No sequence may be split over devices.
        axis_name: mesh axes that split the tokens of one batch, inside `jax.shard_map` or `jax.pmap`. The loss is then
            that of the whole batch, the same on every device, and permits an uneven load on each.

    Returns:
        `float32[]`; 0 for no tokens.

    Raises:
        TypeError: `routing` is no `Routing`, `mask` is not of booleans, or `num_sequences` no integer that is known
            when the program is traced.
        ValueError: `routing` has no probabilities, there is no such axis, `mask` has another shape, or `num_sequences`
            does not divide the number of tokens.

    Example:
        router = jg.moe.Router(top_k=1)

        loss = jax.jit(lambda logits: jg.moe.load_balancing_loss(jg.moe.top_k_routing(logits, router)))

        assert jnp.allclose(loss(10 * jnp.eye(4)), 1)  # each token to an expert of its own
        assert loss(jnp.tile(jnp.array([10.0, 0, 0, 0]), (4, 1))) > 3.9
    """
    check_type("routing", routing, Routing)
    if routing.probabilities is None:
        raise ValueError("load_balancing_loss needs a routing with probabilities, got None.")
    experts, probabilities = as_int32("routing.experts", routing.experts), routing.probabilities
    (tokens, num_experts), top_k = probabilities.shape, experts.shape[1]
    sequences = 1 if num_sequences is None else static_size("num_sequences", num_sequences, least=1)
    if tokens % sequences:
        raise ValueError(f"num_sequences must divide the {tokens} tokens, got {sequences}.")
    exists = None if mask is None else checked_mask(mask, tokens)
    if exists is not None:
        experts, probabilities = masked(exists, experts, num_experts), masked(exists, probabilities, 0)
    pairs = experts.reshape(sequences, tokens // sequences, top_k)
    loads = jax.vmap(functools.partial(count_choices, num_experts=num_experts))(pairs)
    sums = jnp.sum(probabilities.reshape(sequences, -1, num_experts), axis=1)
    if num_sequences is None:
        return balance_loss(loads[0], sums[0], top_k, mean_count(exists, tokens, axis_name), axis_name)
    sequence_losses = jax.vmap(functools.partial(balance_loss, axis_name=None), in_axes=(0, 0, None, 0))
    if exists is None:
        counts = jnp.full(sequences, tokens // sequences, jnp.float32)
        return mean_over_devices(jnp.mean(sequence_losses(loads, sums, top_k, counts)), axis_name)
    counts = jnp.sum(exists.reshape(sequences, -1), axis=1, dtype=jnp.float32)
    losses = jnp.where(counts > 0, sequence_losses(loads, sums, top_k, counts), 0)
    total, number = mean_over_devices((jnp.sum(losses), jnp.sum(counts > 0, dtype=jnp.float32)), axis_name)
    return total / or_one(number)


def mean_over_devices(x: Any, axis_name: str | tuple[str, ...] | None) -> Any:
    """Returns the mean over the devices of these axes. Raises ValueError where there is no such axis."""
    if axis_name is None:
        return x
    axis_size(axis_name)
    return jax.lax.pmean(x, axis_name)


def checked_mask(mask: jax.Array, tokens: int) -> jax.Array:
    """Returns the mask as an array. Raises TypeError or ValueError unless it is `bool[T]`."""
    mask = as_array("mask", mask)
    if mask.dtype != jnp.bool_:
        raise TypeError(f"mask must be of booleans, got {mask.dtype.name}.")
    if mask.shape != (tokens,):
        raise ValueError(f"mask must have shape [T] = {(tokens,)}, got {mask.shape}.")
    return mask


def masked(exists: jax.Array, x: jax.Array, value: float) -> jax.Array:
    """Returns `x[T, ...]` with this value for tokens that do not exist; they get no gradient either."""
    return jnp.where(jnp.expand_dims(exists, range(1, x.ndim)), x, value)


def mean_count(exists: jax.Array | None, tokens: float, axis_name: str | tuple[str, ...] | None) -> float | jax.Array:
    """Returns the number of tokens that exist, on average over the devices: `tokens` without a mask."""
    return tokens if exists is None else mean_over_devices(jnp.sum(exists, dtype=jnp.float32), axis_name)


def or_one(count: float | jax.Array) -> float | jax.Array:
    """Returns the count, or 1 in place of 0, as a divisor."""
    return jnp.where(count == 0, 1, count) if isinstance(count, jax.Array) else count or 1


def balance_loss(
    load: jax.Array,
    probability_sums: jax.Array,
    top_k: int,
    tokens: float | jax.Array,
    axis_name: str | tuple[str, ...] | None,
) -> jax.Array:
    """Computes `load_balancing_loss` from sums over the tokens, of which there are as many on average over devices."""
    means = load.astype(jnp.float32) / or_one(top_k * tokens), probability_sums / or_one(tokens)
    fraction, probability = mean_over_devices(means, axis_name)
    return load.shape[0] * jnp.sum(fraction * probability)


def router_z_loss(
    logits: jax.Array, *, mask: jax.Array | None = None, axis_name: str | tuple[str, ...] | None = None
) -> jax.Array:
    """Measures the size of the router's logits: the mean over tokens of their squared log-sum-exp.

    Added to the training loss with a small weight, such as 0.001, it keeps logits from growing, where float32 rounds
    them more (ST-MoE, arXiv:2202.08906, equation 5).

    Args:
        logits: `[T, E]`, bfloat16, float16 or float32.
        mask: `bool[T]`, False for tokens that do not count, as those of padding; None if all count.
        axis_name: mesh axes that split the tokens of one batch, inside `jax.shard_map` or `jax.pmap`. The loss is then
            that of the whole batch.

    Returns:
        `float32[]`; 0 for no tokens.

    Raises:
        TypeError, ValueError: an argument has a type or a shape that does not fit, or there is no such axis.

    Example:
        assert jnp.allclose(jg.moe.router_z_loss(jnp.zeros((8, 4))), jnp.log(4.0) ** 2)
    """
    logits = as_array("logits", logits)
    inputs.check_tokens("logits", logits, "[T, E]")
    tokens = logits.shape[0]
    if mask is None:
        return mean_z_loss(logits, None, tokens, axis_name)
    exists = checked_mask(mask, tokens)
    return mean_z_loss(masked(exists, logits, 0), exists, mean_count(exists, tokens, axis_name), axis_name)


def mean_z_loss(
    logits: jax.Array,
    exists: jax.Array | None,
    tokens: float | jax.Array,
    axis_name: str | tuple[str, ...] | None,
) -> jax.Array:
    """Computes `router_z_loss` of the tokens that exist, of which there are as many on average over the devices."""
    squares = jax.nn.logsumexp(logits.astype(jnp.float32), axis=1) ** 2
    if exists is not None:
        squares = jnp.where(exists, squares, 0)
    return mean_over_devices(jnp.sum(squares) / or_one(tokens), axis_name)


def update_selection_bias(
    selection_bias: jax.Array, expert_load: jax.Array, rate: float | jax.Array = 1e-3
) -> jax.Array:
    """Moves the bias of each expert against its load: up by `rate` if it had fewer tokens than the mean, else down.

    This is the balancing without a loss of DeepSeek-V3 (arXiv:2408.15664, algorithm 1). Call it once a step, with the
    load of the whole batch.

    Args:
        selection_bias: `float32[E]`, zeros at first. In 16 bits, steps of 0.001 would be lost.
        expert_load: `[E]` integers, choices of each expert, of `MoEMetrics`. They are compared with their mean exactly.
        rate: the step; 0.001 in DeepSeek-V3. It may be a scalar on the device.

    Returns:
        `float32[E]`. The bias of an expert with the mean load stays.

    Raises:
        TypeError, ValueError: an argument has a type that is not supported, the shapes differ, or `rate` is no scalar.

    Example:
        bias = jg.moe.update_selection_bias(jnp.zeros(3), jnp.array([4, 2, 0]))

        assert jnp.allclose(bias, jnp.array([-0.001, 0, 0.001]))
    """
    selection_bias = as_array("selection_bias", selection_bias)
    load = as_int32("expert_load", expert_load)
    if isinstance(expert_load, jax.Array) and expert_load.dtype.itemsize >= 4:
        load = expert_load  # Of the full range of its type.
    if selection_bias.dtype != jnp.float32:
        raise TypeError(f"selection_bias must be float32, to hold small steps, got {selection_bias.dtype.name}.")
    if selection_bias.ndim != 1 or selection_bias.shape != load.shape:
        raise ValueError(
            f"selection_bias and expert_load must have one shape [E], got {selection_bias.shape} and {load.shape}."
        )
    experts = max(load.size, 1)
    # The floor and the remainder of the mean. The sum of all loads may overflow; that of these remainders is below E^2.
    remainders = jnp.sum(load % experts, dtype=load.dtype)
    floor = jnp.sum(load // experts, dtype=load.dtype) + remainders // experts
    is_below = (load < floor) | ((load == floor) & (remainders % experts > 0))
    direction = jnp.where(is_below, 1, jnp.where(load > floor, -1, 0))
    return selection_bias + jnp.asarray(scalar("rate", rate), jnp.float32) * direction.astype(jnp.float32)
