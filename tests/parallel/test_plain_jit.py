"""Layers under plain `jax.jit`, with arrays on a mesh: training is that of one device, and only what must travels."""

import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_grouped as jg
from tests.meshes import mesh_of, need_devices
from tests.parallel import programs
from tests.parallel.test_training import DELAYED, FLOAT32_TOLERANCE, FP8_TOLERANCE, assert_close

TYPES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


def typed_mesh(kind: str, axes: Mapping[str, int]) -> Mesh:
    mesh = mesh_of(axes)
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(TYPES[kind],) * len(axes))


@pytest.mark.slow
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(
    ("api", "axes", "remat"),
    [
        ("linen", dict(data=2, expert=2), False),
        ("nnx", dict(data=2, expert=2), True),
        ("nnx", dict(feature=4), False),
        ("linen", dict(data=2, expert=2, feature=2), True),
        ("linen", dict(expert=8), False),
        ("linen", dict(expert=2, fsdp=2), False),
    ],
    ids=str,
)
def test_training_is_that_of_one_device(backend: str, kind: str, api: str, axes: dict[str, int], remat: bool) -> None:
    mesh = typed_mesh(kind, axes)
    model = programs.model(api, axes, remat=remat)

    got = programs.under_jit(model, mesh).run()

    assert_close(got, programs.on_one_device(jax.devices()[0], backend), FLOAT32_TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("kind", TYPES)
def test_training_with_delayed_scaling_is_that_of_one_device(backend: str, kind: str) -> None:
    axes, options, steps = dict(data=2, expert=2, feature=2), dict(recipe=DELAYED, use_bias=False), 3
    mesh = typed_mesh(kind, axes)

    got = programs.under_jit(programs.model("nnx", axes, **options), mesh).run(steps)

    expected = programs.on_one_device(jax.devices()[0], backend, steps=steps, **options)
    assert_close(got, expected, FP8_TOLERANCE[backend])
