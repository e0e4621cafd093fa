"""Operations on rows without groups: gradients of activations against float64, copies and sums of rows."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_grouped.kernels.activations import Activation, SwiGLU, is_gated
from jax_grouped.kernels.rows import activate, activation_grad, permute_rows, sum_choices, sum_rows
from tests import quantize_oracle
from tests.activations import GPT_OSS, by_jax
from tests.operands import normal
from tests.ops.quantize_cases import ACTIVATIONS, Expected, each_activation, edges_of_clamping, some
from tests.oracle import assert_trees_close, permutation
from tests.programs import custom_calls, lowered, struct

DTYPES = "bfloat16", "float16", "float32"


def arrays(rows: int, features: int, dtype: str, activation: Activation = "swiglu") -> tuple[jax.Array, ...]:
    """Returns the activation's input, the gradient of its weighted result, and the weights of the rows."""
    x = 3 * normal(0, (rows, 2 * features if is_gated(activation) else features))
    return (
        x.astype(dtype),
        normal(1, (rows, features)).astype(dtype),
        jnp.abs(normal(2, (rows,))),
    )


def check_gradient(activation: Activation, x: jax.Array, da: jax.Array, weights: jax.Array) -> None:
    """Compares `activation_grad` with float64."""
    dx, weighted, inner_products = activation_grad(x, da, weights, activation)

    values, gradient, weight = np.asarray(x), np.asarray(da, np.float64), np.asarray(weights, np.float64)[:, None]
    a = Expected.forward(activation, values)
    assert_near(f"{activation}, dx", dx, Expected.backward(activation, weight * gradient, values), x.dtype)
    assert_near(f"{activation}, weighted", weighted, Expected(weight * a.values, weight * a.error), x.dtype)
    terms = a.values * gradient
    finite = np.isfinite(terms).all(axis=1)
    bound = 1e-5 * np.abs(terms[finite]).sum(axis=1).max(initial=0)
    np.testing.assert_allclose(inner_products[finite], terms[finite].sum(axis=1), rtol=0, atol=bound)
    assert not np.isfinite(inner_products[~finite]).any()


def assert_near(label: str, got: jax.Array, expected: Expected, dtype: jax.typing.DTypeLike) -> None:
    assert got.dtype == dtype
    numbers, values = np.asarray(got, np.float64), expected.values
    # The spacing of float16 below its normal numbers is 2^-24.
    bound = expected.error + float(jnp.finfo(dtype).eps) * np.abs(values) + 2.0**-24
    with np.errstate(invalid="ignore"):
        near = np.where(np.isfinite(values), np.abs(numbers - values) <= bound, False)
    off = np.argwhere(~near & (quantize_oracle.bits(numbers) != quantize_oracle.bits(values)))
    assert not off.size, f"{label} {got.shape} differs first at {off[0]}"


@each_activation
def test_gradients_of_activations(backend: str, activation: Activation) -> None:
    forms = itertools.product([(37, 264), (9, 1536), (1, 8), (5, 12)], DTYPES)
    for shape, dtype in some(backend, forms, 5 * ACTIVATIONS.index(activation), count=2):
        x, da, weights = arrays(*shape, dtype, activation)
        # NaN stays in its row.
        check_gradient(activation, x.at[1:2, 3].set(jnp.nan), da, weights)


def test_numbers_at_the_limit_of_clamping_have_a_gradient_and_those_beyond_have_none(backend: str) -> None:
    for dtype in some(backend, DTYPES, 0):
        x = jnp.asarray(edges_of_clamping(dtype))
        rows, features = x.shape[0], x.shape[1] // 2

        check_gradient(GPT_OSS, x, jnp.ones((rows, features), dtype), jnp.linspace(0.5, 2, rows))


def test_rows_take_the_weights_of_their_pairs(backend: str) -> None:
    for axis, dtype in some(backend, [(0, "bfloat16"), (0, "float32"), (None, "bfloat16")], 0):
        x, da, weights = arrays(30, 16, dtype)
        orders = jnp.stack([permutation(15, 2, 30)[0], jax.random.permutation(jax.random.key(0), 40)[:30] - 5])
        operands = [jnp.stack([array, -array]) for array in (x, da, weights)]

        def gradient(x: jax.Array, da: jax.Array, weights: jax.Array, order: jax.Array) -> tuple[jax.Array, ...]:
            return activation_grad(x, da, weights, "swiglu", order)

        batch_results = None if axis is None else jax.vmap(gradient)(*operands, orders)
        for i in range(2):
            one = [array[i] for array in operands]
            order = np.asarray(orders[i])
            exist = (order >= 0) & (order < 30)
            got = gradient(*one, orders[i]) if batch_results is None else [array[i] for array in batch_results]
            expected = activation_grad(*one[:2], one[2][np.where(exist, order, 0)], "swiglu")
            for results, wanted in zip(got, expected, strict=True):
                np.testing.assert_array_equal(results[exist], wanted[exist])


def test_swiglu_without_numbers_is_that_of_the_name() -> None:
    x = normal(0, (4, 32))
    np.testing.assert_array_equal(activate(x, SwiGLU()), activate(x, "swiglu"))


