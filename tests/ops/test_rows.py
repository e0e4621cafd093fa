"""Operations on rows without groups: gradients of activations against float64, copies and sums of rows."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_grouped.kernels.activations import Activation, SwiGLU, is_gated
from jax_grouped.kernels.rows import activate, activation_grad, permute_rows, sum_rows
from tests import quantize_oracle
from tests.activations import GPT_OSS, by_jax
from tests.ops.quantize_cases import ACTIVATIONS, Expected, each_activation, edges_of_clamping, some
from tests.oracle import permutation
from tests.programs import custom_calls, lowered, struct

DTYPES = "bfloat16", "float16", "float32"


def arrays(rows: int, features: int, dtype: str, activation: Activation = "swiglu") -> tuple[jax.Array, ...]:
    """Returns the activation's input, the gradient of its weighted result, and the weights of the rows."""
    keys = jax.random.split(jax.random.key(rows + features), 3)
    x = 3 * jax.random.normal(keys[0], (rows, 2 * features if is_gated(activation) else features))
    return (
        x.astype(dtype),
        jax.random.normal(keys[1], (rows, features)).astype(dtype),
        jax.random.uniform(keys[2], (rows,)),
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
def test_gradients_of_activations(backend: str, activation: str) -> None:
    forms = itertools.product([(37, 264), (9, 1536), (1, 8), (5, 12)], DTYPES)
    for shape, dtype in some(backend, forms, 5 * ACTIVATIONS.index(activation), count=2):
        check_gradient(activation, *arrays(*shape, dtype, activation))


def test_gradients_of_nothing(backend: str) -> None:
    for shape in ((0, 16), (3, 0)):
        check_gradient("swiglu", *arrays(*shape, "bfloat16"))


def test_numbers_at_the_limit_of_clamping_have_a_gradient_and_those_beyond_have_none(backend: str) -> None:
    for dtype in some(backend, DTYPES, 0, count=2):
        x = jnp.asarray(edges_of_clamping(dtype))
        rows, features = x.shape[0], x.shape[1] // 2

        check_gradient(GPT_OSS, x, jnp.ones((rows, features), dtype), jnp.linspace(0.5, 2, rows))


@each_activation
def test_numbers_that_are_not_finite_stay_in_their_rows(backend: str, activation: Activation) -> None:
    x, da, weights = arrays(4, 16, "bfloat16", activation)
    unclean = x.at[1, 3].set(jnp.nan).at[2, -4].set(jnp.inf)

    check_gradient(activation, x.at[1, 3].set(jnp.nan), da, weights)
    results = activation_grad(unclean, da, weights, activation)

    for got, clean in zip(results, activation_grad(x, da, weights, activation), strict=True):
        np.testing.assert_array_equal(got[np.array([0, 3])], clean[np.array([0, 3])])
    _, weighted, inner_products = results
    assert not np.isfinite(weighted[1, 3])
    assert not np.isfinite(inner_products[1])


@pytest.mark.parametrize(("axis", "dtype"), [(None, "bfloat16"), (0, "float32"), (0, "bfloat16")])
def test_rows_take_the_weights_of_their_pairs(backend: str, axis: int | None, dtype: str) -> None:
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


@each_activation
def test_derivatives_of_activations_are_those_of_jax(activation: Activation) -> None:
    x, da, weights = arrays(6, 16, "float32", activation)

    def loss(activate: Callable[..., jax.Array]) -> Any:
        return lambda x: jnp.sum(jnp.sin(activate(x, activation) * weights[:, None]) * da)

    for derivative in (lambda f: f, jax.grad, lambda f: jax.grad(lambda x: jnp.sum(jnp.sin(jax.grad(f)(x))))):
        got, expected = (derivative(loss(function))(x) for function in (activate, by_jax))
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("activation", ["swiglu", "relu_squared"])
def test_vmap_and_higher_derivatives(backend: str, activation: Activation) -> None:
    def gradient(*operands: jax.Array) -> tuple[jax.Array, ...]:
        return activation_grad(*operands, activation)

    one = arrays(6, 16, "float32", activation)
    batch = jax.tree.map(lambda array: jnp.stack([2 * array, array]), one)
    for got, expected in zip(jax.vmap(gradient)(*batch), gradient(*one), strict=True):
        np.testing.assert_allclose(got[1], expected, rtol=1e-6)

    def loss(x: jax.Array, weights: jax.Array, da: jax.Array) -> jax.Array:
        return jnp.sum(activate(x, activation) * weights[:, None] * da)

    x, da, weights = one
    expected = jax.jacobian(jax.grad(loss))(x, weights, da)
    got = jax.jacobian(lambda x: gradient(x, da, weights)[0])(x)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_one_kernel_for_the_gradient_of_an_activation_in_16_bits() -> None:
    forms = ("bfloat16", 16, 1), ("bfloat16", 12, 0), ("float32", 16, 0)
    for activation, (dtype, features, calls) in itertools.product(("swiglu", "relu"), forms):
        x = struct((4, 2 * features if is_gated(activation) else features), dtype)
        operands = (x, struct((4, features), dtype), struct((4,), "float32"))

        text = lowered(lambda *operands, name=activation: activation_grad(*operands, name), *operands)

        assert len(custom_calls(text, "jax_grouped_activation_grad")) == calls


def test_the_custom_call_gets_the_number_of_its_activation() -> None:
    in_order = ["silu", "gelu", "relu", "relu_squared", "swiglu", "geglu", "reglu", SwiGLU(2.5, alpha=0.5, offset=-2)]
    for number, activation in enumerate(in_order, 1):
        x, da = struct((4, 32 if is_gated(activation) else 16)), struct((4, 16))

        text = lowered(lambda *operands, of=activation: activation_grad(*operands, of), x, da, struct((4,), "float32"))

        (call,) = custom_calls(text, "jax_grouped_activation_grad")
        assert f"activation = {number} : i32" in call
    for attribute in ("limit = 2.500000e+00", "alpha = 5.000000e-01", "offset = -2.000000e+00"):
        assert f"{attribute} : f32" in call


@pytest.mark.parametrize("features", [8, 264, 2056, 3])
def test_tokens_are_copied(backend: str, features: int) -> None:
    # All pairs have a row, some are dropped, or rows are left.
    for rows, dtype in some(backend, itertools.product((63, 40, 100), ("bfloat16", "float32")), features // 3, count=2):
        x = jax.random.normal(jax.random.key(features), (21, features)).astype(dtype).at[4].set(jnp.nan)
        order, inverse = permutation(21, 3, rows)

        got = permute_rows(x, order, inverse)

        exist = np.asarray(order) < 63
        expected = np.where(exist[:, None], np.asarray(x, np.float32)[np.where(exist, order, 0) // 3], 0)
        np.testing.assert_array_equal(got.astype(jnp.float32), expected)
        with_any_tail = permute_rows(x, order, inverse, zero_tail=False)
        np.testing.assert_array_equal(with_any_tail.astype(jnp.float32)[exist], expected[exist])


NOTHING = (0, 4, 16), (4, 0, 16), (4, 5, 0)


def test_copies_of_nothing(backend: str) -> None:
    for tokens, rows, features in NOTHING:
        got = permute_rows(jnp.ones((tokens, features)), *permutation(tokens, 2, rows))

        np.testing.assert_array_equal(got, jnp.full((rows, features), tokens > 0, jnp.float32))


@pytest.mark.parametrize("rows", [13, 26], ids=["dropped", "tail"])
def test_copies_under_vmap_and_their_derivatives(backend: str, rows: int) -> None:
    x = jax.random.normal(jax.random.key(0), (3, 10, 8))
    orders, inverses = (jnp.stack([array, array[::-1], array]) for array in permutation(10, 2, rows))
    inverses = inverses.at[1].set(jnp.where(inverses[0] < rows, rows - 1 - inverses[0], rows))
    for x_axis, axis in ((0, 0), (0, None), (None, 0)):
        arguments = x if x_axis == 0 else x[0], *(array if axis == 0 else array[0] for array in (orders, inverses))
        got = jax.vmap(permute_rows, (x_axis, axis, axis))(*arguments)
        for i in range(3):
            one = i * (axis == 0)
            np.testing.assert_array_equal(got[i], permute_rows(x[i * (x_axis == 0)], orders[one], inverses[one]))

    gradient = jax.grad(lambda x: jnp.sum(permute_rows(x, orders[0], inverses[0]) ** 3))(x[0])
    copies = jnp.sum(inverses[0] < rows, axis=1)
    np.testing.assert_allclose(gradient, copies[:, None] * 3 * x[0] ** 2, rtol=1e-6)


def test_one_kernel_for_copies_of_whole_vectors() -> None:
    for features, calls in ((8, 1), (12, 0)):
        text = lowered(permute_rows, struct((4, features)), struct((6,), "int32"), struct((4, 2), "int32"))

        assert len(custom_calls(text, "jax_grouped_permute_rows")) == calls


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
    for weighted, dtype in some(backend, itertools.product((False, True), DTYPES), choices, count=2):
        check_sums(features, choices, weighted, dtype)


def check_sums(features: int, choices: int, weighted: bool, dtype: str) -> None:
    keys = jax.random.split(jax.random.key(features), 2)
    # Half of the pairs have a row, and one token has none.
    inverse = permutation(21, choices, 21 * choices // 2)[1].at[3].set(-1)
    rows = jax.random.normal(keys[0], (21 * choices // 2, features)).astype(dtype)
    # A weight without a row is not used, whatever it is.
    absent = (inverse < 0) | (inverse >= len(rows))
    weights = jnp.where(absent, jnp.inf, jax.random.normal(keys[1], inverse.shape)) if weighted else None

    got = sum_rows(rows, inverse, weights)

    assert got.dtype == dtype
    expected = expected_sums(rows, inverse, weights)
    spacing = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, rtol=spacing, atol=1e-5)
    assert not np.asarray(got[3], np.float32).any()


def test_numbers_of_a_sum_that_are_not_finite_stay_in_their_tokens(backend: str) -> None:
    rows = jnp.ones((6, 16), jnp.bfloat16).at[2, 3].set(jnp.nan).at[4, 0].set(jnp.inf)

    sums = np.asarray(sum_rows(rows, jnp.arange(6).reshape(3, 2)), np.float32)

    np.testing.assert_array_equal(np.argwhere(np.isnan(sums)), [[1, 3]])
    np.testing.assert_array_equal(np.argwhere(np.isinf(sums)), [[2, 0]])


def test_sums_of_nothing(backend: str) -> None:
    for rows, tokens, features in NOTHING:
        got = sum_rows(jnp.ones((rows, features), jnp.bfloat16), jnp.full((tokens, 2), rows, jnp.int32))

        np.testing.assert_array_equal(got, jnp.zeros((tokens, features)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_sums_under_vmap_and_their_derivatives(backend: str, dtype: str) -> None:
    rows = jax.random.normal(jax.random.key(0), (3, 13, 8)).astype(dtype)
    weights = jax.random.normal(jax.random.key(1), (3, 10, 2))
    inverse = permutation(10, 2, 13)[1]
    inverses = jnp.stack([inverse, inverse[::-1], jnp.where(inverse < 13, inverse, -1)])

    for got, arguments in (
        (jax.vmap(sum_rows)(rows, inverses, weights), (rows, inverses, weights)),
        (jax.vmap(sum_rows)(rows, inverses), (rows, inverses, (None,) * 3)),
        (jax.vmap(sum_rows, (None, 0, None))(rows[0], inverses, weights[0]), (rows[:1], inverses, weights[:1])),
    ):
        for i in range(3):
            np.testing.assert_array_equal(got[i], sum_rows(*(array[i % len(array)] for array in arguments)))

    gradients = jax.grad(lambda *arrays: jnp.sum(sum_rows(arrays[0], inverse, arrays[1]).astype(jnp.float32)), (0, 1))
    drows, dweights = gradients(rows[0], weights[0])
    exists = np.asarray(inverse) < 13
    row_weights = np.asarray(weights[0])[exists][np.argsort(np.asarray(inverse)[exists])]
    spacing = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(np.asarray(drows, np.float64), np.tile(row_weights[:, None], 8), rtol=spacing)
    expected_dweights = np.where(exists, np.asarray(rows[0], np.float64).sum(axis=1)[np.where(exists, inverse, 0)], 0)
    np.testing.assert_allclose(dweights, expected_dweights, rtol=1e-5, atol=1e-5)


def test_one_kernel_for_sums_of_rows_of_16_bits() -> None:
    for dtype, features, calls in (("bfloat16", 16, 1), ("bfloat16", 12, 0), ("float32", 16, 0)):
        text = lowered(sum_rows, struct((6, features), dtype), struct((4, 2), "int32"), struct((4, 2), "float32"))

        assert len(custom_calls(text, "jax_grouped_sum_rows")) == calls
