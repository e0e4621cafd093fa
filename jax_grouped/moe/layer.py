"""`moe_mlp`: all steps from a router's logits to the weighted sum of the experts' results."""

import dataclasses
import functools
import math
from collections.abc import Hashable
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_grouped.core.values import as_array, axis_size, is_tracked, vary_alike, varying_axes
from jax_grouped.fp8.recipes import Recipe
from jax_grouped.kernels.activations import Activation, is_gated
from jax_grouped.moe.exchange import plan_exchange, send_rows
from jax_grouped.moe.experts import as_weights, check_shapes, routed_mlp, weighted_mlp
from jax_grouped.moe.gathers import TokenGather, WeightGather
from jax_grouped.moe.on_mesh import MoEArrays, call_on_mesh, mesh_to_split
from jax_grouped.moe.options import DropBy, Parallel, Router, check_instance
from jax_grouped.moe.permutation import Permutation, check_pairs, group_by_expert, permute
from jax_grouped.moe.routing import Routing, balance_loss, expert_load, load_balancing_loss, route_arguments
from jax_grouped.moe.wire import Wire, send_tokens, sum_returned
from jax_grouped.ops import inputs
from jax_grouped.ops.dense import OUTPUT_NAME
from jax_grouped.ops.inputs import Weights, flat_shape, flat_weights
from jax_grouped.ops.routing import route, route_and_group


class MoEMetrics(NamedTuple):
    """Routing metrics of one MoE call. All of them stay on the device.

    Attributes:
        balance_loss: `float32[]`, see `load_balancing_loss`; add it to the training loss, times a small weight.
        expert_load: `int32[E]`, number of pairs of a token and an expert, per expert: of this device's tokens inside
            `jax.shard_map` and `jax.pmap`, else of all.
        dropped: `int32[D]`, number of these pairs that found no room, for each of the `D` devices that the tokens are
            split over; `int32[1]`, of this device's tokens, inside `jax.shard_map` and `jax.pmap`. Always 0 without a
            `capacity_factor`.
        z_loss: `float32[]`, see `router_z_loss`; to be used like `balance_loss`.
        needed_capacity_factor: `float32[]`, the smallest `capacity_factor` that would have dropped nothing: the pairs
            of the device with the most, in multiples of an even share; along `parallel.experts` inside `jax.shard_map`
            and `jax.pmap`, else of all devices.

    Example:
        x, logits = jnp.ones((8, 32)), jnp.tile(jnp.arange(4.0), (8, 1))
        gate_up, down = jnp.ones((4, 32, 32)), jnp.ones((4, 16, 32))

        y, metrics = jg.moe.moe_mlp(x, logits, gate_up, down, router=jg.moe.Router(top_k=2))

        assert isinstance(metrics, jg.moe.MoEMetrics)
        assert metrics.expert_load.tolist() == [0, 0, 8, 8] and metrics.dropped.tolist() == [0]
    """

    balance_loss: jax.Array
    expert_load: jax.Array
    dropped: jax.Array
    z_loss: jax.Array
    needed_capacity_factor: jax.Array


# `flax.nnx.tabulate` takes tuples whose keys are indices, no named ones and no dataclasses.
jax.tree_util.register_pytree_with_keys(
    MoEMetrics,
    lambda metrics: (tuple((jax.tree_util.SequenceKey(i), array) for i, array in enumerate(metrics)), None),
    lambda _, arrays: MoEMetrics(*arrays),
)


