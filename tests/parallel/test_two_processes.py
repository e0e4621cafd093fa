"""Two processes, with several CPU devices each, train as one device does."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np

from tests.parallel import programs, training_process

ROOT = Path(__file__).parents[2]
PROCESSES, SECONDS = 2, 120


def test_two_processes_train_as_one_device_does(tmp_path: Path) -> None:
    port = free_port()
    started = [Started(tmp_path / f"process {process}", port, process) for process in range(PROCESSES)]
    try:
        # While they compile.
        expected, _ = programs.on_one_device(jax.devices("cpu")[0], "xla")
        wait(started)
    finally:
        for process in started:
            process.kill()

    assert all(process.succeeded for process in started), "\n".join(map(str, started))
    for process in started:
        losses = json.loads(process.output.read_text().splitlines()[-1])
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert expected[-1] < 0.9 * expected[0]


class Started:
    """Process of `tests.training_process`, and the files that it writes below a name."""

    def __init__(self, name: Path, port: int, process: int):
        self.output, self.errors = name.with_suffix(".out"), name.with_suffix(".err")
        command = [sys.executable, "-m", training_process.__name__, str(port), str(process), str(PROCESSES)]
        with self.output.open("w") as output, self.errors.open("w") as errors:
            self._process = subprocess.Popen(
                command, stdout=output, stderr=errors, cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "cpu"}
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
