"""Rows of experts: every pair has the row that a plain loop gives it, and sums of rows have exact gradients."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import export
from jax.sharding import PartitionSpec as P

from jax_grouped.moe import Router, Routing, moe_mlp, permutation, top_k_routing
from jax_grouped.moe.permutation import Permutation
from tests import oracle
from tests.exports import exported
from tests.meshes import data_mesh, make_mesh
from tests.programs import lowered
from tests.refusals import assert_refused

pytestmark = pytest.mark.slow

TOKENS, TOP_K, EXPERTS, FEATURES = 7, 3, 4, 5
#: Choices with two pairs of no expert, and an expert without tokens.
CHOICES = np.array([[0, 1, 3], [3, 0, 1], [4, 3, 0], [0, 3, 1], [3, -1, 0], [1, 3, 0], [3, 0, 1]], np.int32)


@pytest.fixture(autouse=True)
def _backend(backend: str) -> None:
    """Runs every test of this module on every backend."""


@functools.partial(jax.jit, static_argnames=("num_experts", "capacity"))
def grouped(experts: jax.Array, num_experts: int, capacity: int | None = None) -> Permutation:
    return permutation.group_by_expert(experts, num_experts, capacity=capacity)


def expected_permutation(experts: np.ndarray, num_experts: int, capacity: int | None) -> Permutation:
    """Computes the definition: lists of pairs, of which the longest lose as many as have no room."""
    pairs = experts.size
    rows = pairs if capacity is None else min(capacity, pairs)
    groups = [np.flatnonzero(experts.reshape(-1) == expert) for expert in range(num_experts)]
    longest = max(n for n in range(pairs + 1) if sum(len(group[:n]) for group in groups) <= rows)
    groups = [oracle.at_equal_distances(group, longest) for group in groups]
    placed = [pair for group in groups for pair in group]
    inverse = np.full(experts.shape, rows)
    for row, pair in enumerate(placed):
        inverse.flat[pair] = row
    order = placed + [pairs] * (rows - len(placed))
    return Permutation(np.array(order, int), inverse, np.array([len(g) for g in groups]), pairs - len(placed))


def assert_permutations_equal(got: Permutation, expected: Permutation) -> None:
    for name, array in vars(got).items():
        assert array.dtype == jnp.int32, name
        np.testing.assert_array_equal(array, getattr(expected, name), err_msg=name)


@settings(max_examples=40, deadline=None)
@given(
    # Draw one shape, because each is compiled, and many values.
    experts=st.lists(st.integers(-1, 5), min_size=12, max_size=12),
    num_experts=st.sampled_from([1, 5]),
    capacity=st.sampled_from([None, 7]),
)
def test_pairs_are_grouped_as_by_a_plain_loop(experts: list[int], num_experts: int, capacity: int | None) -> None:
    choices = np.array(experts, np.int32).reshape(6, 2)
    got = grouped(choices, num_experts, capacity=capacity)
    assert_permutations_equal(got, expected_permutation(choices, num_experts, capacity))


def test_odd_choices_are_grouped_as_by_a_plain_loop() -> None:
    for experts, capacity in (
        (CHOICES, 0),
        (CHOICES, CHOICES.size - 1),
        (CHOICES, CHOICES.size + 1),
        (CHOICES[:0], None),
        (np.full((3, 2), -1, np.int32), 5),
        (np.array([[300], [-7], [2], [0]], np.int16), None),
        (np.array([[2**32 - 1], [3], [4], [0]], np.uint32), 2),
    ):
        got = grouped(experts, EXPERTS, capacity=capacity)
        assert_permutations_equal(got, expected_permutation(experts, EXPERTS, capacity))


def test_a_cut_group_loses_pairs_at_equal_distances() -> None:
    for size, rows in ((7, 3), (2**16, 2**16 - 1), (200_003, 185_000)):
        got = grouped(np.zeros((size, 1), np.int32), EXPERTS, capacity=rows)

        distances = np.diff(got.order)
        assert (got.group_sizes.tolist(), int(got.dropped)) == ([rows] + [0] * (EXPERTS - 1), size - rows)
        assert distances.max(initial=0) - distances.min(initial=size) <= 1, (size, rows)
        np.testing.assert_array_equal(got.inverse[got.order, 0], np.arange(rows))


def operands(dtype: Any = np.float32) -> tuple[np.ndarray, np.ndarray]:
    """Returns tokens `[T, C]` and weights `[T, k]` in NumPy: JAX would compile each operation on its arrays."""
    random = np.random.default_rng(0)
    x, weights = random.standard_normal((TOKENS, FEATURES)), random.random((TOKENS, TOP_K))
    return x.astype(dtype), weights.astype(np.float32)


def mixed(x: jax.Array, weights: jax.Array, routing: Permutation) -> jax.Array:
    """Returns a result to which every row and weight contributes another part."""
    rows = permutation.permute(x, routing)
    rows = jnp.sin(rows * (1 + jnp.arange(rows.shape[0], dtype=rows.dtype)[:, None]))
    return permutation.unpermute(rows, routing, weights)


def test_derivatives_of_both_orders_match_dense_products() -> None:
    routing = grouped(CHOICES, EXPERTS, capacity=11)
    one_hot = (np.arange(11)[:, None, None] == np.asarray(routing.inverse)).astype(np.float32)  # [R, T, k]

    def dense_mixed(x: jax.Array, weights: jax.Array) -> jax.Array:
        precise = functools.partial(jnp.einsum, precision="highest")
        rows = jnp.sin(precise("rtk,tc->rc", one_hot, x) * (1 + np.arange(11, dtype=np.float32)[:, None]))
        return precise("rtk,tk,rc->tc", one_hot, weights, rows)

    def derivatives(function: Any) -> Any:
        gradient = jax.value_and_grad(lambda *arrays: jnp.sum(jnp.cos(function(*arrays))), argnums=(0, 1))

        def gradient_sum(*arguments: jax.Array) -> tuple[jax.Array, Any]:
            value, gradients = gradient(*arguments)
            return sum(jnp.sum(jnp.sin(leaf)) for leaf in gradients), (value, gradients)

        return jax.jit(jax.grad(gradient_sum, argnums=(0, 1), has_aux=True))(*operands())

    got, expected = derivatives(functools.partial(mixed, routing=routing)), derivatives(dense_mixed)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5), got, expected)
    _, (_, (_, dweights)) = got
    assert np.all(np.asarray(dweights)[np.asarray(routing.inverse) == routing.order.shape[0]] == 0)


@pytest.mark.parametrize(("weighted", "dtype"), [(True, jnp.bfloat16), (False, jnp.float32)])
def test_what_is_shared_is_added_before_the_sum_is_rounded(weighted: bool, dtype: Any) -> None:
    rows, weights = operands(jnp.bfloat16)
    routing = grouped(CHOICES % EXPERTS, EXPERTS, capacity=TOKENS)
    weights = np.exp2(np.round(4 * weights)) if weighted else np.ones_like(weights)
    shared = (100 * rows[::-1]).astype(dtype)

    @jax.jit
    def result_and_gradients(rows: jax.Array, shared: jax.Array, dy: jax.Array) -> tuple[jax.Array, ...]:
        y, transpose = jax.vjp(
            lambda rows, shared: permutation.unpermute(rows, routing, weights if weighted else None, shared=shared),
            rows,
            shared,
        )
        return y, *transpose(dy)

    y, drows, dshared = result_and_gradients(rows, shared, rows)
    without = jax.jit(lambda rows: permutation.unpermute(rows, routing, weights))(rows.astype(np.float32))
    _, drows_alone, _ = result_and_gradients(rows, 0 * shared, rows)

    np.testing.assert_array_equal(y, (np.asarray(without) + shared.astype(np.float32)).astype(rows.dtype), strict=True)
    np.testing.assert_array_equal(dshared, rows.astype(dtype), strict=True)
    np.testing.assert_array_equal(drows, drows_alone, strict=True)


@pytest.mark.parametrize("weighted", [True, False])
def test_what_the_tail_and_dropped_weights_hold_reaches_nothing(weighted: bool) -> None:
    routing = grouped(CHOICES, EXPERTS, capacity=14)
    dropped = np.asarray(routing.inverse) == 14
    tail = np.asarray(routing.order) == CHOICES.size
    assert tail.any()
    x, weights = operands()
    rows = np.asarray(jax.jit(permutation.permute)(x, routing))

    @jax.jit
    def results(rows: jax.Array, weights: jax.Array, dy_of_tail: float) -> tuple[jax.Array, ...]:
        y, transpose = jax.vjp(
            lambda rows, w: permutation.unpermute(rows, routing, w if weighted else None), rows, weights
        )
        drows, dweights = transpose(x)
        dx = jax.vjp(lambda x: permutation.permute(x, routing), x)[1](jnp.where(tail[:, None], dy_of_tail, rows))
        return y, drows, dweights, *dx

    poisoned = results(
        np.where(tail[:, None], np.float32(np.nan), rows), np.where(dropped, np.float32(np.inf), weights), np.nan
    )
    clean = results(rows, weights, 0.0)
    for got, expected in zip(poisoned, clean, strict=True):
        assert np.isfinite(expected).all()
        np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(rows[tail], 0)
    np.testing.assert_array_equal(np.asarray(poisoned[1])[tail], 0)


def test_a_gradient_that_is_not_finite_leaves_dropped_weights_alone() -> None:
    routing = grouped(CHOICES, EXPERTS, capacity=0)
    x, weights = operands()

    @jax.jit
    def results(weights: jax.Array) -> tuple[jax.Array, jax.Array]:
        y, transpose = jax.vjp(lambda w: permutation.unpermute(x[:0], routing, w), weights)
        return y, *transpose(jnp.full_like(y, jnp.inf))

    for result in results(weights):
        np.testing.assert_array_equal(result, 0)


def step(x: jax.Array, weights: jax.Array, experts: jax.Array) -> tuple[jax.Array, ...]:
    """Computes grouping, result and gradients of one device's tokens."""
    routing = permutation.group_by_expert(experts, EXPERTS, capacity=11)
    y, transpose = jax.vjp(lambda x, w: mixed(x, w, routing), x, weights)
    return y, *transpose(y)


