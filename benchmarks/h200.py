"""Compiles for an H200 that is not there."""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import topologies

from jax_grouped.backends import extension

_CONFIG = """
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  device_memory_size: 151397597184
  memory_bandwidth: 4800000000000
  l2_cache_size: 52428800
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}
"""


def missing() -> str | None:
    """What has to be installed first, or None if it is all there.

    On a machine without a GPU, `JAX_PLATFORMS=cpu` is needed as well, or JAX's plugin looks for the GPU's libraries.
    """
    if importlib.util.find_spec("jax_plugins") is None or importlib.util.find_spec("jax_plugins.xla_cuda13") is None:
        return "JAX's plugin for CUDA (jax-cuda13-plugin and jax-cuda13-pjrt)"
    if extension.load() is None:
        return "the CUDA extension, whose handlers XLA asks what they can do"
    return None


@functools.cache
def _sharding() -> jax.sharding.Sharding:
    topology = topologies.get_topology_desc("h200", "cuda", target_config=_CONFIG, topology="1x1x1")
    return jax.sharding.SingleDeviceSharding(topology.devices[0])


def compile_for_h200(
    function: Callable[..., Any],
    *arguments: Any,
    donated: tuple[int, ...] = (),
    options: dict[str, Any] | None = None,
) -> jax.stages.Compiled:
    """The function, compiled for arguments like these, of which only shapes and types are read.

    Args:
        function: what `jax.jit` takes.
        arguments: trees of arrays or `jax.ShapeDtypeStruct`.
        donated: numbers of arguments in whose place results may lie.
        options: of XLA, by name.
    """
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=_sharding()), arguments)
    return jax.jit(function, out_shardings=_sharding(), donate_argnums=donated).lower(*placed).compile(options)
