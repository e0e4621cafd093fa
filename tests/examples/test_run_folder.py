"""The folder of a run of `train_moe`: locked, damaged, or of somebody else."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jax_grouped.examples.run_folder import RunFolder
from tests.examples.programs import TINY, files_in, read_rows, run

pytestmark = pytest.mark.slow


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


def truncate(checkpoint: Path) -> None:
    for path in checkpoint.rglob("d/*"):
        path.write_bytes(path.read_bytes()[:100])


def forget_losses(checkpoint: Path) -> None:
    (checkpoint / "records" / "metadata").write_text("{}")


def replace_by_the_other(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint)
    shutil.copytree(checkpoint.with_name("8"), checkpoint)


@pytest.mark.parametrize(
    "damage", [change_a_bit, truncate, forget_losses, replace_by_the_other], ids=lambda damage: damage.__name__
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
    truncate(checkpoints)
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

    # Another model than that of the checkpoints.
    file.write_text(json.dumps({**recorded, "d_model": 64}))
    assert_refused(finished_copy, "no checkpoint in ", "of step 12: ", "; of step 8: ")

    file.unlink()
    assert_refused(finished_copy, f"{file} is missing or damaged: restore it, or start anew in another folder\n")


def test_a_new_run_is_refused_by_a_folder_that_has_its_files(text_file: Path, tmp_path: Path) -> None:
    for name in ("settings.json", "checkpoints", "loss.csv", "load.png", "tensorboard"):
        (tmp_path / name).symlink_to("elsewhere")

        status, out, err = run("--data", text_file, "--out", tmp_path, "--steps", 1, *TINY)

        assert (status, out) == (2, "")
        exists = f"{tmp_path / name} exists already: continue that run with --resume, or name a new folder"
        assert err == f"train_moe: error: --out: {exists}\n"
        assert os.readlink(tmp_path / name) == "elsewhere"
        assert {path.name for path in tmp_path.iterdir()} == {name, "train_moe.lock"}
        (tmp_path / name).unlink()