@each_activation
def test_derivatives_of_activations_are_those_of_jax(activation: Activation) -> None:
    x, da, weights = arrays(6, 16, "float32", activation)

    def derivatives(activate: Callable[..., jax.Array]) -> Any:
        def loss(x: jax.Array) -> jax.Array:
            return jnp.sum(jnp.sin(activate(x, activation) * weights[:, None]) * da)

        def sines(x: jax.Array) -> Any:
            value, gradient = jax.value_and_grad(loss)(x)
            return jnp.sum(jnp.sin(gradient)), (value, gradient)

        return jax.jit(jax.grad(sines, has_aux=True))(x)

    assert_trees_close(derivatives(activate), derivatives(by_jax), 1e-4)


def test_vmap_and_higher_derivatives(backend: str) -> None:
    for activation in some(backend, ["swiglu", "relu_squared"], 0):

        def gradient(*operands: jax.Array, activation: Activation = activation) -> tuple[jax.Array, ...]:
            return activation_grad(*operands, activation)

        def loss(x: jax.Array, weights: jax.Array, da: jax.Array, activation: Activation = activation) -> jax.Array:
            return jnp.sum(activate(x, activation) * weights[:, None] * da)

        x, da, weights = one = arrays(6, 16, "float32", activation)
        batch = jax.tree.map(lambda array: jnp.stack([2 * array, array]), one)
        for got, expected in zip(jax.vmap(gradient)(*batch), gradient(*one), strict=True):
            np.testing.assert_allclose(got[1], expected, rtol=1e-6)
        expected = jax.jit(jax.jacobian(jax.grad(loss)))(x, weights, da)
        got = jax.jit(jax.jacobian(gradient))(x, da, weights)[0]
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_one_kernel_for_16_bits_and_whole_vectors() -> None:
    for dtype, features, calls in (("bfloat16", 16, 1), ("bfloat16", 12, 0), ("float32", 16, 0)):
        rows, pairs = struct((6, features), dtype), struct((4, 2), "int32")
        programs = [("sum_rows", sum_rows, (rows, pairs, struct((4, 2), "float32")))]
        for activation in ("swiglu", "relu"):
            x = struct((6, 2 * features if is_gated(activation) else features), dtype)
            gradient = functools.partial(activation_grad, activation=activation)
            programs.append(("activation_grad", gradient, (x, rows, struct((6,), "float32"))))
        if dtype == "bfloat16":
            programs.append(("permute_rows", permute_rows, (struct((4, features)), struct((6,), "int32"), pairs)))
        for name, function, operands in programs:
            assert len(custom_calls(lowered(function, *operands), f"jax_grouped_{name}")) == calls


def test_the_custom_call_gets_the_number_of_its_activation() -> None:
    in_order = [
        "silu",
        "gelu",
        "relu",
        "relu_squared",
        "swiglu",
        "geglu",
        "reglu",
        SwiGLU(2.5, alpha=0.5, offset=-2, clamp_result=True),
    ]
    for number, activation in enumerate(in_order, 1):
        x, da = struct((4, 32 if is_gated(activation) else 16)), struct((4, 16))

        text = lowered(functools.partial(activation_grad, activation=activation), x, da, struct((4,), "float32"))

        (call,) = custom_calls(text, "jax_grouped_activation_grad")
        assert f"activation = {number} : i32" in call
    for attribute in (
        "limit = 2.500000e+00",
        "gate_limit = 0x7F800000",
        "alpha = 5.000000e-01",
        "offset = -2.000000e+00",
    ):
        assert f"{attribute} : f32" in call


