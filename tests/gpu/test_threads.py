"""Host threads that share a device give the bits that each gives alone, with and without command buffers.

Several threads run programs of their own on one device, over and over. `python3 -m tests.gpu.test_threads CASE` fails
if any result has other bits, or if a call fails. A hang ends the process with every thread's stack.
"""

import dataclasses
import faulthandler
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped as jg
from jax_grouped.fp8.recipes import Recipe
from tests.gpu import replays

pytestmark = pytest.mark.gpu

SECONDS = 10
#: Calls that are under way before a thread looks at the last one's result.
CALLS = 64


@dataclasses.dataclass(frozen=True)
class Job:
    """Program of one thread."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]


def random_sizes(tokens: int, groups: int) -> jax.Array:
    ends = np.sort(np.random.default_rng(groups).integers(0, tokens + 1, groups))
    return jnp.asarray(np.diff(ends, prepend=0), jnp.int32)


def quantization(tokens: int, features: int, groups: int, mode: jg.ScalingMode = jg.ScalingMode.BLOCK_1D) -> Job:
    def quantize(x: jax.Array, sizes: jax.Array) -> Any:
        quantized = jg.grouped_quantize(x, sizes, mode, columnwise=True)
        # The columnwise bytes after a group are unspecified, so they are not compared.
        return quantized.rowwise.data, quantized.amax

    x = jax.random.normal(jax.random.key(groups), (tokens, features), jnp.bfloat16)
    return Job(jax.jit(quantize), (x, random_sizes(tokens, groups)))


def gradients(recipe: Recipe | None, groups: int) -> Job:
    tokens, tail = 4096, 200
    sizes = random_sizes(tokens - tail, groups)
    state = jg.Fp8State.initial(recipe, groups) if isinstance(recipe, jg.DelayedScaling) else None
    x = jax.random.normal(jax.random.key(0), (tokens, 512), jnp.bfloat16).at[-tail:].set(jnp.nan)
    kernel = jax.random.normal(jax.random.key(1), (groups, 512, 768))

    def loss(kernel: jax.Array, x: jax.Array, state: Any) -> jax.Array:
        y = jg.grouped_dense(x, kernel, sizes, recipe=recipe, fp8_state=state)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    return Job(jax.jit(jax.grad(loss, argnums=(0, 1, 2))), (kernel, x, state))


def layer(recipe: Recipe | None, experts: int) -> Job:
    keys = jax.random.split(jax.random.key(experts), 4)
    x = jax.random.normal(keys[0], (2048, 256), jnp.bfloat16)
    logits = jax.random.normal(keys[1], (2048, experts))
    kernels = jax.random.normal(keys[2], (experts, 256, 512)), jax.random.normal(keys[3], (experts, 256, 256))
    states = None
    if isinstance(recipe, jg.DelayedScaling):
        states = [jg.Fp8State.initial(recipe, experts) for _ in kernels]

    def loss(x: jax.Array, logits: jax.Array, kernels: Any, states: Any) -> jax.Array:
        given_states = states or [None] * len(kernels)
        weights = [jg.moe.Weights(kernel, fp8_state=state) for kernel, state in zip(kernels, given_states, strict=True)]
        y, _ = jg.moe.moe_mlp(x, logits, *weights, router=jg.moe.Router(4), recipe=recipe)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    return Job(jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3))), (x, logits, kernels, states))


CASES: dict[str, Callable[[], list[Job]]] = {
    # Setups of one kernel with more and with less shared memory.
    "tables": lambda: [quantization(8192, 4096, 1000), quantization(8192, 4096, 2)],
    "large_tables": lambda: [quantization(8192, 1024, 8000), quantization(8192, 1024, 2000)],
    "recipes": lambda: [
        gradients(None, 4),
        gradients(jg.Float8BlockScaling(), 64),
        gradients(jg.Float8CurrentScaling(), 300),
        gradients(jg.DelayedScaling(amax_history_len=4), 17),
    ],
    "layers": lambda: [
        layer(None, 16),
        layer(jg.Float8BlockScaling(), 64),
        layer(jg.Float8BlockScaling(), 8),
        layer(jg.DelayedScaling(amax_history_len=4), 16),
    ],
    # Grids whose blocks wait for each other.
    "single_launches": lambda: [
        quantization(1024, 768, 8, jg.ScalingMode.TENSOR),
        quantization(1024, 768, 200, jg.ScalingMode.TENSOR),
        quantization(1024, 768, 16),
        gradients(jg.Float8CurrentScaling(), 8),
    ],
}


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def run_together(jobs: Sequence[Job], seconds: float) -> list[str]:
    """Runs each job in a thread of its own, and returns the failures."""
    expected = [bits(job.function(*job.arguments)) for job in jobs]
    calls = [0] * len(jobs)
    problems: list[str] = []
    end = time.monotonic() + seconds

    def run(index: int, job: Job) -> None:
        try:
            while time.monotonic() < end and not problems:
                for _ in range(CALLS):
                    result = job.function(*job.arguments)
                calls[index] += CALLS
                if bits(result) != expected[index]:
                    problems.append(f"job {index} has wrong bits after {calls[index]} calls")
        except Exception as error:
            problems.append(f"job {index} failed after {calls[index]} calls: {error}")

    threads = [threading.Thread(target=run, args=item) for item in enumerate(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print("calls:", *calls, flush=True)
    return problems


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "commands", ["", replays.CAPTURED["xla_gpu_enable_command_buffer"]], ids=["uncaptured", "captured"]
)
def test_threads_do_not_disturb_each_other(case: str, commands: str) -> None:
    flags = f"--xla_gpu_enable_command_buffer={commands} --xla_gpu_graph_min_graph_size=1"
    replays.run_program("test_threads", case, xla_flags=flags)


if __name__ == "__main__":
    faulthandler.dump_traceback_later(120 + 3 * SECONDS, exit=True)
    sys.exit("\n".join(run_together(CASES[sys.argv[1]](), SECONDS)) or 0)
