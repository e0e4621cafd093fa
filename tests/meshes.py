"""Meshes that tests shard over."""

import jax
import pytest
from jax.sharding import AxisType, Mesh


def data_mesh(devices: int) -> Mesh:
    """So many devices along the axis `data`.

    Skips the test where there are fewer: on GPUs these are the machine's own, while of CPUs `conftest` makes enough.
    """
    if jax.device_count() < devices:
        pytest.skip(f"needs {devices} devices")
    return jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
