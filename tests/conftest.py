"""The backends to test, several CPU devices, and tests marked `gpu`: without one skipped, or an error if asked for."""

import gc
import os
import re
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jax_grouped as jg
from jax_grouped.kernels.primitive import cuda_devices

# Set these before anything asks JAX for a device. Test processes may share one GPU. Sharding is tested on one CPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# XLA's older code generator for CPUs compiles small programs in half the time. JAX 0.12 has no older one, and ignores
# this: its runs test the one that users have.
_OLDER = "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_OLDER}"
jax.config.update("jax_num_cpu_devices", int(os.environ.get("JAX_NUM_CPU_DEVICES") or 8))


#: Memory mappings. Linux allows a process 65530 by default; XLA makes some for every program, and crashes beyond.
_MOST_MAPPINGS = 40_000


@pytest.fixture(scope="module", autouse=True)
def few_programs() -> None:
    """Drops the programs that earlier modules have compiled before they are too many for one process."""
    mappings = Path("/proc/self/maps")
    if mappings.exists() and mappings.read_bytes().count(b"\n") > _MOST_MAPPINGS:
        jax.clear_caches()


@pytest.fixture(params=["xla", pytest.param("cuda", marks=pytest.mark.gpu)])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs a test once per backend, on JAX's default device."""
    if request.param == "cuda":
        # Fill the memory that will be reused with NaN, so that a result, scratch or workspace that nothing wrote shows.
        jax.block_until_ready(jnp.full(2**28, jnp.nan))
    with jg.config.override(backend="xla" if request.param == "xla" else "auto"):
        yield request.param


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--require-gpu", action="store_true", help="fail if JAX sees no GPU; `-m gpu` implies it")


def pytest_configure(config: pytest.Config) -> None:
    asked_for = re.search(r"(?<!not )\bgpu\b", config.getoption("markexpr"))
    if (config.getoption("--require-gpu") or asked_for) and not cuda_devices():
        raise pytest.UsageError("GPU tests were asked for, but JAX sees no NVIDIA GPU.")
    if not cuda_devices():
        # Most of the time goes into compiling programs that run once. Processes that tests start set this too.
        jax.config.update("jax_disable_most_optimizations", True)
        os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    gc.set_threshold(50_000)  # Tracing makes many objects, of which few are garbage.


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)  # So that all processes end at one time.
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not cuda_devices():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU, and JAX sees none"))
