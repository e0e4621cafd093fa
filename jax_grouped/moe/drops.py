"""Rows for the pairs of a token and an expert on a device that may not have room for all of them."""

import dataclasses
from collections.abc import Hashable

import jax
import jax.numpy as jnp

from jax_grouped.moe.options import DropBy
from jax_grouped.moe.permutation import Permutation, group_by_expert


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
