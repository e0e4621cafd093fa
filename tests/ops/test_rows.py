"""Operations on rows without groups: the gradient of SwiGLU against float64, and copies of rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_grouped.ops.rows import permute_rows, swiglu, swiglu_grad
from tests.programs import custom_calls, lowered, struct


def arrays(rows: int, features: int, dtype: str) -> tuple[jax.Array, jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(rows + features), 3)
    gate_up = 3 * jax.random.normal(keys[0], (rows, 2 * features))
    return (
        gate_up.astype(dtype),
        jax.random.normal(keys[1], (rows, features)).astype(dtype),
        jax.random.uniform(keys[2], (rows,)),
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("shape", [(1, 8), (37, 264), (9, 1536), (5, 12), (0, 16), (3, 0)], ids=str)
def test_gradient_of_swiglu(backend: str, shape: tuple[int, int], dtype: str) -> None:
    gate_up, da, weights = arrays(*shape, dtype)

    dgate_up, weighted, inner_products = swiglu_grad(gate_up, da, weights)

    (gate, up), gradient = np.split(np.asarray(gate_up, np.float64), 2, axis=1), np.asarray(da, np.float64)
    weight = np.asarray(weights, np.float64)[:, None]
    sigmoid = 1 / (1 + np.exp(-gate))
    a = gate * sigmoid * up
    dgate, dup = weight * gradient * up * sigmoid * (1 + gate * (1 - sigmoid)), weight * gradient * gate * sigmoid
    rounding = float(jnp.finfo(dtype).eps)
    tiny = 2.0**-24  # The spacing of float16 below its normal numbers.
    for got, expected in ((dgate_up, np.concatenate([dgate, dup], axis=1)), (weighted, weight * a)):
        assert got.dtype == dtype
        np.testing.assert_allclose(np.asarray(got, np.float64), expected, rtol=rounding + 1e-5, atol=tiny + 1e-5)
    bound = 1e-5 * np.abs(a * gradient).sum(axis=1).max(initial=0)
    np.testing.assert_allclose(inner_products, (a * gradient).sum(axis=1), rtol=0, atol=bound)


def test_numbers_that_are_not_finite_stay_in_their_rows(backend: str) -> None:
    gate_up, da, weights = arrays(4, 16, "bfloat16")
    gate_up = gate_up.at[1, 3].set(jnp.nan).at[2, 20].set(jnp.inf)

    results = swiglu_grad(gate_up, da, weights)

    for got, clean in zip(results, swiglu_grad(*arrays(4, 16, "bfloat16")), strict=True):
        assert not np.all(np.isfinite(got[1:3]))
        np.testing.assert_array_equal(got[np.array([0, 3])], clean[np.array([0, 3])])


def test_vmap_and_higher_derivatives(backend: str) -> None:
    batch = jax.tree.map(lambda *two: jnp.stack(two), *(arrays(rows, 16, "float32") for rows in (6, 6)))
    for got, one in zip(jax.vmap(swiglu_grad)(*batch), swiglu_grad(*arrays(6, 16, "float32")), strict=True):
        np.testing.assert_allclose(got[1], one, rtol=1e-6)

    def loss(gate_up: jax.Array, weights: jax.Array, da: jax.Array) -> jax.Array:
        return jnp.sum(swiglu(gate_up) * weights[:, None] * da)

    gate_up, da, weights = arrays(6, 16, "float32")
    expected = jax.jacobian(jax.grad(loss))(gate_up, weights, da)
    dgate_up = jax.jacobian(lambda gate_up: swiglu_grad(gate_up, da, weights)[0])(gate_up)
    np.testing.assert_allclose(dgate_up, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("dtype", "features", "calls"), [("bfloat16", 16, 1), ("bfloat16", 12, 0), ("float32", 16, 0)])
def test_one_kernel_for_the_gradient_of_swiglu_in_16_bits(dtype: str, features: int, calls: int) -> None:
    text = lowered(swiglu_grad, struct((4, 2 * features), dtype), struct((4, features), dtype), struct((4,), "float32"))

    assert len(custom_calls(text, "jax_grouped_swiglu_grad")) == calls


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
