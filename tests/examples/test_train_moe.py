"""The example `train_moe`: whole runs on tiny sizes, on one device and on several."""

import itertools
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax.training.train_state import TrainState
from tensorboardX.proto import event_pb2

from jax_grouped.examples import step, training
from jax_grouped.examples.loss_curve import read_losses
from jax_grouped.examples.metrics import read_metrics
from jax_grouped.examples.parallel import programs
from jax_grouped.examples.settings import Devices, parse
from tests.examples.programs import TINY, files_in, prepared, read_rows, run
from tests.meshes import need_devices

pytestmark = pytest.mark.slow

#: With microbatches that share kernels.
DELAYED = "--layer nnx --recipe delayed --microbatches 2"

#: Ends the process when the checkpoint of step 8 is complete but for its name.
KILLED_WHILE_SAVING = """
import os, signal, sys

def guarded(function):
    def rename(source, *rest, **options):
        if os.path.basename(os.path.normpath(source)).startswith("8."):
            os.kill(os.getpid(), signal.SIGKILL)
        return function(source, *rest, **options)
    return rename

os.rename, os.replace = guarded(os.rename), guarded(os.replace)
from jax_grouped.examples.train_moe import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_run_learns_and_leaves_its_files(finished: tuple[Path, str]) -> None:
    folder, out = finished
    rows = read_rows(folder)

    assert rows[0] == ["step", "train_loss", "held_out_loss"]
    assert [row[0] for row in rows[1:]] == [str(step) for step in range(13)]
    assert [row[0] for row in rows[1:] if row[2]] == ["0", "3", "6", "9", "12"]
    before, after = float(rows[1][2]), float(rows[-1][2])
    assert after < before - 1
    assert f"held-out loss before: {before:.3f} nats per byte" in out
    assert f"held-out loss after: {after:.3f} nats per byte" in out
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["12", "8"]
    assert (folder / "load.png").read_bytes().startswith(b"\x89PNG")
    for path in ("loss.png", "loss.csv", "metrics.jsonl", "load.png", "checkpoints/12"):
        assert str(folder / path) in out


def test_a_run_shows_its_metrics(finished: tuple[Path, str]) -> None:
    metrics = read_metrics(finished[0] / "metrics.jsonl")

    assert [row.step for row in metrics] == [3, 6, 9, 12]
    for row in metrics:
        assert np.shape(row.expert_load) == (1, 4)
        assert np.sum(row.expert_load) == pytest.approx(1)
        assert 0.9 < row.balance_loss[0] < 4
        assert row.dropped == [0]
        assert 1 < row.amax[0] < 100, "tokens have a norm of 1 per value"
        assert row.gradient_norm > 0


def test_tensorboard_gets_losses_and_metrics(finished: tuple[Path, str]) -> None:
    folder, _ = finished
    shown = scalars(folder / "tensorboard")

    losses = read_losses(folder / "loss.csv")
    assert shown["loss/train"] == pytest.approx({row.step: row.train for row in losses[1:]}, abs=1e-5)
    assert shown["loss/held_out"] == pytest.approx({row.step: row.held_out for row in losses[::3]}, abs=1e-5)
    for row in read_metrics(folder / "metrics.jsonl"):
        assert shown["gradient_norm"][row.step] == pytest.approx(row.gradient_norm)
        assert shown["amax/block_0"][row.step] == pytest.approx(row.amax[0])
        assert shown["expert_load/block_0/expert_3"][row.step] == pytest.approx(row.expert_load[0][3])


def test_a_resumed_run_has_tensorboard_forget_later_events(finished_copy: Path) -> None:
    shutil.rmtree(finished_copy / "checkpoints" / "12")
    before = {file.name for file in (finished_copy / "tensorboard").iterdir()}

    status, _, err = run("--out", finished_copy, "--resume", "--log", "tensorboard")

    assert status == 0, err
    (added,) = {file.name for file in (finished_copy / "tensorboard").iterdir()} - before
    starts = [of.step for of in events(finished_copy / "tensorboard" / added) if of.session_log.status]
    assert starts == [9], "the run resumes after step 8"


def events(file: Path) -> Iterator[Any]:
    """The events of a file, whose records are a length, its CRC, an event and its CRC."""
    data = file.read_bytes()
    while data:
        end = 12 + struct.unpack_from("<Q", data)[0]
        yield event_pb2.Event.FromString(data[12:end])
        data = data[end + 4 :]


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """The values by step of each tag."""
    found: dict[str, dict[int, float]] = {}
    for event in itertools.chain(*map(events, folder.iterdir())):
        for value in event.summary.value:
            found.setdefault(value.tag, {})[event.step] = value.simple_value
    return found


def test_the_trained_model_writes_the_same_text_when_asked_again(
    finished: tuple[Path, str], finished_copy: Path
) -> None:
    _, out = finished
    text = out[out.index("sample, after a held-out text that ends in ") :]

    status, again, err = run("--out", finished_copy, "--resume", "--sample", 20)

    assert status == 0, err
    assert again.endswith(text)
    assert len(textwrap.dedent(text.split("\n", 1)[1])) >= 20


def test_pairs_without_room_are_counted() -> None:
    need_devices(4)
    prepare = prepared("--parallel expert --devices 4 --capacity-factor 0.5")
    windows = np.random.default_rng(0).integers(97, 105, size=(8, 33), dtype=np.uint8)

    _, metrics = after_steps(prepare, windows[None])

    dropped, load = int(metrics.dropped[0]), int(np.sum(metrics.expert_load))
    assert load == 8 * 32 * 2
    assert dropped >= load // 2


def test_a_resumed_run_has_the_curve_of_an_uninterrupted_one(
    finished: tuple[Path, str], text_file: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    status, _, err = run("--data", text_file, "--out", folder, "--steps", 6, *TINY)
    assert status == 0, err
    # A process that is killed between two checkpoints, while it writes a row, leaves this.
    with (folder / "loss.csv").open("a") as file:
        file.write("7,1.000000,\n8,1.0")

    status, out, err = run("--out", folder, "--resume", "--steps", 12)

    assert status == 0, err
    assert "resuming at step 6" in out
    assert read_rows(folder) == read_rows(finished[0])
    assert (folder / "metrics.jsonl").read_text() == (finished[0] / "metrics.jsonl").read_text()


def test_a_run_killed_while_it_saves_resumes_from_the_checkpoint_before(
    finished: tuple[Path, str], text_file: Path, tmp_path: Path, shared_programs: dict[str, str]
) -> None:
    folder = tmp_path / "run"
    flags = ["--data", text_file, "--out", folder, "--steps", 12, *TINY]
    command = [sys.executable, "-c", KILLED_WHILE_SAVING, *map(str, flags)]
    environment = {**os.environ, **shared_programs, "JAX_NUM_CPU_DEVICES": "8"}
    killed = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    left = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert left[0] == "4"
    assert len(left) == 2, "the checkpoint of step 8 lies there under another name"
    assert read_rows(folder)[-1][0] == "8"
    assert (folder / "train_moe.lock").exists(), "the file stays, its lock does not"

    status, out, err = run("--out", folder, "--resume")

    assert status == 0, err
    assert "resuming at step 4" in out
    assert read_rows(folder) == read_rows(finished[0])
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["12", "8"]


def test_a_run_goes_on_with_devices_that_are_used_otherwise(
    finished: tuple[Path, str], text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_devices(4)
    monkeypatch.setattr(training, "SCALING_STEPS", 2)
    folder = tmp_path / "run"
    flags = ["--parallel", "pmap", "--devices", 2, "--microbatches", 2, "--scaling"]
    status, out, err = run("--data", text_file, "--out", folder, "--steps", 6, *TINY, *flags)
    assert status == 0, err
    assert "pmap over 2 devices" in out
    scaling = re.search(r"scaling: ([\d,]+) bytes per second on 2 devices, ([\d,]+) on one .*: ([\d.]+) %", out)
    assert scaling, out
    together, alone = (int(scaling[group].replace(",", "")) for group in (1, 2))
    assert float(scaling[3]) == pytest.approx(100 * together / (2 * alone), rel=0.01)

    resumed = ["--parallel", "expert", "--devices", 4, "--expert-devices", 2]
    status, out, err = run("--out", folder, "--resume", "--steps", 12, *resumed)

    assert status == 0, err
    assert "4 devices with the experts over 2" in out
    np.testing.assert_allclose(as_numbers(folder), as_numbers(finished[0]), rtol=0.02)


def as_numbers(folder: Path) -> np.ndarray:
    """A curve, with zeros where there is no loss."""
    return np.array([[float(cell or 0) for cell in row] for row in read_rows(folder)[1:]])


def test_delayed_scaling_resumes_with_what_it_remembers(text_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    flags = DELAYED.split()
    status, out, err = run("--data", text_file, "--out", folder, "--steps", 6, *TINY, *flags)
    assert status == 0, err
    interrupted = shutil.copytree(folder, tmp_path / "interrupted")
    shutil.rmtree(interrupted / "checkpoints" / "6")

    status, resumed_out, err = run("--out", interrupted, "--resume")

    assert status == 0, err
    assert "resuming at step 4" in resumed_out
    model = next(line for line in out.splitlines() if line.startswith("model: "))
    assert model.endswith("recipe delayed, Flax nnx")
    assert model in resumed_out
    rows = read_rows(interrupted)
    assert rows == read_rows(folder)
    assert float(rows[-1][2]) < float(rows[1][2])


@pytest.mark.parametrize(
    ("flags", "reference", "tolerance"),
    [
        ("--parallel pmap --devices 2", "", 0.03),
        ("--parallel expert --devices 4 --expert-devices 2", "", 0.03),
        # Microbatches have balance losses of their own, and those of several devices are of other tokens.
        (f"{DELAYED} --parallel expert --devices 4 --expert-devices 2", DELAYED, 0.1),
    ],
    ids=["pmap", "expert", "delayed scaling"],
)
def test_a_step_is_the_same_on_several_devices(
    flags: str, reference: str, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_devices(4)
    monkeypatch.setattr(step, "BALANCE_WEIGHT", 10.0)  # Most of a router's gradient is then the balance loss's.
    windows = np.random.default_rng(0).integers(97, 105, size=(2, 8, 33), dtype=np.uint8)

    expected, actual = (after_steps(prepared(these), windows) for these in (reference, flags))

    # Beside the parameters, Adam's moments: they would show a gradient that is too large, and a balance loss that is a
    # mean over devices (0.07 in the embedding). Rounding to bfloat16 leaves up to 0.02.
    for (path, a), b in zip(jax.tree.leaves_with_path(expected), jax.tree.leaves(actual), strict=True):
        assert a.shape == b.shape
        assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(a), jax.tree_util.keystr(path)


def after_steps(run: training.Run, batches: np.ndarray) -> tuple[TrainState, step.StepMetrics]:
    """The state after a step per batch, and the metrics of the last one; whole arrays on the host."""
    take_step = run.step.compile()
    state, metrics = with_small_gradients(run.programs.initialise()), None
    for batch in batches:
        state, metrics = take_step(state, run.programs.split(batch))
    return jax.device_get((state, metrics))


def with_small_gradients(state: TrainState) -> TrainState:
    """A state whose gradients are not clipped, for that would hide a common factor."""
    params = dict(state.params["params"])
    for layer in ("norm", "logits"):
        params[layer] = jax.tree.map(lambda x: jax.device_put(np.asarray(x) / 5, x.sharding), params[layer])
    return state.replace(params={**state.params, "params": params})


def test_with_expert_parallelism_each_device_has_its_experts() -> None:
    need_devices(4)
    settings = parse([*TINY, "--parallel", "expert", "--recipe", "delayed"])

    state = programs(settings, Devices(4, expert=2)).state

    for path, leaf in jax.tree.leaves_with_path(state):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        experts = "/gate_up/" in name or "/down/" in name
        whole, local = leaf.shape, leaf.sharding.shard_shape(leaf.shape)
        assert local == ((whole[0] // 2, *whole[1:]) if experts else whole), name


def test_resuming_a_finished_run_says_so(finished: tuple[Path, str], finished_copy: Path) -> None:
    status, out, _ = run("--out", finished_copy, "--resume")

    assert status == 0
    assert "the run was at step 12 already" in out
    assert read_rows(finished_copy) == read_rows(finished[0])


def test_progress_tells_of_compilation_steps_and_bytes(text_file: Path, tmp_path: Path) -> None:
    status, out, err = run("--data", text_file, "--out", tmp_path / "run", "--steps", 2, *TINY)

    assert status == 0, err
    assert "\ncompiling" in out
    assert "step 2/2: 100%|" in err
    assert "| 512/512 [" in err


def test_a_new_run_leaves_the_earlier_one(finished_copy: Path, text_file: Path) -> None:
    before = files_in(finished_copy)

    status, out, err = run("--data", text_file, "--out", finished_copy, "--steps", 1, *TINY)

    assert (status, out) == (2, "")
    assert err.endswith("settings.json exists already: continue that run with --resume, or name a new folder\n")
    assert files_in(finished_copy) == before
