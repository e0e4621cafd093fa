"""The training step of `train_moe` copies nothing to the host, and nothing in it waits for a device."""

import jax
import numpy as np
import pytest

from tests.examples.programs import prepared
from tests.gpu.replays import events, occurrences

pytestmark = pytest.mark.gpu

STEPS = 8


@pytest.mark.parametrize(
    ("parallel", "recipe"), [("none", "bf16"), ("none", "delayed"), ("pmap", "block"), ("expert", "current")]
)
def test_steps_follow_one_another_without_the_host(parallel: str, recipe: str) -> None:
    run = prepared(f"--recipe {recipe} --parallel {parallel} --microbatches 2")
    shape = (run.settings.batch, run.settings.sequence + 1)
    batch = run.programs.split(np.random.default_rng(0).integers(0, 256, shape, np.uint8))
    take_step = run.step.compile()
    state, metrics = take_step(run.programs.initialise(), batch)
    jax.block_until_ready((state, metrics))

    def steps() -> jax.Array:
        nonlocal state, metrics
        for _ in range(STEPS):
            state, metrics = take_step(state, batch)
        return metrics.loss

    counts = events(steps)

    # If the profile recorded nothing, the rest would always pass. A profile can miss the first step.
    assert occurrences(counts, "jax_grouped::") >= STEPS - 1, sorted(counts)
    assert not occurrences(counts, "MemcpyD2H", "DtoH"), sorted(counts)
    assert not occurrences(counts, "Synchronize"), sorted(counts)