def moe_mlp(
    x: jax.Array,
    logits: jax.Array,
    gate_up: jax.Array | Weights,
    down: jax.Array | Weights,
    *,
    router: Router,
    parallel: Parallel | None = None,
    activation: Activation = "swiglu",
    recipe: Recipe | None = None,
    precision: jax.lax.PrecisionLike = None,
    selection_bias: jax.Array | None = None,
    num_sequences: int | None = None,
    shared: jax.Array | None = None,
) -> tuple[jax.Array, MoEMetrics]:
    """Sends each token to the experts that its logits choose, and returns the weighted sum of their results.

    The steps are also public functions: `top_k_routing`, `group_by_expert`, `permute`, `plan_exchange`, `send_rows`,
    `grouped_mlp`, `return_rows`, `unpermute`. Nothing is read on the host.

    The backward pass gathers the tokens again. Only `x`, the activation's input, the routing and the kernels are kept
    for it. With a recipe, quantization gathers the tokens, so that no row of them is written in a wider type. The
    routing weights' gradient is computed from the activation's, with the precision of the recipe.

    `parallel` names axes of a mesh. Inside `jax.shard_map` or `jax.pmap` over all of them, the arguments are one
    device's. Otherwise, as under plain `jax.jit`, they are whole arrays on a mesh that has the axes. Each device then
    computes its part, and the metrics are those of all tokens. The number of tokens need not be a multiple of the
    devices: each computes as many, and the last ones have tokens that choose no expert. The result is split over the
    axes of the tokens or, where these are of type `Explicit`, as `x` is. A surrounding `jax.shard_map` may split the
    call over other axes, such as those of pipeline stages.

    Args:
        x: `[T, K]` tokens, bfloat16, float16 or float32.
        logits: `[T, E]`, the router's scores of all experts.
        gate_up: `[E / (D S), K, 2 F]` or `[E / (D S), K, 2, F]`, this device's experts, see `grouped_mlp`. `D` is the
            size of the axis `parallel.experts`, and `S` that of `parallel.fsdp`; 1 without the axis. States of
            `DelayedScaling` are of `E / D` experts. Whole arrays have all `E`.
        down: `[E / (D S), F, N]`.
        router: how experts are chosen and weighted, and the room that they have.
        parallel: how the experts and the tokens are split over devices; None for one device.
        activation: that of the experts, see `grouped_mlp`; with one that has no gate, `gate_up` is
            `[E / (D S), K, F]`.
        recipe: how the experts compute in FP8, None to compute in the type of `x`.
        precision: as in `jax_grouped.ragged_dot`; matters for float32 `x` only. Not with a recipe.
        selection_bias: `[E]`, added to the scores for the choice only.
        num_sequences: number of sequences of equal length in `x`, of which each gets a balance loss of its own, see
            `load_balancing_loss`. No sequence may be split over devices. None for one loss of the batch.
        shared: `[T, N]`, bfloat16, float16 or float32, added to each token's weighted sum in float32, before that is
            rounded: the result of an expert that all tokens share. The same on every device of `parallel.features`,
            whose first device adds it to its part of the sum.

    Returns:
        `[T, N]` in the type of `x`, and the routing metrics.

    Raises:
        TypeError: an argument has a type that is not supported.
        ValueError: an argument has a shape or value that does not fit, an axis is not there, or the result is
            differentiated with an axis of features that JAX does not track.

    Example:
        x, logits = jnp.ones((8, 32)), jnp.tile(jnp.arange(4.0), (8, 1))
        gate_up, down = jnp.ones((4, 32, 32)), jnp.ones((4, 16, 32))

        y, metrics = jg.moe.moe_mlp(x, logits, gate_up, down, router=jg.moe.Router(top_k=2))

        assert jnp.allclose(y, 16 * 32 * jax.nn.silu(32.0))
    """
    x, logits = as_array("x", x), as_array("logits", logits)
    arrays = MoEArrays(
        x,
        logits,
        as_weights("gate_up", gate_up),
        as_weights("down", down),
        None if selection_bias is None else as_array("selection_bias", selection_bias),
        None if shared is None else as_array("shared", shared),
    )
    check_instance("router", router, Router)
    parallel = Parallel() if parallel is None else parallel
    check_instance("parallel", parallel, Parallel)
    if router.balance_sequences and num_sequences is None:
        raise ValueError("A router with balance_sequences needs num_sequences, got None.")
    run = functools.partial(_run_on_device, router=router, activation=activation, recipe=recipe, precision=precision)
    mesh = mesh_to_split(parallel, *jax.tree.leaves(arrays))
    if mesh is None:
        return run(arrays, parallel, num_sequences=num_sequences)
    if x.shape[:1] == (0,):
        return run(arrays, Parallel(), num_sequences=num_sequences)
    axes = parallel.token_axes
    devices = math.prod(mesh.shape[axis] for axis in axes)
    sequences_of_each = _sequences_of_each(num_sequences, x.shape[0], devices)
    _check_arguments(x, logits, arrays.gate_up.kernel.shape, devices=1)
    check_shapes(flat_shape(arrays.gate_up.kernel.shape), arrays.down.kernel.shape, activation)

    def run_on_part(own: MoEArrays) -> tuple[jax.Array, MoEMetrics]:
        bound = dataclasses.replace(parallel, batch=axes)
        y, metrics = run(own, bound, num_sequences=sequences_of_each, all_tokens=x.shape[0])
        if not axes:
            return y, metrics
        me = jax.lax.axis_index(axes)
        needed = jax.lax.pmax(vary_alike(metrics.needed_capacity_factor, me)[0], axes)
        dropped = jnp.where(jnp.arange(devices) == me, metrics.dropped, 0)
        load, dropped = jax.lax.psum((metrics.expert_load, dropped), axes)
        return y, metrics._replace(expert_load=load, dropped=dropped, needed_capacity_factor=needed)

    return call_on_mesh(run_on_part, mesh, parallel, arrays, gated=is_gated(activation))