def test_batches_and_devices_have_their_own_results() -> None:
    x, weights = operands()
    arguments = np.stack([x, 2 - x]), np.stack([weights, weights**2]), np.stack([CHOICES, CHOICES[::-1]])
    alone = jax.jit(step)
    expected = [np.stack(parts) for parts in zip(*(alone(*one) for one in zip(*arguments, strict=True)), strict=True)]

    def local(*arguments: jax.Array) -> Any:
        return jax.tree.map(lambda leaf: leaf[None], step(*(leaf[0] for leaf in arguments)))

    program = lowered(step, x, weights, CHOICES, platform="cpu")
    scatters = re.findall(r"stablehlo.scatter.*?unique_indices = (\w+)", program, re.DOTALL)
    assert scatters == ["true"], "nothing but the inverse is scattered"
    mapped: dict[str, Any] = {"vmap": jax.jit(jax.vmap(step))}
    if jax.device_count() >= 2:
        mapped["pmap"] = jax.pmap(step, devices=jax.devices()[:2])
    if jax.device_count() >= 4:
        mesh = make_mesh({"data": 2, "other": 2})
        mapped["shard_map over some axes"] = jax.jit(
            jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names={"data"})
        )
    for name, function in mapped.items():
        for got, parts in zip(function(*arguments), expected, strict=True):
            np.testing.assert_allclose(got, parts, rtol=1e-5, atol=1e-5, err_msg=name)


