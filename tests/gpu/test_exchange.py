"""Layers whose GPUs write into each other's memory, beside the same layers with plain collectives."""

import functools
import os
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_grouped as jg
from jax_grouped.kernels.exchange import find_obstacle
from tests.gpu import replays
from tests.meshes import make_mesh

pytestmark = pytest.mark.gpu

RECIPES = {
    "bf16": None,
    "block": jg.Float8BlockScaling(),
    "block, any scales": jg.Float8BlockScaling(pow2_scales=False),
    "current": jg.Float8CurrentScaling(),
}
REPLAYS = int(os.environ.get("JAX_GROUPED_REPLAYS") or 200)
TOKENS, FEATURES, HIDDEN, EXPERTS, TOP_K = 640, 256, 128, 16, 3  # Tokens of a device.


@pytest.fixture(scope="module", autouse=True)
def _needs_windows() -> None:
    if obstacle := find_obstacle():
        pytest.skip(f"GPUs cannot write into each other's memory: {obstacle}")


class Layer:
    """A layer over all GPUs, forward and backward, in a program for each kind of exchange."""

    def __init__(self, recipe: str = "block", *, data: int = 1, options: Any = None, **router: Any) -> None:
        self.mesh = make_mesh({"data": data, "expert": jax.device_count() // data})
        self.rng = np.random.default_rng(0)
        self.tokens = TOKENS * jax.device_count()
        shapes = {"gate_up": (EXPERTS, FEATURES, 2 * HIDDEN), "down": (EXPERTS, HIDDEN, FEATURES)}
        self.kernels = [self.put(self.rng.standard_normal(shape) * 0.1, P("expert")) for shape in shapes.values()]

        def step(exchange: str, logits: Any, x: Any, dy: Any, *more: Any) -> Any:
            parallel = jg.moe.Parallel(experts="expert", batch=("data",), exchange=exchange)

            def forward(x: Any, logits: Any, *kernels: Any) -> jax.Array:
                mask = more[0] if more else None
                return jg.moe.moe_mlp(
                    x,
                    logits,
                    *kernels,
                    mask=mask,
                    router=jg.moe.Router(TOP_K, **router),
                    parallel=parallel,
                    recipe=RECIPES[recipe],
                )[0]

            y, pull_back = jax.vjp(forward, x, logits, *self.kernels)
            return y, *pull_back(dy)

        self.programs = [
            jax.jit(functools.partial(step, exchange), compiler_options=options) for exchange in ("push", "gather")
        ]

    def put(self, array: Any, spec: P, dtype: Any = jnp.bfloat16) -> jax.Array:
        return jax.device_put(jnp.asarray(array, dtype), NamedSharding(self.mesh, spec))

    def arrays(self, seed: int, skew: float = 0.0) -> list[jax.Array]:
        rng, tokens = np.random.default_rng(seed), P(("data", "expert"))
        logits = rng.standard_normal((self.tokens, EXPERTS)) - skew * np.arange(EXPERTS)
        x, dy = rng.standard_normal((2, self.tokens, FEATURES))
        return [self.put(logits, tokens, jnp.float32), self.put(x, tokens), self.put(dy, tokens)]

    def compare(self, *arrays: jax.Array) -> None:
        own, plain = (jax.tree.map(np.asarray, program(*arrays)) for program in self.programs)
        for got, expected in zip(own, plain, strict=True):
            np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("skew", [0.0, 100.0], ids=["even", "to the first experts"])
@pytest.mark.parametrize("capacity_factor", [None, 1.25])
def test_results_are_those_of_plain_collectives(recipe: str, skew: float, capacity_factor: float | None) -> None:
    layer = Layer(recipe, capacity_factor=capacity_factor)
    text = layer.programs[0].lower(*layer.arrays(0)).as_text()
    assert text.count("@jax_grouped_push_rows") == (4 if recipe == "block" else 2)
    assert text.count("@jax_grouped_push_sums") == 2
    layer.compare(*layer.arrays(0, skew))


def test_masked_tokens_and_a_mesh_of_two_axes() -> None:
    layer = Layer("block")
    mask = np.random.default_rng(1).random(layer.tokens) < 0.5
    layer.compare(*layer.arrays(1), layer.put(mask, P(("data", "expert")), jnp.bool_))
    if jax.device_count() % 4 == 0:
        layer = Layer("block", data=2)
        layer.compare(*layer.arrays(2))


def test_layers_inside_pmap() -> None:
    layer = Layer("block")
    devices, arrays = jax.device_count(), [np.asarray(array) for array in layer.arrays(3)[:2]]
    split = [array.reshape(devices, -1, array.shape[-1]) for array in arrays]
    kernels = [np.asarray(kernel).reshape(devices, -1, *kernel.shape[1:]) for kernel in layer.kernels]

    def results(exchange: str) -> Any:
        def forward(logits: Any, x: Any, *kernels: Any) -> jax.Array:
            parallel = jg.moe.Parallel(experts="expert", exchange=exchange)
            options = dict(router=jg.moe.Router(TOP_K), parallel=parallel, recipe=RECIPES["block"])
            return jg.moe.moe_mlp(x, logits, *kernels, **options)[0]

        program = jax.pmap(forward, axis_name="expert")
        assert ("@jax_grouped_push_rows" in program.lower(*split, *kernels).as_text()) == (exchange == "push")
        return np.asarray(program(*split, *kernels))

    np.testing.assert_array_equal(results("push"), results("gather"))


@pytest.mark.parametrize("options", [replays.CAPTURED, replays.UNCAPTURED], ids=["captured", "not captured"])
def test_every_replay_with_another_routing(options: dict[str, Any]) -> None:
    layer = Layer("block", options=options, capacity_factor=1.5)
    drawn = [layer.arrays(seed, skew=0.2 * seed) for seed in range(8)]
    digests: list[list[jax.Array]] = [[], []]
    for i in range(REPLAYS):
        for program, found in zip(layer.programs, digests, strict=True):
            found.append(replays.digest(program(*drawn[i % 8])))
    own, plain = (np.stack([np.asarray(one) for one in found]) for found in digests)
    np.testing.assert_array_equal(own, plain)


def test_programs_of_two_threads() -> None:
    layers = [Layer("block"), Layer("bf16")]
    drawn = [layer.arrays(7) for layer in layers]
    expected = [replays.digest(layer.programs[1](*arrays)) for layer, arrays in zip(layers, drawn, strict=True)]
    found: list[list[jax.Array]] = [[], []]

    def run(i: int) -> None:
        for _ in range(50):
            found[i].append(replays.digest(layers[i].programs[0](*drawn[i])))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for digests, one in zip(found, expected, strict=True):
        for digest in digests:
            np.testing.assert_array_equal(digest, one)
