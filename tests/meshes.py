"""Meshes that tests shard over."""

from collections.abc import Mapping

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh


def need_devices(count: int) -> None:
    """Skips the test if there are fewer devices. GPUs are the machine's own; `conftest` makes enough CPU devices."""
    if jax.device_count() < count:
        pytest.skip(f"needs {count} devices")


def data_mesh(devices: int) -> Mesh:
    """Returns a mesh of `devices` devices along the axis `data`. Skips as `need_devices` does."""
    return make_mesh({"data": devices})


def make_mesh(axes: Mapping[str, int]) -> Mesh:
    """Returns a mesh of the first devices, with axes of these sizes; the first axis is the slowest.

    Skips as `need_devices` does.
    """
    devices = int(np.prod([*axes.values()]))
    need_devices(devices)
    types = (AxisType.Auto,) * len(axes)
    return jax.make_mesh((*axes.values(),), (*axes,), axis_types=types, devices=jax.devices()[:devices])


TYPES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


def typed_mesh(kind: str, axes: Mapping[str, int]) -> Mesh:
    """Returns `make_mesh(axes)` with axes of one of the `TYPES`."""
    mesh = make_mesh(axes)
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(TYPES[kind],) * len(axes))
