"""A step captured into a CUDA graph gives, launch after launch, what the same step gives uncaptured."""

import json
import pathlib
from typing import Any

import pytest

from tests.gpu.captured_runs import EVERYTHING, difference, run
from tests.gpu.captured_steps import PROFILED_STEPS, VARIANTS
from tests.gpu.replays import occurrences

pytestmark = pytest.mark.gpu

STEPS = 5000


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> str:
    """Gives the name of the variant of the layers."""
    return request.param


@pytest.fixture(scope="module")
def captured(variant: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(EVERYTHING, tmp_path_factory.mktemp("captured") / "steps.json", STEPS, variant)


@pytest.fixture(scope="module")
def uncaptured(variant: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run("", tmp_path_factory.mktemp("uncaptured") / "steps.json", STEPS, variant)


def count(run: dict[str, Any], *parts: str) -> int:
    return occurrences(run["events"], *parts)


def test_every_launch_gives_the_uncaptured_result(captured: dict[str, Any], uncaptured: dict[str, Any]) -> None:
    assert not difference(captured, uncaptured)
    distinct = {json.dumps(digests) for digests in captured["digests"]}
    assert len(distinct) > STEPS / 2, "the sizes must matter for the comparison to mean anything"


def test_skipped_quantization_gives_what_a_branch_on_the_host_gives(tmp_path: pathlib.Path) -> None:
    captured = run(EVERYTHING, tmp_path / "captured.json", 500, "cached")
    branch = run("", tmp_path / "branch.json", 500, "cached", "--host-decides")
    assert not difference(captured, branch)


def test_steps_are_graph_launches(
    captured: dict[str, Any], uncaptured: dict[str, Any], variant: str, tmp_path: pathlib.Path
) -> None:
    # A profile can miss the first step.
    assert count(captured, "GraphLaunch") >= PROFILED_STEPS - 1, sorted(captured["events"])
    assert count(uncaptured, "GraphLaunch") == 0
    # Nothing else is allowed into a graph, so every launched graph holds custom calls only.
    calls_only = run("CUSTOM_CALL", tmp_path / "steps.json", PROFILED_STEPS, variant)
    assert count(calls_only, "GraphLaunch") >= PROFILED_STEPS - 1, sorted(calls_only["events"])
    assert not difference(calls_only, uncaptured)
    # If the profile recorded nothing, the next tests would always pass.
    assert count(uncaptured, "jax_grouped::") >= PROFILED_STEPS
    assert (count(uncaptured, "QuantizeTiles") >= PROFILED_STEPS) == (VARIANTS[variant].recipe is not None)


def test_nothing_is_copied_to_the_host(captured: dict[str, Any], uncaptured: dict[str, Any]) -> None:
    for profiled in (captured, uncaptured):
        assert count(profiled, "MemcpyD2H", "DtoH") == 0, sorted(profiled["events"])


def test_nothing_waits_for_the_device(uncaptured: dict[str, Any]) -> None:
    # XLA itself may wait for its launches. A wait in a call of the library would add to every step; in a capture it
    # would be an error.
    ours = count(uncaptured, "Synchronize") - occurrences(uncaptured["events_of_xla"], "Synchronize")
    assert ours < PROFILED_STEPS, sorted(uncaptured["events"])
