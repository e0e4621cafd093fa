"""Experts on the devices of a mesh axis: tokens travel to them, and results travel back.

There are two ways. The devices gather the tokens of all devices, `T (D - 1)` rows per device, and each applies its own
experts to them. Or they exchange a row for each pair of a token and a choice, in room for `T k` from every device to
every other one.
"""

import dataclasses
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp

from jax_grouped.core.varying import vary_alike, varying_axes
from jax_grouped.fp8.recipes import Recipe
from jax_grouped.moe.drops import group_in_room
from jax_grouped.moe.exchange import plan_exchange, send_rows
from jax_grouped.moe.experts import routed_mlp, weighted_mlp
from jax_grouped.moe.gathers import TokenGather
from jax_grouped.moe.options import DropBy
from jax_grouped.moe.permutation import Permutation, permute
from jax_grouped.moe.wire import Wire, send_tokens, sum_returned


def mlp_of_gathered_tokens(
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


def mlp_of_exchanged_rows(
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
    row_weights = send_rows(_weights_of_rows(weights, permutation), exchange)[:, 0]
    rows = weighted_mlp(rows, group_sizes=exchange.group_sizes, row_weights=row_weights, **network)
    return sum_returned(rows, permutation, exchange, wire, shared)


def _weights_of_rows(weights: jax.Array, permutation: Permutation) -> jax.Array:
    """Returns the weight of each row, `float32[R, 1]`."""
    pairs = dataclasses.replace(permutation, inverse=permutation.inverse.reshape(weights.size, 1))
    return permute(weights.reshape(weights.size, 1), pairs)
