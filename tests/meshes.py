"""Meshes that tests shard over."""

from collections.abc import Mapping

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh


def data_mesh(devices: int) -> Mesh:
    """So many devices along the axis `data`. Skips as `mesh_of` does."""
    return mesh_of({"data": devices})


def mesh_of(axes: Mapping[str, int]) -> Mesh:
    """A mesh of the first devices, with axes of these sizes, the first one the slowest.

    Skips the test where there are fewer: on GPUs these are the machine's own, while of CPUs `conftest` makes enough.
    """
    devices = int(np.prod([*axes.values()]))
    if jax.device_count() < devices:
        pytest.skip(f"needs {devices} devices")
    types = (AxisType.Auto,) * len(axes)
    return jax.make_mesh((*axes.values(),), (*axes,), axis_types=types, devices=jax.devices()[:devices])
