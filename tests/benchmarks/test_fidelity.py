"""The comparison of training runs: what it prints, writes and draws, and which runs it does not compare."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main

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
    return main(["fidelity", *map(str, arguments)])


def test_runs_near_bf16_are_tabled_written_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Each is compared with bf16 of its seed, wherever it was evaluated as well.
    runs = [
        a_run(tmp_path / f"{recipe}-{seed}", final, recipe=recipe, seed=seed, eval_every=50 + seed)
        for recipe, seed, final in [("bf16", 0, 2.0), ("bf16", 1, 1.0), ("block", 0, 2.01), ("block", 1, 0.999)]
    ]
    results, picture = tmp_path / "fidelity.json", tmp_path / "fidelity.png"

    assert compare("--runs", *runs, "--json", results, "--plot", picture) == 0

    header, _, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["recipe", "seed", "steps", "held-out", "loss", "%", "from", "bf16"]
    assert [row.split()[-2:] for row in rows] == [
        ["2.0000", "+0.00"],
        ["1.0000", "+0.00"],
        ["2.0100", "+0.50"],
        ["0.9990", "-0.10"],
    ]
    block = json.loads(results.read_text())[2]
    assert block == {
        "settings": {**BF16, "recipe": "block"},
        "final_held_out_loss": 2.01,
        "percent_from_bf16": pytest.approx(0.5),
        "held_out": {"0": 5.0, "50": 4.02, "100": 2.01},
    }
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


@pytest.mark.parametrize(
    ("changes", "loss", "message"),
    [
        ({"recipe": "block", "seed": 7}, None, "seed 7: one bf16 run of this seed is needed to compare with, got 0"),
        ({}, None, "bf16, seed 0: one bf16 run of this seed is needed to compare with, got 2"),
        (
            {"recipe": "block", "d_model": 128, "text_sha256": "cd"},
            None,
            "block, seed 0: not the bf16 run's d_model, text_sha256, so they cannot be compared",
        ),
        ({"recipe": "block", "steps": 60}, None, "other: the run has not come to the end of its 100 steps"),
        ({}, "a,b\n1,2\n", "loss.csv"),
    ],
    ids=["no such seed", "two of bf16", "other model and text", "unfinished", "no curve"],
)
def test_runs_that_cannot_be_compared_end_in_one_line(
    changes: dict[str, Any], loss: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [a_run(tmp_path / "bf16", 2.0), a_run(tmp_path / "other", 2.0, **changes)]
    if loss:
        (runs[1] / "loss.csv").write_text(loss)

    with pytest.raises(SystemExit) as exit_:
        compare("--runs", *runs)

    assert exit_.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("settings", [None, "[1]", "{}"], ids=["no settings", "of no kind", "empty settings"])
def test_a_folder_without_a_run_ends_in_one_line(
    settings: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = a_run(tmp_path / "run", 2.0)
    (folder / "settings.json").unlink()
    if settings:
        (folder / "settings.json").write_text(settings)

    with pytest.raises(SystemExit):
        compare("--runs", folder)

    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"python3 -m benchmarks fidelity: error: {folder} holds no run that can be read: ")
