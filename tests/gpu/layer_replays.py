"""Whole layers of experts, forward and backward, captured in CUDA graphs and replayed with other routing each time.

Every replay must give the bits of the same step uncaptured. `python3 -m tests.gpu.layer_replays --help` lists the
options. The exit status is 1 if anything differs, or is copied to the host.
"""

import argparse
import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_grouped as jg
from jax_grouped.fp8.recipes import Recipe
from tests.gpu import replays

TOKENS, FEATURES, HIDDEN, EXPERTS, TOP_K = 1000, 256, 512, 16, 3
#: Number of different tokens and logits. Routing differs in every step.
BATCHES = 7
PROFILED_REPLAYS = 10

#: Recipe of each layer, and whether it is given quantized kernels.
LAYERS: dict[str, tuple[Recipe | None, bool]] = {
    "bf16": (None, False),
    "block": (jg.Float8BlockScaling(), False),
    "block cached": (jg.Float8BlockScaling(), True),
    "delayed": (jg.DelayedScaling(amax_history_len=4), False),
}


def preferences(index: int) -> np.ndarray:
    """Draws what is added to the logits of each expert in a step.

    In turn: a little; all tokens choose one expert; all choose the same `TOP_K`; half of the experts get none.
    """
    wanted, unwanted = [(0, 0), (1, 0), (TOP_K, 0), (0, EXPERTS // 2)][index % 4]
    rng = np.random.default_rng(index)
    added = rng.standard_normal(EXPERTS, np.float32)
    added[:wanted] += 100
    added[EXPERTS - unwanted :] -= 100
    return rng.permutation(added)


def step(
    recipe: Recipe | None, arrays: dict[str, Any], caches: Any, states: Any, added: jax.Array
) -> tuple[Any, dict[str, Any]]:
    """Returns the next states, and the result, all gradients and the load of a layer."""

    def layer(x: jax.Array, logits: jax.Array, kernels: Any, states: Any) -> Any:
        parts = zip(kernels, caches, states, strict=True)
        weights = [jg.moe.Weights(kernel, None, cache, state) for kernel, cache, state in parts]
        return jg.moe.moe_mlp(x, logits, *weights, router=jg.moe.Router(TOP_K), recipe=recipe)

    primals = arrays["x"], arrays["logits"] + added, arrays["kernels"], states
    y, pullback, metrics = jax.vjp(layer, *primals, has_aux=True)
    dx, dlogits, dkernels, states = pullback(arrays["dy"])
    gradients = {"dx": dx, "dlogits": dlogits, "dkernels": dkernels, "states": states}
    return states, {"y": y, **gradients, "load": metrics.expert_load}


class Replays:
    """One layer's step, compiled twice: captured, and uncaptured as the reference."""

    def __init__(self, name: str, count: int):
        recipe, cached = LAYERS[name]
        keys = iter(jax.random.split(jax.random.key(0), 3 * BATCHES + 2))

        def normal(*shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
            return jax.random.normal(next(keys), shape, dtype)

        kernels = [0.05 * normal(EXPERTS, FEATURES, 2 * HIDDEN), 0.05 * normal(EXPERTS, HIDDEN, FEATURES)]
        self._batches = [
            {
                "x": normal(TOKENS, FEATURES),
                "logits": normal(TOKENS, EXPERTS, dtype=jnp.float32),
                "dy": normal(TOKENS, FEATURES),
                "kernels": kernels,
            }
            for _ in range(BATCHES)
        ]
        self._caches = [jg.quantize_kernel(kernel, recipe) if recipe and cached else None for kernel in kernels]
        is_delayed = isinstance(recipe, jg.DelayedScaling)
        self._states = [jg.Fp8State.initial(recipe, EXPERTS) if is_delayed else None for _ in kernels]
        self._added = [jnp.asarray(preferences(index)) for index in range(count)]
        lowered = jax.jit(functools.partial(step, recipe)).lower(*self._arguments(0, self._states))
        self._captured = lowered.compile(compiler_options=replays.CAPTURED)
        self._reference = lowered.compile(compiler_options=replays.UNCAPTURED)
        results = jax.eval_shape(functools.partial(step, recipe), *self._arguments(0, self._states))[1]
        self.names = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(results)]

    def _arguments(self, index: int, states: Any) -> tuple[Any, ...]:
        return self._batches[index % BATCHES], self._caches, states, self._added[index]

    def run(self, *, captured: bool) -> tuple[np.ndarray, np.ndarray]:
        """Runs all steps from the initial states; returns their digests and loads. Uncaptured, waits for each step."""
        program, states = self._captured if captured else self._reference, self._states
        digests, loads = [], []
        for index in range(len(self._added)):
            states, results = program(*self._arguments(index, states))
            digests.append(replays.digest(jax.tree.leaves(results)))
            loads.append(results["load"])
            if not captured:
                digests[-1].block_until_ready()
        return replays.fetch(digests, self.names), np.stack(jax.device_get(loads))

    def profile(self) -> tuple[float, int]:
        """Returns the graph launches per captured step, and how often any of them copied something to the host."""
        profiled = range(min(PROFILED_REPLAYS, len(self._added)))
        events = replays.events(lambda: [self._captured(*self._arguments(index, self._states)) for index in profiled])
        launches = replays.occurrences(events, "GraphLaunch") / len(profiled)
        return launches, replays.occurrences(events, "MemcpyD2H", "DtoH")


def main(count: int, names: list[str]) -> int:
    """Prints a line for each layer, and one for each that differs; returns the exit status."""
    failed = False
    for name in names:
        layer = Replays(name, count)
        expected, loads = layer.run(captured=False)
        got, _ = layer.run(captured=True)
        distinct, (launches, copies) = len(np.unique(expected, axis=0)), layer.profile()
        print(
            f"{name}: {count} replays, {int((got != expected).any(axis=(1, 2)).sum())} mismatches, {distinct} distinct "
            f"results, {int((loads == 0).any(axis=1).sum())} with an expert without tokens, "
            f"{int((loads == TOKENS).any(axis=1).sum())} with an expert of all tokens, "
            f"{launches:.1f} graph launches per step, {copies} copies to the host",
            flush=True,
        )
        if difference := replays.first_difference(got, expected, layer.names):
            print(f"{name}: {difference}")
        failed |= bool(difference or copies)
    return int(failed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replays", type=int, default=5000)
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=list(LAYERS))
    options = parser.parse_args()
    sys.exit(main(options.replays, options.layers))
