"""Sharded products and layers on two GPUs, beside the results of one."""

import itertools
import pathlib
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_grouped as jg
from tests.meshes import need_devices
from tests.parallel.sharded import (
    CASES,
    GROUPS,
    RECIPES,
    WHOLE,
    assert_close,
    check_step,
    operands_of_fp8,
    put,
)

pytestmark = pytest.mark.gpu


def mesh_of_two(sharded_axis: str, type_: AxisType) -> Mesh:
    """Returns a mesh with two devices along one of the axes that the cases name."""
    need_devices(2)
    sizes = [2 if axis == sharded_axis else 1 for axis in ("data", "model")]
    return jax.make_mesh((*sizes,), ("data", "model"), axis_types=(type_,) * 2, devices=jax.devices()[:2])


#: Every case along both axes and with both types of them, and with every recipe.
STEPS = itertools.product(
    ["tokens and features out", "tokens and features in", "tokens and experts"],
    ["data", "model"],
    [AxisType.Auto, AxisType.Explicit],
)


@pytest.mark.parametrize(
    ("case", "axis", "type_", "name"), [(*step, [*RECIPES][i % len(RECIPES)]) for i, step in enumerate(STEPS)], ids=str
)
def test_steps_agree_with_those_of_one_gpu(case: str, axis: str, type_: AxisType, name: str | None) -> None:
    specs, (out, *_), _ = CASES[case]
    out_sharding = out if type_ == AxisType.Explicit else None

    check_step(mesh_of_two(axis, type_), name, specs, out_sharding=out_sharding, again=True)


@pytest.mark.parametrize("recipe", [None, jg.Float8BlockScaling(), jg.DelayedScaling()], ids=repr)
def test_a_stack_of_layers_trains_as_on_one_gpu(recipe: jg.Recipe | None) -> None:
    mesh = mesh_of_two("data", AxisType.Auto)
    x, *_, targets = operands_of_fp8()
    x, sizes = jnp.nan_to_num(x), jnp.array([16, 0, 40, 8])
    layers = jg.linen.GroupedDense(256, GROUPS, recipe=recipe), jg.linen.GroupedDense(512, GROUPS, recipe=recipe)
    variables = [layer.init(jax.random.key(i), x, sizes) for i, layer in enumerate(layers)]

    def loss(variables: Any, x: jax.Array, targets: jax.Array) -> jax.Array:
        for layer, own in zip(layers, variables, strict=True):
            x = layer.apply(own, x, sizes)
        return jnp.mean((x - targets) ** 2)

    @jax.jit
    def step(variables: Any, x: jax.Array, targets: jax.Array) -> tuple[Any, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(variables, x, targets)
        next_states = [{**gradient, "params": None} for gradient in gradients]
        params = [
            jax.tree.map(lambda p, g: p - 0.1 * g, own["params"], gradient["params"])
            for own, gradient in zip(variables, gradients, strict=True)
        ]
        return [{**state, "params": new} for state, new in zip(next_states, params, strict=True)], value

    tokens = NamedSharding(mesh, P("data"))
    one, two = variables, put(mesh, variables, WHOLE)
    for _ in range(4):
        one, expected = step(one, x, targets)
        two, value = step(two, *(jax.device_put(array, tokens) for array in (x, targets)))
        assert_close(value, expected, 1e-4)


def test_kernels_are_loaded_before_a_program_waits_for_the_other_gpu() -> None:
    need_devices(2)
    command = [sys.executable, "-m", "tests.gpu.late_gpu"]
    root = pathlib.Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, text=True, capture_output=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
