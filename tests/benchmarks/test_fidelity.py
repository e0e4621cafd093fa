"""The comparison of training runs: what it prints, writes and draws, and which runs it does not compare."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main

BF16 = {"recipe": "bf16", "seed": 0, "steps": 100, "d_model": 64, "eval_every": 50, "text_sha256": "ab"}


def a_run(folder: Path, final: float, **changes: Any) -> Path:
    """Writes the files of a run with evaluations after 0, 50 and 100 steps."""
    folder.mkdir()
    (folder / "settings.json").write_text(json.dumps({**BF16, "data": str(folder), **changes}))
    held_out = {0: 5.0, 50: 2 * final, 100: final}
    rows = [f"{step},{'' if step == 0 else 5 / step},{held_out.get(step, '')}" for step in range(101)]
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
    last_columns = [row.split()[-2:] for row in capsys.readouterr().out.splitlines()[2:]]
    assert last_columns == [["2.0000", "+0.00"], ["1.0000", "+0.00"], ["2.0100", "+0.50"], ["0.9990", "-0.10"]]
    assert json.loads(results.read_text())[2] == {
        "settings": {**BF16, "recipe": "block"},
        "final_held_out_loss": 2.01,
        "percent_from_bf16": pytest.approx(0.5),
        "held_out": {"0": 5.0, "50": 4.02, "100": 2.01},
    }
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("final", "within", "far"), [(2.03, 1, 1), (1.97, 1, 1), (2.03, 2, 0), (float("nan"), 2, 1)])
def test_a_run_far_from_bf16_is_named(final: float, within: float, far: int, tmp_path: Path, capsys: Any) -> None:
    runs = [a_run(tmp_path / "bf16", 2.0), a_run(tmp_path / "delayed", final, recipe="delayed")]
    assert compare("--runs", *runs, "--within", within) == far
    sentence = f"The final held-out loss is more than {within} % from that of bf16: delayed, seed 0.\n"
    assert capsys.readouterr().out.endswith(sentence) == bool(far)


def test_runs_that_cannot_be_compared_end_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bf16 = a_run(tmp_path / "bf16", 2.0)
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"recipe": "block", "seed": 7}, "", "seed 7: one bf16 run of this seed is needed to compare with, got 0"),
        ({"recipe": "block", "d_model": 128}, "", "not the bf16 run's d_model, so they cannot be compared"),
        ({"recipe": "block", "steps": 200}, "", "the run has not come to the end of its 200 steps"),
        ({}, "settings.json", "holds no run that can be read: KeyError: 'recipe'"),
    ]
    for index, (changes, file, message) in enumerate(cases):
        other = a_run(tmp_path / f"other {index}", 2.0, **changes)
        if file:
            (other / file).write_text("{}")
        with pytest.raises(SystemExit, match="2"):
            compare("--runs", bf16, other)
        assert message in capsys.readouterr().err.splitlines()[-1]
