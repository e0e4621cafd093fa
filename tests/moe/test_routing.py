"""Routing and its balance loss, against loops written from the definitions and gradients of dense formulations."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_grouped.moe import Router, routing
from jax_grouped.moe.routing import Routing
from tests.meshes import make_mesh, typed_mesh
from tests.operands import normal
from tests.refusals import assert_refused

pytestmark = pytest.mark.slow

TOKENS, EXPERTS, TOP_K = 6, 5, 3
LOGITS = np.random.default_rng(0).standard_normal((TOKENS, EXPERTS)).astype(np.float32)
BIAS = np.array([0.0, 0.5, -0.5, 0.2, 0.1], np.float32)
ROUTER = Router(TOP_K)
route = jax.jit(routing.top_k_routing, static_argnames="router")


@pytest.fixture(autouse=True)
def _backend(backend: str) -> None:
    """Runs every test of this module on every backend."""


def expected_routing(
    logits: np.ndarray, top_k: int, score: str, normalize: bool, bias: np.ndarray, scale: float
) -> Routing:
    """Computes the definitions, token by token."""
    experts, weights, probabilities = [], [], []
    for row in np.asarray(logits, np.float64):
        scores = np.exp(row) / np.exp(row).sum() if score == "softmax" else 1 / (1 + np.exp(-row))
        best = sorted(range(len(row)), key=lambda expert: (-(scores + bias)[expert], expert))[:top_k]
        chosen = scores[best]
        experts.append(best)
        weights.append(scale * (chosen / chosen.sum() if normalize else chosen))
        probabilities.append(scores / scores.sum())
    return Routing(np.array(experts), np.array(weights), np.array(probabilities))


def test_tokens_go_where_a_plain_loop_sends_them() -> None:
    for score, normalize, top_k, dtype in (
        ("softmax", True, TOP_K, jnp.float32),
        ("softmax", False, 1, jnp.bfloat16),
        ("sigmoid", True, EXPERTS, jnp.float16),
    ):
        logits = LOGITS.astype(dtype)
        got = route(logits, Router(top_k, score=score, normalize=normalize, scale=2.5), selection_bias=BIAS)
        expected = expected_routing(logits, top_k, score, normalize, np.asarray(BIAS, np.float64), 2.5)
        np.testing.assert_array_equal(got.experts, expected.experts)
        np.testing.assert_allclose(got.weights, expected.weights, rtol=3e-6)
        np.testing.assert_allclose(got.probabilities, expected.probabilities, rtol=3e-6)
        assert [x.dtype for x in vars(got).values()] == [jnp.int32, jnp.float32, jnp.float32]
    assert [x.shape for x in vars(route(LOGITS[:0], ROUTER)).values()] == [(0, TOP_K), (0, TOP_K), (0, EXPERTS)]


def test_gradients_match_those_of_one_hot_products() -> None:
    probe = np.random.default_rng(1).standard_normal((TOKENS, TOP_K + EXPERTS)).astype(np.float32)

    def loss(weights: jax.Array, probabilities: jax.Array) -> jax.Array:
        return jnp.sum(probe * jnp.sin(jnp.concatenate([weights, probabilities], axis=1)))

    router = Router(TOP_K, score="sigmoid", scale=2.5)

    def ours(logits: jax.Array, bias: jax.Array) -> tuple[jax.Array, jax.Array]:
        got = routing.top_k_routing(logits, router, selection_bias=bias)
        return loss(got.weights, got.probabilities), got.experts

    def dense(logits: jax.Array, experts: jax.Array) -> jax.Array:
        scores = jax.nn.sigmoid(logits)
        weights = jnp.einsum("te,tke->tk", scores, jax.nn.one_hot(experts, EXPERTS), precision="highest")
        shares = (x / x.sum(axis=1, keepdims=True) for x in (weights, scores))
        return loss(2.5 * next(shares), next(shares))

    gradient = jax.grad(ours, argnums=(0, 1), has_aux=True)
    (dlogits, dbias), experts = jax.jit(gradient)(LOGITS, BIAS)
    np.testing.assert_allclose(dlogits, jax.jit(jax.grad(dense))(LOGITS, experts), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(dbias, 0)
    assert "scatter" not in str(jax.make_jaxpr(gradient)(LOGITS, BIAS))


def test_the_balance_loss_and_its_gradient_are_those_of_the_definition() -> None:
    got = route(LOGITS, ROUTER)
    loss, gradient = jax.jit(jax.value_and_grad(routing.load_balancing_loss, allow_int=True))(got)
    fraction = np.zeros(EXPERTS)
    for expert in np.asarray(got.experts).flat:
        fraction[expert] += 1 / (TOKENS * TOP_K)
    probability = np.asarray(got.probabilities, np.float64).mean(axis=0)
    np.testing.assert_allclose(loss, EXPERTS * sum(fraction * probability), rtol=1e-6)
    np.testing.assert_allclose(
        gradient.probabilities, np.broadcast_to(EXPERTS * fraction / TOKENS, (TOKENS, EXPERTS)), rtol=1e-6
    )
    np.testing.assert_array_equal(gradient.weights, 0)


def test_the_balance_loss_of_sequences_is_the_mean_of_their_losses() -> None:
    def loss(logits: jax.Array, axis_name: str | None = None, **options: Any) -> jax.Array:
        got = routing.top_k_routing(logits, ROUTER)
        return routing.load_balancing_loss(got, axis_name=axis_name, **options)

    logits = normal(0, (24, EXPERTS))
    parts = logits.reshape(4, 6, EXPERTS)

    got, gradient = jax.jit(jax.value_and_grad(functools.partial(loss, num_sequences=4)))(logits)

    expected, gradients = jax.vmap(jax.value_and_grad(loss))(parts)
    np.testing.assert_allclose(got, jnp.mean(expected), rtol=1e-6)
    np.testing.assert_allclose(gradient, gradients.reshape(24, EXPERTS) / 4, rtol=1e-5, atol=1e-8)
    on_halves = jax.vmap(functools.partial(loss, axis_name="data", num_sequences=2), axis_name="data")
    np.testing.assert_allclose(on_halves(logits.reshape(2, 12, EXPERTS)), [got, got], rtol=1e-6)


def test_the_balance_loss_counts_experts_of_any_integer_type() -> None:
    # Experts 44 and 300 are the same number in eight bits.
    probabilities = np.full((2, 400), 0.5, np.float32) * (np.arange(400) == 300)
    for dtype in ("int8", "uint8", "uint32", "int64"):
        with jax.enable_x64(True):
            got = Routing(jnp.array([[44, 3], [44, 5]], dtype), np.ones((2, 2), np.float32), probabilities)

            for options in ({}, dict(num_sequences=2)):
                np.testing.assert_array_equal(routing.load_balancing_loss(got, **options), 0, err_msg=dtype)


def router_loss(router: jax.Array, x: jax.Array, axis_name: str | tuple[str, ...] | None = None) -> jax.Array:
    """Returns the balance loss of a linear router with a selection bias."""
    got = routing.top_k_routing(jnp.dot(x, router, precision="highest"), ROUTER, selection_bias=BIAS)
    return routing.load_balancing_loss(got, axis_name=axis_name)


def router_operands(devices: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns a router `[8, E]`, and tokens `[devices * T, 8]` that are uneven from device to device."""
    random = np.random.default_rng(2)
    x = random.standard_normal((devices * TOKENS, 8)) + np.repeat(np.arange(devices), TOKENS)[:, None]
    return random.standard_normal((8, EXPERTS)).astype(np.float32), x.astype(np.float32)


