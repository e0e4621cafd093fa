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

from jax_grouped.moe import Router, moe_mlp, permutation
from jax_grouped.moe.permutation import Permutation
from tests import oracle
from tests.exports import exported
from tests.meshes import data_mesh, mesh_of
from tests.programs import lowered

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


@settings(max_examples=60, deadline=None)
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


@pytest.mark.parametrize(
    ("experts", "capacity"),
    [
        (CHOICES, 0),
        (CHOICES, CHOICES.size - 1),
        (CHOICES, CHOICES.size + 1),
        (CHOICES[:0], None),
        (np.full((3, 2), -1, np.int32), 5),
        (np.array([[300], [-7], [2], [0]], np.int16), None),
        (np.array([[2**32 - 1], [3], [4], [0]], np.uint32), 2),
    ],
    ids=["no rows", "one row less", "more rows than pairs", "no tokens", "nobody's", "int16", "uint32"],
)
def test_odd_choices_are_grouped_as_by_a_plain_loop(experts: np.ndarray, capacity: int | None) -> None:
    got = grouped(experts, EXPERTS, capacity=capacity)
    assert_permutations_equal(got, expected_permutation(experts, EXPERTS, capacity))


@pytest.mark.parametrize(("size", "rows"), [(1, 0), (7, 3), (2**16, 2**16 - 1), (200_003, 185_000), (200_003, 3)])
def test_a_cut_group_loses_pairs_at_equal_distances(size: int, rows: int) -> None:
    got = grouped(np.zeros((size, 1), np.int32), EXPERTS, capacity=rows)

    distances = np.diff(got.order)
    assert (got.group_sizes.tolist(), int(got.dropped)) == ([rows] + [0] * (EXPERTS - 1), size - rows)
    assert distances.max(initial=0) - distances.min(initial=size) <= 1
    np.testing.assert_array_equal(got.inverse[got.order, 0], np.arange(rows))


def operands(dtype: Any = np.float32) -> tuple[np.ndarray, np.ndarray]:
    """Returns tokens `[T, C]` and weights `[T, k]` in NumPy: JAX would compile each operation on its arrays."""
    random = np.random.default_rng(0)
    x, weights = random.standard_normal((TOKENS, FEATURES)), random.random((TOKENS, TOP_K))
    return x.astype(dtype), weights.astype(np.float32)


def one_hot(got: Permutation) -> np.ndarray:
    """Marks each row that is a choice of a token, `[R, T, k]`."""
    return np.arange(got.order.shape[0])[:, None, None] == np.asarray(got.inverse)


def mixed(x: jax.Array, weights: jax.Array, routing: Permutation) -> jax.Array:
    """Returns a result to which every row and weight contributes another part."""
    rows = permutation.permute(x, routing)
    rows = jnp.sin(rows * (1 + jnp.arange(rows.shape[0], dtype=rows.dtype)[:, None]))
    return permutation.unpermute(rows, routing, weights)


def dense_mixed(x: jax.Array, weights: jax.Array, one_hot: np.ndarray) -> jax.Array:
    """Computes the same from products with every row."""
    precise = functools.partial(jnp.einsum, precision="highest")
    rows = precise("rtk,tc->rc", one_hot.astype(np.float32), x)
    rows = jnp.sin(rows * (1 + jnp.arange(rows.shape[0], dtype=rows.dtype)[:, None]))
    return precise("rtk,tk,rc->tc", one_hot.astype(np.float32), weights, rows)


