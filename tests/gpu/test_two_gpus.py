"""Sharded products and layers on two GPUs, beside the results of one."""

import itertools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_grouped as jg
from tests.gpu import replays
from tests.meshes import make_mesh, need_devices, typed_mesh
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


def mesh_of_two(sharded_axis: str, kind: str = "auto") -> Mesh:
    """Returns a mesh with two devices along one of the axes that the cases name."""
    return typed_mesh(kind, {axis: 2 if axis == sharded_axis else 1 for axis in ("data", "model")})


#: Every case along both axes and with both types of them, and with every recipe.
STEPS = itertools.product(
    ["tokens and features out", "tokens and features in", "tokens and experts"],
    ["data", "model"],
    ["auto", "explicit"],
)


@pytest.mark.parametrize(
    ("case", "axis", "kind", "name"), [(*step, [*RECIPES][i % len(RECIPES)]) for i, step in enumerate(STEPS)], ids=str
)
def test_steps_agree_with_those_of_one_gpu(case: str, axis: str, kind: str, name: str | None) -> None:
    specs, (out, *_), _ = CASES[case]
    out_sharding = out if kind == "explicit" else None

    check_step(mesh_of_two(axis, kind), name, specs, out_sharding=out_sharding, again=True)


@pytest.mark.parametrize("recipe", [None, jg.Float8BlockScaling(), jg.DelayedScaling()], ids=repr)
def test_a_stack_of_layers_trains_as_on_one_gpu(recipe: jg.Recipe | None) -> None:
    mesh = mesh_of_two("data")
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
    replays.run_program("test_two_gpus")


def run_with_one_late() -> None:
    """Runs a program of two GPUs, one of which is late, with kernels that no earlier program has launched.

    The GPU that is on time is in a collective when its thread launches the second kernel. CUDA may load a kernel only
    after the collective: the other GPU's thread must not wait for that to launch the first kernel.
    """

    def wait(is_late: jax.Array) -> np.ndarray:
        if is_late[0]:
            time.sleep(3)
        return np.zeros((), np.float32)

    def step(x: jax.Array, is_late: jax.Array) -> tuple[jax.Array, jax.Array]:
        sizes = jnp.array([96, 0, 160])
        x = x + jax.pure_callback(wait, jax.ShapeDtypeStruct((), jnp.float32), is_late)
        first = jg.grouped_quantize(x, sizes, jg.ScalingMode.TENSOR, columnwise=True)
        total = jax.lax.psum(jnp.sum(first.amax), "device")
        second = jg.grouped_quantize(x + 0 * total, sizes, jg.ScalingMode.BLOCK_1D, columnwise=True)
        return total, second.amax

    mesh = make_mesh({"device": 2})
    program = jax.jit(
        jax.shard_map(step, mesh=mesh, in_specs=P("device"), out_specs=(P(), P("device")), check_vma=False)
    )
    x = np.random.default_rng(0).standard_normal((2 * 256, 512), np.float32)
    total, amax = program(jnp.asarray(x), jnp.array([True, False]))
    expected = [np.abs(group).max(initial=0) for group in np.split(x, [96, 96, 256, 352, 352])]
    np.testing.assert_array_equal(amax, expected)
    np.testing.assert_allclose(total, np.sum(expected), rtol=1e-6)


if __name__ == "__main__":
    run_with_one_late()
