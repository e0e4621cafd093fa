"""Truncation of groups whose rows do not all fit into a buffer."""

import jax
import jax.numpy as jnp


def fit_to_capacity(sizes: jax.Array, capacity: int) -> jax.Array:
    """Returns the sizes with the largest ones cut to one length, so that all groups fit into `capacity` rows.

    The cut truncates the largest groups only, wherever they are. After it, up to one row per group is unused.

    Args:
        sizes: integers of any shape, none negative.
        capacity: number of rows in the buffer.

    Returns:
        `int32`, in the shape of `sizes`.
    """
    ascending = jnp.sort(sizes.astype(jnp.int32), axis=None)
    # For each size: do all groups fit if the smaller ones stay whole and the others are cut to this size?
    before = jnp.cumsum(ascending) - ascending
    others = ascending.size - jnp.arange(ascending.size, dtype=jnp.int32)
    level = (capacity - before) // others
    first_cut = jnp.sum(ascending <= level)  # If a size does not fit, no larger one does.
    longest = jnp.where(first_cut == ascending.size, capacity, level[jnp.minimum(first_cut, ascending.size - 1)])
    return jnp.minimum(sizes, longest).astype(jnp.int32)
