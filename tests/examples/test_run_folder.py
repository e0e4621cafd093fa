"""The folder of a run of `train_moe`: interrupted, full, damaged, locked, or of somebody else."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jax_grouped.examples import training
from jax_grouped.examples.processes import _describe
from jax_grouped.examples.run_folder import RunFolder
from tests.examples.programs import TINY, files_in, read_rows, run, succeed

pytestmark = pytest.mark.slow

#: Gets a signal while it compiles for minutes, in one call outside of Python.
COMPILING = """
def compile(_):
    threading.Timer(0.5, os.kill, (os.getpid(), signals[0])).start()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)

jax.stages.Lowered.compile = compile
"""

#: Gets signals when the checkpoint of step 8 is complete but for its name.
SAVING = """
rename = os.rename

def interrupted(source, *rest, **options):
    if os.path.basename(os.path.normpath(source)).startswith("8."):
        for number in signals:
            os.kill(os.getpid(), number)
            time.sleep(1.5)
    return rename(source, *rest, **options)

os.rename = interrupted
"""

#: From step 6 on, files cannot be longer than 4096 bytes: the system refuses more as it does on a full disk.
FULL_DISK = """
windows = training.random_windows

def full(*arguments):
    if arguments[-1] == 5:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    return windows(*arguments)

training.random_windows = full
"""

PROGRAM = """
import hashlib, os, resource, sys, threading, time
import jax
from jax_grouped.examples import train_moe, training