def test_shard_map_of_remat_sums_the_gradients_of_replicated_tokens() -> None:
    (x, weights), experts = operands(), np.stack([CHOICES, CHOICES[::-1]])
    ws = np.stack([weights, weights**2])

    @jax.checkpoint
    def loss(x: jax.Array, weights: jax.Array, experts: jax.Array) -> jax.Array:
        routing = permutation.group_by_expert(experts[0], EXPERTS, capacity=11)
        return jnp.sum(jnp.cos(mixed(x, weights[0], routing)))

    @jax.jit
    @jax.shard_map(mesh=data_mesh(2), in_specs=(P(), P("data"), P("data")), out_specs=(P(), P("data")))
    def sharded(x: jax.Array, weights: jax.Array, experts: jax.Array) -> tuple[jax.Array, ...]:
        return jax.grad(loss, argnums=(0, 1))(x, weights, experts)

    dx, dweights = sharded(x, ws, experts)
    gradient = jax.jit(jax.grad(loss, argnums=(0, 1)))
    parts = [gradient(x, ws[i : i + 1], experts[i : i + 1]) for i in range(2)]
    np.testing.assert_allclose(dx, parts[0][0] + parts[1][0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dweights, np.concatenate([p[1] for p in parts]), rtol=1e-5, atol=1e-5)


def test_a_routing_and_its_permutation_are_exported_with_their_program() -> None:
    def both(logits: jax.Array, experts: jax.Array) -> tuple[Routing, Permutation]:
        return top_k_routing(logits, Router(TOP_K)), permutation.group_by_expert(experts, EXPERTS)

    arguments = jnp.eye(TOKENS, EXPERTS), jnp.array(CHOICES)
    routing, grouping = exported(both, *arguments)(*arguments)
    assert isinstance(routing, Routing)
    np.testing.assert_array_equal(routing.experts, both(*arguments)[0].experts)
    assert_permutations_equal(grouping, expected_permutation(CHOICES, EXPERTS, None))


def test_arguments_that_do_not_fit_are_refused() -> None:
    choices = dict(experts=CHOICES, num_experts=EXPERTS)
    integer = "must be an integer, known when the program is traced"
    assert_refused(
        permutation.group_by_expert,
        choices,
        {
            "experts must be of an integer type, got float": dict(experts=CHOICES * 1.0),
            "experts must have shape [T, k] with k of at least 1, got (3,).": dict(experts=CHOICES[0]),
            "experts must have shape [T, k] with k of at least 1, got (7, 0).": dict(experts=CHOICES[:, :0]),
            f"num_experts {integer}": dict(num_experts=4.0),
            "num_experts must be at least 1, got 0.": dict(num_experts=0),
            f"capacity {integer}, got 1.5.": dict(capacity=1.5),
            "capacity must be at least 0, got -1.": dict(capacity=-1),
        },
    )
    no_permutation = "permutation must be a jax_grouped.moe.Permutation, got Array("
    types = "type must be bfloat16, float16 or float32, got"
    given = dict(permutation=grouped(CHOICES, EXPERTS, capacity=11))
    assert_refused(
        permutation.permute,
        given | dict(x=jnp.ones((7, 5))),
        {
            f"x's {types} int32.": dict(x=jnp.ones((7, 5), jnp.int32)),
            "x must have shape [T, C], got (7,).": dict(x=jnp.ones(7)),
            "x must have the permutation's 7 tokens, got (11, 5).": dict(x=jnp.ones((11, 5))),
            no_permutation: dict(permutation=jnp.array([3, 4])),
        },
    )
    assert_refused(
        permutation.unpermute,
        given | dict(rows=jnp.ones((11, 5))),
        {
            f"rows's {types} int8.": dict(rows=jnp.ones((11, 5), jnp.int8)),
            "rows must have shape [R, C], got (11, 5, 1).": dict(rows=jnp.ones((11, 5, 1))),
            "rows must have the permutation's 11 rows, got (7, 5).": dict(rows=jnp.ones((7, 5))),
            no_permutation: dict(permutation=jnp.array([3, 4])),
            f"weights' {types} int32.": dict(weights=jnp.ones((7, 3), int)),
            "weights must have the permutation's shape [T, k] = (7, 3), got (7, 2).": dict(weights=jnp.ones((7, 2))),
            f"shared's {types} int32.": dict(shared=jnp.ones((7, 5), int)),
            "shared must have the shape [T, N] of the result, (7, 5), got (7, 1).": dict(shared=jnp.ones((7, 1))),
        },
    )


def test_the_number_of_tokens_must_be_known_and_counted_in_int32() -> None:
    experts = jax.ShapeDtypeStruct((2**29 + 1, 2), jnp.int8)
    with pytest.raises(ValueError, match=re.escape("experts must have at most 2^30 pairs of a token and an expert")):
        jax.eval_shape(lambda experts: permutation.group_by_expert(experts, EXPERTS), experts)

    (tokens,) = export.symbolic_shape("t")
    layer = functools.partial(moe_mlp, router=Router(2))
    shapes = (tokens, 32), (tokens, 4), (4, 32, 64), (4, 32, 32)
    with pytest.raises(ValueError, match="The number of tokens must be known when the program is traced, got "):
        export.export(jax.jit(layer))(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))
