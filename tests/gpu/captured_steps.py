"""One jitted forward-and-backward step, run many times with other group sizes each time.

`python3 -m tests.gpu.captured_steps OUT STEPS RECIPE` writes to the JSON file OUT a digest of the results of STEPS
steps and what a profile of some of them saw. Whether XLA captures the step into a graph is up to the XLA_FLAGS of the
process.
"""

import collections
import functools
import hashlib
import json
import pathlib
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np

import jax_grouped as jg
from benchmarks import shapes
from jax_grouped.recipes import Recipe

PROFILED_STEPS = 20
SHAPE = shapes.Shape("captured", num_groups=16, tokens=2048, K=256, N=512)
RECIPES = {"none": None, "block": jg.Float8BlockScaling(), "current": jg.Float8CurrentScaling()}


@functools.partial(jax.jit, static_argnums=4)
def step(
    x: jax.Array, kernel: jax.Array, bias: jax.Array, sizes: jax.Array, recipe: Recipe | None
) -> tuple[jax.Array, ...]:
    """The loss and gradients of two layers with shared sizes, one of them with float32 weights."""

    def loss(x: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
        hidden = jax.nn.gelu(jg.grouped_dense(x, kernel, sizes, bias, recipe=recipe))
        y = jg.grouped_dense(hidden, kernel.swapaxes(1, 2), sizes, recipe=recipe)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    value, gradients = jax.value_and_grad(loss, argnums=(0, 1, 2))(x, kernel, bias)
    return value, *gradients


def changing_sizes(index: int) -> np.ndarray:
    """Every skew in turn, hostile ones included, each time drawn anew."""
    skew = shapes.TEST_SKEWS[index % len(shapes.TEST_SKEWS)]
    return np.random.default_rng(index).permutation(shapes.group_sizes(SHAPE, skew, seed=index))


def profile(arguments: tuple[jax.Array, ...], all_sizes: list[jax.Array], recipe: Recipe | None) -> dict[str, int]:
    """How often each event occurs, host and device alike, while steps run and their results stay on the device."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for sizes in all_sizes:
                results = step(*arguments, sizes, recipe)
            jax.block_until_ready(results)
        (file,) = pathlib.Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(file))
    return collections.Counter(event.name for plane in data.planes for line in plane.lines for event in line.events)


def main(out: str, steps: int, recipe: Recipe | None) -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    arguments = (
        jax.random.normal(keys[0], (SHAPE.tokens, SHAPE.K), jnp.bfloat16),
        jax.random.normal(keys[1], (SHAPE.num_groups, SHAPE.K, SHAPE.N)) * 0.05,
        jax.random.normal(keys[2], (SHAPE.num_groups, SHAPE.N), jnp.bfloat16),
    )
    all_sizes = [jnp.asarray(changing_sizes(index)) for index in range(steps)]
    digests = []
    for sizes in all_sizes:
        digest = hashlib.sha256()
        for result in step(*arguments, sizes, recipe):
            array = np.asarray(result)
            assert np.isfinite(array.astype(np.float32)).all(), f"step {len(digests)} gave NaN or infinity"
            digest.update(array.tobytes())
        digests.append(digest.hexdigest())
    events = profile(arguments, all_sizes[:PROFILED_STEPS], recipe)
    pathlib.Path(out).write_text(json.dumps({"digests": digests, "events": events}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), RECIPES[sys.argv[3]])
