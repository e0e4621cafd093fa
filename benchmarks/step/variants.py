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
from jax_grouped.recipes import Recipe

#: What the others are held against: this library without a recipe.
BASE = "bf16"


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
    def run(
        x: jax.Array,
        kernel: jax.Array,
        dy: jax.Array,
        group_sizes: jax.Array,
        cache: jg.KernelCache | None,
        state: jg.Fp8State | None,
    ) -> Results:
        def layer(x: jax.Array, kernel: jax.Array, state: jg.Fp8State | None) -> jax.Array:
            return jg.grouped_dense(x, kernel, group_sizes, recipe=recipe, fp8_state=state, kernel_cache=cache)

        y, backward = jax.vjp(layer, x, kernel, state)
        # The gradient of the state is the next state.
        return y, *jax.tree.leaves(backward(dy))

    return run


@functools.partial(jax.jit, static_argnums=0)
def _next_state(recipe: Recipe, *operands: Any) -> jg.Fp8State:
    return jg.Fp8State(*_step(recipe)(*operands)[3:])


_quantize_kernel = jax.jit(jg.quantize_kernel, static_argnames="recipe")


def _prepare(case: Case, *, recipe: Recipe | None, cached: bool) -> Work:
    sizes = jnp.asarray(case.sizes)
    state = scale = None
    if isinstance(recipe, jg.DelayedScaling):
        # One step from the initial state: then the scales bring the operands into the range of FP8, as in training.
        initial = jg.Fp8State.initial(recipe, case.shape.num_groups)
        state = _next_state(recipe, *case.inputs[0], sizes, None, initial)
        scale = state.scales(recipe).kernel
    sets = [
        (*inputs, sizes, _quantize_kernel(inputs.kernel, recipe=recipe, scale=scale) if cached else None, state)
        for inputs in case.inputs
    ]
    return JaxWork(_step(recipe), sets)


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
}