def test_values_and_gradients_match_dense_products() -> None:
    routing = grouped(CHOICES, EXPERTS, capacity=11)
    x, weights = operands()

    def value_and_gradients(function: Any, how: Any) -> Any:
        return jax.jit(jax.value_and_grad(lambda *a: jnp.sum(jnp.cos(function(*a, how))), argnums=(0, 1)))(x, weights)

    got = value_and_gradients(mixed, routing)
    expected = value_and_gradients(dense_mixed, one_hot(routing))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, expected)
    assert np.all(np.asarray(got[1][1])[np.asarray(routing.inverse) == routing.order.shape[0]] == 0)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_sums_are_of_float32_in_the_order_of_the_choices(dtype: Any) -> None:
    x, weights = operands(dtype)
    routing = grouped(CHOICES, EXPERTS, capacity=14)
    # Powers of two: with a fused multiply-add or without, every product is exact.
    weights = np.exp2(np.round(4 * weights)).astype(dtype)

    @jax.jit
    def results(x: jax.Array, weights: jax.Array) -> tuple[jax.Array, ...]:
        rows, transpose_permute = jax.vjp(lambda x: permutation.permute(x, routing), x)
        y, transpose = jax.vjp(lambda rows, w: permutation.unpermute(rows, routing, w), rows, weights)
        return rows, y, *transpose_permute(rows), *transpose(y)

    rows, y, dx, *gradients = results(x, weights)

    inverse, kept = np.asarray(routing.inverse), np.asarray(rows)
    kept = np.append(kept, np.zeros((1, FEATURES), kept.dtype), axis=0)
    expected, expected_dx = np.zeros((2, TOKENS, FEATURES), np.float32)
    for token, choice in np.ndindex(TOKENS, TOP_K):
        row = kept[inverse[token, choice]].astype(np.float32)
        expected[token] += row * np.float32(weights[token, choice])
        expected_dx[token] += row
    np.testing.assert_array_equal(y, expected.astype(kept.dtype), strict=True)
    np.testing.assert_array_equal(dx, expected_dx.astype(kept.dtype), strict=True)
    assert [gradient.dtype for gradient in gradients] == [dtype, dtype]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("weighted", [True, False])
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


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_there_and_back_is_as_many_times_the_tokens(dtype: Any) -> None:
    x = (np.arange(TOKENS * FEATURES) - 10).reshape(TOKENS, FEATURES).astype(dtype)
    routing = grouped(CHOICES % EXPERTS, EXPERTS)
    y = jax.jit(lambda x: permutation.unpermute(permutation.permute(x, routing), routing))(x)
    np.testing.assert_array_equal(y, x * x.dtype.type(TOP_K), strict=True)


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


def test_no_tokens_give_no_rows() -> None:
    routing = grouped(CHOICES[:0], EXPERTS)
    x, weights = operands()
    loss = jax.jit(jax.grad(lambda x, w: jnp.sum(mixed(x, w, routing)), argnums=(0, 1)))
    gradients = loss(x[:0], weights[:0])
    assert [g.shape for g in gradients] == [(0, FEATURES), (0, TOP_K)]


def test_no_array_is_scattered_into_except_the_inverse() -> None:
    def step(x: jax.Array, weights: jax.Array, experts: jax.Array) -> jax.Array:
        return jnp.sum(mixed(x, weights, permutation.group_by_expert(experts, EXPERTS, capacity=11)))

    program = lowered(jax.grad(step, argnums=(0, 1)), *operands(), CHOICES, platform="cpu")
    scatters = re.findall(r"stablehlo.scatter.*?unique_indices = (\w+)", program, re.DOTALL)
    assert scatters == ["true"]


def test_the_weighted_sum_is_one_kernel() -> None:
    routing = grouped(CHOICES, EXPERTS)
    x, weights = operands(jnp.bfloat16)
    rows = jax.jit(permutation.permute)(x, routing)
    program = jax.jit(permutation.unpermute).lower(rows, routing, weights).compile().as_text()
    entry = program[program.index("ENTRY") :]
    kernels = [line for line in entry.splitlines() if re.search(r" (fusion|gather|custom-call|call)\(", line)]
    assert len(kernels) == 1, entry