def test_the_balance_loss_of_sharded_tokens_is_that_of_the_whole_batch() -> None:
    mesh = make_mesh({"data": 2, "expert": 2})
    router, x = router_operands(4)
    expected, expected_gradient = jax.jit(jax.value_and_grad(router_loss))(router, x)

    # That the result has no axis is checked: it is the same on all devices.
    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(P(), P(("data", "expert"))), out_specs=(P(), P()))
    def sharded(router: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.value_and_grad(router_loss)(router, x, ("data", "expert"))

    def step(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss, gradient = jax.value_and_grad(router_loss)(router, x, "data")
        return loss, jax.lax.pmean(gradient, "data")

    mapped = jax.pmap(step, axis_name="data", devices=mesh.devices.ravel().tolist())(x.reshape(4, TOKENS, 8))
    for loss, gradient in (sharded(router, x), *zip(*mapped, strict=True)):
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
        np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-5, atol=1e-6)


def test_arguments_that_do_not_fit_are_refused() -> None:
    types, bias = "type must be bfloat16, float16 or float32, got", "selection_bias"
    assert_refused(
        routing.top_k_routing,
        dict(logits=LOGITS, router=ROUTER),
        {
            f"logits's {types} int32.": dict(logits=LOGITS.astype(np.int32)),
            "logits must have shape [T, E], got (5,).": dict(logits=LOGITS[0]),
            "logits must be an array, got None.": dict(logits=None),
            "top_k must be at most the 5 experts of logits (6, 5), got 6.": dict(router=Router(6)),
            f"{bias}'s {types} bool.": dict(selection_bias=jnp.ones(5, bool)),
            f"{bias} must have shape [E] = (5,), got (6,).": dict(selection_bias=jnp.ones(6)),
            f"A router with use_{bias} needs a {bias}, float32[E], ": dict(router=Router(3, use_selection_bias=True)),
            "groups must divide the 5 experts, got 2.": dict(router=Router(3, groups=2, top_groups=1)),
            "top_groups must be groups of at least top_k = 3 experts together, got 1 groups of 1.": dict(
                router=Router(3, groups=5, top_groups=1)
            ),
            "router must be a jax_grouped.moe.Router, got 3.": dict(router=3),
        },
    )
    assert_refused(
        routing.load_balancing_loss,
        dict(routing=routing.top_k_routing(LOGITS, ROUTER)),
        {
            "routing must be a jax_grouped.moe.Routing, got an object of type ndarray.": dict(routing=LOGITS),
            "There is no mesh axis 'data' here: call it inside jax": dict(axis_name="data"),
            "num_sequences must divide the 6 tokens, got 5.": dict(num_sequences=5),
        },
    )
    assert_refused(
        routing.update_selection_bias,
        dict(selection_bias=jnp.zeros(3), expert_load=jnp.array([1, 2, 3])),
        {
            f"{bias} must be float32, to hold small steps,": dict(selection_bias=jnp.zeros(3, jnp.bfloat16)),
            "expert_load must be of an integer type, got float32.": dict(expert_load=jnp.ones(3)),
            f"{bias} and expert_load must have one shape [E], got (3,) and": dict(expert_load=jnp.ones(2, int)),
            "rate must be a number, known when the program is traced, got 'x'.": dict(rate="x"),
            "rate must be a number, got an array of type bool.": dict(rate=jnp.array(True)),
            "rate must be a scalar, got shape (3,).": dict(rate=jnp.ones(3)),
        },
    )
    assert_refused(
        routing.router_logits,
        dict(x=jnp.ones((5, 4))),
        {
            "kernel must have shape [K, E] for x (5, 4), got (3, 2).": dict(kernel=jnp.ones((3, 2))),
            "kernel's type must be": dict(kernel=jnp.ones((4, 2), jnp.int32)),
        },
    )
    refused = {"logits must have shape [T, E], got (5,).": dict(logits=LOGITS[0])}
    assert_refused(routing.router_z_loss, {}, refused)


def test_the_z_loss_is_the_mean_square_of_the_log_sum_exp() -> None:
    logits = 3 * normal(0, (8, 5))

    loss, gradient = jax.value_and_grad(routing.router_z_loss)(logits)

    numbers = np.asarray(logits, np.float64)
    log_sums = np.log(np.exp(numbers).sum(axis=1))
    np.testing.assert_allclose(loss, np.mean(log_sums**2), rtol=1e-6)
    shares = np.exp(numbers - log_sums[:, None])
    np.testing.assert_allclose(gradient, 2 * log_sums[:, None] * shares / 8, rtol=1e-5)
    assert routing.router_z_loss(jnp.zeros((0, 5))) == 0
    halves = jax.vmap(functools.partial(routing.router_z_loss, axis_name="data"), axis_name="data")
    np.testing.assert_allclose(halves(logits.reshape(2, 4, 5)), [loss, loss], rtol=1e-6)


def test_a_selection_bias_moves_by_its_rate_against_the_load() -> None:
    bias = routing.update_selection_bias(jnp.array([0.5, 0, 0], jnp.float32), jnp.array([9, 5, 1]), rate=0.25)
    np.testing.assert_array_equal(bias, [0.25, 0, 0.25])

    # Loads are compared with their mean exactly: near the most, far apart, and more than float32 counts.
    for loads, directions in (
        (7 * [131071], 7 * [0]),
        ([2**31 - 1, 2**31 - 1, 2**31 - 2], [-1, -1, 1]),
        ([2**31 - 1, 0, 0, 2**31 - 1], [-1, 1, 1, -1]),
        ([16777217, 16777217, 16777216], [-1, -1, 1]),
        ([16777217, 16777215, 16777216], [-1, 1, 0]),
        ([4000000000, 3000000000, 2500000000], [-1, 1, 1]),
    ):
        load = jnp.array(loads, jnp.uint32 if max(loads) >= 2**31 else jnp.int32)
        got = routing.update_selection_bias(jnp.zeros(len(loads)), load, rate=jnp.float32(1))
        np.testing.assert_array_equal(got, directions, err_msg=str(loads))


def test_loads_of_any_integer_type() -> None:
    for dtype in ("int8", "uint16", "int64", "uint64"):
        with jax.enable_x64(True):
            load = jnp.zeros(300, dtype).at[7].set(100)  # More experts than an 8-bit type counts.

            bias = routing.update_selection_bias(jnp.zeros(300, jnp.float32), load, rate=np.float64(1))

        np.testing.assert_array_equal(bias, np.where(np.arange(300) == 7, -1, 1), err_msg=dtype)


@pytest.mark.parametrize("tokens", [40, 1])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_logits_of_a_linear_router(dtype: str, tokens: int, backend: str) -> None:
    x, kernel = normal(0, (tokens, 24)).astype(dtype), normal(1, (24, 6))
    dlogits = normal(2, (tokens, 6))

    with jax.default_matmul_precision("highest"):  # A GPU would round float32.
        logits, pull_back = jax.vjp(routing.router_logits, x, kernel)
        dx, dkernel = pull_back(dlogits)

    def rounded(array: jax.Array) -> np.ndarray:
        return np.asarray(array.astype(dtype), np.float64)

    assert (logits.dtype, dx.dtype, dkernel.dtype) == (jnp.float32, dtype, jnp.float32)
    error = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(logits, rounded(x) @ rounded(kernel), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        rounded(dx), rounded(dlogits) @ rounded(kernel).T, rtol=error, atol=2e-2 if error > 1e-3 else 1e-5
    )
    np.testing.assert_allclose(dkernel, rounded(x).T @ rounded(dlogits), rtol=1e-5, atol=1e-5)


def test_gradients_of_a_linear_router_over_explicit_axes_are_sharded_like_its_arguments() -> None:
    x, kernel, dlogits = normal(0, (40, 24)), normal(1, (24, 6)), normal(2, (40, 6))
    mesh = typed_mesh("explicit", {"data": 2})
    rows = NamedSharding(mesh, P("data"))
    split = (jax.device_put(x, rows), jax.device_put(kernel, NamedSharding(mesh, P())), jax.device_put(dlogits, rows))

    def gradients(x: jax.Array, kernel: jax.Array, dlogits: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.vjp(routing.router_logits, x, kernel)[1](dlogits)

    with jax.default_matmul_precision("highest"):  # A GPU would round float32.
        actual, expected = jax.jit(gradients)(*split), gradients(x, kernel, dlogits)

    assert [jax.typeof(gradient).sharding.spec for gradient in actual] == [P("data", None), P(None, None)]
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), actual, expected)
