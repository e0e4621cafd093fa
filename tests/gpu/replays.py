"""Code shared by tests that run one step thousands of times with other sizes: digests of results, and profiles.

Copying results to the host would take longer than the steps, and would leave the device idle between them. So results
are digested where they are, and the digests are fetched at the end.
"""

import collections
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import shapes

#: Options of a program that XLA captures as far as it can, and of one that it does not.
CAPTURED = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL",
    "xla_gpu_graph_min_graph_size": 1,
}
UNCAPTURED = {"xla_gpu_enable_command_buffer": ""}

#: Odd numbers that are far from each other.
_MULTIPLIERS = (0x9E3779B1, 0x85EBCA77)


def changing_sizes(shape: shapes.Shape, index: int) -> np.ndarray:
    """Draws sizes with every skew in turn, hostile ones included, anew for every index."""
    skew = shapes.TEST_SKEWS[index % len(shapes.TEST_SKEWS)]
    return np.random.default_rng(index).permutation(shapes.group_sizes(shape, skew, seed=index))


@jax.jit
def digest(arrays: Sequence[jax.Array]) -> jax.Array:
    """Returns `uint32[n, 3]` for `n` arrays: two position-weighted sums of each one's bits, and if it is all finite.

    Weights are odd, so two arrays that differ in one number never have the same sums.
    """
    return jnp.stack([_digest(array) for array in arrays])


def _digest(array: jax.Array) -> jax.Array:
    words = jax.lax.bitcast_convert_type(array, f"uint{8 * array.dtype.itemsize}").astype(jnp.uint32).ravel()
    position = jax.lax.iota(jnp.uint32, words.size)
    sums = [jnp.sum(words * (position * np.uint32(m) | np.uint32(1)), dtype=jnp.uint32) for m in _MULTIPLIERS]
    return jnp.stack([*sums, jnp.isfinite(array).all().astype(jnp.uint32)])


def fetch(digests: Iterable[jax.Array], names: Sequence[str]) -> np.ndarray:
    """Returns the sums of each step's results on the host, `uint32[steps, n, 2]`.

    Raises:
        AssertionError: a result was not finite. The error gives its name.
    """
    on_host = np.stack(jax.device_get(list(digests)))
    not_finite = np.argwhere(on_host[..., 2] == 0)
    if not_finite.size:
        step, result = not_finite[0].tolist()
        raise AssertionError(f"{len(not_finite)} results have NaN or infinity, the first is {names[result]} of {step}")
    return on_host[..., :2]


def first_difference(got: np.ndarray, expected: np.ndarray, names: Sequence[str]) -> str:
    """Describes the differing steps: their number, the results that differ, and the first one. Empty if none does."""
    different = np.argwhere((got != expected).any(axis=-1))
    if not different.size:
        return ""
    step, result = different[0].tolist()
    count = len(set(different[:, 0].tolist()))
    where = ", ".join(names[index] for index in sorted(set(different[:, 1].tolist())))
    return f"{count} of {len(got)} steps differ, in {where}, the first in {names[result]} of step {step}"


def events(run: Callable[[], Any]) -> dict[str, int]:
    """Counts each event, on host and device, in a profile of `run`. Waits for the results of `run`."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run())
        (file,) = pathlib.Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(file))
    return collections.Counter(event.name for plane in data.planes for line in plane.lines for event in line.events)


def occurrences(counts: dict[str, int], *parts: str) -> int:
    """Counts the events with one of these parts in their name."""
    return sum(count for name, count in counts.items() if any(part.lower() in name.lower() for part in parts))


def run_program(module: str, *options: object, xla_flags: str | None = None) -> None:
    """Runs a module of this folder in a process of its own, which must succeed. `conftest` has set what it inherits."""
    environment = os.environ if xla_flags is None else {**os.environ, "XLA_FLAGS": xla_flags}
    command = [sys.executable, "-m", f"tests.gpu.{module}", *map(str, options)]
    root = pathlib.Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=environment, text=True, capture_output=True, check=False, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
