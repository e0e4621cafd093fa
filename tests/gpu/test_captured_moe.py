"""A mixture-of-experts layer in a CUDA graph: routing, permutation, cached kernels, products and gradients."""

import json
import pathlib

import pytest

from tests.gpu.captured_moe import PROFILED_STEPS, RECIPES
from tests.gpu.captured_runs import EVERYTHING, difference, run
from tests.gpu.replays import occurrences

pytestmark = pytest.mark.gpu

STEPS = 1000


@pytest.mark.parametrize("recipe", RECIPES)
def test_captured_steps_give_the_uncaptured_results_without_the_host(recipe: str, tmp_path: pathlib.Path) -> None:
    captured = run(EVERYTHING, tmp_path / "captured.json", STEPS, recipe, module="tests.gpu.captured_moe")
    uncaptured = run("", tmp_path / "uncaptured.json", STEPS, recipe, module="tests.gpu.captured_moe")

    assert not difference(captured, uncaptured)
    distinct = {json.dumps(digests) for digests in captured["digests"]}
    assert len(distinct) > STEPS / 2, "the tokens must matter for the comparison to mean anything"
    assert occurrences(captured["events"], "GraphLaunch") >= PROFILED_STEPS - 1, sorted(captured["events"])
    assert occurrences(uncaptured["events"], "QuantizeTiles") >= PROFILED_STEPS
    for profiled in (captured, uncaptured):
        assert occurrences(profiled["events"], "MemcpyD2H", "DtoH") == 0, sorted(profiled["events"])