def test_tokens_are_copied(backend: str) -> None:
    # All pairs have a row, some are dropped, or rows are left.
    forms = itertools.product((8, 264, 2056, 3), (63, 40, 100), ("bfloat16", "float32"))
    for features, rows, dtype in some(backend, forms, 0, count=5):
        x = normal(features, (21, features)).astype(dtype).at[4].set(jnp.nan)
        order, inverse = permutation(21, 3, rows)

        got = permute_rows(x, order, inverse)

        exist = np.asarray(order) < 63
        expected = np.where(exist[:, None], np.asarray(x, np.float32)[np.where(exist, order, 0) // 3], 0)
        np.testing.assert_array_equal(got.astype(jnp.float32), expected)
        with_any_tail = permute_rows(x, order, inverse, zero_tail=False)
        np.testing.assert_array_equal(with_any_tail.astype(jnp.float32)[exist], expected[exist])


def test_nothing(backend: str) -> None:
    for tokens, rows, features in ((0, 4, 16), (4, 0, 16), (4, 5, 0)):
        copies = permute_rows(jnp.ones((tokens, features)), *permutation(tokens, 2, rows))
        np.testing.assert_array_equal(copies, jnp.full((rows, features), tokens > 0, jnp.float32))
        sums = sum_rows(jnp.ones((tokens, features), jnp.bfloat16), jnp.full((rows, 2), tokens, jnp.int32))
        np.testing.assert_array_equal(sums, jnp.zeros((rows, features)))
    # A dropped pair has no row: its weight counts for nothing.
    dropped = sum_choices(jnp.ones((0, 16), jnp.bfloat16), jnp.zeros((4, 2), jnp.int32), jnp.full((4, 2), jnp.inf))
    np.testing.assert_array_equal(dropped, jnp.zeros((4, 16)))
    for shape in ((0, 16), (3, 0)):
        check_gradient("swiglu", *arrays(*shape, "bfloat16"))


def test_copies_under_vmap_and_their_derivatives(backend: str) -> None:
    for rows in some(backend, (13, 26), 0):  # Pairs are dropped, or there is a tail.
        x = normal(0, (3, 10, 8))
        orders, inverses = (jnp.stack([array, array[::-1], array]) for array in permutation(10, 2, rows))
        inverses = inverses.at[1].set(jnp.where(inverses[0] < rows, rows - 1 - inverses[0], rows))
        for x_axis, axis in ((0, 0), (0, None), (None, 0)):
            given = x if x_axis == 0 else x[0], *(array if axis == 0 else array[0] for array in (orders, inverses))
            got = jax.vmap(permute_rows, (x_axis, axis, axis))(*given)
            for i in range(3):
                one = i * (axis == 0)
                expected = permute_rows(x[i * (x_axis == 0)], orders[one], inverses[one])
                np.testing.assert_array_equal(got[i], expected)

        gradient = jax.grad(lambda x, at=(orders[0], inverses[0]): jnp.sum(permute_rows(x, *at) ** 3))(x[0])
        copies = jnp.sum(inverses[0] < rows, axis=1)
        np.testing.assert_allclose(gradient, copies[:, None] * 3 * x[0] ** 2, rtol=1e-6)


def expected_sums(rows: jax.Array, inverse: jax.Array, weights: jax.Array | None = None) -> np.ndarray:
    """Returns the sums in float64."""
    numbers, indices = np.asarray(rows, np.float64), np.asarray(inverse)
    exist = (indices >= 0) & (indices < len(numbers))
    terms = np.where(exist[..., None], numbers[np.where(exist, indices, 0)], 0)
    if weights is not None:
        terms *= np.where(exist, weights, 0)[..., None]
    return terms.sum(axis=1)


@pytest.mark.parametrize(("features", "choices"), [(8, 1), (264, 3), (2056, 8), (1024, 40), (3, 2)])
def test_rows_of_tokens_are_summed(backend: str, features: int, choices: int) -> None:
    for weighted, dtype in some(backend, itertools.product((False, True), DTYPES), choices):
        # Half of the pairs have a row, and one token has none.
        inverse = permutation(21, choices, 21 * choices // 2)[1].at[3].set(-1)
        rows = normal(0, (21 * choices // 2, features)).astype(dtype)
        # Numbers that are not finite stay in their token and feature.
        rows = rows.at[1, 2].set(jnp.nan).at[7, 0].set(jnp.inf)
        # A weight without a row is not used, whatever it is.
        absent = (inverse < 0) | (inverse >= len(rows))
        weights = jnp.where(absent, jnp.inf, normal(1, inverse.shape)) if weighted else None

        got = sum_rows(rows, inverse, weights)

        assert got.dtype == dtype
        expected = expected_sums(rows, inverse, weights)
        assert np.isnan(expected).any()
        spacing = float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(np.asarray(got, np.float64), expected, rtol=spacing, atol=1e-5)
        assert not np.asarray(got[3], np.float32).any()


def test_sums_under_vmap_and_their_derivatives(backend: str) -> None:
    for dtype in some(backend, ("bfloat16", "float32"), 0):
        rows = normal(0, (3, 13, 8)).astype(dtype)
        weights = normal(1, (3, 10, 2))
        inverse = permutation(10, 2, 13)[1]
        inverses = jnp.stack([inverse, inverse[::-1], jnp.where(inverse < 13, inverse, -1)])

        for got, arguments in (
            (jax.vmap(sum_rows)(rows, inverses, weights), (rows, inverses, weights)),
            (jax.vmap(sum_rows)(rows, inverses), (rows, inverses, (None,) * 3)),
            (jax.vmap(sum_rows, (None, 0, None))(rows[0], inverses, weights[0]), (rows[:1], inverses, weights[:1])),
        ):
            for i in range(3):
                np.testing.assert_array_equal(got[i], sum_rows(*(array[i % len(array)] for array in arguments)))

        y, pull_back = jax.vjp(
            lambda rows, weights, inverse=inverse: sum_rows(rows, inverse, weights), rows[0], weights[0]
        )
        drows, dweights = pull_back(jnp.ones_like(y))
        exists = np.asarray(inverse) < 13
        row_weights = np.asarray(weights[0])[exists][np.argsort(np.asarray(inverse)[exists])]
        spacing = float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(np.asarray(drows, np.float64), np.tile(row_weights[:, None], 8), rtol=spacing)
        sums = np.asarray(rows[0], np.float64).sum(axis=1)
        expected = np.where(exists, sums[np.where(exists, inverse, 0)], 0)
        np.testing.assert_allclose(dweights, expected, rtol=1e-5, atol=1e-5)
