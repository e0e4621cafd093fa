"""Two processes, with several CPU devices each, train as one device does, and exchange tokens in both ways."""

import os
import sys
from pathlib import Path

import jax
import numpy as np

from tests.meshes import make_mesh
from tests.parallel import programs
from tests.processes import free_port, started

PROCESSES = 2
#: The experts' axis is the first, so it spans the processes.
AXES = dict(expert=4, data=2)
IN_FP8 = dict(recipe=programs.BLOCK, use_bias=False)


def train(port: str, folder: str) -> None:
    """Trains in FP8 in one of the processes, and writes the losses of all steps."""
    process = int(os.environ["PROCESS"])
    jax.config.update("jax_num_cpu_devices", 4)
    jax.distributed.initialize(f"localhost:{port}", PROCESSES, process, initialization_timeout=60)
    losses, _ = programs.under_jit(programs.model("linen", AXES, **IN_FP8), make_mesh(AXES)).run(3)
    np.save(Path(folder, f"{process}.npy"), losses)


def test_two_processes_compute_what_one_device_does(tmp_path: Path) -> None:
    environments = [{"PROCESS": str(process)} for process in range(PROCESSES)]
    with started("tests.parallel.test_two_processes", [free_port(), str(tmp_path)], environments, tmp_path):
        # While they compile.
        losses, _ = programs.on_one_device(jax.devices("cpu")[0], "xla", steps=3, **IN_FP8)

    for process in range(PROCESSES):
        actual = np.load(tmp_path / f"{process}.npy")
        np.testing.assert_allclose(actual, losses, rtol=programs.FP8_TOLERANCE["xla"])
    assert losses[-1] < 0.9 * losses[0]


if __name__ == "__main__":
    train(*sys.argv[1:])
