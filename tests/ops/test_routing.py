"""The choice of experts and the rows of pairs, against loops written from the definitions."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from jax_grouped.kernels import routing
from jax_grouped.kernels.routing import RouteSpec
from jax_grouped.ops.routing import RoutedAndGrouped, group_pairs, route, route_and_group
from tests import oracle
from tests.ops.quantize_cases import some
from tests.programs import custom_calls, lowered, struct

TOKENS = 45
SCORES = "softmax", "sigmoid"
LOWEST, TINY = float(np.finfo(np.float32).min), float(np.finfo(np.float32).tiny)


def logits_of(tokens: int, num_experts: int, dtype: Any = "float32") -> np.ndarray:
    """Returns logits without near-ties, whose rounded exponentials could be in another order.

    Rounding to 16 bits makes exact ties. The first rows have more of them, NaN and infinities.
    """
    random = np.random.default_rng(tokens + num_experts)
    logits = np.stack([random.permutation(num_experts) for _ in range(tokens)]) * (8 / num_experts) - 3
    special = [0, np.nan, np.inf, -np.inf]
    logits[: len(special)] = np.array(special)[: len(logits), None]
    logits[4:5, ::2] = np.nan
    logits[5:6, ::3] = -np.inf
    logits[6:7, : num_experts // 2] = 1
    logits[7:8, -1] = np.inf
    return np.asarray(jnp.asarray(logits, dtype))


def bias_of(num_experts: int) -> np.ndarray:
    """Returns a bias that makes no near-ties: it differs by more than scores do."""
    bias = 2.0 * np.random.default_rng(num_experts).integers(-1, 2, num_experts)
    bias[1:4] = np.array([np.nan, np.inf, -np.inf])[: num_experts - 1]
    return bias.astype(np.float32)


def expected_experts(compared: np.ndarray, scores: np.ndarray, spec: RouteSpec) -> list[int]:
    """Chooses a token's experts from the numbers to compare, and from the scores that groups add up."""
    compared, scores = (np.nan_to_num(np.clip(x, LOWEST, -LOWEST), nan=LOWEST) for x in (compared, scores))
    size = len(scores) // spec.expert_groups
    pairs = [np.sort(scores[first : first + size])[-2:].sum() for first in range(0, len(scores), size)]
    best = np.argsort(-np.asarray(pairs), kind="stable")[: spec.top_groups]
    allowed = [expert for expert in range(len(scores)) if expert // size in best]
    return sorted(allowed, key=lambda expert: (-compared[expert], expert))[: spec.top_k]


def without_subnormals(scores: np.ndarray) -> np.ndarray:
    return np.where(scores < TINY, 0, scores)


def shares(logarithms: np.ndarray) -> np.ndarray:
    """Divides numbers, of which it has the logarithms, by their sum; zeros where all are zero."""
    if np.all(logarithms == -np.inf):
        return np.zeros_like(logarithms)
    powers = np.exp(logarithms - logarithms.max())
    return powers / powers.sum()


@np.errstate(invalid="ignore", over="ignore", divide="ignore")
def check_routed(got: Any, logits: np.ndarray, bias: np.ndarray | None, spec: RouteSpec, rtol: float = 1e-6) -> None:
    is_softmax = spec.score == "softmax"
    for token, row in enumerate(logits.astype(np.float64)):
        powers = np.exp(row - row.max())
        logarithms = np.log(powers / powers.sum()) if is_softmax else -np.logaddexp(0, -row)
        compared = scores = np.exp(logarithms)
        if bias is not None:
            compared = scores = without_subnormals(scores) + bias
        elif not is_softmax:
            compared, scores = row, without_subnormals(np.exp(logarithms - np.fmax.reduce(logarithms)))
        experts = expected_experts(compared, scores, spec)
        assert got.experts[token].tolist() == experts, token
        chosen = logarithms[experts]
        weights = shares(chosen) if spec.normalize_weights else np.exp(chosen)
        np.testing.assert_allclose(got.weights[token], weights, rtol=rtol, atol=1e-30, err_msg=str(token))
        np.testing.assert_allclose(got.probabilities[token], shares(logarithms), rtol=rtol, atol=1e-30)


def check_grouped(got: Any, experts: np.ndarray, num_experts: int, rows: int) -> None:
    pairs = experts.size
    groups = [np.flatnonzero(experts.reshape(-1) == expert) for expert in range(num_experts)]
    longest = max(n for n in range(pairs + 1) if sum(min(len(group), n) for group in groups) <= rows)
    placed = np.concatenate([oracle.at_equal_distances(group, longest) for group in groups])
    inverse = np.full(pairs, rows)
    inverse[placed] = np.arange(len(placed))
    np.testing.assert_array_equal(got.order, np.append(placed, np.full(rows - len(placed), pairs)))
    np.testing.assert_array_equal(got.inverse, inverse.reshape(experts.shape))
    np.testing.assert_array_equal(got.group_sizes, [min(len(group), longest) for group in groups])
    assert int(got.dropped) == pairs - len(placed)


def check_alike(got: jax.Array, expected: jax.Array) -> None:
    """Compares results of two programs, which the `xla` backend may add up in different orders."""
    exact = jnp.issubdtype(expected.dtype, jnp.integer)
    np.testing.assert_allclose(got, expected, rtol=0 if exact else 1e-5)


@functools.partial(jax.jit, static_argnames=("spec", "rows"))
def whole(logits: jax.Array, bias: jax.Array | None, spec: RouteSpec, rows: int) -> RoutedAndGrouped:
    return route_and_group(logits, bias, spec, rows)


ROUTINGS = [
    (1, 1, "float32"),
    (3, 2, "bfloat16"),
    (8, 8, "float16"),
    (64, 8, "bfloat16"),
    (100, 32, "float32"),
    (128, 8, "bfloat16"),
    (257, 2, "float32"),
    (512, 1, "float16"),
    (512, 33, "float32"),
    (513, 8, "float32"),
]


@pytest.mark.parametrize(("num_experts", "top_k", "dtype"), ROUTINGS)
def test_tokens_are_routed_and_grouped_as_by_plain_loops(
    backend: str, num_experts: int, top_k: int, dtype: str
) -> None:
    logits = logits_of(TOKENS, num_experts, dtype)
    for score in some(backend, SCORES, ROUTINGS.index((num_experts, top_k, dtype)) // 2):
        bias = bias_of(num_experts) if score == "sigmoid" else None
        spec = RouteSpec(top_k, score, normalize_weights=dtype != "float16")
        rows = TOKENS * top_k * 2 // 3 if dtype == "bfloat16" else TOKENS * top_k

        got = whole(logits, bias, spec, rows)
        alone = jax.jit(route, static_argnums=2)(logits, bias, spec)

        check_routed(got.routed, logits, bias, spec)
        experts = np.asarray(got.routed.experts)
        check_grouped(got.grouped, experts, num_experts, rows)
        np.testing.assert_array_equal(got.expert_load, np.bincount(experts.reshape(-1), minlength=num_experts))
        np.testing.assert_allclose(got.probability_sums, np.sum(got.routed.probabilities, axis=0), rtol=1e-5)
        jax.tree.map(check_alike, alone, got.routed)


@pytest.mark.parametrize(
    ("num_experts", "expert_groups", "top_groups", "top_k"),
    [(12, 4, 2, 5), (12, 12, 3, 3), (96, 3, 1, 8), (256, 8, 4, 8), (510, 17, 4, 8), (128, 32, 31, 4), (66, 33, 2, 4)],
)
def test_experts_come_from_the_best_groups(
    backend: str, num_experts: int, expert_groups: int, top_groups: int, top_k: int
) -> None:
    logits, bias = logits_of(TOKENS, num_experts), bias_of(num_experts)
    for score in some(backend, SCORES, top_groups + top_k):
        spec = RouteSpec(top_k, score, True, expert_groups, top_groups)

        check_routed(jax.jit(route, static_argnums=2)(logits, bias, spec), logits, bias, spec)


#: Logits whose sigmoids float32 rounds to 0, by other margins than 16-bit types do, with ordinary ones or without.
FAR_BELOW = np.array(
    [
        [-60, -61, -62, -60.5, -63, -64],
        [-88, -88.5, -87, -89, -90, -86],
        [-95, -96.5, -94, -97, -98, -95.5],
        [-110, -300, -108, -1e30, -111, -112],
        [-1e30, -300, -305, -304, -1e30, -301.5],
        [0.5, -300, -88, -110, -95, -1e30],
        [-60, -2, -88, 3, -1e30, -95],
        [-np.inf, -95, -np.inf, -96, -np.inf, -94],
        [-np.inf] * 6,
        [-95, -96, np.nan, -94, -97, -98],
    ],
    np.float32,
)


@pytest.mark.parametrize(("dtype", "normalize"), [("float32", True), ("bfloat16", False)])
def test_sigmoids_that_float32_rounds_to_zero_are_weighted_by_their_logarithms(
    backend: str, dtype: str, normalize: bool
) -> None:
    logits = np.asarray(jnp.asarray(FAR_BELOW, dtype))
    # This bias forbids the first experts, so the best of the others is far below the best of all.
    forbidding = np.array([-9, -9, 0, 0, 0.125, 0], np.float32)
    for bias, groups in itertools.product((None, forbidding, np.zeros(6, np.float32)), [(1, 1), (3, 2), (6, 3)]):
        spec = RouteSpec(3, "sigmoid", normalize, *groups)
        check_routed(jax.jit(route, static_argnums=2)(logits, bias, spec), logits, bias, spec, rtol=1e-5)


def test_the_loss_and_the_gradient_of_sigmoids_that_float32_rounds_to_zero(backend: str) -> None:
    logits, spec = jnp.asarray(FAR_BELOW[:5]), RouteSpec(3, "sigmoid", normalize_weights=True)
    experts = route(logits, None, spec).experts

    def by_logarithms(logits: jax.Array) -> jax.Array:
        logarithms = jax.nn.log_sigmoid(logits)
        probabilities = jax.nn.softmax(logarithms)
        weights = jax.nn.softmax(jnp.take_along_axis(logarithms, experts, axis=1))
        return mixed(weights, probabilities, jnp.sum(probabilities, axis=0))

    got, expected = (
        jax.jit(jax.value_and_grad(function))(logits)
        for function in (functools.partial(outputs, spec=spec), by_logarithms)
    )

    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), got, expected)
    assert np.all(np.any(np.abs(got[1]) > 1e-3, axis=1))


