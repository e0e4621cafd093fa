"""The gradient of SwiGLU for rows with weights, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_grouped.ops.swiglu import swiglu, swiglu_grad
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
def test_results(backend: str, shape: tuple[int, int], dtype: str) -> None:
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
def test_one_kernel_for_numbers_of_16_bits(dtype: str, features: int, calls: int) -> None:
    text = lowered(swiglu_grad, struct((4, 2 * features), dtype), struct((4, features), dtype), struct((4,), "float32"))

    assert len(custom_calls(text, "jax_grouped_swiglu_grad")) == calls
