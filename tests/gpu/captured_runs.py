"""Runs of programs that XLA captures into CUDA graphs, each in a process of its own."""

import json
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import numpy as np

from tests.gpu.replays import CAPTURED, first_difference

EVERYTHING = CAPTURED["xla_gpu_enable_command_buffer"]


def run(commands: str, out: pathlib.Path, steps: int, variant: str, *options: str) -> dict[str, Any]:
    """Runs steps in a separate process in which XLA captures these kinds of commands, however few they are."""
    xla_flags = f"--xla_gpu_enable_command_buffer={commands} --xla_gpu_graph_min_graph_size=1"
    # Another process might find another of XLA's algorithms fastest for what surrounds the custom calls, which may add
    # up in another order.
    xla_flags += " --xla_gpu_autotune_level=0"
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_FLAGS": xla_flags}
    root = pathlib.Path(__file__).parents[2]
    command = [sys.executable, "-m", "tests.gpu.captured_steps", str(out), str(steps), variant, *options]
    done = subprocess.run(command, cwd=root, env=environment, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text())


def check_replays(module: str, *options: str, expected: str) -> None:
    """Runs a program of replays in a separate process, which must succeed, print this, and launch graphs."""
    done = subprocess.run(
        [sys.executable, "-m", module, *options],
        cwd=pathlib.Path(__file__).parents[2],
        env={**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert expected in done.stdout
    (launches,) = re.findall(r"([\d.]+) graph launches per step", done.stdout)
    assert float(launches) >= 1, done.stdout


def difference(run: dict[str, Any], expected: dict[str, Any]) -> str:
    """Describes the difference of the first steps, as many as both runs have; empty if there is none."""
    assert run["names"] == expected["names"]
    steps = min(len(run["digests"]), len(expected["digests"]))
    got, other = (np.array(one["digests"][:steps]) for one in (run, expected))
    return first_difference(got, other, run["names"])
