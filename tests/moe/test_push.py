"""Layers whose devices write into each other's memory, with these writes in plain collectives on devices of the CPU."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_grouped as jg
from jax_grouped.kernels import exchange
from jax_grouped.kernels.exchange import Windows
from jax_grouped.kernels.rows import sum_choices
from jax_grouped.moe import exchange as moe_exchange
from jax_grouped.moe import experts, layer
from tests.meshes import make_mesh

TOKENS, FEATURES, HIDDEN, EXPERTS, DEVICES = 24, 128, 128, 8, 4  # Tokens of a device.


def has_bit(words: jax.Array, bit: Any) -> jax.Array:
    return (words >> bit.astype(jnp.uint32)) & 1 > 0


def push_rows(windows: Windows, wanted: jax.Array, x: jax.Array) -> jax.Array:
    assert windows.group_size == DEVICES
    rows, words = jax.lax.all_gather((x, wanted), "expert")
    return jnp.where(has_bit(words, jax.lax.axis_index("expert"))[..., None], rows, jnp.nan)


def push_sums(windows: Windows, wanted: jax.Array, rows: jax.Array, inverse: jax.Array, weights: Any = None) -> Any:
    sums = sum_choices(rows, inverse, weights).astype(rows.dtype)
    sums = jnp.where(has_bit(wanted, jax.lax.axis_index("expert"))[:, None], sums, jnp.nan)
    return jax.lax.all_to_all(sums.reshape(windows.group_size, -1, sums.shape[1]), "expert", 0, 0)


@pytest.fixture
def pushes(monkeypatch: pytest.MonkeyPatch) -> list[Windows]:
    """Makes devices push, what nobody wants as NaN, and returns the windows of each call of `find_windows`."""
    found = []

    def find_windows(axis_name: Any) -> Windows:
        mesh = jax.sharding.get_abstract_mesh()
        found.append(exchange.windows_of(mesh.shape, axis_name))
        return found[-1]

    monkeypatch.setattr(layer, "find_windows", find_windows)
    monkeypatch.setattr(moe_exchange, "push_rows", push_rows)
    monkeypatch.setattr(experts, "push_sums", push_sums)
    return found


@pytest.mark.parametrize("recipe", [None, jg.Float8BlockScaling(), jg.Float8CurrentScaling()], ids=repr)
@pytest.mark.parametrize("options", [{}, {"capacity_factor": 1.25}, {"bias": True}, {"mask": True}], ids=str)
def test_a_layer_reads_no_row_that_it_has_not_wanted(
    pushes: list[Windows], recipe: jg.Recipe | None, options: dict[str, Any]
) -> None:
    options = dict(options)
    has_bias, has_mask = options.pop("bias", False), options.pop("mask", False)
    mesh = make_mesh({"expert": DEVICES})
    rng = np.random.default_rng(0)
    tokens = DEVICES * TOKENS
    x, dy = (jnp.asarray(rng.standard_normal((tokens, FEATURES)), jnp.bfloat16) for _ in range(2))
    logits = jnp.asarray(rng.standard_normal((tokens, EXPERTS)), jnp.float32)
    mask = jnp.asarray(rng.random(tokens) < 0.7) if has_mask else None
    gate_up = jg.moe.Weights(jnp.asarray(0.1 * rng.standard_normal((EXPERTS, FEATURES, 2 * HIDDEN)), jnp.bfloat16))
    down = jg.moe.Weights(jnp.asarray(0.1 * rng.standard_normal((EXPERTS, HIDDEN, FEATURES)), jnp.bfloat16))
    if has_bias:
        down = down._replace(bias=jnp.asarray(rng.standard_normal((EXPERTS, FEATURES)), jnp.float32))

    def results(method: str) -> Any:
        def forward(x: jax.Array, logits: jax.Array, gate_up: Any, down: Any) -> jax.Array:
            parallel = jg.moe.Parallel(experts="expert", exchange=method)
            router = jg.moe.Router(2, **options)
            return jg.moe.moe_mlp(x, logits, gate_up, down, mask=mask, router=router, parallel=parallel, recipe=recipe)[
                0
            ]

        @jax.jit
        def step(*arrays: Any) -> Any:
            y, pull_back = jax.vjp(forward, *arrays)
            return y, pull_back(dy)

        with jax.set_mesh(mesh):
            return step(*jax.device_put((x, logits), jax.NamedSharding(mesh, P("expert"))), gate_up, down)

    got, expected = results("auto"), results("gather")
    assert pushes
    assert {*pushes} == {Windows(tuple(range(DEVICES)), DEVICES)}
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def test_groups_of_devices_along_one_axis_of_a_mesh() -> None:
    shape = {"data": 2, "expert": 3}

    assert exchange.windows_of(shape, "expert") == Windows((0, 1, 2, 3, 4, 5), 3)
    assert exchange.windows_of(shape, "data") == Windows((0, 3, 1, 4, 2, 5), 2)
    shape |= {"local": 2}
    assert exchange.windows_of(shape, ("data", "local")) == Windows((0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11), 4)
    assert exchange.windows_of(shape, ("local", "data")) is None
    assert exchange.windows_of({"data": 33}, "data") is None


def test_devices_of_the_experts_of_each_token() -> None:
    chosen = jnp.array([[0, 1, 5], [8, 8, 8], [7, 8, 2]])  # 8 is none of the eight experts.

    assert exchange.devices_of(chosen, own_experts=2, devices=4).tolist() == [0b0101, 0, 0b1010]
