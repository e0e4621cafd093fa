"""A captured layer of experts gives the bits of the uncaptured one, replay after replay, however tokens are routed."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

from tests.gpu.layer_replays import LAYERS

pytestmark = pytest.mark.gpu

REPLAYS = 500


@pytest.mark.parametrize("layer", LAYERS)
def test_replays_give_the_uncaptured_result(layer: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.layer_replays", "--replays", str(REPLAYS), "--layers", layer],
        cwd=pathlib.Path(__file__).parents[2],
        env={**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{layer}: {REPLAYS} replays, 0 mismatches, {REPLAYS} distinct results" in done.stdout
    (launches,) = re.findall(r"([\d.]+) graph launches per step", done.stdout)
    assert float(launches) >= 1, done.stdout
