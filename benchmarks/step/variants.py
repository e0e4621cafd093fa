"""The implementations that are measured: this library with each of its recipes, and peers in bfloat16."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jax_grouped as jg
from benchmarks import peers
from benchmarks.cases import Case
from benchmarks.jax_work import JaxWork, Results
from benchmarks.peers import Prepare
from benchmarks.timing import Work
from jax_grouped.__main__ import choose_backend
from jax_grouped.fp8.recipes import Recipe

#: What the others are held against: this library without a recipe.
BASE = "bf16"

#: Measured on request only: a step takes many times as long as those of the others.
SLOW = ("jax.lax.ragged_dot",)

# Of each kernel: a dense layer has one, an MLP two.
Caches = tuple[jg.KernelCache | None, ...]
States = tuple[jg.Fp8State | None, ...]
Accumulators = tuple[jax.Array | None, ...]


class Variant(NamedTuple):
    """An implementation.

    Attributes:
        prepare: makes the program for a case; raises if it can't.
        backend: what its programs run on.
    """

    prepare: Prepare
    backend: str


# One function for each recipe, so that JAX compiles it once for all group sizes.
@functools.cache
def _step(recipe: Recipe | None) -> Callable[..., Results]:
    def run(*operands: Any) -> Results:
        return tuple(jax.tree.leaves(_gradients(recipe, *operands)))

    return run


@functools.cache
def _accumulating_step(recipe: Recipe | None) -> Callable[..., tuple[Any, ...]]:
    def run(*operands: Any) -> tuple[Any, ...]:
        y, dx, dkernels, states = _gradients(recipe, *operands)
        return *jax.tree.leaves((y, dx, states)), dkernels

    return run


def _gradients(
    recipe: Recipe | None,
    x: jax.Array,
    kernels: tuple[jax.Array, ...],
    dy: jax.Array,
    group_sizes: jax.Array,
    caches: Caches,
    states: States,
    accumulators: Accumulators,
) -> tuple[jax.Array, jax.Array, tuple[jax.Array, ...], States]:
    """The layer's result, and the gradients of `x`, of its kernels and of its states, which are the next states."""

    def layer(x: jax.Array, kernels: tuple[jax.Array, ...], states: States) -> jax.Array:
        biases = (None,) * len(kernels)
        weights = [jg.moe.Weights(*of) for of in zip(kernels, biases, caches, states, accumulators, strict=True)]
        if len(weights) == 1:
            return jg.grouped_dense(x, group_sizes=group_sizes, recipe=recipe, **weights[0]._asdict())
        gate_up, down = weights
        return jg.moe.grouped_mlp(x, gate_up, down, group_sizes, recipe=recipe)

    y, backward = jax.vjp(layer, x, kernels, states)
    return y, *backward(dy)


_next_states = jax.jit(lambda *operands: _gradients(*operands)[-1], static_argnums=0)
_quantize_kernel = jax.jit(jg.quantize_kernel, static_argnames="recipe")


def _prepare(case: Case, *, recipe: Recipe | None, cached: bool) -> Work:
    sizes = jnp.asarray(case.sizes)
    nothing = (None,) * len(case.inputs[0].kernels)
    states: States = nothing
    scales: tuple[jax.Array | None, ...] = nothing
    if isinstance(recipe, jg.DelayedScaling):
        # One step from the initial state: then the scales bring the operands into the range of FP8, as in training.
        initial = tuple(jg.Fp8State.initial(recipe, case.shape.num_groups) for _ in nothing)
        x, _, dy = case.inputs[0]
        states = _next_states(recipe, x, case.inputs[0].kernels, dy, sizes, nothing, initial, nothing)
        scales = tuple(state.scales(recipe).kernel for state in states if state)

    def caches(kernels: tuple[jax.Array, ...]) -> Caches:
        if not cached:
            return nothing
        pairs = zip(kernels, scales, strict=True)
        return tuple(_quantize_kernel(kernel, recipe=recipe, scale=scale) for kernel, scale in pairs)

    sets = [(of.x, of.kernels, of.dy, sizes, caches(of.kernels), states) for of in case.inputs]
    if case.op == "accumulating step":
        return JaxWork(_accumulating_step(recipe), sets, tuple(jnp.zeros_like(of) for of in case.inputs[0].kernels))
    return JaxWork(_step(recipe), [(*arguments, nothing) for arguments in sets])


def _ours(recipe: Recipe | None, *, cached: bool = False) -> Callable[[], Variant]:
    return lambda: Variant(functools.partial(_prepare, recipe=recipe, cached=cached), choose_backend()[0])


def _peer(name: str, backend: str) -> Callable[[], Variant]:
    return lambda: Variant(peers.LOADERS[name](), backend)


#: What loads each variant. A loader raises if the variant can't run here; the message says why.
LOADERS: dict[str, Callable[[], Variant]] = {
    BASE: _ours(None),
    "block": _ours(jg.Float8BlockScaling()),
    "block cached": _ours(jg.Float8BlockScaling(), cached=True),
    "current": _ours(jg.Float8CurrentScaling()),
    "current cached": _ours(jg.Float8CurrentScaling(), cached=True),
    "delayed": _ours(jg.DelayedScaling()),
    "delayed cached": _ours(jg.DelayedScaling(), cached=True),
    "torch._grouped_mm": _peer("torch._grouped_mm", "torch"),
    "transformer_engine.jax": _peer("transformer_engine.jax", "transformer_engine"),
    "jax.lax.ragged_dot": _peer("jax.lax.ragged_dot", "jax"),
}
