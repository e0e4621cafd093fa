"""Operations on rows without groups: gradients of activations against float64, and copies of rows."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_grouped.backends.spec import is_gated
from jax_grouped.ops.rows import activate, activation_grad, permute_rows
from tests import quantize_oracle
from tests.activations import by_jax
from tests.ops.quantize_cases import ACTIVATIONS, Expected, each_activation, edges_of_clamping, some
from tests.programs import custom_calls, lowered, struct


def arrays(rows: int, features: int, dtype: str, activation: str = "silu_mul") -> tuple[jax.Array, ...]:
    """Returns the activation's input, the gradient of its weighted result, and the weights of the rows."""
    keys = jax.random.split(jax.random.key(rows + features), 3)
    x = 3 * jax.random.normal(keys[0], (rows, 2 * features if is_gated(activation) else features))
    return (
        x.astype(dtype),
        jax.random.normal(keys[1], (rows, features)).astype(dtype),
        jax.random.uniform(keys[2], (rows,)),
    )


def check_gradient(activation: str, x: jax.Array, da: jax.Array, weights: jax.Array) -> None:
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


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@each_activation
def test_gradients_of_activations(backend: str, activation: str, dtype: str) -> None:
    shapes = [(37, 264), (9, 1536), (1, 8), (5, 12)]
    for shape in some(backend, shapes, ACTIVATIONS.index(activation) + len(dtype)):
        check_gradient(activation, *arrays(*shape, dtype, activation))


