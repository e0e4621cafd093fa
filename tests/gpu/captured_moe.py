"""An MoE layer forward and backward, run many times with other tokens, and so other routing, each time.

`python3 -m tests.gpu.captured_moe OUT STEPS RECIPE` writes the same file as `tests.gpu.captured_steps`. Steps carry
quantized kernels, and a flag on the device says in which steps they are quantized again.
"""

import argparse
import functools
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_grouped as jg
from tests.gpu import replays

PROFILED_STEPS = 20
TOKENS, FEATURES = 1000, 256
#: Number of different batches, and of steps that share the quantized kernels. They have no common factor.
BATCHES, MICROBATCHES = 7, 4
RECIPES = {"block": jg.Float8BlockScaling(), "delayed": jg.DelayedScaling(amax_history_len=4)}


class Steps:
    """The steps of one recipe."""

    def __init__(self, recipe: str):
        layer = jg.linen.MoEMlp(
            num_experts=16,
            top_k=3,
            hidden_features=512,
            dtype=jnp.bfloat16,
            recipe=RECIPES[recipe],
            cache_kernel=True,
        )
        # Tokens are far from each other, so that experts are chosen unequally and often not at all.
        self._batches = [
            3 * jax.random.normal(jax.random.key(seed), (TOKENS, FEATURES), jnp.bfloat16) for seed in range(BATCHES)
        ]
        variables = layer.init(jax.random.key(100), self._batches[0])
        self._cache = variables.pop("kernel_cache")
        self._variables = variables
        self._flags = [jnp.asarray(index == 0) for index in range(MICROBATCHES)]

        @functools.partial(jax.jit, donate_argnums=1)
        def step(variables: Any, cache: Any, x: jax.Array, is_first: jax.Array) -> Any:
            def loss(variables: Any) -> Any:
                (y, metrics), new = layer.apply(
                    variables | {"kernel_cache": cache}, x, is_first_microbatch=is_first, mutable=["kernel_cache"]
                )
                return jnp.mean(y.astype(jnp.float32) ** 2) + metrics.balance_loss, (new["kernel_cache"], metrics)

            (value, (cache, metrics)), gradients = jax.value_and_grad(loss, has_aux=True)(variables)
            # The next microbatches get another kernel, which only a first microbatch may read.
            params = jax.tree.map(lambda p, g: p - 0.5 * g, variables["params"], gradients["params"])
            return variables | gradients | {"params": params}, cache, (value, metrics.expert_load, gradients)

        self._step = step

    def run(self, index: int) -> Any:
        """Returns the results of one step without waiting for the device."""
        x, is_first = self._batches[index % BATCHES], self._flags[index % MICROBATCHES]
        self._variables, self._cache, results = self._step(self._variables, self._cache, x, is_first)
        return results


def main(out: str, steps: int, recipe: str) -> None:
    run = Steps(recipe).run
    results = [run(0)]
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(results[0])]
    digests = [replays.digest(jax.tree.leaves(results[0]))]
    digests += [replays.digest(jax.tree.leaves(run(index))) for index in range(1, steps)]
    fetched = replays.fetch(digests, names)
    events = replays.events(lambda: [run(index) for index in range(min(PROFILED_STEPS, steps))])
    record = {"names": names, "digests": np.asarray(fetched).tolist(), "events": events}
    pathlib.Path(out).write_text(json.dumps(record))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", help="JSON file to write")
    parser.add_argument("steps", type=int)
    parser.add_argument("recipe", choices=RECIPES)
    options = parser.parse_args()
    main(options.out, options.steps, options.recipe)
