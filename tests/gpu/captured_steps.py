"""One jitted forward-and-backward step, run many times with other group sizes each time.

`python3 -m tests.gpu.captured_steps OUT STEPS VARIANT` writes to the JSON file OUT the digests of the results of STEPS
steps, and the events in a profile of some of them. The XLA_FLAGS of the process decide whether XLA captures the step
into a graph.
"""

import argparse
import dataclasses
import functools
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_grouped as jg
from benchmarks import shapes
from jax_grouped.fp8.recipes import Recipe
from tests.gpu import replays

PROFILED_STEPS = 20
SHAPE = shapes.Shape("captured", num_groups=16, tokens=2048, K=256, N=512)

#: Number of kernels to change between.
KERNELS = 3

#: Values carried from step to step, for each of the two layers: a state, a cache, an accumulator, or nothing.
Carry = tuple[Any, Any]
NOTHING: Carry = (None, None)


@dataclasses.dataclass(frozen=True)
class Variant:
    """Recipe and type of the layers, with flags for steps that share a quantized kernel or add up its gradients."""

    recipe: Recipe | None
    cached: bool = False
    accumulates: bool = False
    dtype: str = "bfloat16"

    def initial(self) -> Carry:
        """Returns the carry of the first step. A cache is all zeros, and must not be used."""
        if isinstance(self.recipe, jg.DelayedScaling):
            first, second = (jg.Fp8State.initial(self.recipe, SHAPE.num_groups) for _ in range(2))
            return first, second
        kernel = jnp.zeros((SHAPE.num_groups, SHAPE.K, SHAPE.N))
        if self.cached:
            return self.caches(kernel)
        return (kernel, kernel.swapaxes(1, 2)) if self.accumulates else NOTHING

    def caches(self, kernel: jax.Array, previous: Carry = NOTHING, skip: jax.Array | None = None) -> Carry:
        """Quantizes the kernels of both layers."""
        assert self.recipe is not None
        quantize = functools.partial(jg.quantize_kernel, recipe=self.recipe, skip=skip)
        return quantize(kernel, previous=previous[0]), quantize(kernel.swapaxes(1, 2), previous=previous[1])


VARIANTS = {
    "none": Variant(None),
    "block": Variant(jg.Float8BlockScaling()),
    "current": Variant(jg.Float8CurrentScaling()),
    "delayed": Variant(jg.DelayedScaling(amax_history_len=4)),
    "cached": Variant(jg.Float8BlockScaling(), cached=True),
    "cached_current": Variant(jg.Float8CurrentScaling(), cached=True),
    "accumulating": Variant(None, accumulates=True),
    "accumulating_block": Variant(jg.Float8BlockScaling(), accumulates=True),
    "float16": Variant(None, dtype="float16"),
    "float16_delayed": Variant(jg.DelayedScaling(amax_history_len=4), dtype="float16"),
    "float32": Variant(None, dtype="float32"),
    "float32_block": Variant(jg.Float8BlockScaling(), dtype="float32"),
}


@functools.partial(jax.jit, static_argnames="variant", donate_argnames="carry")
def step(
    variant: Variant,
    carry: Carry,
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array,
    sizes: jax.Array,
    skip: jax.Array | None,
) -> tuple[Carry, dict[str, jax.Array]]:
    """Returns the next carry, and loss and gradients of two layers with shared sizes, one with float32 weights.

    `skip` says on the device whether to keep the quantized kernels of the carry. None means that the host has decided,
    and that the step uses the carry.
    """
    if variant.cached and skip is not None:
        carry = variant.caches(kernel, carry, skip)
    caches = carry if variant.cached else NOTHING
    accumulators = carry if variant.accumulates else NOTHING
    states = NOTHING if variant.cached or variant.accumulates else carry

    def loss(x: jax.Array, kernels: Any, bias: jax.Array, states: Carry) -> jax.Array:
        def dense(layer: int, x: jax.Array, bias: jax.Array | None) -> jax.Array:
            given = dict(fp8_state=states[layer], kernel_cache=caches[layer], dkernel_accumulator=accumulators[layer])
            return jg.grouped_dense(x, kernels[layer], sizes, bias, recipe=variant.recipe, **given)

        y = dense(1, jax.nn.gelu(dense(0, x, bias)), None)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    kernels = kernel, kernel.swapaxes(1, 2)
    value, (dx, dkernels, dbias, states) = jax.value_and_grad(loss, argnums=(0, 1, 2, 3))(x, kernels, bias, states)
    results = {"loss": value, "dx": dx, "dkernel": dkernels[0], "dkernel of layer 1": dkernels[1], "dbias": dbias}
    if variant.accumulates:
        # Halve the sum: thousands of gradients would add up to one that rounds the next ones away.
        return tuple(dkernel / 2 for dkernel in dkernels), results
    # The gradient of a state is the next one.
    for layer, state in enumerate(states):
        if state is not None:
            for field in dataclasses.fields(state):
                results[f"{field.name} of layer {layer}"] = getattr(state, field.name)
    return (caches if variant.cached else states), results


