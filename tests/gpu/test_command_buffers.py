"""A step captured into a CUDA graph gives, launch after launch, what the same step gives uncaptured."""

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

from tests.gpu.captured_steps import PROFILED_STEPS, RECIPES

pytestmark = pytest.mark.gpu

STEPS = 1000


def run(commands: str, out: pathlib.Path, steps: int, recipe: str) -> dict[str, Any]:
    """Runs steps in a process of their own, in which XLA captures these kinds of commands, however few they are."""
    xla_flags = f"--xla_gpu_enable_command_buffer={commands} --xla_gpu_graph_min_graph_size=1"
    environment = {**os.environ, "XLA_FLAGS": xla_flags, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    root = pathlib.Path(__file__).parents[2]
    command = [sys.executable, "-m", "tests.gpu.captured_steps", str(out), str(steps), recipe]
    done = subprocess.run(command, cwd=root, env=environment, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text())


@pytest.fixture(scope="module", params=RECIPES)
def recipe(request: pytest.FixtureRequest) -> str:
    """The name of what the layers compute in."""
    return request.param


@pytest.fixture(scope="module")
def captured(recipe: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("captured") / "steps.json"
    return run("FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL", path, STEPS, recipe)


@pytest.fixture(scope="module")
def uncaptured(recipe: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run("", tmp_path_factory.mktemp("uncaptured") / "steps.json", STEPS, recipe)


def occurrences(run: dict[str, Any], *parts: str) -> int:
    return sum(count for name, count in run["events"].items() if any(part.lower() in name.lower() for part in parts))


def test_every_launch_gives_the_uncaptured_result(captured: dict[str, Any], uncaptured: dict[str, Any]) -> None:
    different = [i for i in range(STEPS) if captured["digests"][i] != uncaptured["digests"][i]]
    assert not different, f"{len(different)} of {STEPS} steps differ, the first is step {different[0]}"
    assert len(set(captured["digests"])) > STEPS / 2, "the sizes must matter for the comparison to mean anything"


def test_steps_are_graph_launches(
    captured: dict[str, Any], uncaptured: dict[str, Any], recipe: str, tmp_path: pathlib.Path
) -> None:
    assert occurrences(captured, "GraphLaunch") >= PROFILED_STEPS, sorted(captured["events"])
    assert occurrences(uncaptured, "GraphLaunch") == 0
    # With nothing else allowed into a graph, what is launched can only be the custom calls.
    calls_only = run("CUSTOM_CALL", tmp_path / "steps.json", PROFILED_STEPS, recipe)
    assert occurrences(calls_only, "GraphLaunch") >= PROFILED_STEPS, sorted(calls_only["events"])
    assert calls_only["digests"] == uncaptured["digests"][:PROFILED_STEPS]
    # Were nothing recorded, the next test would pass whatever happened.
    assert occurrences(uncaptured, "MatmulSetup") >= PROFILED_STEPS
    assert (occurrences(uncaptured, "QuantizeTiles") >= PROFILED_STEPS) == (recipe != "none")


def test_nothing_is_copied_to_the_host(captured: dict[str, Any], uncaptured: dict[str, Any]) -> None:
    for profiled in (captured, uncaptured):
        assert occurrences(profiled, "MemcpyD2H", "DtoH") == 0, sorted(profiled["events"])
