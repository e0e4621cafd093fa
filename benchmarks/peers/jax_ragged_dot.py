"""`jax.lax.ragged_dot`."""

import jax

from benchmarks.cases import Arrays, Case
from benchmarks.peers import JaxWork, jax_layer


@jax_layer.layer_of
def _layer(x: jax.Array, kernel: jax.Array, sizes: jax.Array) -> jax.Array:
    return jax.lax.ragged_dot(x, kernel.astype(x.dtype), sizes)


def product(case: Case, sets: list[Arrays]) -> JaxWork:
    """Makes the product; a float32 kernel and its gradient are converted."""
    return jax_layer.product_work(case, sets, _layer)
