"""Operations on a layer that is a JAX function, by differentiation; and the layer with `jax.lax.ragged_dot`."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.cases import Arrays, Case
from benchmarks.peers import JaxWork, NotOfferedError
from jax_grouped.moe import Weights
from jax_grouped.ops.rows import activate

#: `(x, weights, group_sizes) -> y`, with the weights of one projection, or of an MLP's two.
Layer = Callable[[jax.Array, Sequence[Weights], jax.Array], jax.Array]


def layer_of(product: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]) -> Layer:
    """Returns the layer whose products are `product(x, kernel, group_sizes)`."""

    def layer(x: jax.Array, weights: Sequence[Weights], sizes: jax.Array) -> jax.Array:
        if weights[0].dkernel_accumulator is not None:
            raise NotOfferedError
        y = product(x, weights[0].kernel, sizes)
        return product(activate(y, "silu_mul"), weights[1].kernel, sizes) if len(weights) > 1 else y

    return layer


def gradients(layer: Layer, x: jax.Array, weights: Sequence[Weights], dy: jax.Array, sizes: jax.Array) -> Any:
    """Returns `y`, the gradients of `x` and of the kernels, and those of the states, which are the next states."""

    def forward(x: jax.Array, kernels: Sequence[jax.Array], states: Sequence[Any]) -> jax.Array:
        parts = zip(weights, kernels, states, strict=True)
        return layer(x, [of._replace(kernel=kernel, fp8_state=state) for of, kernel, state in parts], sizes)

    y, pullback = jax.vjp(forward, x, [of.kernel for of in weights], [of.fp8_state for of in weights])
    return y, *pullback(dy)


# One function for each, so that JAX compiles it once for all group sizes.
@functools.cache
def _program(operation: str, layer: Layer) -> Callable[..., Any]:
    def run(x: jax.Array, weights: Sequence[Weights], dy: jax.Array, sizes: jax.Array, sums: Any = None) -> Any:
        if sums is not None:
            weights = [of._replace(dkernel_accumulator=total) for of, total in zip(weights, sums, strict=True)]
        y, dx, dkernels, states = gradients(layer, x, weights, dy, sizes)
        # The compiler drops what is not returned.
        returned = {"fprop": y, "dgrad": dx, "wgrad": dkernels, "wgrad f32": dkernels, "backward": (dx, dkernels)}
        step = (y, dx, dkernels, states) if sums is None else (y, dx, states, dkernels)
        return returned.get(operation, step)

    return run


def layer_work(
    case: Case, sets: list[Arrays], layer: Layer, weights: Callable[[jax.Array, int], Weights] = lambda x, _: Weights(x)
) -> JaxWork:
    """Returns the case's operation on a layer, with `weights(kernel, index)` for each of its kernels."""
    arguments = [
        (x, [weights(kernel, index) for index, kernel in enumerate(kernels)], dy, jnp.asarray(case.sizes))
        for x, *kernels, dy in sets
    ]
    sums = [jnp.zeros_like(kernel) for kernel in sets[0][1:-1]] if case.operation == "accumulating" else None
    return JaxWork(_program(case.operation, layer), arguments, sums)


@layer_of
def _ragged_dot(x: jax.Array, kernel: jax.Array, sizes: jax.Array) -> jax.Array:
    return jax.lax.ragged_dot(x, kernel.astype(x.dtype), sizes)


def product(case: Case, sets: list[Arrays]) -> JaxWork:
    """Makes `jax.lax.ragged_dot`. A float32 kernel and its gradient are converted."""
    return layer_work(case, sets, _ragged_dot)
