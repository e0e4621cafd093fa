"""The folder of a run of `train_moe`: locked, full, damaged, or of somebody else."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jax_grouped.examples.loss_curve import Losses, read_losses
from jax_grouped.examples.metrics import Metrics, line_of
from jax_grouped.examples.run_folder import RunFolder
from jax_grouped.examples.settings import UsageError
from tests.examples.programs import TINY, file_size_limit, files_in, read_rows, run

pytestmark = pytest.mark.slow

#: From step 6 on, files cannot be longer than 4096 bytes: the system refuses more as it does on a full disk.
FULL_DISK = """
import sys
from jax_grouped.examples import training
from jax_grouped.examples.train_moe import main
from tests.examples.programs import file_size_limit

windows, limit = training.random_windows, file_size_limit(4096)

def full(*arguments):
    if arguments[-1] == 5:
        limit.__enter__()
    return windows(*arguments)

training.random_windows = full
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("resumed", [False, True], ids=["new", "resumed"])
def test_a_folder_has_one_process_at_a_time(resumed: bool, finished_copy: Path, text_file: Path) -> None:
    before = files_in(finished_copy)
    with RunFolder(str(finished_copy)).locked():
        flags = ["--resume"] if resumed else ["--data", text_file, *TINY]
        status, _, err = run("--out", finished_copy, *flags)

    assert status == 2
    lock = finished_copy / "train_moe.lock"
    assert err == (
        f"train_moe: error: --out: {finished_copy} is in use by process {os.getpid()}, which has locked {lock}\n"
    )
    assert files_in(finished_copy) == before


def test_a_full_disk_ends_a_run_in_one_line_and_it_resumes_when_there_is_room(
    finished: tuple[Path, str], text_file: Path, tmp_path: Path, shared_programs: dict[str, str]
) -> None:
    folder = tmp_path / "run"
    flags = ["--data", text_file, "--out", folder, "--steps", 12, *TINY]
    full = subprocess.run(
        [sys.executable, "-c", FULL_DISK, *map(str, flags)],
        env={**os.environ, **shared_programs, "JAX_NUM_CPU_DEVICES": "8"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert full.returncode == 2
    *progress, error = full.stderr.splitlines()
    assert error == (
        f"train_moe: error: --out: cannot save a checkpoint in {folder / 'checkpoints'}: File too large; "
        "--resume continues from the latest that is there"
    )
    assert all("step " in line or not line.strip() for line in progress), full.stderr

    status, out, err = run("--out", folder, "--resume")

    assert status == 0, err
    assert "resuming at step 4" in out
    assert read_rows(folder) == read_rows(finished[0])


def change_a_bit(checkpoint: Path) -> None:
    largest = max(checkpoint.rglob("d/*"), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)


def truncate(checkpoint: Path) -> None:
    for path in checkpoint.rglob("d/*"):
        path.write_bytes(path.read_bytes()[:100])


def empty(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint)
    checkpoint.mkdir()


def replace_by_the_other(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint)
    shutil.copytree(checkpoint.with_name("8"), checkpoint)


@pytest.mark.parametrize(
    "damage",
    [change_a_bit, truncate, empty, replace_by_the_other],
    ids=lambda f: f.__name__,
)
def test_a_damaged_checkpoint_is_kept_and_the_one_before_is_taken(
    damage: Callable[[Path], None], finished: tuple[Path, str], finished_copy: Path
) -> None:
    damage(finished_copy / "checkpoints" / "12")
    damaged = files_in(finished_copy / "checkpoints" / "12")

    status, out, err = run("--out", finished_copy, "--resume")

    assert status == 0, err
    assert "note: the checkpoint of step 12 cannot be read (" in out
    (moved,) = finished_copy.glob("unreadable-*")
    assert f") and has been moved to {moved}\n" in out
    assert "note: resuming at step 8\n" in out
    assert files_in(moved / "12") == damaged
    assert read_rows(finished_copy) == read_rows(finished[0])
    assert sorted(path.name for path in (finished_copy / "checkpoints").iterdir()) == ["12", "8"]


def test_without_a_checkpoint_that_can_be_read_nothing_changes(finished_copy: Path) -> None:
    truncate(finished_copy / "checkpoints")
    before = files_in(finished_copy)

    status, _, err = run("--out", finished_copy, "--resume")

    assert status == 2
    assert err.startswith(f"train_moe: error: --resume: no checkpoint in {finished_copy / 'checkpoints'} can be read (")
    assert "of step 12: " in err
    assert "; of step 8: " in err
    assert err.count("\n") == 1
    assert files_in(finished_copy) == before


@pytest.mark.parametrize(
    "change",
    [
        None,
        "",
        '{"data": "/te',
        "\udcff",
        "[1]",
        {"text_sha256": None},
        {"steps": "twelve"},
        {"steps": None},
        {"batch": True},
        {"layer": "haiku"},
        {"colour": "red"},
    ],
    ids=str,
)
def test_damaged_settings_are_named_and_nothing_changes(change: Any, finished_copy: Path) -> None:
    file = finished_copy / "settings.json"
    if isinstance(change, dict):
        changed = {**json.loads(file.read_text()), **change}
        change = json.dumps({name: value for name, value in changed.items() if name != "text_sha256" or value})
    file.unlink()
    if change is not None:
        file.write_text(change, errors="surrogateescape")
    before = files_in(finished_copy)

    status, _, err = run("--out", finished_copy, "--resume")

    assert status == 2
    assert err.startswith("train_moe: error: --resume: ")
    assert "settings.json" in err
    assert err.endswith("restore it, or start anew in another folder\n")
    assert err.count("\n") == 1
    assert files_in(finished_copy) == before


def test_settings_of_another_model_are_told_from_damage(finished_copy: Path) -> None:
    file = finished_copy / "settings.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "d_model": 64}))
    before = files_in(finished_copy)

    status, _, err = run("--out", finished_copy, "--resume")

    assert status == 2
    assert re.search(r"of step 12: it has another \S+ than the model of the settings; of step 8: ", err)
    assert err.count("\n") == 1
    assert files_in(finished_copy) == before


UNEVEN = [Metrics(step, 1.0, [1.0], [[1.0] * step], [0.0], [1.0]) for step in (1, 2)]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("loss.csv", ""),
        ("loss.csv", "something,else\n1,2\n"),
        ("loss.csv", None),
        ("metrics.jsonl", "{}\n"),
        ("metrics.jsonl", "something,else\n1,2\n"),
        ("metrics.jsonl", "".join(map(line_of, UNEVEN))),
        ("metrics.jsonl", None),
    ],
    ids=["empty", "another table", "folder", "no names", "no JSON", "other experts", "folder of metrics"],
)
def test_a_damaged_record_is_named_and_nothing_changes(name: str, content: str | None, finished_copy: Path) -> None:
    what = "losses" if name == "loss.csv" else "metrics"
    file = finished_copy / name
    file.unlink()
    if content is None:
        file.mkdir()
    else:
        file.write_text(content)
    before = files_in(finished_copy)

    status, _, err = run("--out", finished_copy, "--resume", "--steps", 15)

    assert status == 2
    assert str(file) in err
    assert err.endswith(f"; restore it, or move it away to continue without the {what} so far\n")
    assert err.count("\n") == 1
    assert files_in(finished_copy) == before


