"""Layers whose devices write into each other's memory, with these writes in plain collectives on devices of the CPU."""

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_grouped as jg
from jax_grouped.kernels import exchange
from jax_grouped.kernels.exchange import Peers
from jax_grouped.kernels.rows import sum_choices
from jax_grouped.moe import exchange as moe_exchange
from jax_grouped.moe import experts, layer
from tests.meshes import make_mesh

TOKENS, FEATURES, HIDDEN, EXPERTS, DEVICES = 24, 128, 128, 8, 4  # Tokens of a device.


def has_bit(words: jax.Array, bit: Any) -> jax.Array:
    return (words >> bit.astype(jnp.uint32)) & 1 > 0


@pytest.fixture
def pushed(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Makes devices push, with NaN in place of what is undefined, and counts the calls."""
    pushed: Counter[str] = Counter()

    def push_rows(peers: Peers, destinations: jax.Array, x: jax.Array) -> jax.Array:
        assert exchange.can_push(x)
        pushed["rows"] += 1
        rows, words = jax.lax.all_gather((x, destinations), "expert")
        return jnp.where(has_bit(words, jax.lax.axis_index("expert"))[..., None], rows, jnp.nan)

    def push_sums(peers: Peers, needed: jax.Array, rows: jax.Array, inverse: jax.Array, weights: Any = None) -> Any:
        pushed["sums"] += 1
        sums = sum_choices(rows, inverse, weights).astype(rows.dtype)
        sums = jnp.where(has_bit(needed, jax.lax.axis_index("expert"))[:, None], sums, jnp.nan)
        return jax.lax.all_to_all(sums.reshape(peers.group_size, -1, sums.shape[1]), "expert", 0, 0)

    def find_peers(axis_name: Any) -> Peers | None:
        return exchange.list_peers(jax.sharding.get_abstract_mesh().shape, axis_name)

    monkeypatch.setattr(layer, "find_peers", find_peers)
    monkeypatch.setattr(moe_exchange, "push_rows", push_rows)
    monkeypatch.setattr(experts, "push_sums", push_sums)
    return pushed


@pytest.mark.parametrize("recipe", [None, jg.Float8BlockScaling(), jg.Float8CurrentScaling()], ids=repr)
@pytest.mark.parametrize("options", [{}, {"capacity_factor": 1.25}, {"bias": True}, {"mask": True}], ids=str)
def test_a_layer_reads_no_row_that_was_not_pushed_to_it(
    pushed: Counter[str], recipe: jg.Recipe | None, options: dict[str, Any]
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

    got = results("push")
    # FP8 rows are two arrays. With a bias, gradients are gathered, and sums are not pushed. JAX traces the rule's
    # function, which it does not run, and both passes.
    passes, arrays = 1 if has_bias else 2, 2 if isinstance(recipe, jg.Float8BlockScaling) else 1
    assert pushed == Counter(rows=passes * arrays, sums=0 if has_bias else 3)
    expected = results("gather")
    assert pushed["rows"] == passes * arrays
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def test_groups_of_devices_along_one_axis_of_a_mesh() -> None:
    shape = {"data": 2, "expert": 3}

    assert exchange.list_peers(shape, "expert") == Peers((0, 1, 2, 3, 4, 5), 3)
    assert exchange.list_peers(shape, "data") == Peers((0, 3, 1, 4, 2, 5), 2)
    shape |= {"local": 2}
    assert exchange.list_peers(shape, ("data", "local")) == Peers((0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11), 4)
    assert exchange.list_peers(shape, ("local", "data")) is None
    assert exchange.list_peers({"data": 33}, "data") is None


def test_devices_of_the_experts_of_each_token() -> None:
    chosen = jnp.array([[0, 1, 5], [8, 8, 8], [7, 8, 2]])  # 8 is none of the eight experts.

    assert exchange.find_destinations(chosen, own_experts=2, devices=4).tolist() == [0b0101, 0, 0b1010]
