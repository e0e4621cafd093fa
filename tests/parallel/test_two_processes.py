"""Two processes, with several CPU devices each, train as one device does, and exchange tokens in both ways."""

import itertools
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from tests.parallel import layer, programs, training_process

ROOT = Path(__file__).parents[2]
PROCESSES, SECONDS = 2, 120


def test_two_processes_compute_what_one_device_does(tmp_path: Path) -> None:
    port = free_port()
    started = [Started(tmp_path / f"process {process}", port, process) for process in range(PROCESSES)]
    try:
        # While they compile.
        device = jax.devices("cpu")[0]
        losses, _ = programs.on_one_device(device, "xla")
        one_device = Mesh(np.array([device]), ("data",))
        layer_results = {recipe: layer.results(one_device, recipe) for recipe in layer.RECIPES}
        wait(started)
    finally:
        for process in started:
            process.kill()

    assert all(process.succeeded for process in started), "\n".join(map(str, started))
    for process in started:
        arrays = np.load(process.arrays)
        np.testing.assert_allclose(arrays["losses"], losses, rtol=programs.FLOAT32_TOLERANCE)
        for recipe, expected in layer_results.items():
            for method, name in itertools.product(layer.METHODS, expected):
                process_array = arrays[f"{recipe} {method} {name}"]
                error = np.linalg.norm(process_array - expected[name]) / np.linalg.norm(expected[name])
                assert error <= layer.TOLERANCES[recipe], f"{recipe}, {method}, {name} {process_array.shape}: {error}"
    assert losses[-1] < 0.9 * losses[0]


class Started:
    """Process of `tests.training_process`, and the files that it writes below a name."""

    def __init__(self, name: Path, port: int, process: int):
        self.arrays, self.errors = name.with_suffix(".npz"), name.with_suffix(".err")
        arguments = [str(port), str(process), str(PROCESSES), str(self.arrays)]
        with self.errors.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", training_process.__name__, *arguments],
                stdout=errors,
                stderr=errors,
                cwd=ROOT,
                env=os.environ | {"JAX_PLATFORMS": "cpu"},
            )

    def __str__(self) -> str:
        return f"{self.errors.name}, exit code {self._process.returncode}:\n{self.errors.read_text()}"

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def succeeded(self) -> bool:
        return self._process.poll() == 0

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def wait(started: list[Started]) -> None:
    """Waits until all have ended, the time is over, or one has failed, for which others might wait forever."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline and not all(process.ended for process in started):
        if any(process.ended and not process.succeeded for process in started):
            return
        time.sleep(0.1)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]
