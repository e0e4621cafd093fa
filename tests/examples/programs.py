"""Whole runs of `train_moe` in this process, on tiny sizes."""

import contextlib
import csv
import io
import shlex
from pathlib import Path

import jax

from jax_grouped.examples import training
from jax_grouped.examples.settings import count_devices, parse
from jax_grouped.examples.train_moe import main

TINY = shlex.split(
    "--d-model 32 --layers 1 --heads 2 --experts 4 --batch 8 --sequence 32 --learning-rate 0.01 "
    "--eval-every 3 --save-every 4 --sample 0"
)


def run(*flags: object) -> tuple[int, str, str]:
    """Returns the exit status, standard output and standard error of the program."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main([str(flag) for flag in flags])
    return status, out.getvalue(), err.getvalue()


def succeed(*flags: object) -> str:
    """Returns the standard output of the program, which must end with success."""
    status, out, err = run(*flags)
    assert status == 0, err
    return out


def prepared(flags: str) -> training.Run:
    """Prepares a tiny run with these flags."""
    settings = parse([*TINY, *flags.split()])
    return training.prepare(settings, count_devices(settings, jax.device_count()))


def read_rows(folder: Path) -> list[list[str]]:
    with (folder / "loss.csv").open(newline="") as file:
        return list(csv.reader(file))


def files_in(folder: Path) -> dict[str, bytes]:
    """Returns the content of every file of a folder but the lock, by its path."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "train_moe.lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