@pytest.mark.parametrize("tokens", [1, 32, 33, 5000])
def test_blocks_of_tokens_add_up(backend: str, tokens: int) -> None:
    logits = logits_of(tokens + 8, 7)[8:]
    spec = RouteSpec(2, "softmax", True)

    got = whole(logits, None, spec, rows=len(logits))

    check_grouped(got.grouped, np.asarray(got.routed.experts), 7, len(logits))
    np.testing.assert_allclose(
        got.probability_sums, np.sum(np.asarray(got.routed.probabilities, np.float64), axis=0), rtol=1e-5
    )


#: Ranges of choices, of `E` experts.
CHOICES = {
    "even": lambda num_experts: (0, num_experts),
    "one": lambda num_experts: (num_experts // 2, num_experts // 2 + 1),
    "nobody": lambda _: (-1, 0),
    "out of range": lambda num_experts: (-3, num_experts + 4),
}


@pytest.mark.parametrize(
    ("tokens", "top_k", "num_experts"),
    [(1, 7, 3), (129, 5, 1), (50, 3, 64), (700, 1, 512), (4200, 2, 9), (20, 2, 513)],
)
def test_any_pairs_are_grouped_as_by_a_plain_loop(backend: str, tokens: int, top_k: int, num_experts: int) -> None:
    random = np.random.default_rng(tokens)
    function = jax.jit(group_pairs, static_argnums=(1, 2))
    for choices in CHOICES.values():
        experts = random.integers(*choices(num_experts), (tokens, top_k), dtype=np.int32)
        for rows in (experts.size, experts.size // 2, 1):
            check_grouped(function(experts, num_experts, rows), experts, num_experts, rows)


def test_two_runs_give_the_same_bits(backend: str) -> None:
    arguments = logits_of(3000, 128, "bfloat16"), bias_of(128), RouteSpec(8, "sigmoid", True), 10_000

    jax.tree.map(np.testing.assert_array_equal, whole(*arguments), whole(*arguments))


@pytest.mark.parametrize(("num_experts", "bias_axis"), [(16, None), (520, 0)])
def test_vmap_routes_and_groups_each_batch_by_itself(backend: str, num_experts: int, bias_axis: int | None) -> None:
    logits = np.stack([logits_of(40, num_experts)[i:] for i in (0, 0)])
    logits[1] = logits[1, ::-1]
    biases = np.stack([bias_of(num_experts), bias_of(num_experts)[::-1]])
    spec, rows = RouteSpec(3, "sigmoid", True), 70

    got = jax.vmap(lambda x, b: whole(x, b, spec, rows), (0, bias_axis))(
        logits, biases if bias_axis == 0 else biases[0]
    )
    grouped = jax.vmap(lambda experts: group_pairs(experts, num_experts, rows))(got.routed.experts)

    jax.tree.map(np.testing.assert_array_equal, grouped, got.grouped)
    for i in range(2):
        one = whole(logits[i], biases[i if bias_axis == 0 else 0], spec, rows)
        jax.tree.map(check_alike, jax.tree.map(lambda x, i=i: x[i], got), one)


def mixed(*parts: jax.Array) -> jax.Array:
    """Returns a number to which every element contributes another part."""
    return sum(jnp.sum(jnp.sin(part * jnp.linspace(1, 3, part.size).reshape(part.shape))) for part in parts)


def outputs(logits: jax.Array, spec: RouteSpec) -> jax.Array:
    """Mixes every differentiable result."""
    got = route_and_group(logits, None, spec, rows=spec.top_k * logits.shape[0])
    return mixed(got.routed.weights, got.routed.probabilities, got.probability_sums)


def dense(logits: jax.Array, spec: RouteSpec, experts: jax.Array) -> jax.Array:
    """Computes the same from all scores, for the given choice."""
    scores = jax.nn.softmax(logits) if spec.score == "softmax" else jax.nn.sigmoid(logits)
    weights = jnp.take_along_axis(scores, experts, axis=1)
    if spec.normalize_weights:
        weights = weights / jnp.sum(weights, axis=1, keepdims=True)
    probabilities = scores / jnp.sum(scores, axis=1, keepdims=True)
    return mixed(weights, probabilities, jnp.sum(probabilities, axis=0))


@pytest.mark.parametrize(("score", "normalize"), [("softmax", True), ("softmax", False), ("sigmoid", False)])
def test_derivatives_of_both_orders_and_modes_are_those_of_dense_scores(
    backend: str, score: Any, normalize: bool
) -> None:
    logits, spec = jnp.asarray(logits_of(13, 5)[8:]), RouteSpec(3, score, normalize)
    experts = route(logits, None, spec).experts
    ours, expected = functools.partial(outputs, spec=spec), functools.partial(dense, spec=spec, experts=experts)

    for derivative in (jax.grad, jax.hessian, *[lambda f: jax.jacrev(jax.grad(f))][:normalize]):
        np.testing.assert_allclose(
            jax.jit(derivative(ours))(logits), jax.jit(derivative(expected))(logits), rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_gradients_scatter_nothing_and_keep_no_more_than_they_need(platform: str) -> None:
    tokens, num_experts, spec = 64, 32, RouteSpec(4, "softmax", True)

    def pull_back(logits: jax.Array, dweights: jax.Array) -> Any:
        return jax.vjp(lambda logits: route(logits, None, spec).weights, logits)[1](dweights)

    logits, dweights = struct((tokens, num_experts)), struct((tokens, 4), jnp.float32)
    residuals = jax.eval_shape(lambda logits: jax.vjp(lambda x: route(x, None, spec).weights, logits)[1], logits)

    assert "scatter" not in lowered(pull_back, logits, dweights, platform=platform)
    assert sorted(leaf.shape for leaf in jax.tree.leaves(residuals)) == [(tokens, 4), (tokens, 4)]


@pytest.mark.parametrize(
    ("tokens", "num_experts", "spec", "calls"),
    [
        (40, 512, RouteSpec(32, "softmax", True), 1),
        (40, 513, RouteSpec(2, "softmax", True), 0),
        (40, 64, RouteSpec(33, "softmax", True), 0),
        (40, 64, RouteSpec(2, "softmax", True, 32, 2), 1),
        (40, 66, RouteSpec(2, "softmax", True, 33, 2), 0),
        (0, 64, RouteSpec(2, "softmax", True), 0),
    ],
    ids=["most", "more experts", "more choices", "most groups", "more groups", "no tokens"],
)
def test_kernels_take_what_they_can(tokens: int, num_experts: int, spec: RouteSpec, calls: int) -> None:
    text = lowered(lambda logits: whole(logits, None, spec, spec.top_k * tokens), struct((tokens, num_experts)))

    assert len(custom_calls(text, "jax_grouped_route")) == calls
    assert len(custom_calls(text, "jax_grouped_group_pairs")) == calls


def test_a_number_of_tokens_that_is_not_known_is_exported() -> None:
    (tokens,) = export.symbolic_shape("T")
    spec = RouteSpec(2, "softmax", True)
    for platform in ("cpu", "cuda"):
        program = export.export(jax.jit(lambda logits: route(logits, None, spec).experts), platforms=[platform])
        exported = program(jax.ShapeDtypeStruct((tokens, 4), jnp.float32))
        if jax.default_backend() == "cpu" and platform == "cpu":
            np.testing.assert_array_equal(exported.call(jnp.array([[0.0, 3, 1, 2]])), [[1, 3]])


def test_there_are_few_blocks_of_many_tokens() -> None:
    assert [routing.count_blocks(tokens) for tokens in (1, 32, 33, 4096, 4097, 2**30)] == [1, 1, 2, 128, 125, 128]
