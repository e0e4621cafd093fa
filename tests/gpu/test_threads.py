"""Host threads that share a device give the bits that each gives alone, with and without command buffers."""

import os
import pathlib
import subprocess
import sys

import pytest

from tests.gpu.threads import CASES

pytestmark = pytest.mark.gpu

SECONDS = 10


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("commands", ["", "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL"], ids=["uncaptured", "captured"])
def test_threads_do_not_disturb_each_other(case: str, commands: str) -> None:
    flags = f"--xla_gpu_enable_command_buffer={commands} --xla_gpu_graph_min_graph_size=1"
    environment = {**os.environ, "XLA_FLAGS": flags, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    command = [sys.executable, "-m", "tests.gpu.threads", case, str(SECONDS)]
    root = pathlib.Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=environment, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
