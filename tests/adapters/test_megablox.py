"""`gmm` beside the Megablox kernel of JAX itself, which the CPU interprets."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped as jg
from jax_grouped.adapters.megablox import gmm

megablox = pytest.importorskip("jax.experimental.pallas.ops.tpu.megablox.ops", reason="this JAX has no Megablox")

T, K, N, E = 64, 32, 16, 6
SIZES = jnp.array([20, 0, 9, 14, 16, 5], jnp.int32)
theirs = functools.partial(megablox.gmm, tiling=(16, 16, 16), interpret=True)


def operands(groups: int, *, transposed: bool = False) -> tuple[jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(groups), 2)
    shape = (groups, N, K) if transposed else (groups, K, N)
    return jax.random.normal(keys[0], (T, K)), jax.random.normal(keys[1], shape)


@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
def test_products_and_gradients_are_those_of_megablox(transposed: bool) -> None:
    lhs, rhs = operands(E, transposed=transposed)

    def results(product: Any) -> Any:
        y, pull_back = jax.vjp(lambda lhs, rhs: product(lhs, rhs, SIZES, transpose_rhs=transposed), lhs, rhs)
        return y, *pull_back(jnp.cos(y))

    with jax.default_matmul_precision("highest"):
        for got, expected in zip(results(gmm), results(theirs), strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


def test_a_ring_of_experts_adds_its_parts_to_what_is_there() -> None:
    lhs, rhs = operands(E)

    def ring(product: Any, lhs: jax.Array) -> jax.Array:
        y = jnp.full((T, N), 7.0)
        for first in range(0, E, 2):
            part = rhs[first : first + 2]
            y = product(lhs, part, SIZES, jnp.float32, group_offset=jnp.int32(first), existing_out=y)
        return y

    with jax.default_matmul_precision("highest"):
        got, expected = ring(gmm, lhs), ring(theirs, lhs)
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(got, jg.ragged_dot(lhs, rhs, SIZES), rtol=1e-5, atol=1e-5)
        # Every row is overwritten, so the start of the ring has no gradient.
        gradient = jax.grad(lambda lhs: jnp.sum(jnp.sin(ring(gmm, lhs))))(lhs)
        whole = jax.grad(lambda lhs: jnp.sum(jnp.sin(jg.ragged_dot(lhs, rhs, SIZES))))(lhs)
    np.testing.assert_allclose(gradient, whole, rtol=1e-4, atol=1e-4)


def test_rows_of_no_group_keep_what_is_there() -> None:
    lhs, rhs = operands(2)

    y = gmm(lhs, rhs, jnp.array([30, 10]), existing_out=jnp.full((T, N), 3.0))

    np.testing.assert_array_equal(y[40:], 3)
    with pytest.raises(
        ValueError, match=r"existing_out must be like the result, float32 \(64, 16\), got float32 \(2,\)"
    ):
        gmm(lhs, rhs, jnp.array([30, 10]), existing_out=jnp.ones(2))


def test_a_recipe_computes_in_fp8() -> None:
    lhs, rhs = operands(E)
    recipe = jg.Float8CurrentScaling()

    got = gmm(lhs, rhs, SIZES, jnp.bfloat16, recipe=recipe)

    expected = jg.grouped_dense(lhs, rhs, SIZES, recipe=recipe, preferred_element_type=jnp.bfloat16)
    np.testing.assert_array_equal(got, expected)
    with pytest.raises(NotImplementedError, match="gmm takes no transposed rhs"):
        gmm(lhs, rhs, SIZES, transpose_rhs=True, recipe=recipe)


def test_the_call_of_maxtext() -> None:
    lhs, rhs = operands(E)
    parts = [(lhs[:, half], rhs[:, half]) for half in (slice(0, K // 2), slice(K // 2, K))]
    options = dict(  # Those of MaxText 0.2.5 with its defaults, in a shard_map that checks what varies.
        tiling=(512, 1024, 1024) * 3,
        group_offset=0,
        lhs_quantize_dtype=None,
        rhs_quantize_dtype=None,
        use_qwix_quantization=False,
        use_tokamax_backend=False,
        weight_gather_axes=[],
        lhs_vma_axes=("data", "expert"),
        rhs_vma_axes=("expert",),
        use_gmm_v2=False,
        use_gmm_v2_heuristic_tiling=False,
        interpret=True,
    )

    y = None
    for x, kernel in parts:
        y = gmm(x, kernel, SIZES, preferred_element_type=jnp.float32, partial_sum=y, **options)

    np.testing.assert_allclose(y, jg.ragged_dot(lhs, rhs, SIZES), rtol=1e-5, atol=1e-5)
    for chosen in dict(use_qwix_quantization=True), dict(weight_gather_axes=[("fsdp", 0)]):
        with pytest.raises(NotImplementedError, match="gmm does not take"):
            gmm(lhs, rhs, SIZES, **{**options, **chosen})
    with pytest.raises(ValueError, match="partial_sum must be like the result"):
        gmm(lhs, rhs, SIZES, partial_sum=jnp.ones((T, N), jnp.bfloat16))