def test_derivatives_of_second_order_match_dense_products() -> None:
    routing = grouped(CHOICES, EXPERTS)

    def hessian_product(function: Any, how: Any) -> Any:
        loss = jax.grad(lambda *a: jnp.sum(jnp.cos(function(*a, how))), argnums=(0, 1))
        return jax.jit(jax.grad(lambda *a: sum(jnp.sum(jnp.sin(g)) for g in loss(*a)), argnums=(0, 1)))(*operands())

    expected = hessian_product(dense_mixed, one_hot(routing))
    got = hessian_product(mixed, routing)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), got, expected)


def step(x: jax.Array, weights: jax.Array, experts: jax.Array) -> tuple[jax.Array, ...]:
    """Computes grouping, result and gradients of one device's tokens."""
    routing = permutation.group_by_expert(experts, EXPERTS, capacity=11)
    y, transpose = jax.vjp(lambda x, w: mixed(x, w, routing), x, weights)
    return y, *transpose(y)


@functools.cache
def batches() -> tuple[np.ndarray, np.ndarray, np.ndarray, list[tuple[jax.Array, ...]]]:
    """Returns arguments of `step` for two devices, and its results for each alone."""
    x, weights = operands()
    xs, ws, experts = np.stack([x, 2 - x]), np.stack([weights, weights**2]), np.stack([CHOICES, CHOICES[::-1]])
    return xs, ws, experts, [jax.jit(step)(*arguments) for arguments in zip(xs, ws, experts, strict=True)]


def assert_each_is_alone(got: tuple[jax.Array, ...], expected: list[tuple[jax.Array, ...]]) -> None:
    for index, parts in enumerate(zip(*expected, strict=True)):
        np.testing.assert_allclose(got[index], np.stack(parts), rtol=1e-5, atol=1e-5)


def test_vmap_gives_each_batch_its_own_result() -> None:
    *arguments, expected = batches()
    assert_each_is_alone(jax.jit(jax.vmap(step))(*arguments), expected)


def test_pmap_gives_each_device_its_own_result() -> None:
    devices = data_mesh(2).devices.ravel().tolist()
    *arguments, expected = batches()
    assert_each_is_alone(jax.pmap(step, devices=devices)(*arguments), expected)


def test_shard_map_over_some_axes_of_a_mesh_gives_each_device_its_own_result() -> None:
    *arguments, expected = batches()

    def local(*arguments: jax.Array) -> Any:
        return jax.tree.map(lambda leaf: leaf[None], step(*(leaf[0] for leaf in arguments)))

    mesh = mesh_of({"data": 2, "other": 2})
    sharded = jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names={"data"})
    assert_each_is_alone(jax.jit(sharded)(*arguments), expected)


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


