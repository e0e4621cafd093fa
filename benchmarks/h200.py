"""Compiles for an H200 that is not there."""

import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from jax_grouped.backends import extension

_CONFIG = Path(__file__).with_suffix(".txtpb").read_text()


def missing() -> str | None:
    """Returns what has to be installed first, or None if it is all there.

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
    function: Callable[..., Any], *arguments: Any, donated: tuple[int, ...] = (), options: dict[str, Any] | None = None
) -> jax.stages.Compiled:
    """Compiles the function for arguments like these, of which only shapes and types are read.

    Results may lie in the place of `donated` arguments; `options` are XLA's, by name.
    """
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=_sharding()), arguments)
    return jax.jit(function, out_shardings=_sharding(), donate_argnums=donated).lower(*placed).compile(options)
