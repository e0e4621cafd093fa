"""The choice of experts and the rows of pairs, against loops written from the definitions."""

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from jax_grouped.kernels import routing
from jax_grouped.kernels.routing import RouteSpec, group_pairs
from tests import oracle
from tests.ops.quantize_cases import some
from tests.programs import custom_calls, lowered, struct

TOKENS = 45
SCORES = "softmax", "sigmoid", "sqrtsoftplus"
LOWEST, TINY = float(np.finfo(np.float32).min), float(np.finfo(np.float32).tiny)


class Results(NamedTuple):
    """Results of the choice of experts and, with a number of rows, of the order of the rows."""

    experts: jax.Array
    weights: jax.Array
    probabilities: jax.Array
    order: Any = None
    inverse: Any = None
    group_sizes: Any = None
    dropped: Any = None
    expert_load: Any = None
    probability_sums: Any = None


def route(
    logits: jax.Array, bias: jax.Array | None, spec: RouteSpec, rows: int | None = None, choice: Any = None
) -> Results:
    return Results(*routing.route(logits, bias, spec, rows, choice))


def drawn_logits(tokens: int, num_experts: int, dtype: Any = "float32") -> np.ndarray:
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


def drawn_bias(num_experts: int) -> np.ndarray:
    """Returns a bias that makes no near-ties: it differs by more than scores do."""
    bias = 2.0 * np.random.default_rng(num_experts).integers(-1, 2, num_experts)
    bias[1:4] = np.array([np.nan, np.inf, -np.inf])[: num_experts - 1]
    return bias.astype(np.float32)


def expected_experts(compared: np.ndarray, scores: np.ndarray, spec: RouteSpec) -> list[int]:
    """Chooses a token's experts from the numbers to compare, and from the scores that groups are compared by."""
    compared, scores = (np.nan_to_num(np.clip(x, LOWEST, -LOWEST), nan=LOWEST) for x in (compared, scores))
    size = len(scores) // spec.expert_groups
    counted = 1 if spec.group_score == "max" else 2
    groups = [np.sort(scores[first : first + size])[-counted:].sum() for first in range(0, len(scores), size)]
    best = np.argsort(-np.asarray(groups), kind="stable")[: spec.top_groups]
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


def log_scores(row: Any, score: str, np: Any = np) -> Any:
    """Returns the logarithms of a token's scores, computed by NumPy or JAX."""
    if score == "softmax":
        powers = np.exp(row - row.max(axis=-1, keepdims=True))
        return np.log(powers / powers.sum(axis=-1, keepdims=True))
    if score == "sigmoid":
        return -np.logaddexp(0, -row)
    # Far below 0, softplus is the exponential.
    return np.where(row < -30, row / 2, np.log(np.logaddexp(0, np.where(row < -30, 0, row))) / 2)


@np.errstate(invalid="ignore", over="ignore", divide="ignore")
def check_routed(got: Any, logits: np.ndarray, bias: np.ndarray | None, spec: RouteSpec, rtol: float = 1e-6) -> None:
    is_softmax = spec.score == "softmax"
    for token, row in enumerate(logits.astype(np.float64)):
        logarithms = log_scores(row, spec.score)
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
    got_order, got_inverse, group_sizes, dropped = got
    np.testing.assert_array_equal(got_order, np.append(placed, np.full(rows - len(placed), pairs)))
    np.testing.assert_array_equal(got_inverse, inverse.reshape(experts.shape))
    np.testing.assert_array_equal(group_sizes, [min(len(group), longest) for group in groups])
    assert int(dropped[0]) == pairs - len(placed)


def check_alike(got: jax.Array, expected: jax.Array) -> None:
    """Compares results of two programs, which the `xla` backend may add up in different orders."""
    exact = jnp.issubdtype(expected.dtype, jnp.integer)
    np.testing.assert_allclose(got, expected, rtol=0 if exact else 1e-5)


