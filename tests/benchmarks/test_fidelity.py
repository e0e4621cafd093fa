"""The comparison of training runs: what it prints, writes and draws, and which runs it does not compare."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fidelity import main

BF16 = {"recipe": "bf16", "seed": 0, "steps": 100, "d_model": 64, "eval_every": 50, "text_sha256": "ab"}


def a_run(folder: Path, final: float, steps: int = 100, **changes: Any) -> Path:
    """The files of a run with evaluations after 0, 50 and 100 steps."""
    folder.mkdir(parents=True)
    (folder / "settings.json").write_text(json.dumps({**BF16, "data": str(folder), **changes}))
    held_out = {0: 5.0, 50: 2 * final, 100: final}
    rows = [f"{step},{'' if step == 0 else 5 / step},{held_out.get(step, '')}" for step in range(steps + 1)]
    (folder / "loss.csv").write_text("\n".join(["step,train_loss,held_out_loss", *rows, ""]))
    return folder


def compare(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def test_runs_near_bf16_are_tabled_written_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [a_run(tmp_path / "bf16", 2.0), a_run(tmp_path / "block", 2.01, recipe="block")]
    results, picture = tmp_path / "fidelity.json", tmp_path / "fidelity.png"

    status = compare("--runs", *runs, "--json", results, "--plot", picture)

    assert status == 0
    header, _, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["recipe", "seed", "steps", "held-out", "loss", "%", "from", "bf16"]
    assert [row.split() for row in rows] == [
        ["bf16", "0", "100", "2.0000", "+0.00"],
        ["block", "0", "100", "2.0100", "+0.50"],
    ]
    _, block = json.loads(results.read_text())
    assert block["settings"] == {**BF16, "recipe": "block"}
    assert block["final_held_out_loss"] == 2.01
    assert block["percent_from_bf16"] == pytest.approx(0.5)
    assert block["held_out"] == {"0": 5.0, "50": 4.02, "100": 2.01}
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("final", "within", "status"),
    [(2.03, 1, 1), (1.97, 1, 1), (2.03, 2, 0), (float("nan"), 2, 1)],
    ids=["above", "below", "in a wider bound", "not a number"],
)
def test_a_run_far_from_bf16_is_named(
    final: float, within: float, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [a_run(tmp_path / "bf16", 2.0), a_run(tmp_path / "delayed", final, recipe="delayed")]

    assert compare("--runs", *runs, "--within", within) == status

    sentence = f"The final held-out loss is more than {within} % from that of bf16: delayed, seed 0.\n"
    assert capsys.readouterr().out.endswith(sentence) == bool(status)


def test_each_run_is_compared_with_bf16_of_its_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [
        a_run(tmp_path / f"{recipe}-{seed}", final, recipe=recipe, seed=seed, eval_every=50 + seed)
        for recipe, seed, final in [("bf16", 0, 1.0), ("bf16", 1, 2.0), ("block", 0, 1.001), ("block", 1, 1.998)]
    ]

    assert compare("--runs", *runs) == 0

    percents = [line.split()[-1] for line in capsys.readouterr().out.splitlines()[2:]]
    assert percents == ["+0.00", "+0.00", "+0.10", "-0.10"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recipe": "block", "seed": 7}, "block, seed 7: one bf16 run of this seed is needed to compare with, got 0"),
        ({}, "bf16, seed 0: one bf16 run of this seed is needed to compare with, got 2"),
        (
            {"recipe": "block", "d_model": 128, "text_sha256": "cd"},
            "block, seed 0: not the bf16 run's d_model, text_sha256, so they cannot be compared",
        ),
        ({"recipe": "block", "steps": 60}, "other: the run has not come to the end of its 100 steps"),
    ],
    ids=["no such seed", "two of bf16", "other model and text", "unfinished"],
)
def test_runs_that_cannot_be_compared_end_in_one_line(
    changes: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [a_run(tmp_path / "bf16", 2.0), a_run(tmp_path / "other", 2.0, **changes)]

    with pytest.raises(SystemExit) as exit_:
        compare("--runs", *runs)

    assert exit_.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith(message)


@pytest.mark.parametrize(
    ("file", "content"),
    [("settings.json", None), ("settings.json", "[1]"), ("settings.json", "{}"), ("loss.csv", "a,b\n1,2\n")],
    ids=["no settings", "settings of no kind", "empty settings", "no curve"],
)
def test_a_folder_without_a_run_ends_in_one_line(
    file: str, content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = a_run(tmp_path / "run", 2.0)
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_text(content)

    with pytest.raises(SystemExit):
        compare("--runs", folder)

    usage, error = capsys.readouterr().err.splitlines()
    assert usage == "usage: python3 -m benchmarks.fidelity [options]"
    assert error.startswith("python3 -m benchmarks.fidelity: error: ")
    assert str(folder) in error
