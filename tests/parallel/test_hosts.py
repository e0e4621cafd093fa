"""Experts over hosts and their devices: each token crosses the network once per host that has an expert of it."""

import functools
import math
import os
import re
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_grouped as jg
from tests.meshes import make_mesh

EXPERTS, FEATURES, HIDDEN, TOP_K, TOKENS = 16, 256, 128, 3, 48  # Tokens of a device.
BOTH = P(("host", "local"))
RECIPES = {"float32": None, "block": jg.Float8BlockScaling()}


def make_hosts(hosts: int) -> Mesh:
    return make_mesh({"host": hosts, "local": jax.device_count() // hosts})


def make_arrays(mesh: Mesh, skew: float = 0.0) -> list[jax.Array]:
    rng, tokens = np.random.default_rng(0), TOKENS * mesh.size
    x, dy = rng.standard_normal((2, tokens, FEATURES), np.float32)
    logits = rng.standard_normal((tokens, EXPERTS), np.float32) - np.float32(skew) * np.arange(EXPERTS)
    kernels = [
        0.1 * rng.standard_normal(shape, np.float32)
        for shape in ((EXPERTS, FEATURES, 2 * HIDDEN), (EXPERTS, HIDDEN, FEATURES))
    ]
    return [jax.device_put(array, NamedSharding(mesh, BOTH)) for array in (x, logits, *kernels, dy)]


def step(parallel: jg.moe.Parallel, recipe: str, **router: Any) -> Any:
    """Returns the program of results, dropped pairs and gradients, from the arrays and perhaps a mask."""

    def run(x: Any, logits: Any, gate_up: Any, down: Any, dy: Any, mask: Any = None) -> Any:
        def forward(*arrays: Any) -> tuple[jax.Array, jax.Array]:
            options = dict(router=jg.moe.Router(TOP_K, **router), parallel=parallel, recipe=RECIPES[recipe])
            precision = "highest" if recipe == "float32" else None
            y, metrics = jg.moe.moe_mlp(*arrays, **options, mask=mask, precision=precision)
            return y, metrics.dropped

        y, pull_back, dropped = jax.vjp(forward, x, logits, gate_up, down, has_aux=True)
        return y, dropped, pull_back(dy)

    return jax.jit(run)


ONE, HOSTS = jg.moe.Parallel(), jg.moe.Parallel(experts=("host", "local"))


@pytest.mark.parametrize("hosts", [2, 4])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("case", ["even", "to the first experts", "masked"])
def test_results_are_those_of_one_device(hosts: int, recipe: str, case: str) -> None:
    mesh = make_hosts(hosts)
    arrays = make_arrays(mesh, skew=5.0 if case == "to the first experts" else 0.0)
    mask = None
    if case == "masked":
        mask = jax.device_put(np.random.default_rng(1).random(len(arrays[0])) < 0.7, NamedSharding(mesh, BOTH))

    got, expected = (step(parallel, recipe)(*arrays, mask) for parallel in (HOSTS, ONE))

    assert not got[1].any()
    tolerance = 2e-6 if recipe == "float32" else 0.03
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert jnp.linalg.norm(one.astype(jnp.float32) - other) <= tolerance * jnp.linalg.norm(other)


@pytest.mark.parametrize("hosts", [2, 4])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", ["dropless", "capacity", "groups"])
def test_bytes_between_hosts(hosts: int, recipe: str, kind: str) -> None:
    mesh, share = make_hosts(hosts), 1.0
    router: dict[str, Any] = {} if kind == "dropless" else {"capacity_factor": 1.0}
    if kind == "capacity":
        share = 1 - (1 - 1 / hosts) ** TOP_K
    if kind == "groups":  # A host has a group.
        router |= dict(groups=hosts, top_groups=hosts // 2)
        share = 1 / 2
    room = math.ceil(TOKENS * share)
    # A row of FP8 numbers has a scale per 128; what goes back is float32, and so are weights and their gradients.
    token = FEATURES * 4 if recipe == "float32" else FEATURES + 4 * FEATURES // 128
    rows = (hosts - 1) * room * (2 * token + 2 * FEATURES * 4 + 3 * TOP_K * 4)

    crossing = bytes_between_hosts(step(HOSTS, recipe, **router).lower(*make_arrays(mesh)).compile().as_text(), mesh)

    # Besides, counts of each expert and of dropped pairs.
    assert rows <= crossing <= rows + 4096


def bytes_between_hosts(text: str, mesh: Mesh) -> int:
    """Returns the bytes that each device sends to other hosts, in all collectives of a compiled program."""
    total = 0
    for results, kind, groups in re.findall(
        r"= (.*?) (all-to-all|all-gather|all-reduce|reduce-scatter|collective-permute)\(.*?replica_groups="
        r"(mesh\[.*?\] \{.*?\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?|\{\{.*?\}\})",
        text,
    ):
        devices = devices_of_groups(groups, mesh)
        if (devices // mesh.shape["local"] == devices[:, :1] // mesh.shape["local"]).all():
            continue
        assert kind in ("all-to-all", "all-reduce")
        numbers = [
            math.prod(map(int, filter(None, shape.split(",")))) * int(bits) // 8
            for bits, shape in re.findall(r"[sfu](\d+)\[([\d,]*)\]", results)
        ]
        total += sum(numbers) * (devices.shape[1] - 1) // devices.shape[1]
    return total


def devices_of_groups(groups: str, mesh: Mesh) -> np.ndarray:
    """Returns the devices of each group, one row per group, from either of the forms in which XLA writes them."""
    devices = np.arange(mesh.size)
    if groups.startswith("mesh"):
        names = re.findall(r"'(\w+)'", groups.partition("] {")[2])
        others = [name for name in mesh.axis_names if name not in names]
        order = [mesh.axis_names.index(name) for name in (*others, *names)]
        return devices.reshape(mesh.devices.shape).transpose(order).reshape(-1, math.prod(mesh.shape[n] for n in names))
    if groups.startswith("["):
        shape, dims, order = ([*map(int, part.split(","))] for part in re.findall(r"[\[(]([\d,]+)", groups + "(0")[:3])
        return devices.reshape(dims).transpose(order if len(order) == len(dims) else None).reshape(shape)
    return np.array([[*map(int, group.split(","))] for group in re.findall(r"\{([\d,]+)\}", groups)])


@functools.cache
def dropped_pairs(hosts: int, capacity_factor: float, skew: float) -> tuple[int, int]:
    """Returns how many pairs were dropped, and how many results are not those of a layer that drops none."""
    arrays = make_arrays(make_hosts(hosts), skew)
    y, dropped, _ = step(HOSTS, "float32", capacity_factor=capacity_factor)(*arrays)
    expected, _, _ = step(ONE, "float32")(*arrays)
    assert dropped.shape == (jax.device_count(),)
    return int(dropped.sum()), int((jnp.abs(y - expected).max(axis=1) > 1e-4).sum())


def test_pairs_without_room_are_counted() -> None:
    assert dropped_pairs(4, 4.0, 0.0) == (0, 0)
    for capacity_factor, skew in ((0.8, 0.0), (1.2, 0.5), (2.0, 5.0)):
        dropped, different = dropped_pairs(4, capacity_factor, skew)
        assert 0 < different <= dropped < TOKENS * jax.device_count() * TOP_K


def test_the_ways_of_several_axes() -> None:
    mesh = make_hosts(2)
    arrays = make_arrays(mesh)
    gather = jg.moe.Parallel(experts=("host", "local"), exchange="gather")
    text = step(gather, "float32").lower(*arrays).compile().as_text()
    two_levels, one_level = (step(parallel, "float32")(*arrays) for parallel in (HOSTS, gather))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), two_levels, one_level)
    with pytest.raises(AssertionError):  # All tokens go to all devices.
        bytes_between_hosts(text, mesh)


@pytest.mark.slow
def test_four_hosts_of_four_devices() -> None:
    if jax.device_count() == 16:
        pytest.skip("this is the process of 16 devices that the test itself starts")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__, "-k", "4 or room"]
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "16", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=environment, text=True, capture_output=True, check=False, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