@functools.partial(jax.jit, static_argnames=("spec", "rows"))
def whole_and_parts(logits: jax.Array, bias: jax.Array | None, spec: RouteSpec, rows: int) -> tuple[Results, Any]:
    """Returns the routing with its groups, and both as they are made alone."""
    got = route(logits, bias, spec, rows)
    return got, (route(logits, bias, spec)[:3], group_pairs(got.experts, logits.shape[1], rows))


#: Experts, choices, type of the logits, groups of experts, and how many of these are chosen.
ROUTINGS = [
    (1, 1, "float32", 1, 1),
    (3, 2, "bfloat16", 1, 1),
    (8, 8, "float16", 1, 1),
    (64, 8, "bfloat16", 1, 1),
    (100, 32, "float32", 1, 1),
    (128, 8, "bfloat16", 1, 1),
    (257, 2, "float32", 1, 1),
    (512, 1, "float16", 1, 1),
    (512, 33, "float32", 1, 1),
    (513, 8, "float32", 1, 1),
    (12, 5, "float32", 4, 2),
    (12, 3, "float32", 12, 3),
    (96, 8, "float32", 3, 1),
    (256, 8, "float32", 8, 4),
    (510, 8, "float32", 17, 4),
    (128, 4, "float32", 32, 31),
    (66, 4, "float32", 33, 2),
]