def _sequences_of_each(num_sequences: int | None, tokens: int, devices: int) -> int | None:
    """Returns the number of sequences of one of the devices that the tokens are split over."""
    if num_sequences is None:
        return None
    if inputs.static_size("num_sequences", num_sequences, least=1) % devices or tokens % num_sequences:
        raise ValueError(
            f"num_sequences must be a multiple of the {devices} devices that the tokens are split over, and a divisor "
            f"of the {tokens} tokens, got {num_sequences}."
        )
    return num_sequences // devices


def _run_on_device(
    arrays: MoEArrays,
    parallel: Parallel,
    *,
    router: Router,
    activation: Activation,
    recipe: Recipe | None,
    precision: jax.lax.PrecisionLike,
    num_sequences: int | None,
    all_tokens: int | None = None,
) -> tuple[jax.Array, MoEMetrics]:
    """Computes `moe_mlp` for one device's arrays, with axes that are bound.

    `all_tokens` is the number of tokens on all devices of `parallel.token_axes`, which the tokens of the last ones may
    exceed.
    """
    x, logits, gate_up, down, selection_bias, shared = arrays
    expert_axis, feature_axis, fsdp_axis, token_axes = (
        parallel.experts,
        parallel.features,
        parallel.fsdp,
        parallel.token_axes,
    )
    top_k, drop_by = router.top_k, router.drop_by
    gate_up = flat_weights(gate_up)
    devices = 1 if expert_axis is None else axis_size(expert_axis)
    if feature_axis is not None and axis_size(feature_axis) > 1:
        _check_split("gate_up", gate_up.kernel, feature_axis)
        _check_split("down", down.kernel, feature_axis)
        if shared is not None:
            _check_same("shared", shared, feature_axis)
    weight_gather = None
    if fsdp_axis is not None and axis_size(fsdp_axis) > 1:
        weight_gather = WeightGather(fsdp_axis)
        for name, array in (("x", x), ("gate_up", gate_up.kernel), ("down", down.kernel)):
            _check_split(name, array, fsdp_axis)
    stored_over = devices if weight_gather is None else devices * weight_gather.parts
    _check_arguments(x, logits, gate_up.kernel.shape, stored_over)
    tokens, num_experts = logits.shape
    if feature_axis is not None:
        # The results of all devices are summed, so only the first device adds what all of them have.
        first = jax.lax.axis_index(feature_axis) == 0
        if down.bias is not None:
            down = down._replace(bias=jnp.where(first, down.bias, 0))
        if shared is not None:
            shared = jnp.where(first, shared, 0)
    if weight_gather is not None:
        gate_up, down = map(weight_gather.with_biases, (gate_up, down))

    bias, spec = route_arguments(logits, router, selection_bias)
    check_pairs((tokens, top_k), num_experts, None)
    real_tokens: float = tokens  # on average over the devices
    exists = None
    sources = math.prod(map(axis_size, token_axes))
    if all_tokens is not None and all_tokens < sources * tokens:
        real_tokens = all_tokens / sources
        exists = jnp.arange(tokens) + tokens * jax.lax.axis_index(token_axes) < all_tokens
    pairs = real_tokens * top_k
    worst = devices * tokens * min(top_k, num_experts // devices)
    capacity = worst
    if router.capacity_factor is not None:
        capacity = min(worst, math.ceil(router.capacity_factor * pairs))
    wire = Wire.make(recipe, dispatch=parallel.dispatch == "fp8", combine=parallel.combine == "fp8")
    options: dict[str, Any] = dict(
        gate_up=gate_up,
        down=down,
        activation=activation,
        recipe=recipe,
        precision=precision,
        shared=shared,
        weight_gather=weight_gather,
    )
    gathers = devices > 1 and tokens > 0 and parallel.exchange != "padded"
    has_room = capacity == worst
    rows = capacity if devices == 1 else tokens * top_k
    if exists is None and not gathers and (has_room or (devices == 1 and drop_by == "even")):
        routed, grouped, load, probability_sums = route_and_group(logits, bias, spec, rows=rows)
        experts, permutation = routed.experts, Permutation(*grouped)
    else:
        routed, permutation = route(logits, bias, spec), None
        experts, probabilities = routed.experts, routed.probabilities
        if exists is not None:
            experts = jnp.where(exists[:, None], experts, num_experts)
            probabilities = jnp.where(exists[:, None], probabilities, 0)
        load, probability_sums = expert_load(experts, num_experts), jnp.sum(probabilities, axis=0)
    weights = routed.weights * jnp.asarray(router.scale, jnp.float32)
    if gathers:
        options |= dict(num_experts=num_experts // devices, capacity=capacity, drop_by=drop_by, wire=wire)
        y, dropped = _mlp_on_gathered_tokens(x, experts, weights, expert_axis, expected_rows=tokens * top_k, **options)
    else:
        if devices > 1 and not has_room:
            kept = are_kept(experts, weights, num_experts, capacity=capacity, axis_name=expert_axis, drop_by=drop_by)
            experts = jnp.where(kept, experts, num_experts)
        if permutation is None:
            permutation = group_in_room(experts, weights, num_experts, capacity=rows, sources=1, drop_by=drop_by)
        dropped = jnp.sum(load - permutation.group_sizes, dtype=jnp.int32).reshape(1)
        if devices == 1:
            y = routed_mlp(x, permutation=permutation, weights=weights, **options)
        else:
            options |= dict(capacity=capacity, wire=wire, expected_rows=tokens * top_k)
            y = _mlp_on_exchanged_rows(x, permutation, weights, expert_axis, **options)
    if has_room:
        dropped = jnp.zeros(1, jnp.int32)
    if feature_axis is not None:
        y = _sum_over_features(y, feature_axis)
    batch = tuple(parallel.batch) or None
    if num_sequences is None:
        loss = balance_loss(load, probability_sums, pairs, real_tokens, batch)
    else:
        loss = load_balancing_loss(Routing(*routed), num_sequences=num_sequences, axis_name=batch)
    squares = jax.nn.logsumexp(logits.astype(jnp.float32), axis=1) ** 2
    z_loss = jnp.sum(squares if exists is None else jnp.where(exists, squares, 0)) / (real_tokens or 1)
    if batch is not None:
        z_loss = jax.lax.pmean(z_loss, batch)
    wanted = load
    if expert_axis is not None:
        wanted = jax.lax.psum(vary_alike(load, jax.lax.axis_index(expert_axis))[0], expert_axis)
    needed = jnp.max(jnp.sum(wanted.reshape(devices, -1), axis=1)) / (pairs or 1)
    return checkpoint_name(y, OUTPUT_NAME), MoEMetrics(loss, load, dropped, z_loss, needed)


def _mlp_on_gathered_tokens(
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    axis_name: Hashable,
    *,
    num_experts: int,
    capacity: int,
    drop_by: DropBy,
    wire: Wire,
    recipe: Recipe | None,
    shared: jax.Array | None,
    **network: Any,
) -> tuple[jax.Array, jax.Array]:
    """Gathers the tokens of all devices, applies this device's experts to them, and sums each token's results.

    A device rounds its part of a token's sum to the type of `x`. The parts are summed in float32. Gradients likewise.
    """
    me = jax.lax.axis_index(axis_name)
    # Mark x and the weights as varying over the axis of features too: their gradients are then summed over it after the
    # sum of parts, which leaves fewer bytes.
    x, weights, *_ = vary_alike(x, weights, network["gate_up"].kernel, me)
    experts, me = vary_alike(experts, me)
    axes = varying_axes(experts)
    gather = TokenGather(axis_name, wire)
    received = gather.tokens(jax.lax.stop_gradient(x))
    if recipe is None:
        # XLA runs one collective at a time. If this one comes before that of the choices, the router and a shared
        # expert run during it. With a recipe, the quantization of kernels does.
        received, experts, shared = jax.lax.optimization_barrier((received, experts, shared))
    experts = jax.lax.all_gather(experts, axis_name, tiled=True) - num_experts * me
    all_weights, devices = gather.routing_weights(weights), jax.lax.axis_size(axis_name)
    permutation = group_in_room(experts, all_weights, num_experts, capacity=capacity, sources=devices, drop_by=drop_by)
    has_no_row = (experts >= 0) & (experts < num_experts) & (permutation.inverse == permutation.order.shape[0])
    dropped = jnp.sum(has_no_row.reshape(devices, -1), axis=1, dtype=jnp.int32)
    y = routed_mlp(
        x,
        permutation=permutation,
        weights=weights,
        token_gather=gather,
        received=received,
        recipe=recipe,
        shared=shared,
        **network,
    )
    dropped = jax.lax.psum_scatter(dropped, axis_name, tiled=True)
    # Before JAX 0.11, a barrier makes all of its results vary over the axes of each.
    others = tuple(varying_axes(dropped) - axes)
    return y, jax.lax.pmax(dropped, others) if others else dropped


def _mlp_on_exchanged_rows(
    x: jax.Array,
    permutation: Permutation,
    weights: jax.Array,
    axis_name: Hashable,
    *,
    capacity: int,
    wire: Wire,
    shared: jax.Array | None,
    **network: Any,
) -> jax.Array:
    """Sends the rows of each token to their experts' devices, and sums the results that are sent back."""
    num_rows = permutation.order.shape[0]
    exchange = plan_exchange(permutation.group_sizes, axis_name, num_rows=num_rows, capacity=capacity)
    rows = send_tokens(x, permutation, exchange, wire)
    pairs = dataclasses.replace(permutation, inverse=permutation.inverse.reshape(weights.size, 1))
    row_weights = send_rows(permute(weights.reshape(weights.size, 1), pairs), exchange)[:, 0]
    rows = weighted_mlp(rows, group_sizes=exchange.group_sizes, row_weights=row_weights, **network)
    return sum_returned(rows, permutation, exchange, wire, shared)


def group_in_room(
    experts: jax.Array, weights: jax.Array, num_experts: int, *, capacity: int, sources: int, drop_by: DropBy
) -> Permutation:
    """Gives every pair of a token and an expert a row, as `group_by_expert` does, or drops pairs as `Router` says."""
    tokens, choices = experts.shape
    if capacity >= tokens * min(choices, num_experts):
        return group_by_expert(experts, num_experts, capacity=capacity)
    if drop_by == "weight":
        experts = jnp.where(_are_heaviest(experts, weights, num_experts, capacity), experts, num_experts)
        return group_by_expert(experts, num_experts, capacity=capacity)
    source = jnp.arange(tokens, dtype=jnp.int32)[:, None] // max(tokens // sources, 1)
    permutation = group_by_expert(experts * sources + source, num_experts * sources, capacity=capacity)
    group_sizes = jnp.sum(permutation.group_sizes.reshape(num_experts, sources), axis=1, dtype=jnp.int32)
    return dataclasses.replace(permutation, group_sizes=group_sizes)


def are_kept(
    experts: jax.Array, weights: jax.Array, num_experts: int, *, capacity: int, axis_name: Hashable, drop_by: DropBy
) -> jax.Array:
    """Tells which pairs get a row on their experts' device, `bool[T, k]`; False for no pair.

    The arguments are those of `group_in_room` on one device of the mesh axis, with the experts of all devices.
    """
    me, devices = jax.lax.axis_index(axis_name), jax.lax.axis_size(axis_name)
    experts, weights = (jax.lax.all_gather(x, axis_name, tiled=True) for x in (experts, weights))
    experts, num_experts = experts - num_experts // devices * me, num_experts // devices
    permutation = group_in_room(experts, weights, num_experts, capacity=capacity, sources=devices, drop_by=drop_by)
    has_row = permutation.inverse < permutation.order.shape[0]
    return jax.lax.psum_scatter(has_row.astype(jnp.int32), axis_name, tiled=True) > 0


def _are_heaviest(experts: jax.Array, weights: jax.Array, num_experts: int, capacity: int) -> jax.Array:
    """Tells which pairs are among the `capacity` ones with the largest weights."""
    is_pair = (experts >= 0) & (experts < num_experts)
    weights = jnp.abs(jax.lax.stop_gradient(weights))
    weights = jnp.where(is_pair, jnp.where(jnp.isnan(weights), -1, weights), -jnp.inf)
    # A multiple of an odd number decides between equal weights: any of them, early or late, and always the same ones.
    number = (jnp.arange(weights.size, dtype=jnp.uint32) * jnp.uint32(0x9E3779B1)).reshape(weights.shape)
    ascending = jax.lax.sort((weights.reshape(-1), number.reshape(-1)), num_keys=2)
    lowest, first = (keys[-capacity] for keys in ascending)
    return is_pair & ((weights > lowest) | ((weights == lowest) & (number >= first)))


def _sum_over_features(y: jax.Array, axis_name: str) -> jax.Array:
    """Returns the sum over the devices of the axis, with a gradient where JAX knows that all devices get the same."""
    if axis_size(axis_name) == 1 or is_tracked(axis_name):
        return jax.lax.psum(y, axis_name)
    return _sum_without_gradient(axis_name, y)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum_without_gradient(axis_name: str, y: jax.Array) -> jax.Array:
    return jax.lax.psum(y, axis_name)


def _refuse_gradient(axis_name: str, *_: Any) -> NoReturn:
    # Without tracking, JAX transposes a psum to a psum. It adds up the gradients of all devices, as if each had a loss
    # of its own: those of split kernels would be too large by the size of the axis, those of the router incomplete.
    raise ValueError(
        f"The features axis {axis_name!r} has gradients only inside jax.shard_map with its checks on (check_vma=True), "
        "because without them, and under jax.pmap, JAX counts the loss once per device of the axis."
    )


_sum_without_gradient.defvjp(_refuse_gradient, _refuse_gradient)


def _check_arguments(x: jax.Array, logits: jax.Array, kernel: tuple[int, ...], devices: int) -> None:
    inputs.check_tokens("x", x)
    if logits.ndim != 2 or logits.shape[0] != x.shape[0]:
        raise ValueError(f"logits must have shape [T, E] for x {x.shape}, got {logits.shape}.")
    if kernel[:1] != (logits.shape[1] / devices,):
        raise ValueError(
            f"gate_up must hold its part of the experts, for logits {logits.shape} of E experts, which the axes "
            f"experts and fsdp split over {devices} devices, got {kernel}."
        )


def _check_split(name: str, x: jax.Array, axis_name: str) -> None:
    """Raises ValueError if `jax.shard_map` with its checks on knows that all devices of the axis have the same array.

    Sums over the devices would count all features, or tokens, once per device.
    """
    if is_tracked(axis_name) and axis_name not in varying_axes(x):
        raise ValueError(
            f"{name} must be split over the mesh axis {axis_name!r} (in_specs of jax.shard_map), got {x.shape}, the "
            "same on every device."
        )


def _check_same(name: str, x: jax.Array, axis_name: str) -> None:
    """Raises ValueError if `jax.shard_map` with its checks on does not know that all devices of the axis have the same.

    Only the first device would use its own.
    """
    if is_tracked(axis_name) and axis_name in varying_axes(x):
        raise ValueError(
            f"{name} must be the same on every device of the mesh axis {axis_name!r}, got {x.shape}, which varies "
            "over it: sum the devices' parts first (jax.lax.psum)."
        )
