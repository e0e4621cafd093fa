"""The commands beside `run`: weak scaling, whole models, and the comparison of training runs."""

import dataclasses
import json
import subprocess
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from benchmarks import gpus, model
from benchmarks.__main__ import main
from benchmarks.gpus import LAYERS, RECIPES, exchange, layer
from benchmarks.model import MODELS, Model
from benchmarks.peers import our_model
from benchmarks.runner import Span
from tests.meshes import need_devices

pytestmark = pytest.mark.slow

SMALL = dataclasses.replace(LAYERS["dsv3"], num_groups=4, tokens=32, K=128, N=256, top_k=2)
TINY = Model(64, 4, 2, 16, 4, 2, 32, vocabulary=96, layers=1, sequence=32, sequences=2, microbatches=2)


def test_a_step_on_two_devices_is_that_of_one() -> None:
    need_devices(2)
    twice = dataclasses.replace(SMALL, num_groups=2 * SMALL.num_groups, tokens=2 * SMALL.tokens)
    results = layer(SMALL, RECIPES["bf16"], 2, None).results()
    for got, wanted in zip(results, layer(twice, RECIPES["bf16"], 1, None).results(), strict=True):
        got, wanted = (np.asarray(array, np.float32) for array in (got, wanted))
        assert np.linalg.norm(got - wanted) < 0.03 * np.linalg.norm(wanted)


def test_weak_scaling_is_measured_written_and_printed(monkeypatch: Any, tmp_path: Path, capsys: Any) -> None:
    need_devices(2)
    file = tmp_path / "gpus.json"
    # Communication for 40, and 15 + 15 of it alone, until the next kernel starts; the other GPU waits for longer.
    spans = [
        *(Span("nvjet", 0.0, 10e6), Span("ncclDevKernel_AllGather", 5e6, 30e6), Span("nvjet", 25e6, 40e6)),
        *(Span("ncclDevKernel_SendRecv", 50e6, 60e6), Span("MemcpyP2P", 52e6, 65e6)),
        Span("ncclDevKernel_AllGather", 0.0, 90e6, gpu=1),
    ]
    monkeypatch.setitem(LAYERS, "dsv3", SMALL)
    monkeypatch.setattr(gpus, "cuda_devices", lambda: jax.devices()[:2])
    monkeypatch.setattr(gpus, "profile", lambda *_: spans)

    assert main(["gpus", "--layers", "dsv3", "--variants", "bf16", "--json", str(file)]) == 0
    (row,) = json.loads(file.read_text())["rows"]
    assert (row["communication_ms"], row["exposed_ms"]) == pytest.approx((40 / 4, 30 / 4))  # In one of four calls.
    assert row["efficiency"] == max(map(median, row["one_gpu_ms"])) / median(row["all_gpus_ms"])
    assert f"dsv3 bf16: {row['efficiency']:.1%}" in capsys.readouterr().out
    assert exchange(SMALL, 2).results()[0].shape == (4, SMALL.tokens, SMALL.K)


def test_steps_learn_and_share_quantized_weights() -> None:
    take_step, _ = our_model.training(TINY, "delayed cached, projections")
    first, second, third = (float(take_step()) for _ in range(3))
    assert third < second < first


def test_operations_are_six_per_parameter_that_a_token_uses_and_those_of_attention() -> None:
    olmoe = MODELS["OLMoE-1B-7B"]
    block = 8 * 3 * 2048 * 1024 + 2048 * 64 + 4 * 2048 * 2048
    assert olmoe.operations == 6 * (8 * block + 2048 * 25152) + 8 * 3 * 4096 * 2048 * 2
    assert olmoe.tokens == 65536


def test_models_are_measured_written_and_printed(monkeypatch: Any, tmp_path: Path, capsys: Any) -> None:
    def run(command: list[str], **_: Any) -> Any:
        row = json.dumps(dataclasses.asdict(model.measure_here(*command[3:])))
        return SimpleNamespace(returncode=int("SonicMoE" in command), stdout=row, stderr="a report\nKilled\n")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(model, "cuda_devices", lambda: ["a GPU"])
    monkeypatch.setattr(model, "profile", lambda *_: [Span("nvjet", 0, 3e6), Span("fmha", 3e6, 4e6)])
    monkeypatch.setattr(our_model, "training", lambda *_: (lambda: 2.5, lambda: 3 * 2**30))
    file = tmp_path / "model.json"
    options = ["--models", "OLMoE-1B-7B", "--variants", "bf16 cached", "torch compiled", "SonicMoE"]
    assert main(["model", *options, "--json", str(file)]) == 0
    ours, failed, killed = json.loads(file.read_text())["rows"]
    assert ours["tokens_per_second"] == pytest.approx(65536e3 / ours["milliseconds"][2])
    assert (ours["peak_gib"], ours["losses"]) == (3, [2.5] * 7)
    assert (ours["parts"]["product"], ours["parts"]["attention"]) == (3, 1)
    assert failed["note"].startswith(("RuntimeError: needs a GPU", "ModuleNotFoundError: No module named 'torch'"))
    assert killed["note"] == "ended with 1: Killed"
    assert f"OLMoE-1B-7B, bf16 cached: {ours['tokens_per_second']:,.0f} tokens/s" in capsys.readouterr().out


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


def test_runs_near_bf16_are_tabled_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Each is compared with bf16 of its seed, wherever it was evaluated as well.
    runs = [
        a_run(tmp_path / f"{recipe}-{seed}", final, recipe=recipe, seed=seed, eval_every=50 + seed)
        for recipe, seed, final in [("bf16", 0, 2.0), ("bf16", 1, 1.0), ("block", 0, 2.01), ("block", 1, 0.999)]
    ]
    results = tmp_path / "fidelity.json"
    assert compare("--runs", *runs, "--json", results) == 0
    last_columns = [row.split()[-2:] for row in capsys.readouterr().out.splitlines()[2:]]
    assert last_columns == [["2.0000", "+0.00"], ["1.0000", "+0.00"], ["2.0100", "+0.50"], ["0.9990", "-0.10"]]
    assert json.loads(results.read_text())[2] == {
        "settings": {**BF16, "recipe": "block"},
        "final_held_out_loss": 2.01,
        "percent_from_bf16": pytest.approx(0.5),
        "held_out": {"0": 5.0, "50": 4.02, "100": 2.01},
    }


def test_a_run_far_from_bf16_is_named(tmp_path: Path, capsys: Any) -> None:
    bf16 = a_run(tmp_path / "bf16", 2.0)
    for final, within, far in ((2.03, 1, 1), (1.97, 1, 1), (2.03, 2, 0), (float("nan"), 2, 1)):
        delayed = a_run(tmp_path / f"{final} {within}", final, recipe="delayed")
        assert compare("--runs", bf16, delayed, "--within", within) == far
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
