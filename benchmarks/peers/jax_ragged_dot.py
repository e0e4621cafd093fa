"""`jax.lax.ragged_dot`. A float32 kernel and its gradient are converted."""

import jax

from benchmarks.cases import Arrays, Case
from benchmarks.peers import JaxWork, layers


@layers.layer_of
def _layer(x: jax.Array, kernel: jax.Array, sizes: jax.Array) -> jax.Array:
    return jax.lax.ragged_dot(x, kernel.astype(x.dtype), sizes)


def product(case: Case, sets: list[Arrays]) -> JaxWork:
    return layers.layer_work(case, sets, _layer)
