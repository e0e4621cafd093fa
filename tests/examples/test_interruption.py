"""Ctrl-C and SIGTERM, sent to `train_moe` wherever they could do harm."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jax_grouped.examples import training
from tests.examples.programs import TINY, files_in, read_rows, run

pytestmark = pytest.mark.slow

#: Compiles for minutes, in one call outside of Python.
COMPILING = """
import hashlib, sys
import jax

jax.stages.Lowered.compile = lambda _: hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
from jax_grouped.examples.train_moe import main
sys.exit(main(sys.argv[1:]))
"""

#: Sends itself SIGINT where what saves the checkpoint of step 8 has started the third of Orbax's threads.
INTERRUPTED_WHILE_SAVING = """
import os, signal, sys, threading
import orbax.checkpoint as ocp

save, start, savers, started = ocp.CheckpointManager.save, threading.Thread.start, [], []

def starting(thread):
    start(thread)
    if threading.current_thread() in savers:
        started.append(thread)
        if len(started) == 3:
            os.kill(os.getpid(), signal.SIGINT)

def saving(manager, step, **arguments):
    if step == 8:
        savers.append(threading.current_thread())
    return save(manager, step, **arguments)

threading.Thread.start, ocp.CheckpointManager.save = starting, saving
from jax_grouped.examples.train_moe import main
sys.exit(main(sys.argv[1:]))
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
from jax_grouped.examples.train_moe import main
sys.exit(main(sys.argv[1:]))
"""


Start = Callable[[str, Path, str], "subprocess.Popen[str]"]


@pytest.fixture
def start(text_file: Path, shared_programs: dict[str, str]) -> Iterator[Start]:
    """Starts a program in a process, to train 12 steps in a folder; waits until it prints a line that begins so."""
    processes: list[subprocess.Popen[str]] = []
    watchdogs: list[threading.Timer] = []

    def start(program: str, folder: Path, line: str) -> subprocess.Popen[str]:
        flags = ["--data", text_file, "--out", folder, "--steps", 12, *TINY]
        process = subprocess.Popen(
            [sys.executable, "-c", program, *map(str, flags)],
            env={**os.environ, **shared_programs, "JAX_NUM_CPU_DEVICES": "8"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        watchdogs.append(threading.Timer(100, process.kill))
        watchdogs[-1].start()
        assert process.stdout
        assert any(printed.startswith(line) for printed in process.stdout), "the program has ended"
        return process

    yield start
    for watchdog in watchdogs:
        watchdog.cancel()
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_an_interrupted_run_saves_its_last_step_and_resumes_from_it(
    number: int, finished: tuple[Path, str], text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    windows = training.random_windows

    def interrupted(*arguments: Any) -> Any:
        if arguments[-1] == 4:
            os.kill(os.getpid(), number)
            # `timeout` of GNU sends it twice.
            os.kill(os.getpid(), number)
            time.sleep(0.5)
        return windows(*arguments)

    monkeypatch.setattr(training, "random_windows", interrupted)
    status, _, err = run("--data", text_file, "--out", folder, "--steps", 12, *TINY)

    assert status == 128 + number
    assert err.splitlines()[-1] == "train_moe: interrupted at step 5, which is saved; --resume continues from there"
    assert read_rows(folder)[-1][0] == "5"
    monkeypatch.undo()

    status, out, err = run("--out", folder, "--resume")

    assert status == 0, err
    assert "resuming at step 5" in out
    assert read_rows(folder) == read_rows(finished[0])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_a_signal_ends_a_compilation_at_once_and_the_folder_is_as_it_was(
    number: int, tmp_path: Path, start: Start
) -> None:
    process = start(COMPILING, tmp_path / "run", "compiling")

    process.send_signal(number)
    _, err = process.communicate(timeout=30)

    assert process.returncode == 128 + number
    assert err == "train_moe: interrupted; --resume continues from the latest checkpoint, if there is one\n"
    assert not files_in(tmp_path / "run")


def test_ctrl_c_while_a_checkpoint_is_written_does_not_hang(
    finished: tuple[Path, str], tmp_path: Path, start: Start
) -> None:
    process = start(INTERRUPTED_WHILE_SAVING, tmp_path / "run", "step 6")

    _, err = process.communicate(timeout=60)

    assert process.returncode == signal.SIGINT + 128
    assert "Traceback" not in err
    (step,) = re.findall(r"^train_moe: interrupted at step (\d+), which is saved", err, re.MULTILINE)
    assert (tmp_path / "run" / "checkpoints" / step).is_dir()
    assert read_rows(tmp_path / "run") == read_rows(finished[0])[: int(step) + 2]


def test_a_second_ctrl_c_ends_a_slow_save_and_the_checkpoint_before_is_the_latest(
    finished: tuple[Path, str], tmp_path: Path, start: Start
) -> None:
    folder = tmp_path / "run"
    process = start(SAVING_SLOWLY, folder, "saving step 8")

    process.send_signal(signal.SIGINT)
    time.sleep(1.5)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)

    assert process.returncode == signal.SIGINT + 128
    assert err.endswith("\ntrain_moe: interrupted; --resume continues from the latest checkpoint, if there is one\n")
    status, out, err = run("--out", folder, "--resume")
    assert status == 0, err
    assert "resuming at step 4" in out
    assert read_rows(folder) == read_rows(finished[0])
