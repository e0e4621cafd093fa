"""Products that share XLA's temporary memory give the same bits, replay after replay, as those with their own."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu

REPLAYS = 300


@pytest.mark.parametrize("executables", [1, 2], ids=["one-executable", "two-executables"])
@pytest.mark.parametrize("workspaces", ["shared", "own"])
def test_replays_give_the_uncaptured_result(workspaces: str, executables: int) -> None:
    options = ["--replays", str(REPLAYS), "--workspaces", workspaces, "--executables", str(executables), "--poison"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.workspace_stress", *options],
        cwd=pathlib.Path(__file__).parents[2],
        env={**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{REPLAYS} replays each, 0 mismatches" in done.stdout
    (launches,) = re.findall(r"([\d.]+) graph launches per step", done.stdout)
    assert float(launches) >= 1, done.stdout
