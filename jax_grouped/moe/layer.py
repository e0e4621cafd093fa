"""`moe_mlp`: all steps from a router's logits, or a routing, to the weighted sum of the experts' results."""

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_grouped.core.values import (
    as_array,
    as_int32,
    axis_names,
    axis_size,
    canonical_dtype,
    check_type,
    is_tracked,
    static_bool,
    static_size,
    vary_alike,
    varying_axes,
)
from jax_grouped.fp8.recipes import Recipe
from jax_grouped.kernels.activations import Activation, is_gated
from jax_grouped.kernels.exchange import Peers, Push, find_destinations, find_peers
from jax_grouped.kernels.routing import count_choices
from jax_grouped.moe.exchange import (
    Wire,
    gather_tokens,
    plan_exchange,
    plan_host_exchange,
    send_rows,
    send_tokens,
    sum_returned,
)
from jax_grouped.moe.experts import Network, as_weights, check_shapes, routed_mlp, weighted_mlp
from jax_grouped.moe.parallel import MoEArrays, Parallel, call_on_mesh, mesh_to_split
from jax_grouped.moe.permutation import Permutation, group_by_expert, permute
from jax_grouped.moe.routing import (
    DropBy,
    Router,
    Routing,
    balance_loss,
    checked_mask,
    load_balancing_loss,
    masked,
    mean_count,
    mean_over_devices,
    mean_z_loss,
    or_one,
    route_and_group,
    softcapped,
)
from jax_grouped.ops import inputs
from jax_grouped.ops.dense import OUTPUT_NAME
from jax_grouped.ops.inputs import Weights, flat_shape, flat_weights


