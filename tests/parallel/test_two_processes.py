"""Two processes, with several CPU devices each, train as one device does, and exchange tokens in both ways."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np

from tests.meshes import make_mesh
from tests.parallel import programs

PROCESSES, SECONDS = 2, 120
#: The experts' axis is the first, so it spans the processes.
AXES = dict(expert=4, data=2)
IN_FP8 = dict(recipe=programs.BLOCK, use_bias=False)


def train(port: str, process: str, out: str) -> None:
    """Trains in FP8 in one of the processes, and writes the losses of all steps."""
    jax.config.update("jax_num_cpu_devices", 4)
    jax.distributed.initialize(f"localhost:{port}", PROCESSES, int(process), initialization_timeout=60)
    losses, _ = programs.under_jit(programs.model("linen", AXES, **IN_FP8), make_mesh(AXES)).run(3)
    np.save(out, losses)


def test_two_processes_compute_what_one_device_does(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port = listener.getsockname()[1]
    started, outs = [], [tmp_path / f"{process}.npy" for process in range(PROCESSES)]
    for process, out in enumerate(outs):
        command = [sys.executable, "-m", "tests.parallel.test_two_processes", str(port), str(process), str(out)]
        with out.with_suffix(".err").open("w") as errors:
            environment = os.environ | {"JAX_PLATFORMS": "cpu"}
            started.append(
                subprocess.Popen(command, stdout=errors, stderr=errors, cwd=Path(__file__).parents[2], env=environment)
            )
    try:
        # While they compile.
        losses, _ = programs.on_one_device(jax.devices("cpu")[0], "xla", steps=3, **IN_FP8)
        # If one has failed, others might wait for it forever.
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline and None in [process.poll() for process in started]:
            if any(process.poll() for process in started):
                break
            time.sleep(0.1)
    finally:
        for ended in started:
            ended.kill()
            ended.wait()

    errors = "\n".join(out.with_suffix(".err").read_text() for out in outs)
    assert [ended.returncode for ended in started] == [0] * PROCESSES, errors
    for out in outs:
        np.testing.assert_allclose(np.load(out), losses, rtol=programs.FP8_TOLERANCE["xla"])
    assert losses[-1] < 0.9 * losses[0]


if __name__ == "__main__":
    train(*sys.argv[1:])
