"""Routing and its balance loss, against loops written from the definitions and gradients of dense formulations."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jax_grouped.moe import Router, routing
from jax_grouped.moe.routing import Routing
from tests.exports import exported
from tests.meshes import data_mesh

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


@pytest.mark.parametrize(
    ("score", "normalize", "top_k", "dtype"),
    [
        ("softmax", True, TOP_K, jnp.float32),
        ("softmax", False, 1, jnp.bfloat16),
        ("sigmoid", True, EXPERTS, jnp.float16),
        ("sigmoid", False, TOP_K, jnp.float32),
    ],
    ids=["softmax", "softmax as is", "sigmoid of all", "sigmoid as is"],
)
def test_tokens_go_where_a_plain_loop_sends_them(score: str, normalize: bool, top_k: int, dtype: Any) -> None:
    logits = LOGITS.astype(dtype)
    got = route(logits, Router(top_k, score=score, normalize=normalize, scale=2.5), selection_bias=BIAS)
    expected = expected_routing(logits, top_k, score, normalize, np.asarray(BIAS, np.float64), 2.5)
    np.testing.assert_array_equal(got.experts, expected.experts)
    np.testing.assert_allclose(got.weights, expected.weights, rtol=3e-6)
    np.testing.assert_allclose(got.probabilities, expected.probabilities, rtol=3e-6)
    assert [x.dtype for x in (got.experts, got.weights, got.probabilities)] == [jnp.int32, jnp.float32, jnp.float32]


def test_experts_come_from_the_best_groups_even_for_the_lowest_scores() -> None:
    logits = jnp.array([[5.0, -jnp.inf, 1.0, 1.0], [0.0, 2.0, 2.0, 2.0]])

    # The scores' sums decide with a bias too.
    for bias, experts in ((None, [[0, 1], [2, 3]]), (jnp.array([9.0, 0, 0, 0]), [[0, 1], [0, 1]])):
        got = route(logits, Router(2, groups=2, top_groups=1), selection_bias=bias)

        np.testing.assert_array_equal(got.experts, experts)


def test_no_tokens_are_routed_nowhere() -> None:
    got = route(LOGITS[:0], ROUTER)
    assert [x.shape for x in vars(got).values()] == [(0, TOP_K), (0, TOP_K), (0, EXPERTS)]


def test_experts_with_a_logit_of_minus_infinity_come_last_and_get_no_weight() -> None:
    logits = jnp.array([[-jnp.inf, 1.0, -jnp.inf, 2.0, -jnp.inf]])

    @functools.partial(jax.jit, static_argnames="score")
    def results(logits: jax.Array, score: str) -> tuple[Routing, jax.Array]:
        got, transpose = jax.vjp(lambda logits: routing.top_k_routing(logits, Router(TOP_K, score=score)), logits)
        cotangent = Routing(np.zeros((1, TOP_K), jax.dtypes.float0), got.weights, got.probabilities)
        return got, *transpose(cotangent)

    for score in ("softmax", "sigmoid"):
        got, gradient = results(logits, score)
        np.testing.assert_array_equal(got.experts, [[3, 1, 0]])
        assert float(got.weights[0, 2]) == 0
        np.testing.assert_allclose(got.weights.sum(), 1, rtol=1e-6)
        assert np.isfinite(gradient).all(), gradient


def test_scores_of_zero_get_weights_of_zero_and_finite_gradients() -> None:
    router = Router(TOP_K, score="sigmoid")
    weights, gradient = jax.jit(
        jax.value_and_grad(lambda logits: jnp.sum(routing.top_k_routing(logits, router).weights))
    )(jnp.full((2, EXPERTS), -jnp.inf))
    assert float(weights) == 0
    np.testing.assert_array_equal(gradient, 0)


@pytest.mark.parametrize(("score", "normalize"), [("softmax", False), ("sigmoid", True)])
def test_gradients_match_those_of_one_hot_products(score: str, normalize: bool) -> None:
    router = Router(TOP_K, score=score, normalize=normalize, scale=2.5)
    experts = route(LOGITS, router, selection_bias=BIAS).experts
    probe = np.random.default_rng(1).standard_normal((TOKENS, TOP_K + EXPERTS)).astype(np.float32)

    def loss(weights: jax.Array, probabilities: jax.Array) -> jax.Array:
        return jnp.sum(probe * jnp.sin(jnp.concatenate([weights, probabilities], axis=1)))

    def ours(logits: jax.Array, bias: jax.Array) -> jax.Array:
        got = routing.top_k_routing(logits, router, selection_bias=bias)
        return loss(got.weights, got.probabilities)

    def dense(logits: jax.Array) -> jax.Array:
        scores = jax.nn.softmax(logits) if score == "softmax" else jax.nn.sigmoid(logits)
        weights = jnp.einsum("te,tke->tk", scores, jax.nn.one_hot(experts, EXPERTS), precision="highest")
        if normalize:
            weights = weights / weights.sum(axis=1, keepdims=True)
        return loss(2.5 * weights, scores / scores.sum(axis=1, keepdims=True))

    dlogits, dbias = jax.jit(jax.grad(ours, argnums=(0, 1)))(LOGITS, BIAS)
    np.testing.assert_allclose(dlogits, jax.jit(jax.grad(dense))(LOGITS), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(dbias, 0)


def balanced_loss(logits: jax.Array, axis_name: str | tuple[str, ...] | None = None) -> jax.Array:
    """Returns a loss with every gradient of a router."""
    got = routing.top_k_routing(logits, ROUTER, selection_bias=BIAS)
    return routing.load_balancing_loss(got, axis_name=axis_name)


def test_nothing_is_scattered() -> None:
    def loss(logits: jax.Array) -> jax.Array:
        return balanced_loss(logits) + jnp.sum(routing.top_k_routing(logits, ROUTER).weights ** 2)

    assert "scatter" not in str(jax.make_jaxpr(jax.grad(loss))(LOGITS))


def test_a_routing_is_exported_with_its_program() -> None:
    got = exported(lambda logits: routing.top_k_routing(logits, ROUTER), LOGITS)(LOGITS)
    assert isinstance(got, Routing)
    np.testing.assert_array_equal(got.experts, route(LOGITS, ROUTER).experts)


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

    logits = jax.random.normal(jax.random.key(0), (24, EXPERTS))
    parts = logits.reshape(4, 6, EXPERTS)

    got, gradient = jax.jit(jax.value_and_grad(functools.partial(loss, num_sequences=4)))(logits)

    expected, gradients = jax.vmap(jax.value_and_grad(loss))(parts)
    np.testing.assert_allclose(got, jnp.mean(expected), rtol=1e-6)
    np.testing.assert_allclose(gradient, gradients.reshape(24, EXPERTS) / 4, rtol=1e-5, atol=1e-8)
    of_halves = jax.vmap(functools.partial(loss, axis_name="data", num_sequences=2), axis_name="data")
    np.testing.assert_allclose(of_halves(logits.reshape(2, 12, EXPERTS)), [got, got], rtol=1e-6)
    with pytest.raises(ValueError, match=r"^num_sequences must divide the 24 tokens, got 5\.$"):
        loss(logits, num_sequences=5)


def test_the_balance_loss_counts_experts_of_any_integer_type() -> None:
    # Experts 44 and 300 are the same number in eight bits.
    probabilities = np.full((2, 400), 0.5, np.float32) * (np.arange(400) == 300)
    for dtype in ("int8", "uint8", "uint32", "int64"):
        with jax.enable_x64(True):
            got = Routing(jnp.array([[44, 3], [44, 5]], dtype), np.ones((2, 2), np.float32), probabilities)

            for options in ({}, dict(num_sequences=2)):
                np.testing.assert_array_equal(routing.load_balancing_loss(got, **options), 0, err_msg=dtype)


def router_loss(router: jax.Array, x: jax.Array, axis_name: str | tuple[str, ...] | None = None) -> jax.Array:
    return balanced_loss(jnp.dot(x, router, precision="highest"), axis_name)


def router_operands(devices: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns a router `[8, E]`, and tokens `[devices * T, 8]` that are uneven from device to device."""
    random = np.random.default_rng(2)
    x = random.standard_normal((devices * TOKENS, 8)) + np.repeat(np.arange(devices), TOKENS)[:, None]
    return random.standard_normal((8, EXPERTS)).astype(np.float32), x.astype(np.float32)