def test_a_permutation_is_exported_with_its_program() -> None:
    program = exported(lambda experts: permutation.group_by_expert(experts, EXPERTS), jnp.array(CHOICES))
    assert_permutations_equal(program(jnp.array(CHOICES)), expected_permutation(CHOICES, EXPERTS, None))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (dict(experts=CHOICES * 1.0), TypeError, "experts must be of an integer type, got float"),
        (dict(experts=CHOICES[0]), ValueError, "experts must have shape [T, k] with k of at least 1, got (3,)."),
        (dict(experts=CHOICES[:, :0]), ValueError, "experts must have shape [T, k] with k of at least 1, got (7, 0)."),
        (dict(num_experts=4.0), TypeError, "num_experts must be an integer, known when the program is traced"),
        (dict(num_experts=0), ValueError, "num_experts must be at least 1, got 0."),
        (dict(capacity=1.5), TypeError, "capacity must be an integer, known when the program is traced, got 1.5."),
        (dict(capacity=-1), ValueError, "capacity must be at least 0, got -1."),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_group_by_expert_rejects(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        permutation.group_by_expert(**(dict(experts=CHOICES, num_experts=EXPERTS) | arguments))


def test_more_pairs_than_int32_has_places_for_are_refused() -> None:
    def shapes(tokens: int) -> Any:
        experts = jax.ShapeDtypeStruct((tokens, 2), jnp.int8)
        return jax.eval_shape(lambda experts: permutation.group_by_expert(experts, EXPERTS), experts)

    assert shapes(2**29).order.shape == (2**30,)
    with pytest.raises(ValueError, match=re.escape("experts must have at most 2^30 pairs of a token and an expert")):
        shapes(2**29 + 1)


@pytest.mark.parametrize("whole", [False, True], ids=["group_by_expert", "moe_mlp"])
def test_the_number_of_tokens_must_be_known(whole: bool) -> None:
    (tokens,) = export.symbolic_shape("t")
    kernels = jnp.ones((4, 32, 64)), jnp.ones((4, 32, 32))

    def layer(x: jax.Array, experts: jax.Array) -> Any:
        if whole:
            return moe_mlp(x, x[:, :4], *kernels, router=Router(2))
        return permutation.group_by_expert(experts, 4)

    arguments = jax.ShapeDtypeStruct((tokens, 32), jnp.float32), jax.ShapeDtypeStruct((tokens, 2), jnp.int32)
    with pytest.raises(ValueError, match="the number of tokens must be known when the program is traced, got experts"):
        export.export(jax.jit(layer))(*arguments)


@pytest.mark.parametrize(
    ("function", "arguments", "error", "message"),
    [
        ("permute", ((7, 5), jnp.int32), TypeError, "x's type must be bfloat16, float16 or float32, got int32."),
        ("permute", ((7,),), ValueError, "x must have shape [T, C], got (7,)."),
        ("permute", ((11, 5),), ValueError, "x must have the permutation's 7 tokens, got (11, 5)."),
        ("unpermute", ((11, 5), jnp.int8), TypeError, "rows's type must be bfloat16, float16 or float32, got int8."),
        ("unpermute", ((11, 5, 1),), ValueError, "rows must have shape [R, C], got (11, 5, 1)."),
        ("unpermute", ((7, 5),), ValueError, "rows must have the permutation's 11 rows, got (7, 5)."),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_both_directions_reject(function: str, arguments: tuple, error: type[Exception], message: str) -> None:
    routing = grouped(CHOICES, EXPERTS, capacity=11)
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        getattr(permutation, function)(jnp.ones(*arguments), routing)


@pytest.mark.parametrize(
    ("weights", "error", "message"),
    [
        (jnp.ones((7, 3), int), TypeError, "weights' type must be bfloat16, float16 or float32, got int32."),
        (jnp.ones((7, 2)), ValueError, "weights must have the permutation's shape [T, k] = (7, 3), got (7, 2)."),
    ],
    ids=["type", "shape"],
)
def test_unpermute_rejects_weights(weights: jax.Array, error: type[Exception], message: str) -> None:
    routing = grouped(CHOICES, EXPERTS, capacity=11)
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        permutation.unpermute(jnp.ones((11, FEATURES)), routing, weights)


@pytest.mark.parametrize(
    ("shared", "error", "message"),
    [
        (jnp.ones((7, 5), int), TypeError, "shared's type must be bfloat16, float16 or float32, got int32."),
        (jnp.ones((7, 1)), ValueError, "shared must have the shape [T, N] of the result, (7, 5), got (7, 1)."),
    ],
    ids=["type", "shape"],
)
def test_unpermute_rejects_what_is_shared(shared: jax.Array, error: type[Exception], message: str) -> None:
    routing = grouped(CHOICES, EXPERTS, capacity=11)
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        permutation.unpermute(jnp.ones((11, FEATURES)), routing, shared=shared)


@pytest.mark.parametrize("function", ["permute", "unpermute"])
def test_group_sizes_are_no_permutation(function: str) -> None:
    with pytest.raises(TypeError, match=r"^permutation must be a jax_grouped\.moe\.Permutation, got Array\("):
        getattr(permutation, function)(jnp.ones((7, FEATURES)), jnp.array([3, 4]))