@pytest.mark.parametrize("shape", [(0, 16), (3, 0)], ids=str)
def test_gradients_of_nothing(backend: str, shape: tuple[int, int]) -> None:
    check_gradient("silu_mul", *arrays(*shape, "bfloat16"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_numbers_at_the_limit_of_clamping_have_a_gradient_and_those_beyond_have_none(backend: str, dtype: str) -> None:
    x = jnp.asarray(edges_of_clamping(dtype))
    rows, features = x.shape[0], x.shape[1] // 2

    check_gradient("clamped_silu_mul", x, jnp.ones((rows, features), dtype), jnp.linspace(0.5, 2, rows))


@each_activation
def test_numbers_that_are_not_finite_stay_in_their_rows(backend: str, activation: str) -> None:
    x, da, weights = arrays(4, 16, "bfloat16", activation)
    unclean = x.at[1, 3].set(jnp.nan).at[2, -4].set(jnp.inf)

    results = activation_grad(unclean, da, weights, activation)

    for got, clean in zip(results, activation_grad(x, da, weights, activation), strict=True):
        np.testing.assert_array_equal(got[np.array([0, 3])], clean[np.array([0, 3])])
    _, weighted, inner_products = results
    assert not np.isfinite(weighted[1, 3])
    assert not np.isfinite(inner_products[1])


@each_activation
def test_derivatives_of_activations_are_those_of_jax(activation: str) -> None:
    x, da, weights = arrays(6, 16, "float32", activation)

    def loss(activate: Callable[..., jax.Array]) -> Any:
        return lambda x: jnp.sum(jnp.sin(activate(x, activation) * weights[:, None]) * da)

    for derivative in (lambda of: of, jax.grad, lambda of: jax.grad(lambda x: jnp.sum(jnp.sin(jax.grad(of)(x))))):
        got, expected = (derivative(loss(of))(x) for of in (activate, by_jax))
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("activation", ["silu_mul", "relu_squared"])
def test_vmap_and_higher_derivatives(backend: str, activation: str) -> None:
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


@pytest.mark.parametrize(("dtype", "features", "calls"), [("bfloat16", 16, 1), ("bfloat16", 12, 0), ("float32", 16, 0)])
def test_one_kernel_for_the_gradient_of_an_activation_in_16_bits(dtype: str, features: int, calls: int) -> None:
    for activation in ("silu_mul", "relu"):
        x = struct((4, 2 * features if is_gated(activation) else features), dtype)
        operands = (x, struct((4, features), dtype), struct((4,), "float32"))

        text = lowered(lambda *operands, of=activation: activation_grad(*operands, of), *operands)

        assert len(custom_calls(text, "jax_grouped_activation_grad")) == calls


def test_the_custom_call_gets_the_number_of_its_activation() -> None:
    in_order = ["silu", "gelu", "relu", "relu_squared", "silu_mul", "gelu_mul", "clamped_silu_mul"]
    for number, activation in enumerate(in_order, 1):
        x, da = struct((4, 32 if is_gated(activation) else 16)), struct((4, 16))

        text = lowered(lambda *operands, of=activation: activation_grad(*operands, of), x, da, struct((4,), "float32"))

        (call,) = custom_calls(text, "jax_grouped_activation_grad")
        assert f"activation = {number} : i32" in call


def permutation(tokens: int, choices: int, rows: int) -> tuple[jax.Array, jax.Array]:
    """Returns the order and the inverse of a permutation that drops pairs or has a tail."""
    pairs = np.random.default_rng(rows).permutation(tokens * choices).astype(np.int32)
    order, inverse = np.full(rows, pairs.size, np.int32), np.full(pairs.size, rows, np.int32)
    kept = min(rows, pairs.size)
    order[:kept] = pairs[:kept]
    inverse[pairs[:kept]] = np.arange(kept)
    return jnp.asarray(order), jnp.asarray(inverse.reshape(tokens, choices))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("rows", [63, 40, 100], ids=["all", "dropped", "tail"])
@pytest.mark.parametrize("features", [8, 264, 2056, 3])
def test_tokens_are_copied(backend: str, features: int, rows: int, dtype: str) -> None:
    x = jax.random.normal(jax.random.key(features), (21, features)).astype(dtype).at[4].set(jnp.nan)
    order, inverse = permutation(21, 3, rows)

    got = permute_rows(x, order, inverse)

    exist = np.asarray(order) < 63
    expected = np.where(exist[:, None], np.asarray(x, np.float32)[np.where(exist, order, 0) // 3], 0)
    np.testing.assert_array_equal(got.astype(jnp.float32), expected)
    with_any_tail = permute_rows(x, order, inverse, zero_tail=False)
    np.testing.assert_array_equal(with_any_tail.astype(jnp.float32)[exist], expected[exist])


@pytest.mark.parametrize(("tokens", "rows", "features"), [(0, 4, 16), (4, 0, 16), (4, 5, 0)])
def test_copies_of_nothing(backend: str, tokens: int, rows: int, features: int) -> None:
    got = permute_rows(jnp.ones((tokens, features)), *permutation(tokens, 2, rows))

    np.testing.assert_array_equal(got, jnp.full((rows, features), tokens > 0, jnp.float32))


@pytest.mark.parametrize("rows", [20, 13, 26], ids=["all", "dropped", "tail"])
def test_copies_under_vmap_and_their_derivatives(backend: str, rows: int) -> None:
    x = jax.random.normal(jax.random.key(0), (3, 10, 8))
    orders, inverses = (jnp.stack([of, of[::-1], of]) for of in permutation(10, 2, rows))
    inverses = inverses.at[1].set(jnp.where(inverses[0] < rows, rows - 1 - inverses[0], rows))
    for x_axis, axis in ((0, 0), (0, None), (None, 0)):
        arguments = x if x_axis == 0 else x[0], *(of if axis == 0 else of[0] for of in (orders, inverses))
        got = jax.vmap(permute_rows, (x_axis, axis, axis))(*arguments)
        for i in range(3):
            one = i * (axis == 0)
            np.testing.assert_array_equal(got[i], permute_rows(x[i * (x_axis == 0)], orders[one], inverses[one]))

    gradient = jax.grad(lambda x: jnp.sum(permute_rows(x, orders[0], inverses[0]) ** 3))(x[0])
    copies = jnp.sum(inverses[0] < rows, axis=1)
    np.testing.assert_allclose(gradient, copies[:, None] * 3 * x[0] ** 2, rtol=1e-6)


@pytest.mark.parametrize(("features", "calls"), [(8, 1), (12, 0)])
def test_one_kernel_for_copies_of_whole_vectors(features: int, calls: int) -> None:
    text = lowered(permute_rows, struct((4, features)), struct((6,), "int32"), struct((4, 2), "int32"))

    assert len(custom_calls(text, "jax_grouped_permute_rows")) == calls