signals = {signals}
{patch}
sys.exit(train_moe.main(sys.argv[1:]))
"""


def resume(folder: Path, step: int, finished: Path) -> None:
    out = succeed("--out", folder, "--resume")

    assert f"resuming at step {step}\n" in out
    assert read_rows(folder) == read_rows(finished)
    assert (folder / "metrics.jsonl").read_text() == (finished / "metrics.jsonl").read_text()
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["12", "8"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_an_interrupted_run_saves_its_last_step_and_resumes_from_it(
    number: int, finished: tuple[Path, str], text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows = training.random_windows

    def interrupted(*arguments: Any) -> Any:
        if arguments[-1] == 4:
            os.kill(os.getpid(), number)
            # `timeout` of GNU sends it twice.
            os.kill(os.getpid(), number)
        return windows(*arguments)

    monkeypatch.setattr(training, "random_windows", interrupted)
    folder = tmp_path / "run"
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    status, _, err = run("--data", text_file, "--out", folder, "--steps", 12, *TINY)
    monkeypatch.undo()

    assert status == 128 + number
    assert err.splitlines()[-1] == "train_moe: interrupted at step 5, which is saved; --resume continues from there"
    assert read_rows(folder)[-1][0] == "5"
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == handlers
    resume(folder, 5, finished[0])


@pytest.mark.parametrize(
    ("patch", "signals", "status", "message"),
    [
        (COMPILING, [signal.SIGINT], 130, "interrupted: nothing is saved; the same command starts again"),
        (SAVING, [signal.SIGKILL], -signal.SIGKILL, ""),
        (SAVING, 4 * [signal.SIGINT], 130, "interrupted: step 4 is saved; --resume continues from there"),
        (FULL_DISK, [], 2, "checkpoints: File too large; --resume continues from the latest that is there"),
    ],
    ids=["Ctrl-C while compiling", "killed", "a second Ctrl-C", "full disk"],
)
def test_a_run_that_ends_at_once_leaves_what_was_saved_before(
    patch: str,
    signals: list[int],
    status: int,
    message: str,
    finished: tuple[Path, str],
    text_file: Path,
    tmp_path: Path,
    shared_programs: dict[str, str],
) -> None:
    folder = tmp_path / "run"
    program = PROGRAM.format(patch=patch, signals=[*map(int, signals)])
    flags = ["--data", text_file, "--out", folder, "--steps", 12, *TINY]
    environment = {**os.environ, **shared_programs, "JAX_NUM_CPU_DEVICES": "8"}
    command = [sys.executable, "-c", program, *map(str, flags)]

    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=100)

    assert ended.returncode == status, ended.stderr
    *progress, last = ended.stderr.splitlines() or [""]
    assert message in last
    assert all("byte/s" in shown or not shown.strip() for shown in progress), ended.stderr
    if patch == COMPILING:
        assert "\ncompiling" in ended.stdout
        assert not files_in(folder)
        return
    left = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert left[0] == "4"
    assert len(left) == 2, "the checkpoint of step 8 lies there under another name"
    if signals == [signal.SIGKILL]:  # What is left has the same form in all cases.
        resume(folder, 4, finished[0])


def test_a_process_that_ends_at_once_says_how_to_go_on(tmp_path: Path) -> None:
    (tmp_path / "settings.json").touch()
    assert _describe(tmp_path) == f"nothing is saved; delete {tmp_path} or choose another --out, and start again"
    (tmp_path / "checkpoints" / "12").mkdir(parents=True)
    (tmp_path / "checkpoints" / "8").mkdir()
    assert _describe(tmp_path) == "step 12 is saved; --resume continues from there"


def test_a_folder_has_one_process_at_a_time(finished_copy: Path, text_file: Path) -> None:
    before = files_in(finished_copy)
    with RunFolder(str(finished_copy)).locked():
        for flags in (["--resume"], ["--data", text_file, *TINY]):
            status, _, err = run("--out", finished_copy, *flags)

            assert (status, err) == (2, f"train_moe: error: --out: {finished_copy} is in use by another process\n")
    assert files_in(finished_copy) == before


def change_a_bit(checkpoint: Path) -> None:
    largest = max(checkpoint.rglob("d/*"), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)


def forget_losses(checkpoint: Path) -> None:
    (checkpoint / "records" / "metadata").write_text("{}")


@pytest.mark.parametrize("damage", [change_a_bit, forget_losses], ids=lambda damage: damage.__name__)
def test_a_damaged_checkpoint_is_kept_and_the_one_before_is_taken(
    damage: Callable[[Path], None], finished: tuple[Path, str], finished_copy: Path
) -> None:
    damage(finished_copy / "checkpoints" / "12")
    damaged = files_in(finished_copy / "checkpoints" / "12")

    out = succeed("--out", finished_copy, "--resume")

    assert "note: the checkpoint of step 12 cannot be read (" in out
    (moved,) = finished_copy.glob("unreadable-*")
    assert f") and has been moved to {moved}\n" in out
    assert "note: resuming at step 8\n" in out
    assert files_in(moved / "12") == damaged
    assert read_rows(finished_copy) == read_rows(finished[0])
    assert sorted(path.name for path in (finished_copy / "checkpoints").iterdir()) == ["12", "8"]


def assert_refused(folder: Path, *messages: str) -> None:
    before = files_in(folder)

    status, _, err = run("--out", folder, "--resume", "--steps", 15)

    assert status == 2
    assert err.startswith("train_moe: error: --resume: ")
    assert [message for message in messages if message not in err] == [], err
    assert err.count("\n") == 1
    assert files_in(folder) == before


def test_a_folder_without_a_checkpoint_that_can_be_read_is_left_alone(finished_copy: Path) -> None:
    checkpoints = finished_copy / "checkpoints"
    for path in checkpoints.rglob("d/*"):
        path.write_bytes(path.read_bytes()[:100])
    assert_refused(finished_copy, f"no checkpoint in {checkpoints} can be read (of step 12: ", "; of step 8: ")

    for step in ("8", "12"):
        shutil.rmtree(checkpoints / step)
    assert_refused(finished_copy, f"there is no checkpoint in {finished_copy}\n")


def test_damaged_settings_are_named_and_nothing_changes(finished_copy: Path) -> None:
    file = finished_copy / "settings.json"
    recorded = json.loads(file.read_text())
    changes: list[Any] = [{"batch": "eight"}, {"batch": None}, {"layer": "haiku"}, {"colour": "red"}]
    contents = [json.dumps({**recorded, **change}) for change in changes]
    contents += [json.dumps({name: recorded[name] for name in recorded if name != left_out}) for left_out in recorded]
    for content in (*contents, "", '{"data": "/te', "\udcff", "[1]"):
        file.write_text(content, errors="surrogateescape")
        assert_refused(finished_copy, "settings.json", "damaged", ": restore it, or start anew in another folder\n")

    file.unlink()
    assert_refused(finished_copy, f"{file} is missing or damaged: restore it, or start anew in another folder\n")


def test_a_new_run_is_refused_by_a_folder_that_has_its_files(text_file: Path, tmp_path: Path) -> None:
    for name in ("settings.json", "checkpoints", "loss.csv", "load.png", "tensorboard"):
        (tmp_path / name).symlink_to("elsewhere")

        status, out, err = run("--data", text_file, "--out", tmp_path, "--steps", 1, *TINY)

        assert (status, out) == (2, "")
        exists = f"{tmp_path / name} exists already: continue that run with --resume, or name a new folder"
        assert err == f"train_moe: error: --out: {exists}\n"
        assert {path.name for path in tmp_path.iterdir()} == {name, "train_moe.lock"}
        (tmp_path / name).unlink()
