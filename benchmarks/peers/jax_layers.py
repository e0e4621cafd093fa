"""Operations on a layer that is a JAX function, by differentiation; and the layer with `jax.lax.ragged_dot`."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.cases import Arrays, Case
from benchmarks.peers import JaxWork, NotOfferedError
from jax_grouped.kernels.rows import activate
from jax_grouped.moe import Weights

#: `(x, router or None, weights, group_sizes) -> y`, with the weights of one projection, or of an MLP's two.
Layer = Callable[[jax.Array, jax.Array | None, Sequence[Weights], jax.Array], jax.Array]


def find_layer(product: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]) -> Layer:
    """Returns the layer whose products are `product(x, kernel, group_sizes)`."""

    def layer(x: jax.Array, _: jax.Array | None, weights: Sequence[Weights], sizes: jax.Array) -> jax.Array:
        if weights[0].dkernel_accumulator is not None:
            raise NotOfferedError
        y = product(x, weights[0].kernel, sizes)
        return product(activate(y, "swiglu"), weights[1].kernel, sizes) if len(weights) > 1 else y

    return layer


def gradients(layer: Layer, x: jax.Array, router: Any, weights: Sequence[Weights], dy: jax.Array, sizes: Any) -> Any:
    """Returns `y`, the gradients of `x`, router and kernels, and those of the states, which are the next states."""

    def forward(x: jax.Array, router: Any, kernels: Sequence[jax.Array], states: Sequence[Any]) -> jax.Array:
        parts = zip(weights, kernels, states, strict=True)
        return layer(x, router, [part._replace(kernel=kernel, fp8_state=state) for part, kernel, state in parts], sizes)

    kernels, states = [part.kernel for part in weights], [part.fp8_state for part in weights]
    y, pullback = jax.vjp(forward, x, router, kernels, states)
    return y, *pullback(dy)


@functools.cache  # One function for each, so that JAX compiles it once for all group sizes.
def _program(operation: str, layer: Layer) -> Callable[..., Any]:
    def run(x: jax.Array, router: Any, weights: Any, dy: jax.Array, sizes: jax.Array, sums: Any = None) -> Any:
        if operation == "moe forward":
            return layer(x, router, weights, sizes)  # Without differentiation nothing is kept for a backward pass.
        if sums is not None:
            weights = [part._replace(dkernel_accumulator=total) for part, total in zip(weights, sums, strict=True)]
        y, dx, drouter, dkernels, states = gradients(layer, x, router, weights, dy, sizes)
        # The compiler drops what is not returned.
        returned = {"fprop": y, "dgrad": dx, "wgrad": dkernels, "wgrad f32": dkernels, "backward": (dx, dkernels)}
        step = (y, dx, drouter, dkernels, states) if sums is None else (y, dx, states, dkernels)
        return returned.get(operation, step)

    return run


def split(case: Case, arrays: Arrays) -> tuple[jax.Array, jax.Array | None, list[jax.Array], jax.Array]:
    """Returns `x`, the kernel of the router if there is one, those of the projections, and `dy`."""
    x, *kernels, dy = arrays
    router = kernels.pop(0) if case.operation in ("moe", "moe forward") else None
    return x, router, kernels, dy


def layer_work(case: Case, sets: list[Arrays], layer: Layer, make_weights: Any = None, sizes: Any = None) -> JaxWork:
    """Returns the case's operation on a layer, with the weights that are made of each kernel and its index."""
    group_sizes = jnp.asarray(case.sizes if sizes is None else sizes, jnp.int32)
    arguments = []
    for arrays in sets:
        x, router, kernels, dy = split(case, arrays)
        make = make_weights or (lambda kernel, _: Weights(kernel))
        weights = [make(kernel, index) for index, kernel in enumerate(kernels)]
        arguments.append((x, router, weights, dy, group_sizes))
    sums = [jnp.zeros_like(kernel) for kernel in sets[0][1:-1]] if case.operation == "accumulating" else None
    return JaxWork(_program(case.operation, layer), arguments, sums)


@find_layer
def _ragged_dot(x: jax.Array, kernel: jax.Array, sizes: jax.Array) -> jax.Array:
    return jax.lax.ragged_dot(x, kernel.astype(x.dtype), sizes)


product = functools.partial(layer_work, layer=_ragged_dot)
