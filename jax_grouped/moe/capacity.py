"""Which rows stay where a buffer cannot hold all of them."""

import jax
import jax.numpy as jnp


def fit_to_capacity(sizes: jax.Array, capacity: int) -> jax.Array:
    """The sizes, the largest of them cut to one length at which all fit into `capacity` rows.

    No group loses a row while a longer one could, whatever its place. After a cut, up to one row per group is unused.

    Args:
        sizes: integers of any shape, none negative.
        capacity: how many rows there are.

    Returns:
        `int32`, in the shape of `sizes`.
    """
    ascending = jnp.sort(sizes.astype(jnp.int32), axis=None)
    # With the groups before this one whole and all others of its size, does everything fit?
    before = jnp.cumsum(ascending) - ascending
    others = ascending.size - jnp.arange(ascending.size, dtype=jnp.int32)
    level = (capacity - before) // others
    first_cut = jnp.sum(ascending <= level)  # Once a size does not fit, no larger one does.
    longest = jnp.where(first_cut == ascending.size, capacity, level[jnp.minimum(first_cut, ascending.size - 1)])
    return jnp.minimum(sizes, longest).astype(jnp.int32)
