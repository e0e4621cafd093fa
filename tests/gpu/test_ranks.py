"""Four processes that share the machine's GPUs, and NCCL between them: sharded arrays give what one device gives."""

import os
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import jax
import pytest

from tests.processes import free_port, started

RANKS = 4


def run_test(port: str) -> None:
    """Runs the test in one of the processes, which has one device of every mesh."""
    rank, gpus = int(os.environ["RANK"]), int(os.environ["GPUS"])
    jax.distributed.initialize(f"localhost:{port}", RANKS, rank, local_device_ids=[rank % gpus])
    # If it is there, pytest-benchmark warns that the test which starts these processes may be one of pytest-xdist's.
    options = ["-q", "-m", "gpu", "-p", "no:cacheprovider", "-p", "no:benchmark"]
    sys.exit(pytest.main([*options, "tests/parallel/test_any_mesh.py"]))


@pytest.mark.gpu
@pytest.mark.slow
def test_processes_that_share_gpus_compute_what_one_device_does(tmp_path: Path) -> None:
    try:
        nccl = version("nvidia-nccl-cu13")
    except PackageNotFoundError:
        nccl = "0.0"
    if tuple(map(int, nccl.split(".")[:2])) < (2, 30):
        pytest.skip("needs nvidia-nccl-cu13>=2.30, which lets processes share a GPU")
    shared = {"JAX_PLATFORMS": "cuda,cpu", "NCCL_MULTI_RANK_GPU_ENABLE": "1", "GPUS": str(jax.local_device_count())}
    environments = [shared | {"RANK": str(rank)} for rank in range(RANKS)]

    with started("tests.gpu.test_ranks", [free_port()], environments, tmp_path, seconds=900):
        pass


if __name__ == "__main__":
    run_test(*sys.argv[1:])