@pytest.mark.parametrize("kept", [0, 5], ids=["all", "the end"])
def test_a_curve_that_lacks_steps_goes_on(kept: int, finished: tuple[Path, str], finished_copy: Path) -> None:
    shutil.rmtree(finished_copy / "checkpoints" / "12")
    file = finished_copy / "loss.csv"
    rows = file.read_text().splitlines(keepends=True)
    file.unlink()
    if kept:
        file.write_text("".join(rows[: kept + 2]) + rows[kept + 2][:5])

    status, out, err = run("--out", finished_copy, "--resume")

    assert status == 0, err
    assert f"note: {file} lacks {8 - kept} of the 8 steps\n" in out
    expected = read_rows(finished[0])
    assert read_rows(finished_copy) == [*(expected[: kept + 2] if kept else expected[:1]), *expected[10:]]
    assert ("held-out loss before" in out) == bool(kept)


@pytest.mark.parametrize("name", ["settings.json", "checkpoints", "loss.csv", "load.png", "tensorboard"])
def test_a_new_run_is_refused_by_a_folder_that_has_its_files(name: str, text_file: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / name).symlink_to("elsewhere")

    status, _, err = run("--data", text_file, "--out", tmp_path, "--steps", 1, *TINY)

    assert status == 2
    assert err == (
        f"train_moe: error: --out: {tmp_path / name} exists already: continue that run with --resume, "
        "or name a new folder\n"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["notes.txt", name, "train_moe.lock"])
    assert os.readlink(tmp_path / name) == "elsewhere"


def test_losses_that_do_not_fit_on_the_disk_leave_the_file_as_it_was(tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path))
    folder.extend([Losses(0, None, 6.0), Losses(1, 5.5, None)])
    before = folder.csv_path.read_bytes()

    with file_size_limit(len(before) + 5), pytest.raises(UsageError, match="File too large"):
        folder.extend([Losses(2, 5.0, 4.5)])

    assert [path.name for path in tmp_path.iterdir()] == ["loss.csv"]
    assert folder.csv_path.read_bytes() == before
    folder.extend([Losses(2, 5.0, 4.5)])
    assert folder.rows == read_losses(folder.csv_path)
    assert len(folder.rows) == 3
