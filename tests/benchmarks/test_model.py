"""Steps of whole models: variants of this library train, caches change nothing, and rows are counted and drawn."""

import json
from pathlib import Path

import pytest

from benchmarks import model, plot
from benchmarks.__main__ import main
from benchmarks.model import MODELS, VARIANTS, Model, Row
from benchmarks.peers import our_model

pytestmark = pytest.mark.slow

TINY = Model(64, 4, 2, 16, 4, 2, 32, vocabulary=96, layers=2, sequence=32, sequences=2, microbatches=2)


def losses(variant: str) -> list[float]:
    run = our_model.training(TINY, **VARIANTS[variant].options)
    return [run.wait(run.step()) for _ in range(3)]


@pytest.mark.parametrize("recipe", ["bf16", "block", "delayed"])
def test_steps_learn_and_share_quantized_or_converted_weights(recipe: str) -> None:
    reference, alone, shared = (losses(variant) for variant in ("bf16", recipe, f"{recipe} cached"))

    assert reference[2] < reference[1] < reference[0]
    assert alone == pytest.approx(reference, rel=0.01)
    assert shared == alone


@pytest.mark.parametrize("recipe", ["bf16", "block"])
def test_projections_of_attention_have_the_recipe_and_the_cache_too(recipe: str) -> None:
    first, _, last = losses(f"{recipe} cached, projections")
    assert last < first


def test_operations_are_six_per_parameter_that_a_token_uses_and_those_of_attention() -> None:
    of = MODELS["OLMoE-1B-7B"]
    block = 8 * 3 * 2048 * 1024 + 2048 * 64 + 4 * 2048 * 2048
    assert of.operations == 6 * (8 * block + 2048 * 25152) + 8 * 3 * 4096 * 2048 * 2
    assert of.tokens == 65536


def test_a_variant_that_fails_gives_a_row_with_the_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(model, "cuda_devices", lambda: ["a GPU"])
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # For the process of the variant, which then has no GPU.
    file = tmp_path / "model.json"

    status = main(["model", "--models", "OLMoE-1B-7B", "--variants", "torch compiled", "--json", str(file)])

    assert status == 0
    (row,) = json.loads(file.read_text())["rows"]
    assert row["note"].startswith(("RuntimeError: needs a GPU", "ModuleNotFoundError: No module named 'torch'"))


def test_a_machine_without_a_gpu_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(model, "cuda_devices", list)
    with pytest.raises(SystemExit, match="2"):
        main(["model"])
    assert "needs a GPU" in capsys.readouterr().err


def test_rows_are_drawn(tmp_path: Path) -> None:
    rows = [
        Row("a", "bf16", [1.0], 1000.0, 0.4, 2.0),
        Row("a", "block", note="too large"),
        Row("b", "block", [1.0], 9.0),
    ]
    picture = tmp_path / "model.png"

    plot.models(rows, "bf16", "H200", picture)

    assert picture.read_bytes().startswith(b"\x89PNG")