class MoEMetrics(NamedTuple):
    """Routing metrics of one MoE call. All of them stay on the device.

    Attributes:
        balance_loss: `float32[]`, see `load_balancing_loss`; add it to the training loss, times a small weight. 0 for a
            routing without probabilities.
        expert_load: `int32[E]`, pairs of a token and an expert, per expert: of this device's tokens inside
            `jax.shard_map` and `jax.pmap`, else of all.
        dropped: `int32[D]`, pairs that found no room, on each of the `D` devices that the tokens are split over;
            `int32[1]`, of this device, inside `jax.shard_map` and `jax.pmap`. Always 0 without a `capacity_factor`.
        z_loss: `float32[]`, see `router_z_loss`; to be used like `balance_loss`. 0 for a routing without logits.
        needed_capacity_factor: `float32[]`, the smallest `capacity_factor` that would have dropped nothing: the pairs
            of the device with the most, in multiples of an even share; along `parallel.experts` inside `jax.shard_map`
            and `jax.pmap`, else of all devices.
        mean_probabilities: `float32[E]`, the mean over the tokens of a routing's probabilities, over which also the
            balance loss is one; None for a routing without. With them a balance loss can be one of many microbatches:
            `E * sum(share * mean_probabilities)`, where `share` is the fraction of all their choices.
        experts: `int32[T, k]`, the choice of every token, to be forced in another pass; `E` for no expert, and for a
            token that `mask` leaves out. None unless `moe_mlp` is asked to `record` it.

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
    mean_probabilities: jax.Array | None = None
    experts: jax.Array | None = None


# `flax.nnx.tabulate` takes tuples whose keys are indices, no named ones and no dataclasses.
jax.tree_util.register_pytree_with_keys(
    MoEMetrics,
    lambda metrics: (tuple((jax.tree_util.SequenceKey(i), array) for i, array in enumerate(metrics)), None),
    lambda _, arrays: MoEMetrics(*arrays),
)


def router_loss(metrics: Any, *, balance: float | jax.Array = 0.0, z: float | jax.Array = 0.0) -> jax.Array:
    """Sums the losses of all routers of a model, times their weights.

    Args:
        metrics: any pytree of `MoEMetrics`, such as the collection `jg.linen.MOE_METRICS` or what
            `nnx.capture(model, jg.nnx.SownMetrics)` returns; those of a scan over layers may be stacked.
        balance: weight of the balance losses, such as 0.01.
        z: weight of the z-losses, such as 0.001.

    Returns:
        `float32[]`, to be added to the training loss; 0 without metrics.

    Raises:
        TypeError: a leaf of `metrics` is no `MoEMetrics`.

    Example:
        layer = jg.linen.MoEMlp(num_experts=4, hidden_features=16, router=jg.moe.Router(top_k=2), sow_metrics=True)
        x = jnp.ones((2, 4, 32))
        variables = layer.init(jax.random.key(0), x)

        (y, _), sown = layer.apply(variables, x, mutable=jg.linen.MOE_METRICS)

        assert jg.moe.router_loss(sown, balance=0.01) > 0
    """
    leaves = jax.tree.leaves(metrics, is_leaf=lambda leaf: isinstance(leaf, MoEMetrics))
    total = jnp.zeros((), jnp.float32)
    for each in leaves:
        check_type("metrics", each, MoEMetrics)
        total += balance * jnp.sum(each.balance_loss) + z * jnp.sum(each.z_loss)
    return total


def moe_mlp(
    x: jax.Array,
    routing: jax.Array | Routing,
    gate_up: jax.Array | Weights,
    down: jax.Array | Weights,
    *,
    router: Router | None = None,
    parallel: Parallel | None = None,
    # Quotes keep `help` from spelling these types out. Postponed annotations would spell out those of `MoEMetrics`.
    activation: "Activation" = "swiglu",
    recipe: "Recipe | None" = None,
    precision: "jax.lax.PrecisionLike" = None,
    selection_bias: jax.Array | None = None,
    experts: jax.Array | None = None,
    mask: jax.Array | None = None,
    num_sequences: int | None = None,
    shared: jax.Array | None = None,
    record: bool = False,
) -> tuple[jax.Array, MoEMetrics]:
    """Sends each token to the experts that its logits or a routing choose, and sums their results by weight.

    The steps are also public functions: `top_k_routing`, `group_by_expert`, `permute`, `plan_exchange`, `send_rows`,
    `grouped_mlp`, `return_rows`, `unpermute`. Nothing is read on the host. Only `x`, the activation's input, the
    routing and the kernels wait for the backward pass; along `parallel.experts`, the tokens that came from all devices
    wait in place of `x`. The routing weights' gradient has a recipe's precision.

    `parallel` names axes of a mesh. Inside `jax.shard_map` or `jax.pmap` over all of them, the arguments are one
    device's. Otherwise, as under plain `jax.jit`, they are whole arrays on a mesh that has the axes, with any number of
    tokens. Each device then computes its part, and the metrics are those of all tokens. The result is split over the
    axes of the tokens or, where these are of type `Explicit`, as `x` is. A surrounding `jax.shard_map` may split the
    call over other axes, such as those of pipeline stages.

    Args:
        x: `[T, K]` tokens, bfloat16, float16 or float32.
        routing: `[T, E]` logits, the router's scores of all experts; or a `Routing` of your own, of these types or
            others of integers and numbers. Its weights and probabilities are differentiable.
        gate_up: `[E / (D S), K, 2 F]` or `[E / (D S), K, 2, F]`, this device's experts, see `grouped_mlp`. `D` is the
            size of the axis `parallel.experts`, and `S` that of `parallel.fsdp`; 1 without the axis. States of
            `DelayedScaling` are of `E / D` experts. Whole arrays have all `E`.
        down: `[E / (D S), F, N]`.
        router: how experts are chosen and weighted, and the room that they have. With a `Routing`, only the room and
            `weights_on` matter, and None stands for a router without options.
        parallel: how the experts and the tokens are split over devices; None for one device.
        activation: with a gate "swiglu", "geglu", "reglu" or a `jax_grouped.SwiGLU`; without one "silu", "gelu", "relu"
            or "relu_squared", and `gate_up` is `[E / (D S), K, F]`.
        recipe: how the experts' products are computed in FP8; None to compute in the type of `x`.
        precision: of float32 products of experts: "default", "high" or "highest", see `jax_grouped.ragged_dot`.
        selection_bias: `[E]`, added to the scores for the choice only.
        experts: `[T, top_k]` integers, a choice in place of one by the scores, see `top_k_routing`.
        mask: `bool[T]`, False for tokens that are none, such as padding: they are computed by no expert, take no room,
            count in no metric, and get zeros, whatever their rows of `x`, `routing` and `shared` hold. All other
            results are those without these tokens, but that a `capacity_factor` gives room for all `T`.
        num_sequences: number of sequences of `T / num_sequences` successive tokens, for a router with
            `balance_sequences`: of whole arrays or of this device. No sequence may be split.
        shared: `[T, N]`, bfloat16, float16 or float32, added to each token's weighted sum in float32, before that is
            rounded: the result of an expert that all tokens share. The same on every device of `parallel.features`,
            whose first device adds it to its part of the sum.
        record: whether the metrics have the choice of `experts`.

    Returns:
        `[T, N]` in the type of `x`, and the routing metrics.

    Raises:
        TypeError, ValueError: an argument has a type, a shape or a value that does not fit, an axis is not there, or
            the result is differentiated with an axis of features that JAX does not track.

    Example:
        x, logits = jnp.ones((8, 32)), jnp.tile(jnp.arange(4.0), (8, 1))
        gate_up, down = jnp.ones((4, 32, 32)), jnp.ones((4, 16, 32))

        y, metrics = jg.moe.moe_mlp(x, logits, gate_up, down, router=jg.moe.Router(top_k=2))

        assert jnp.allclose(y, 16 * 32 * jax.nn.silu(32.0))
    """
    x = as_array("x", x)
    inputs.check_tokens("x", x)
    if isinstance(routing, tuple):
        raise TypeError("routing must be logits or a jax_grouped.moe.Routing, got a tuple.")
    if isinstance(routing, Routing):
        for name, array in (("selection_bias", selection_bias), ("experts", experts)):
            if array is not None:
                raise ValueError(f"{name} is for logits, and routing is a Routing, whose choice it cannot change.")
        routing = _canonical_routing(routing, x)
        router = Router(routing.experts.shape[1]) if router is None else router
    else:
        routing = as_array("routing", routing)
    check_type("router", router, Router)
    assert router is not None
    record = static_bool("record", record)
    arrays = MoEArrays(
        x,
        routing,
        as_weights("gate_up", gate_up),
        as_weights("down", down),
        None if selection_bias is None else as_array("selection_bias", selection_bias),
        None if shared is None else as_array("shared", shared),
        None if experts is None else as_int32("experts", experts),
        None if mask is None else checked_mask(mask, x.shape[0]),
    )
    shape = arrays.gate_up.kernel.shape
    if len(shape) == 4 and shape[2] != 2 and is_gated(activation):
        raise ValueError(f"gate_up must have shape [E, K, 2 F] or [E, K, 2, F] for {activation}, got {shape}.")
    parallel = Parallel() if parallel is None else parallel
    check_type("parallel", parallel, Parallel)
    if router.balance_sequences and num_sequences is None:
        raise ValueError("A router with balance_sequences needs num_sequences, got None.")
    make_network = functools.partial(Network, activation=activation, recipe=recipe, precision=precision)
    run = functools.partial(_run_on_device, router=router, make_network=make_network, record=record)
    mesh = mesh_to_split(parallel, *jax.tree.leaves(arrays)) if parallel.axes else None
    if mesh is None:
        return run(arrays, parallel, num_sequences=num_sequences)
    if x.shape[:1] == (0,):
        return run(arrays, Parallel(), num_sequences=num_sequences)
    tokens, axes = x.shape[0], parallel.token_axes
    devices = math.prod(mesh.shape[axis] for axis in axes)
    own_sequences = None
    if num_sequences is not None:
        if static_size("num_sequences", num_sequences, least=1) % devices or tokens % num_sequences:
            raise ValueError(
                f"num_sequences must be a multiple of the {devices} devices that the tokens are split over, and a "
                f"divisor of the {tokens} tokens, got {num_sequences}."
            )
        own_sequences = num_sequences // devices
    _check_arguments(arrays, router, arrays.gate_up.kernel.shape, devices=1)
    check_shapes(flat_shape(arrays.gate_up.kernel.shape), arrays.down.kernel.shape, activation)

    def run_on_part(own: MoEArrays) -> tuple[Any, MoEMetrics]:
        y, metrics = run(own, parallel, num_sequences=own_sequences, all_tokens=tokens)
        rows, metrics = (y, metrics.experts), metrics._replace(experts=None)
        if not axes:
            return rows, metrics
        me = jax.lax.axis_index(axes)
        needed = jax.lax.pmax(vary_alike(metrics.needed_capacity_factor, me)[0], axes)
        dropped = jnp.where(jnp.arange(devices) == me, metrics.dropped, 0)
        load, dropped = jax.lax.psum((metrics.expert_load, dropped), axes)
        return rows, metrics._replace(expert_load=load, dropped=dropped, needed_capacity_factor=needed)

    (y, chosen), metrics = call_on_mesh(run_on_part, mesh, parallel, arrays, gated=is_gated(activation))
    return y, metrics._replace(experts=chosen)


def _run_on_device(
    arrays: MoEArrays,
    parallel: Parallel,
    *,
    router: Router,
    make_network: Callable[..., Network],
    record: bool,
    num_sequences: int | None,
    all_tokens: int | None = None,
) -> tuple[jax.Array, MoEMetrics]:
    """Computes `moe_mlp` for one device's arrays, with bound axes. Those past `all_tokens` in all are padding."""
    x, given, gate_up, down, selection_bias, shared, choice, exists = arrays
    expert_axis, feature_axis, fsdp_axis = parallel.experts, parallel.features, parallel.fsdp
    top_k, drop_by = router.top_k, router.drop_by
    gate_up = flat_weights(gate_up)
    devices = 1 if expert_axis is None else axis_size(expert_axis)
    parts = 1 if fsdp_axis is None else axis_size(fsdp_axis)
    kernels = {"gate_up": gate_up.kernel, "down": down.kernel}
    for axis, split in ((feature_axis, kernels), (fsdp_axis, {"x": x, **kernels})):
        if axis is None or axis_size(axis) == 1 or not is_tracked(axis):
            continue
        for name, array in split.items():
            # Sums over the devices would count all features, or tokens, once per device.
            if not {*axis_names(axis)} <= varying_axes(array):
                raise ValueError(
                    f"{name} must be split over the mesh axis {axis!r} (in_specs of jax.shard_map), got {array.shape}, "
                    "the same on every device."
                )
        # Only the first device would use its own.
        if axis == feature_axis and shared is not None and axis in varying_axes(shared):
            raise ValueError(
                f"shared must be the same on every device of the mesh axis {axis!r}, got {shared.shape}, which varies "
                "over it: sum the devices' parts first (jax.lax.psum)."
            )
    _check_arguments(arrays, router, gate_up.kernel.shape, devices * parts)
    tokens, num_experts = x.shape[0], gate_up.kernel.shape[0] * devices * parts
    if feature_axis is not None:
        # The results of all devices are summed, so only the first device adds what all of them have.
        first = jax.lax.axis_index(feature_axis) == 0
        if down.bias is not None:
            down = down._replace(bias=jnp.where(first, down.bias, 0))
        if shared is not None:
            shared = jnp.where(first, shared, 0)

    batch = parallel.token_axes or None
    if batch is not None:  # Tokens may be the same on all devices of an axis.
        x, given, choice, exists, _ = vary_alike(x, given, choice, exists, jax.lax.axis_index(batch))
    real_tokens = mean_count(exists, tokens, batch)  # on average over the devices
    if exists is not None:
        # No gradient either: NaN times 0 would be NaN.
        given = jax.tree.map(functools.partial(masked, exists, value=0), given)
        shared = None if shared is None else masked(exists, shared, 0)
    if isinstance(given, jax.Array):
        given = softcapped(given, router)
    room: float = tokens * top_k
    if all_tokens is not None:
        sources = math.prod(map(axis_size, parallel.token_axes))
        if all_tokens < sources * tokens:
            room = all_tokens / sources * top_k
            if exists is None:
                real_tokens = all_tokens / sources
                exists = jnp.arange(tokens) + tokens * jax.lax.axis_index(parallel.token_axes) < all_tokens
    # The experts of one token are distinct if they were chosen here.
    is_chosen = isinstance(given, jax.Array) and choice is None
    worst = devices * tokens * (min(top_k, num_experts // devices) if is_chosen else top_k)
    capacity = worst
    if router.capacity_factor is not None:
        capacity = min(worst, math.ceil(router.capacity_factor * room))
    has_room = capacity == worst
    rows = capacity if devices == 1 else tokens * top_k
    network = make_network(gate_up, down, fsdp_axis=fsdp_axis if parts > 1 else None)
    recipe = network.recipe
    gathers = devices > 1 and tokens > 0 and parallel.exchange != "padded" and not network.has_lora
    peers = find_peers(expert_axis) if gathers and parallel.exchange == "push" else None
    # With several axes, the first one is between hosts, unless all devices write into each other's memory.
    host_axes = None
    if gathers and isinstance(expert_axis, tuple) and axis_size(expert_axis[0]) > 1 and peers is None:
        host_axes = expert_axis if parallel.exchange != "gather" else None

    # One operation chooses the experts and groups the pairs, unless pairs are left out or depend on other devices.
    groups_all = exists is None and not gathers and (has_room or (devices == 1 and drop_by == "even"))
    if isinstance(given, Routing):
        routing, groups_all = given, False
    else:
        routing, grouped = route_and_group(given, router, selection_bias, choice, rows if groups_all else None)
    experts, weights, probabilities = routing.experts, routing.weights, routing.probabilities
    probability_sums = None
    if groups_all:
        load, probability_sums = grouped[4:]
    else:
        if exists is not None:
            experts = masked(exists, experts, num_experts)
        load = count_choices(experts, num_experts)
        if probabilities is not None:
            probabilities = probabilities if exists is None else masked(exists, probabilities, 0)
            probability_sums = jnp.sum(probabilities, axis=0)
    if not is_chosen:
        is_none = (experts < 0) | (experts >= num_experts)
        experts, weights = jnp.where(is_none, num_experts, experts), jnp.where(is_none, 0, weights)
    chosen, priority = experts if record else None, jax.lax.stop_gradient(weights)
    if router.weights_on == "input":
        # Multiply in float32: the gradient of a weight is a sum over the features, in this type.
        x = x if exists is None else masked(exists, x, 0)
        x, weights = (x.astype(jnp.float32) * weights).astype(x.dtype), jnp.ones_like(weights)

    if devices > 1:
        network = network._replace(expected_tokens=tokens * top_k)
        wire = Wire.make(
            recipe, dispatch=parallel.dispatch == "fp8" and not network.has_lora, combine=parallel.combine == "fp8"
        )
    if gathers:
        apply = functools.partial(
            _on_gathered_tokens,
            network=network,
            capacity=capacity,
            drop_by=drop_by,
            distinct=is_chosen,
            wire=wire,
            peers=peers,
        )
        if host_axes is not None:
            y, dropped, host_room = _on_tokens_of_hosts(
                x, experts, weights, priority, shared, num_experts, host_axes, router=router, wire=wire, apply=apply
            )
            has_room &= host_room == tokens
        else:
            y, dropped = apply(x, experts, weights, priority, shared, num_experts, expert_axis)
    else:
        if groups_all:
            order, inverse, group_sizes, no_row = grouped[:4]
            permutation = Permutation(order, inverse, group_sizes, no_row[0])
        else:
            if devices > 1 and not has_room:
                options: Any = dict(capacity=capacity, drop_by=drop_by, distinct=is_chosen)
                kept = are_kept(experts, priority, num_experts, axis_name=expert_axis, **options)
                experts = jnp.where(kept, experts, num_experts)
            permutation = group_in_room(
                experts, priority, num_experts, capacity=rows, sources=1, drop_by=drop_by, distinct=is_chosen
            )
        dropped = jnp.sum(load - permutation.group_sizes, dtype=jnp.int32).reshape(1)
        if devices == 1:
            y = routed_mlp(x, network, permutation, weights, shared=shared)
        else:
            # Send the rows of each token to their experts' devices, and sum the results that are sent back.
            exchange = plan_exchange(permutation.group_sizes, expert_axis, num_rows=rows, capacity=capacity)
            sent = send_tokens(x, permutation, exchange, wire)
            by_pair = dataclasses.replace(permutation, inverse=permutation.inverse.reshape(weights.size, 1))
            row_weights = send_rows(permute(weights.reshape(weights.size, 1), by_pair), exchange)[:, 0]
            results = weighted_mlp(sent, network, exchange.group_sizes, row_weights)
            y = sum_returned(results, permutation, exchange, wire, shared)
    if has_room:
        dropped = jnp.zeros(1, jnp.int32)
    if feature_axis is not None:
        # Give the sum a gradient where JAX knows that all devices get the same.
        has_gradient = axis_size(feature_axis) == 1 or is_tracked(feature_axis)
        y = jax.lax.psum(y, feature_axis) if has_gradient else _sum_without_gradient(feature_axis, y)

    loss = z_loss = jnp.zeros((), jnp.float32)
    mean_probabilities = None
    if probability_sums is not None:
        mean_probabilities = mean_over_devices(probability_sums / or_one(real_tokens), batch)
    if num_sequences is not None and probabilities is not None:
        loss = load_balancing_loss(routing, mask=arrays.mask, num_sequences=num_sequences, axis_name=batch)
    elif probability_sums is not None:
        loss = balance_loss(load, probability_sums, top_k, real_tokens, batch)
    if isinstance(given, jax.Array):
        z_loss = mean_z_loss(given, exists, real_tokens, batch)
    wanted = load
    if expert_axis is not None:
        wanted = jax.lax.psum(vary_alike(load, jax.lax.axis_index(expert_axis))[0], expert_axis)
    needed = jnp.max(jnp.sum(wanted.reshape(devices, -1), axis=1)) / (room or 1)
    return checkpoint_name(y, OUTPUT_NAME), MoEMetrics(loss, load, dropped, z_loss, needed, mean_probabilities, chosen)


def _on_gathered_tokens(
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    priority: jax.Array,
    shared: jax.Array | None,
    num_experts: int,
    expert_axis: Hashable,
    *,
    network: Network,
    capacity: int,
    drop_by: DropBy,
    distinct: bool,
    wire: Wire,
    peers: Peers | None,
    sources: int = 1,
) -> tuple[jax.Array, jax.Array]:
    """Gathers the tokens of all devices, applies this device's experts to them, and sums each token's results.

    Returns the sums, and how many pairs of this device's tokens were dropped, `int32[sources]`: those of equal parts of
    its tokens.
    """
    devices, me = axis_size(expert_axis), jax.lax.axis_index(expert_axis)
    # Mark x and the weights as varying over the axis of features too: their gradients are then summed over it after
    # the sum of parts, which leaves fewer bytes.
    x, weights, *_ = vary_alike(x, weights, network.gate_up.kernel, me)
    experts, priority, me = vary_alike(experts, priority, me)
    axes = varying_axes(experts)
    own_experts = num_experts // devices
    push = None if peers is None else Push(peers, find_destinations(experts, own_experts, devices))
    # Stop the gather's gradient where the rule below returns that of x. Without a recipe and pushes, second derivatives
    # need the gather's own.
    gathered = x if network.recipe is None and push is None else jax.lax.stop_gradient(x)
    received = gather_tokens(gathered, expert_axis, wire.tokens, push)
    if network.recipe is None:
        # XLA runs one collective at a time. If this one comes before that of the choices, the router and a shared
        # expert run during it. With a recipe, the quantization of kernels does.
        received, experts, shared = _in_order(received, experts, shared)
    experts = jax.lax.all_gather(experts, expert_axis, tiled=True) - own_experts * me
    priority = jax.lax.all_gather(priority, expert_axis, tiled=True)
    permutation = group_in_room(
        experts,
        priority,
        own_experts,
        capacity=capacity,
        sources=devices * sources,
        drop_by=drop_by,
        distinct=distinct,
    )
    is_own = (experts >= 0) & (experts < own_experts)
    has_no_row = is_own & (permutation.inverse == permutation.order.shape[0])
    dropped = jnp.sum(has_no_row.reshape(devices * sources, -1), axis=1, dtype=jnp.int32)
    if push is not None:
        needed = jnp.where(jnp.any(is_own, axis=1), jnp.uint32(1) << me.astype(jnp.uint32), 0)
        push = dataclasses.replace(push, needed=needed)
    y = routed_mlp(
        x,
        network,
        permutation,
        weights,
        shared=shared,
        expert_axis=expert_axis,
        wire=wire,
        received=received,
        push=push,
    )
    dropped = jax.lax.psum_scatter(dropped, expert_axis, tiled=True)
    # Before JAX 0.11, a barrier makes all of its results vary over the axes of each.
    if others := tuple(varying_axes(dropped) - axes):
        dropped = jax.lax.pmax(dropped, others)
    return y, dropped


@jax.custom_jvp
def _in_order(*arrays: Any) -> tuple[Any, ...]:
    """Computes all arrays before what reads one of them. Before JAX 0.11, gradients of a barrier are never zero."""
    return jax.lax.optimization_barrier(arrays)


_in_order.defjvp(lambda primals, tangents: (_in_order(*primals), tangents))


def _on_tokens_of_hosts(
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    priority: jax.Array,
    shared: jax.Array | None,
    num_experts: int,
    expert_axes: tuple[str, ...],
    *,
    router: Router,
    wire: Wire,
    apply: Callable[..., tuple[jax.Array, jax.Array]],
) -> tuple[jax.Array, jax.Array, int]:
    """Sends each token once to each host that has an expert of it, and there applies `_on_gathered_tokens`.

    A token goes to the device with its own number on the host, and one sum of results comes back. Returns the sums of
    all hosts, how many pairs were dropped, `int32[1]`, and the room that a host has for tokens of one device.
    """
    host_axis, local_axes = expert_axes[0], expert_axes[1:]
    hosts, tokens, own_experts = axis_size(host_axis), x.shape[0], num_experts // axis_size(host_axis)
    room = tokens
    if router.capacity_factor is not None:
        # The share of tokens that want a host: in hosts of whole groups, a token has top_groups at most.
        share = 1 - (1 - 1 / hosts) ** router.top_k
        if router.groups is not None and router.top_groups is not None and router.groups % hosts == 0:
            share = min(router.top_groups / hosts, share)
        room = min(tokens, math.ceil(router.capacity_factor * share * tokens))
    given = x, experts, weights, priority, shared, jax.lax.axis_index(host_axis)
    x, experts, weights, priority, shared, me = vary_alike(*given)
    host = jnp.where((experts >= 0) & (experts < num_experts), experts // own_experts, hosts)
    permutation, exchange = plan_host_exchange(jnp.any(host[..., None] == jnp.arange(hosts), axis=1), room, host_axis)
    received = send_tokens(x, permutation, exchange, wire)
    received_weights = send_tokens(weights, permutation, exchange)
    received_priority = jax.lax.stop_gradient(received_weights)
    if router.weights_on == "input":  # Weights are ones.
        received_priority = send_tokens(priority, permutation, exchange)
    # Rows of no token are zero: numbers of experts are sent from 1 on.
    received_experts = send_tokens(experts + 1, permutation, exchange) - 1 - own_experts * me
    received_experts = jnp.where(
        (received_experts >= 0) & (received_experts < own_experts), received_experts, own_experts
    )
    local_axis = local_axes[0] if len(local_axes) == 1 else local_axes
    sent = received, received_experts, received_weights, received_priority
    y, dropped = apply(*sent, None, own_experts, local_axis, sources=hosts)
    y = sum_returned(y, permutation, exchange, wire, shared)
    dropped = jnp.sum(jax.lax.all_to_all(dropped, host_axis, 0, 0))
    slots = jnp.pad(permutation.inverse, [(0, 0), (0, 1)], constant_values=-1)  # none of hosts
    unsent = jnp.take_along_axis(slots, host, axis=1) == hosts * room
    return y, (dropped + jnp.sum(unsent, dtype=jnp.int32)).reshape(1), room


def group_in_room(
    experts: jax.Array,
    weights: jax.Array,
    num_experts: int,
    *,
    capacity: int,
    sources: int,
    drop_by: DropBy,
    distinct: bool = True,
) -> Permutation:
    """Gives every pair of a token and an expert a row, as `group_by_expert` does, or drops pairs as `Router` says.

    `distinct` tells that no token has an expert twice.
    """
    tokens, choices = experts.shape
    if capacity >= tokens * (min(choices, num_experts) if distinct else choices):
        return group_by_expert(experts, num_experts, capacity=capacity)
    if drop_by == "weight":
        is_pair = (experts >= 0) & (experts < num_experts)
        weights = jnp.abs(jax.lax.stop_gradient(weights))
        weights = jnp.where(is_pair, jnp.where(jnp.isnan(weights), -1, weights), -jnp.inf)
        # A multiple of an odd number decides between equal weights: any of them, early or late, and always the same.
        number = (jnp.arange(weights.size, dtype=jnp.uint32) * jnp.uint32(0x9E3779B1)).reshape(weights.shape)
        ascending = jax.lax.sort((weights.reshape(-1), number.reshape(-1)), num_keys=2)
        lowest, first = (keys[-capacity] for keys in ascending)
        is_heavy = is_pair & ((weights > lowest) | ((weights == lowest) & (number >= first)))
        return group_by_expert(jnp.where(is_heavy, experts, num_experts), num_experts, capacity=capacity)
    source = jnp.arange(tokens, dtype=jnp.int32)[:, None] // max(tokens // sources, 1)
    permutation = group_by_expert(experts * sources + source, num_experts * sources, capacity=capacity)
    group_sizes = jnp.sum(permutation.group_sizes.reshape(num_experts, sources), axis=1, dtype=jnp.int32)
    return dataclasses.replace(permutation, group_sizes=group_sizes)


def are_kept(
    experts: jax.Array, weights: jax.Array, num_experts: int, *, axis_name: Hashable, **options: Any
) -> jax.Array:
    """Tells which pairs of one device get a row on their experts' device, where `group_in_room` decides."""
    me, devices = jax.lax.axis_index(axis_name), jax.lax.axis_size(axis_name)
    experts, weights = (jax.lax.all_gather(x, axis_name, tiled=True) for x in (experts, weights))
    experts, num_experts = experts - num_experts // devices * me, num_experts // devices
    permutation = group_in_room(experts, weights, num_experts, sources=devices, **options)
    has_row = permutation.inverse < permutation.order.shape[0]
    return jax.lax.psum_scatter(has_row.astype(jnp.int32), axis_name, tiled=True) > 0


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


def _canonical_routing(routing: Routing, x: jax.Array) -> Routing:
    """Returns the routing in the types of the fields. Raises TypeError or ValueError unless it is one of `x`."""
    experts = as_int32("routing.experts", routing.experts)
    arrays = {"weights": as_array("routing.weights", routing.weights)}
    if routing.probabilities is not None:
        arrays["probabilities"] = as_array("routing.probabilities", routing.probabilities)
    if experts.ndim != 2 or experts.shape[0] != x.shape[0] or experts.shape[1] == 0:
        raise ValueError(f"routing.experts must have shape [T, k] for x {x.shape}, got {experts.shape}.")
    for name, array in arrays.items():
        canonical_dtype(f"routing.{name}'s type", array.dtype)
    if arrays["weights"].shape != experts.shape:
        shapes = f"{experts.shape} and {arrays['weights'].shape}"
        raise ValueError(f"routing.experts and routing.weights must have one shape [T, k], got {shapes}.")
    return Routing(experts, **{name: array.astype(jnp.float32) for name, array in arrays.items()})


def _check_arguments(arrays: MoEArrays, router: Router, kernel: tuple[int, ...], devices: int) -> None:
    x, routing = arrays.x, arrays.routing
    inputs.check_tokens("x", x)
    if not isinstance(x.shape[0], int):
        raise ValueError(f"The number of tokens must be known when the program is traced, got x of shape {x.shape}.")
    scores, name = (routing.probabilities, "probabilities") if isinstance(routing, Routing) else (routing, "logits")
    if scores is not None:
        canonical_dtype(f"{name}'s type", scores.dtype)
        if scores.ndim != 2 or scores.shape[0] != x.shape[0]:
            raise ValueError(f"{name} must have shape [T, E] for x {x.shape}, got {scores.shape}.")
        if kernel[:1] != (scores.shape[1] / devices,):
            raise ValueError(
                f"gate_up must hold its part of the experts, for {name} {scores.shape} of E experts, which the axes "
                f"experts and fsdp split over {devices} devices, got {kernel}."
            )
    if isinstance(routing, Routing) and routing.experts.shape[1] != router.top_k:
        raise ValueError(f"routing.experts must have top_k = {router.top_k} of router, got {routing.experts.shape}.")