def schedule(steps: int) -> list[tuple[bool, int]]:
    """Returns for each step whether it skips quantization, and the index of its kernel.

    The kernel changes after every quantization, and sometimes in between; then it must not be read.
    """
    draws = np.random.default_rng(0).random((steps, 2))
    skips = draws[:, 0] < 0.7
    skips[0] = False
    unread = skips & (draws[:, 1] < 0.2)
    indices = (np.cumsum(~skips) + unread) % KERNELS
    return list(zip(skips.tolist(), indices.tolist(), strict=True))


class Steps:
    """Steps of one variant, each with sizes of its own. With `cached`, their kernels change."""

    def __init__(self, variant: Variant, steps: int, *, host_decides: bool):
        self._variant, self._host_decides = variant, host_decides
        self._carry = variant.initial()
        keys = jax.random.split(jax.random.key(0), 2 + KERNELS)
        self._x = jax.random.normal(keys[0], (SHAPE.tokens, SHAPE.K), variant.dtype)
        self._bias = jax.random.normal(keys[1], (SHAPE.num_groups, SHAPE.N), jnp.bfloat16)
        shape = SHAPE.num_groups, SHAPE.K, SHAPE.N
        self._kernels = [jax.random.normal(key, shape) * 0.05 for key in keys[2:]]
        self._quantize = jax.jit(variant.caches)
        self._flags = {skip: jnp.asarray(skip) for skip in (False, True)}
        self._schedule = schedule(steps) if variant.cached else [(False, 0)] * steps
        self._sizes = [jnp.asarray(replays.changing_sizes(SHAPE, index)) for index in range(steps)]

    def run(self, index: int) -> dict[str, jax.Array]:
        """Returns the results of one step without waiting for the device."""
        skip, kernel = self._schedule[index]
        flag: jax.Array | None = self._flags[skip]
        if self._host_decides:
            flag = None
            if not skip:
                self._carry = self._quantize(self._kernels[kernel])
        arguments = self._carry, self._x, self._kernels[kernel], self._bias, self._sizes[index], flag
        self._carry, results = step(self._variant, *arguments)
        return results


def main(out: str, steps: int, variant: Variant, host_decides: bool) -> None:
    run = Steps(variant, steps, host_decides=host_decides).run
    names: list[str] = []
    digests = []
    for index in range(steps):
        results = run(index)
        names = list(results)
        digests.append(replays.digest(list(results.values())))
    fetched = replays.fetch(digests, names)

    profiled = range(min(PROFILED_STEPS, steps))
    nothing_of_ours = jax.jit(jnp.sin)
    x = jnp.ones((SHAPE.tokens, SHAPE.K))
    jax.block_until_ready(nothing_of_ours(x))
    record = {
        "names": names,
        "digests": fetched.tolist(),
        "events": replays.events(lambda: [run(index) for index in profiled]),
        "events_of_xla": replays.events(lambda: [nothing_of_ours(x) for _ in profiled]),
    }
    pathlib.Path(out).write_text(json.dumps(record))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", help="JSON file to write")
    parser.add_argument("steps", type=int)
    parser.add_argument("variant", choices=VARIANTS)
    parser.add_argument("--host-decides", action="store_true", help="quantize kernels in a branch on the host")
    options = parser.parse_args()
    main(options.out, options.steps, VARIANTS[options.variant], options.host_decides)
