"""Autotune's file, whatever its path leads to. Needs a C++ compiler, as building the extension does, and no GPU."""

import fcntl
import os
import pathlib
import subprocess
import time

import pytest

from tests.csrc.compiler import COMPILER, compiled

MOST_BYTES = 4 << 20

pytestmark = pytest.mark.skipif(not COMPILER, reason="there is no C++ compiler")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    out = tmp_path_factory.mktemp("build") / "append_to_file"
    return compiled(out, "tests/csrc/append_to_file.cc", "csrc/gemm/cublaslt/text_file.cc")


def append(program: pathlib.Path, path: pathlib.Path | str, text: str = "line\n") -> int:
    """Appends to a file, and returns how many bytes it held; raises if that takes long or much memory."""

    limited = 'ulimit -v 262144 && exec "$0" "$@"'
    command = ["sh", "-c", limited, program, path, text]
    done = subprocess.run(command, timeout=20, check=True, capture_output=True, text=True)
    return int(done.stdout)


def test_lines_are_appended_to_a_file_that_is_made(program: pathlib.Path, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "algorithms.tsv"
    assert [append(program, path, "one\n"), append(program, path, "two\n")] == [0, 4]
    assert path.read_text() == "one\ntwo\n"


@pytest.mark.parametrize("kind", ["/dev/zero", "/dev/full", "fifo", "folder", "loop", "no folder"])
def test_what_is_no_regular_file_is_empty(program: pathlib.Path, tmp_path: pathlib.Path, kind: str) -> None:
    path = pathlib.Path(kind) if kind.startswith("/") else tmp_path / kind
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "loop":
            path.symlink_to(path)
        case "no folder":
            path = path / "algorithms.tsv"
    assert append(program, path) == 0


def test_a_file_has_a_most_length(program: pathlib.Path, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "algorithms.tsv"
    garbage = os.urandom(MOST_BYTES + 1000)
    path.write_bytes(garbage)
    assert append(program, path) == MOST_BYTES
    assert path.read_bytes() == garbage


def test_a_lock_that_is_never_released_is_not_waited_for(program: pathlib.Path, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "algorithms.tsv"
    path.write_text("one\n")
    with path.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        begin = time.monotonic()
        assert append(program, path) == 4
    assert time.monotonic() - begin < 10
    assert path.read_text() == "one\n"
