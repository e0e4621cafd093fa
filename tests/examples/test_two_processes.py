"""Two processes of `train_moe`, started as srun starts two tasks."""

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jax_grouped.examples import training
from jax_grouped.examples.loss_curve import held_out_points, read_losses, train_points
from jax_grouped.examples.processes import saved_steps
from tests.examples.programs import TINY, run, succeed
from tests.processes import free_port, started

pytestmark = pytest.mark.slow


def train(data: str, out: str) -> None:
    """Runs the program three times in one of the processes, and writes down what it did."""
    process, written = os.environ["SLURM_PROCID"], set()

    def see(event: str, arguments: Any) -> None:
        if event == "open" and str(arguments[0]).startswith(out) and arguments[2] & (os.O_WRONLY | os.O_RDWR):
            written.add(os.path.relpath(arguments[0], out).split(os.sep)[0])

    def interrupted(*arguments: Any) -> Any:
        if process == "1" and arguments[-1] == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return windows(*arguments)

    sys.addaudithook(see)
    windows, training.random_windows = training.random_windows, interrupted
    flags, ended = ["--out", out, *TINY, "--save-every", 10_000, "--steps", 10_000], []
    if process == "1":
        ended.append(run("--data", "missing", *flags))
    else:
        with pytest.raises(SystemExit, match="2"):
            run("--data", data, *flags)
    ended.append(run("--data", data, *flags))
    ended.append(run("--out", out, "--resume", "--steps", max(saved_steps(Path(out))) + 2, "--sample", 0))
    Path(f"{out}.{process}").write_text(json.dumps([ended, sorted(written)]))


def test_two_tasks_train_together_stop_together_and_resume(
    finished: tuple[Path, str], text_file: Path, tmp_path: Path, shared_programs: dict[str, str]
) -> None:
    folder, job = tmp_path / "run", {"SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2"}
    job |= shared_programs | {"JAX_COORDINATOR_PORT": free_port(), "JAX_NUM_CPU_DEVICES": "1"}
    job["NPROC"] = "1"  # Threads of XLA, which would wait for work in a loop.
    tasks = [{**job, "SLURM_PROCID": task, "SLURM_LOCALID": task} for task in ("0", "1")]

    with started("tests.examples.test_two_processes", [str(text_file), str(folder)], tasks, tmp_path):
        pass

    (first, resumed), written = json.loads(Path(f"{folder}.0").read_text())
    (missing, *others), checkpoints = json.loads(Path(f"{folder}.1").read_text())
    two, (step, _) = read_losses(folder / "loss.csv"), sorted(saved_steps(folder))
    assert step >= 6
    assert f"train_moe: interrupted at step {step}, which is saved; --resume continues from there\n" in first[2]
    assert "2 devices of 2 processes with the experts over 2" in first[1]
    assert f"note: resuming at step {step}\n" in resumed[1]
    assert [first[0], resumed[0]] == [130, 0]
    assert missing[:2] == [2, ""]
    assert missing[2].endswith("missing: No such file or directory\n")
    assert others == [[130, "", ""], [0, "", ""]]
    assert {"train_moe.lock", "settings.json.part", "loss.png"} < {*written}
    assert {*checkpoints} <= {"checkpoints"}

    shutil.rmtree(folder / "checkpoints" / str(step + 2))
    out = succeed("--out", folder, "--resume", "--parallel", "none", "--sample", 0)
    assert f"note: resuming at step {step}\n" in out

    one, expected = read_losses(folder / "loss.csv"), read_losses(finished[0] / "loss.csv")
    for points in (train_points, held_out_points):
        np.testing.assert_allclose(points(two[:7]), points(expected[:7]), rtol=0.02)
        np.testing.assert_allclose(points(two), points(one), rtol=0.02)


if __name__ == "__main__":
    train(*sys.argv[1:])