@pytest.mark.parametrize(
    ("shape", "names"), [((4,), "data"), ((2, 2), ("data", "expert"))], ids=["one axis", "two axes"]
)
def test_the_balance_loss_of_sharded_tokens_is_that_of_the_whole_batch(
    shape: tuple[int, ...], names: str | tuple[str, ...]
) -> None:
    devices = data_mesh(4).devices.ravel().tolist()
    axes = (names,) if isinstance(names, str) else names
    mesh = jax.make_mesh(shape, axes, axis_types=(AxisType.Auto,) * len(axes), devices=devices)
    operands = router_operands(4)

    # That the result has no axis is checked: it is the same on all devices.
    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(P(), P(axes)), out_specs=(P(), P()))
    def sharded(router: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.value_and_grad(router_loss)(router, x, names)

    expected = jax.jit(jax.value_and_grad(router_loss))(*operands)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), sharded(*operands), expected)


def test_the_balance_loss_under_pmap_is_that_of_the_whole_batch() -> None:
    devices = data_mesh(2).devices.ravel().tolist()
    router, x = router_operands(2)

    def step(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss, gradient = jax.value_and_grad(router_loss)(router, x, "data")
        return loss, jax.lax.pmean(gradient, "data")

    losses, gradients = jax.pmap(step, axis_name="data", devices=devices)(x.reshape(2, TOKENS, 8))
    expected, expected_gradient = jax.jit(jax.value_and_grad(router_loss))(router, x)
    for device in range(2):
        np.testing.assert_allclose(losses[device], expected, rtol=1e-5)
        np.testing.assert_allclose(gradients[device], expected_gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            dict(logits=LOGITS.astype(np.int32)),
            TypeError,
            "logits' type must be bfloat16, float16 or float32, got int32.",
        ),
        (dict(logits=LOGITS[0]), ValueError, "logits must have shape [T, E], got (5,)."),
        (
            dict(router=Router(6)),
            ValueError,
            "top_k must be at most the 5 experts of logits (6, 5), got 6.",
        ),
        (
            dict(selection_bias=jnp.ones(5, bool)),
            TypeError,
            "selection_bias's type must be bfloat16, float16 or float32, got bool.",
        ),
        (dict(selection_bias=jnp.ones(6)), ValueError, "selection_bias must have shape [E] = (5,), got (6,)."),
        (
            dict(router=Router(3, use_selection_bias=True)),
            ValueError,
            "A router with use_selection_bias needs a selection_bias, got None.",
        ),
        (dict(router=Router(3, groups=2, top_groups=1)), ValueError, "groups must divide the 5 experts, got 2."),
        (
            dict(router=Router(3, groups=5, top_groups=1)),
            ValueError,
            "top_groups must be groups of at least top_k = 3 experts together, got 1 groups of 1.",
        ),
        (dict(router=3), TypeError, "router must be a jax_grouped.moe.Router, got 3."),
        (dict(logits=None), TypeError, "logits must be an array, got None."),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_top_k_routing_rejects(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        routing.top_k_routing(**(dict(logits=LOGITS, router=ROUTER) | arguments))


def test_the_balance_loss_rejects_what_is_no_routing_and_no_axis() -> None:
    with pytest.raises(
        TypeError, match=r"^routing must be a jax_grouped\.moe\.Routing, got an object of type ndarray\.$"
    ):
        routing.load_balancing_loss(LOGITS)
    with pytest.raises(ValueError, match=r"^There is no mesh axis 'data' here: call it inside jax"):
        routing.load_balancing_loss(routing.top_k_routing(LOGITS, ROUTER), axis_name="data")


def test_the_z_loss_is_the_mean_square_of_the_log_sum_exp() -> None:
    logits = 3 * jax.random.normal(jax.random.key(0), (8, 5))

    loss, gradient = jax.value_and_grad(routing.router_z_loss)(logits)

    numbers = np.asarray(logits, np.float64)
    log_sums = np.log(np.exp(numbers).sum(axis=1))
    np.testing.assert_allclose(loss, np.mean(log_sums**2), rtol=1e-6)
    shares = np.exp(numbers - log_sums[:, None])
    np.testing.assert_allclose(gradient, 2 * log_sums[:, None] * shares / 8, rtol=1e-5)
    assert routing.router_z_loss(jnp.zeros((0, 5))) == 0
    halves = jax.vmap(functools.partial(routing.router_z_loss, axis_name="data"), axis_name="data")
    np.testing.assert_allclose(halves(logits.reshape(2, 4, 5)), [loss, loss], rtol=1e-6)
    with pytest.raises(ValueError, match=r"^logits must have shape \[T, E\], got \(5,\)\.$"):
        routing.router_z_loss(logits[0])


def test_a_selection_bias_moves_by_its_rate() -> None:
    bias = routing.update_selection_bias(jnp.array([0.5, 0, 0], jnp.float32), jnp.array([9, 5, 1]), rate=0.25)

    np.testing.assert_array_equal(bias, [0.25, 0, 0.25])
    with pytest.raises(ValueError, match=r"^selection_bias and expert_load must have one shape \[E\], got \(3,\) and"):
        routing.update_selection_bias(bias, jnp.ones(2, jnp.int32))


@pytest.mark.parametrize(
    ("loads", "directions"),
    [
        (7 * [131071], 7 * [0]),
        ([2**31 - 1, 2**31 - 1, 2**31 - 2], [-1, -1, 1]),
        ([2**31 - 1, 0, 0, 2**31 - 1], [-1, 1, 1, -1]),
        ([16777217, 16777217, 16777216], [-1, -1, 1]),
        ([16777217, 16777215, 16777216], [-1, 1, 0]),
    ],
    ids=["equal", "near the most", "far apart", "more than float32 counts", "around the mean"],
)
def test_loads_are_compared_with_their_mean_exactly(loads: list[int], directions: list[int]) -> None:
    got = routing.update_selection_bias(jnp.zeros(len(loads)), jnp.array(loads, jnp.int32), rate=jnp.float32(1))

    np.testing.assert_array_equal(got, directions)


def test_loads_of_any_integer_type() -> None:
    for dtype in ("int8", "uint16", "int64", "uint64"):
        with jax.enable_x64(True):
            load = jnp.zeros(300, dtype).at[7].set(100)  # More experts than an 8-bit type counts.

            bias = routing.update_selection_bias(jnp.zeros(300, jnp.float32), load, rate=np.float64(1))

        np.testing.assert_array_equal(bias, np.where(np.arange(300) == 7, -1, 1), err_msg=dtype)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (dict(selection_bias=jnp.zeros(3, jnp.bfloat16)), TypeError, "selection_bias must be float32 to be updated,"),
        (dict(expert_load=jnp.ones(3)), TypeError, "expert_load must be of an integer type, got float32."),
        (dict(rate="x"), TypeError, "rate must be a number, known when the program is traced, got 'x'."),
        (dict(rate=jnp.array(True)), TypeError, "rate must be a number, got an array of type bool."),
        (dict(rate=jnp.ones(3)), ValueError, "rate must be a scalar, got shape (3,)."),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_update_selection_bias_rejects(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        routing.update_selection_bias(
            **(dict(selection_bias=jnp.zeros(3), expert_load=jnp.array([1, 2, 3])) | arguments)
        )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_logits_of_a_linear_router(dtype: str) -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    x, kernel = jax.random.normal(keys[0], (40, 24)).astype(dtype), jax.random.normal(keys[1], (24, 6))
    dlogits = jax.random.normal(keys[2], (40, 6))

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


@pytest.mark.parametrize(
    ("kernel", "error", "message"),
    [
        (jnp.ones((3, 2)), ValueError, r"kernel must have shape \[K, E\] for x \(5, 4\), got \(3, 2\)."),
        (jnp.ones((4, 2), jnp.int32), TypeError, "kernel's type must be"),
    ],
    ids=["shape", "type"],
)
def test_kernels_of_a_router_that_do_not_fit(kernel: jax.Array, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        routing.router_logits(jnp.ones((5, 4)), kernel)
