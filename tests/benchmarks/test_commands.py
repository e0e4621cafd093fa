"""Weak scaling over GPUs and whole models: the programs, on devices of any kind, and their rows."""

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
TINY = Model(64, 4, 2, 16, 4, 2, 32, vocabulary=96, layers=2, sequence=32, sequences=2, microbatches=2)


@pytest.mark.parametrize("variant", RECIPES)
def test_a_step_on_two_devices_is_that_of_one(variant: str) -> None:
    need_devices(2)
    twice = dataclasses.replace(SMALL, num_groups=2 * SMALL.num_groups, tokens=2 * SMALL.tokens)
    results = layer(SMALL, RECIPES[variant], 2, None).results()
    for got, wanted in zip(results, layer(twice, RECIPES[variant], 1, None).results(), strict=True):
        got, wanted = (np.asarray(array, np.float32) for array in (got, wanted))
        assert np.linalg.norm(got - wanted) < 0.03 * np.linalg.norm(wanted)


def test_weak_scaling_is_measured_written_printed_and_drawn(monkeypatch: Any, tmp_path: Path, capsys: Any) -> None:
    need_devices(2)
    file, picture = tmp_path / "gpus.json", tmp_path / "gpus.png"
    # Communication for 40, and 15 + 15 of it alone, until the next kernel starts; the other GPU waits for longer.
    spans = [
        *(Span("nvjet", 0.0, 10e6), Span("ncclDevKernel_AllGather", 5e6, 30e6), Span("nvjet", 25e6, 40e6)),
        *(Span("ncclDevKernel_SendRecv", 50e6, 60e6), Span("MemcpyP2P", 52e6, 65e6)),
        Span("ncclDevKernel_AllGather", 0.0, 90e6, gpu=1),
    ]
    monkeypatch.setitem(LAYERS, "dsv3", SMALL)
    monkeypatch.setattr(gpus, "cuda_devices", lambda: jax.devices()[:2])
    monkeypatch.setattr(gpus, "profile", lambda *_: spans)

    assert main(["gpus", "--layers", "dsv3", "--variants", "bf16", "--json", str(file), "--plot", str(picture)]) == 0
    (row,) = json.loads(file.read_text())["rows"]
    assert (row["communication_ms"], row["exposed_ms"]) == pytest.approx((40 / 4, 30 / 4))  # In one of four calls.
    assert row["efficiency"] == max(map(median, row["one_gpu_ms"])) / median(row["all_gpus_ms"])
    assert f"dsv3 bf16: {row['efficiency']:.1%}" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert exchange(SMALL, 2).results()[0].shape == (4, SMALL.tokens, SMALL.K)


def losses(variant: str) -> list[float]:
    take_step, _ = our_model.training(TINY, variant)
    return [float(take_step()) for _ in range(3)]


def test_steps_learn_and_share_quantized_or_converted_weights() -> None:
    bf16, block, delayed = losses("bf16"), losses("block"), losses("delayed cached, projections")
    assert bf16[2] < bf16[1] < bf16[0]
    assert block == pytest.approx(bf16, rel=0.01)
    assert delayed[2] < delayed[0]
    assert (losses("bf16 cached"), losses("block cached")) == (bf16, block)


def test_operations_are_six_per_parameter_that_a_token_uses_and_those_of_attention() -> None:
    olmoe = MODELS["OLMoE-1B-7B"]
    block = 8 * 3 * 2048 * 1024 + 2048 * 64 + 4 * 2048 * 2048
    assert olmoe.operations == 6 * (8 * block + 2048 * 25152) + 8 * 3 * 4096 * 2048 * 2
    assert olmoe.tokens == 65536


def test_models_are_measured_written_printed_and_drawn(monkeypatch: Any, tmp_path: Path, capsys: Any) -> None:
    def run(command: list[str], **_: Any) -> Any:
        row = json.dumps(dataclasses.asdict(model.measure_here(*command[3:])))
        return SimpleNamespace(returncode=int("SonicMoE" in command), stdout=row, stderr="a report\nKilled\n")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(model, "cuda_devices", lambda: ["a GPU"])
    monkeypatch.setattr(model, "profile", lambda *_: [Span("nvjet", 0, 3e6), Span("fmha", 3e6, 4e6)])
    monkeypatch.setattr(our_model, "training", lambda *_: (lambda: 2.5, lambda: 3 * 2**30))
    file, picture = tmp_path / "model.json", tmp_path / "model.png"
    options = ["--models", "OLMoE-1B-7B", "--variants", "bf16 cached", "torch compiled", "SonicMoE"]
    assert main(["model", *options, "--json", str(file), "--plot", str(picture)]) == 0
    ours, failed, killed = json.loads(file.read_text())["rows"]
    assert ours["tokens_per_second"] == pytest.approx(65536e3 / ours["milliseconds"][2])
    assert (ours["peak_gib"], ours["losses"]) == (3, [2.5] * 7)
    assert (ours["parts"]["product"], ours["parts"]["attention"]) == (3, 1)
    assert failed["note"].startswith(("RuntimeError: needs a GPU", "ModuleNotFoundError: No module named 'torch'"))
    assert killed["note"] == "ended with 1: Killed"
    assert f"OLMoE-1B-7B, bf16 cached: {ours['tokens_per_second']:,.0f} tokens/s" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")
