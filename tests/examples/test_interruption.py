"""Signals and full disks end a run of `train_moe` without harm: it resumes to the curve of an uninterrupted one."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
import pytest

from jax_grouped.examples import training
from tests.examples.programs import TINY, files_in, read_rows, run

pytestmark = pytest.mark.slow

MAIN = """
from jax_grouped.examples.train_moe import main
sys.exit(main(sys.argv[1:]))
"""

#: Compiles for minutes, in one call outside of Python.
COMPILING = """
import hashlib, sys
import jax

jax.stages.Lowered.compile = lambda _: hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
"""

#: Needs minutes to give the checkpoint of step 8 its name.
SAVING_SLOWLY = """
import os, sys, time

def slow(function):
    def rename(source, *rest, **options):
        if os.path.basename(os.path.normpath(source)).startswith("8."):
            print("saving step 8", flush=True)
            time.sleep(600)
        return function(source, *rest, **options)
    return rename

os.rename, os.replace = slow(os.rename), slow(os.replace)
"""

#: From step 6 on, files cannot be longer than 4096 bytes: the system refuses more as it does on a full disk.
FULL_DISK = """
import resource, sys
from jax_grouped.examples import training

windows = training.random_windows

def full(*arguments):
    if arguments[-1] == 5:
        print("full", flush=True)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    return windows(*arguments)

training.random_windows = full
"""

Start = Callable[[str, Path, str], "subprocess.Popen[str]"]


@pytest.fixture
def start(text_file: Path, shared_programs: dict[str, str]) -> Iterator[Start]:
    """Starts a program in a process, to train 12 steps in a folder; waits until it prints a line that begins so."""
    started: list[tuple[subprocess.Popen[str], threading.Timer]] = []

    def start(program: str, folder: Path, line: str) -> subprocess.Popen[str]:
        flags = ["--data", text_file, "--out", folder, "--steps", 12, *TINY]
        process = subprocess.Popen(
            [sys.executable, "-c", program + MAIN, *map(str, flags)],
            env={**os.environ, **shared_programs, "JAX_NUM_CPU_DEVICES": "8"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append((process, threading.Timer(100, process.kill)))
        started[-1][1].start()
        assert process.stdout
        assert any(printed.startswith(line) for printed in process.stdout), "the program has ended"
        return process

    yield start
    for process, watchdog in started:
        watchdog.cancel()
        process.kill()
        process.communicate()


def resume(folder: Path, step: int, finished: Path) -> None:
    status, out, err = run("--out", folder, "--resume")

    assert status == 0, err
    assert f"resuming at step {step}\n" in out
    assert read_rows(folder) == read_rows(finished)
    assert (folder / "metrics.jsonl").read_text() == (finished / "metrics.jsonl").read_text()
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["12", "8"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_an_interrupted_run_saves_its_last_step_and_resumes_from_it(
    number: int, finished: tuple[Path, str], text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # SIGINT comes before the fifth step, SIGTERM while the checkpoint of the fourth is written.
    windows, save = training.random_windows, ocp.CheckpointManager.save

    def interrupt() -> None:
        os.kill(os.getpid(), number)
        # `timeout` of GNU sends it twice.
        os.kill(os.getpid(), number)

    def interrupted_windows(*arguments: Any) -> Any:
        if number == signal.SIGINT and arguments[-1] == 4:
            interrupt()
        return windows(*arguments)

    def interrupted_save(manager: Any, step: int, **arguments: Any) -> Any:
        if number == signal.SIGTERM and step == 4:
            interrupt()
        return save(manager, step, **arguments)

    monkeypatch.setattr(training, "random_windows", interrupted_windows)
    monkeypatch.setattr(ocp.CheckpointManager, "save", interrupted_save)
    folder = tmp_path / "run"
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    status, _, err = run("--data", text_file, "--out", folder, "--steps", 12, *TINY)
    monkeypatch.undo()

    assert status == 128 + number
    assert err.splitlines()[-1] == "train_moe: interrupted at step 5, which is saved; --resume continues from there"
    assert read_rows(folder)[-1][0] == "5"
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == handlers
    resume(folder, 5, finished[0])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_a_signal_ends_a_compilation_at_once_and_nothing_is_written(number: int, tmp_path: Path, start: Start) -> None:
    process = start(COMPILING, tmp_path / "run", "compiling")

    process.send_signal(number)
    _, err = process.communicate(timeout=30)

    assert (process.returncode, err) == (-number, "")
    assert not files_in(tmp_path / "run")


@pytest.mark.parametrize(
    ("program", "line", "signals", "status", "message"),
    [
        (SAVING_SLOWLY, "saving step 8", [signal.SIGKILL], -signal.SIGKILL, ""),
        (SAVING_SLOWLY, "saving step 8", [signal.SIGINT] * 2, 130, "train_moe: interrupted; --resume continues from"),
        (FULL_DISK, "full", [], 2, "checkpoints: File too large; --resume continues from the latest that is there"),
    ],
    ids=["killed", "a second Ctrl-C", "full disk"],
)
def test_a_run_that_ends_while_it_saves_resumes_from_the_checkpoint_before(
    program: str,
    line: str,
    signals: list[int],
    status: int,
    message: str,
    finished: tuple[Path, str],
    tmp_path: Path,
    start: Start,
) -> None:
    folder = tmp_path / "run"
    process = start(program, folder, line)

    for number in signals:
        process.send_signal(number)
        time.sleep(1.5)
    _, err = process.communicate(timeout=60)

    assert process.returncode == status, err
    *progress, last = err.splitlines()
    assert message in last
    assert all("step " in shown or not shown.strip() for shown in progress), err
    left = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert left[0] == "4"
    assert len(left) == 2, "the checkpoint of step 8 lies there under another name"
    resume(folder, 4, finished[0])