@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
def test_tokens_are_routed_and_grouped_as_by_plain_loops(backend: str, routing: tuple[int, int, str, int, int]) -> None:
    num_experts, top_k, dtype, expert_groups, top_groups = routing
    logits = drawn_logits(TOKENS, num_experts, dtype)
    for score in some(backend, SCORES, ROUTINGS.index(routing) // 2):
        bias = drawn_bias(num_experts) if score == "sigmoid" or expert_groups > 1 else None
        group_score = "max" if top_groups == 2 else "top2_sum"
        spec = RouteSpec(top_k, score, dtype != "float16", expert_groups, top_groups, group_score)
        rows = TOKENS * top_k * 2 // 3 if dtype == "bfloat16" else TOKENS * top_k

        got, parts = whole_and_parts(logits, bias, spec, rows)

        check_routed(got, logits, bias, spec)
        experts = np.asarray(got.experts)
        check_grouped(got[3:7], experts, num_experts, rows)
        np.testing.assert_array_equal(got.expert_load, np.bincount(experts.reshape(-1), minlength=num_experts))
        np.testing.assert_allclose(got.probability_sums, np.sum(got.probabilities, axis=0), rtol=1e-5)
        jax.tree.map(check_alike, parts, (got[:3], [*got[3:7]]))


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


def test_scores_that_float32_rounds_to_zero_are_weighted_by_their_logarithms(backend: str) -> None:
    # This bias forbids the first experts, so the best of the others is far below the best of all.
    forbidding = np.array([-9, -9, 0, 0, 0.125, 0], np.float32)
    biases, groups = (None, forbidding, np.zeros(6, np.float32)), [(1, 1), (3, 2), (6, 3)]
    options = itertools.product([("float32", True), ("bfloat16", False)], biases, groups, SCORES[1:])
    for (dtype, normalize), bias, chosen, score in some(backend, options, 0, count=6):
        # The square roots are as far below as the sigmoids are.
        factor = 2 if score == "sqrtsoftplus" else 1
        logits = np.asarray(jnp.asarray(np.maximum(FAR_BELOW, -1e30 / factor) * factor, dtype))
        spec = RouteSpec(3, score, normalize, *chosen)
        check_routed(jax.jit(route, static_argnums=2)(logits, bias, spec), logits, bias, spec, rtol=1e-5)


def test_a_given_choice_is_weighted_as_its_own(backend: str) -> None:
    """The same choice gives the same bits. Experts that do not exist weigh nothing, and nobody counts them."""
    num_experts, top_k, rows = 12, 3, 2 * TOKENS
    logits = drawn_logits(TOKENS, num_experts)
    choices = np.random.default_rng(0).integers(-2, num_experts + 2, (TOKENS, top_k), dtype=np.int32)
    choices[8:10] = -1
    routed = jax.jit(route, static_argnums=(2, 3))
    for score, normalize in some(backend, itertools.product(SCORES, (True, False)), 0, count=6):
        spec = RouteSpec(top_k, score, normalize, 4, 2)
        own = routed(logits, drawn_bias(num_experts), spec, rows)
        jax.tree.map(np.testing.assert_array_equal, routed(logits, None, spec, rows, own.experts), own)

        got = routed(logits, None, spec, rows, choices)
        np.testing.assert_array_equal(got.experts, choices)
        np.testing.assert_array_equal(got.probabilities, own.probabilities)
        exists = (choices >= 0) & (choices < num_experts)
        check_grouped(got[3:7], choices, num_experts, rows)
        np.testing.assert_array_equal(got.expert_load, np.bincount(choices[exists], minlength=num_experts))
        for token in range(8, TOKENS):  # The first tokens are not finite.
            chosen = np.where(
                exists[token], log_scores(logits[token].astype(np.float64), score)[choices[token] % 12], -np.inf
            )
            weights = shares(chosen) if normalize else np.exp(chosen)
            np.testing.assert_allclose(got.weights[token], weights, rtol=1e-6, atol=1e-30, err_msg=str(token))


@pytest.mark.parametrize("tokens", [1, 33, 5000])
def test_blocks_of_tokens_add_up(backend: str, tokens: int) -> None:
    logits = drawn_logits(tokens + 8, 7)[8:]
    spec = RouteSpec(2, "softmax", True)

    got, _ = whole_and_parts(logits, None, spec, rows=len(logits))

    check_grouped(got[3:7], np.asarray(got.experts), 7, len(logits))
    np.testing.assert_allclose(
        got.probability_sums, np.sum(np.asarray(got.probabilities, np.float64), axis=0), rtol=1e-5
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
    pairs = tokens * top_k
    for rows in some(backend, (pairs // 2, pairs, 1), tokens):
        for choices in CHOICES.values():
            experts = random.integers(*choices(num_experts), (tokens, top_k), dtype=np.int32)
            check_grouped(function(experts, num_experts, rows), experts, num_experts, rows)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cuda"], indirect=True)
def test_two_runs_give_the_same_bits(backend: str) -> None:
    arguments = drawn_logits(3000, 128, "bfloat16"), drawn_bias(128), RouteSpec(8, "sigmoid", True), 10_000

    jax.tree.map(np.testing.assert_array_equal, whole_and_parts(*arguments), whole_and_parts(*arguments))


def test_vmap_routes_and_groups_each_batch_by_itself(backend: str) -> None:
    for num_experts, bias_axis in some(backend, [(16, 0), (16, None), (520, 0)], 0):
        logits = np.stack([drawn_logits(40, num_experts)] * 2)
        logits[1] = logits[1, ::-1]
        biases = np.stack([drawn_bias(num_experts), drawn_bias(num_experts)[::-1]])
        spec, rows = RouteSpec(3, "sigmoid", True), 70

        route_one = functools.partial(whole_and_parts, spec=spec, rows=rows)
        got = jax.vmap(route_one, (0, bias_axis))(logits, biases if bias_axis == 0 else biases[0])

        for i in range(2):
            one = route_one(logits[i], biases[i if bias_axis == 0 else 0])
            jax.tree.map(check_alike, jax.tree.map(lambda x, i=i: x[i], got), one)


def mixed(*parts: jax.Array) -> jax.Array:
    """Returns a number to which every element contributes another part."""
    return sum(jnp.sum(jnp.sin(part * jnp.linspace(1, 3, part.size).reshape(part.shape))) for part in parts)


def outputs(logits: jax.Array, spec: RouteSpec) -> jax.Array:
    """Mixes every differentiable result."""
    got = route(logits, None, spec, rows=spec.top_k * logits.shape[0])
    return mixed(got.weights, got.probabilities, got.probability_sums)


def dense(logits: jax.Array, spec: RouteSpec, experts: jax.Array) -> jax.Array:
    """Computes the same from the logarithms of all scores, for the given choice."""
    logarithms = log_scores(logits, spec.score, jnp)
    chosen = jnp.take_along_axis(logarithms, experts, axis=1)
    probabilities = jax.nn.softmax(logarithms)
    weights = jax.nn.softmax(chosen) if spec.normalize_weights else jnp.exp(chosen)
    return mixed(weights, probabilities, jnp.sum(probabilities, axis=0))


@pytest.mark.parametrize(
    ("score", "normalize", "second", "far_below"),
    [
        ("softmax", True, jax.hessian, False),
        ("softmax", False, lambda f: jax.jacrev(jax.grad(f)), False),
        ("sigmoid", False, None, False),
        ("sigmoid", True, None, True),
        ("sqrtsoftplus", False, jax.hessian, False),
        ("sqrtsoftplus", True, None, True),
    ],
    ids=["hessian", "jacrev", "sigmoid", "sigmoid far below", "sqrtsoftplus", "sqrtsoftplus far below"],
)
def test_derivatives_of_both_orders_and_modes_are_those_of_dense_scores(
    backend: str, score: Any, normalize: bool, second: Any, far_below: bool
) -> None:
    logits = jnp.asarray(FAR_BELOW[:5] if far_below else drawn_logits(13, 5)[8:])
    spec = RouteSpec(3, score, normalize)
    experts = route(logits, None, spec).experts

    @functools.partial(jax.jit, static_argnums=1)
    def derivatives(logits: jax.Array, function: Any) -> Any:
        return [derivative(function)(logits) for derivative in (jax.grad, second) if derivative]

    got = derivatives(logits, functools.partial(outputs, spec=spec))
    oracle.assert_trees_close(got, derivatives(logits, functools.partial(dense, spec=spec, experts=experts)), 1e-4)
    if far_below:
        assert np.all(np.any(np.abs(got[0]) > 1e-3, axis=1))


def test_gradients_scatter_nothing_and_keep_no_more_than_they_need() -> None:
    tokens, num_experts, spec = 64, 32, RouteSpec(4, "softmax", True)

    def pull_back(logits: jax.Array, dweights: jax.Array) -> Any:
        return jax.vjp(lambda logits: route(logits, None, spec).weights, logits)[1](dweights)

    logits, dweights = struct((tokens, num_experts)), struct((tokens, 4), jnp.float32)
    residuals = jax.eval_shape(lambda logits: jax.vjp(lambda x: route(x, None, spec).weights, logits)[1], logits)

    assert sorted(leaf.shape for leaf in jax.tree.leaves(residuals)) == [(tokens, 4), (tokens, 4)]
    for platform in ("cpu", "cuda"):
        assert "scatter" not in lowered(pull_back, logits, dweights, platform=platform)


def test_kernels_take_what_they_can() -> None:
    for tokens, num_experts, top_k, groups, calls in (
        (40, 512, 32, (1, 1), 1),
        (40, 513, 2, (1, 1), 0),
        (40, 64, 33, (1, 1), 0),
        (40, 64, 2, (32, 2), 1),
        (40, 66, 2, (33, 2), 0),
        (0, 64, 2, (1, 1), 0),
    ):
        spec = RouteSpec(top_k, "softmax", True, *groups)
        function = functools.partial(route, bias=None, spec=spec, rows=top_k * tokens)
        text = lowered(function, struct((tokens, num_experts)))
        for name in ("route", "group_pairs"):
            assert len(custom_calls(text, f"jax_grouped_{name}")) == calls, (tokens, num_experts, spec)


def test_a_number_of_tokens_that_is_not_known_is_exported() -> None:
    (tokens,) = export.symbolic_shape("T")
    spec = RouteSpec(2, "softmax", True)
    for platform in ("cpu", "cuda"):
        program = export.export(jax.jit(lambda logits: route(logits, None, spec).experts), platforms=[platform])
        exported = program(jax.ShapeDtypeStruct((tokens, 4), jnp.float32))
        if jax.default_backend() == "cpu" and platform == "cpu":
            np.testing.assert_array_equal(exported.call(jnp.array([[0.0, 3, 1, 2]])), [[1, 3]])
