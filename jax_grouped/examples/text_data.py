"""Text as bytes: reading it, holding a region out, and cutting windows that depend on seed and step alone."""

import hashlib
import os
import sysconfig
from collections.abc import Set
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jax_grouped.examples.settings import UsageError

#: The last 1/20 of the text is never trained on.
HELD_OUT_PART = 20

#: Not sources of the library itself, or not shipped with every interpreter.
_SKIPPED_IN_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


class Corpus(NamedTuple):
    """A text in two contiguous regions.

    Attributes:
        name: the place that it was read from, in words.
        train: `uint8[N]`.
        held_out: `uint8[M]`, the bytes after `train`.
        sha256: fingerprint of all of them.
    """

    name: str
    train: np.ndarray
    held_out: np.ndarray
    sha256: str


def read_corpus(path: str | None, sequence: int) -> Corpus:
    """Reads a file, a folder of text files, or, for None, the Python sources of the standard library.

    A folder's files follow one another in an order drawn from their names, so that the held-out region at the end is
    a fair sample of them and not the end of the alphabet. Hidden files and files that hold a zero byte are left out.
    Raises a UsageError if one of the two regions is not longer than a window of `sequence` bytes.
    """
    stdlib = sysconfig.get_path("stdlib")
    if path is None:
        name, text = f"the standard library in {stdlib}", _read_folder(Path(stdlib), ".py", _SKIPPED_IN_STDLIB)
    else:
        name, text = path, _read_folder(Path(path), "", set()) if os.path.isdir(path) else Path(path).read_bytes()
    needed = HELD_OUT_PART * (sequence + 1)
    if len(text) < needed:
        raise UsageError(f"--data: {name} holds {len(text)} bytes of text, --sequence {sequence} needs {needed}")
    data = np.frombuffer(text, np.uint8)
    boundary = len(data) - len(data) // HELD_OUT_PART
    return Corpus(name, data[:boundary], data[boundary:], hashlib.sha256(text).hexdigest())


def _read_folder(root: Path, suffix: str, skipped: Set[str]) -> bytes:
    def is_read(name: Path) -> bool:
        hidden = any(part.startswith(".") for part in name.parts)
        return not hidden and skipped.isdisjoint(name.parts) and (root / name).is_file()

    names = filter(is_read, (file.relative_to(root) for file in root.rglob(f"*{suffix}")))
    shuffled = sorted(names, key=lambda name: hashlib.sha256(os.fsencode(name.as_posix())).digest())
    return b"".join(text for text in ((root / name).read_bytes() for name in shuffled) if b"\0" not in text)


def random_windows(data: np.ndarray, sequence: int, batch: int, seed: int, step: int) -> np.ndarray:
    """Returns `uint8[batch, sequence + 1]`, windows at random places, the same ones for the same arguments.

    A run that is resumed at some step thus sees the text that it would have seen without the interruption.
    """
    starts = np.random.default_rng((seed, step)).integers(len(data) - sequence, size=batch)
    return data[starts[:, None] + np.arange(sequence + 1)]


def even_windows(data: np.ndarray, sequence: int, count: int) -> np.ndarray:
    """Returns `uint8[count, sequence + 1]`, windows spread evenly over all of `data`."""
    starts = np.linspace(0, len(data) - sequence - 1, count).astype(np.int64)
    return data[starts[:, None] + np.arange(sequence + 1)]
