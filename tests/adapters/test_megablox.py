"""`gmm` beside the Megablox kernel of JAX itself, which the CPU interprets."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped as jg
from jax_grouped.adapters.megablox import gmm
from tests.operands import normal
from tests.oracle import assert_trees_close
from tests.refusals import assert_refused

megablox = pytest.importorskip("jax.experimental.pallas.ops.tpu.megablox.ops", reason="this JAX has no Megablox")

T, K, N, E = 64, 32, 16, 6
SIZES = jnp.array([20, 0, 9, 14, 16, 5], jnp.int32)
theirs = functools.partial(megablox.gmm, tiling=(16, 16, 16), interpret=True)


def operands(groups: int, *, transposed: bool = False) -> tuple[jax.Array, jax.Array]:
    shape = (groups, N, K) if transposed else (groups, K, N)
    return normal(0, (T, K)), normal(1, shape)


def test_products_of_transposed_matrices_and_gradients_are_those_of_megablox() -> None:
    def results(product: Any) -> Any:
        product = functools.partial(product, group_sizes=SIZES, transpose_rhs=True)
        y, pull_back = jax.vjp(product, *operands(E, transposed=True))
        return y, *pull_back(jnp.cos(y))

    with jax.default_matmul_precision("highest"):
        assert_trees_close(results(gmm), results(theirs), 1e-4)


def test_a_ring_of_experts_keeps_the_rows_of_others() -> None:
    lhs, rhs = operands(E)

    def ring(product: Any, lhs: jax.Array) -> jax.Array:
        y = jnp.full((T, N), 7.0)
        for first in range(0, E, 3):
            part = rhs[first : first + 3]
            y = product(lhs, part, SIZES, jnp.float32, group_offset=jnp.int32(first), existing_out=y)
        return y

    with jax.default_matmul_precision("highest"):
        # Every row is overwritten, so the start of the ring has no gradient.
        got, whole = (
            jax.jit(jax.value_and_grad(lambda lhs, run=run: jnp.sum(jnp.sin(run(lhs)))))(lhs)
            for run in (functools.partial(ring, gmm), lambda lhs: jg.ragged_dot(lhs, rhs, SIZES))
        )
        assert_trees_close(got, whole, 1e-4)
        parts = (
            product(lhs, rhs[3:], SIZES, group_offset=jnp.int32(3), existing_out=jnp.full((T, N), 7.0))
            for product in (gmm, theirs)
        )
        np.testing.assert_allclose(*parts, rtol=1e-4, atol=1e-4)
    # Rows of no group keep what is there too.
    y = gmm(lhs, rhs[:2], jnp.array([30, 10]), existing_out=jnp.full((T, N), 3.0))
    np.testing.assert_array_equal(y[40:], 3)


def test_a_recipe_computes_in_fp8() -> None:
    lhs, rhs = operands(E)
    recipe = jg.Float8CurrentScaling()

    got = gmm(lhs, rhs, SIZES, jnp.bfloat16, recipe=recipe)

    expected = jg.grouped_dense(lhs, rhs, SIZES, recipe=recipe, preferred_element_type=jnp.bfloat16)
    np.testing.assert_array_equal(got, expected)


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
    refused: dict[str, dict[str, Any]] = {
        "gmm does not take use_qwix_quantization": dict(use_qwix_quantization=True),
        "gmm does not take weight_gather_axes": dict(weight_gather_axes=[("fsdp", 0)]),
        "With a recipe, gmm takes no transposed rhs.": dict(transpose_rhs=True, recipe=jg.Float8CurrentScaling()),
        "partial_sum must be like the result": dict(partial_sum=jnp.ones((T, N), jnp.bfloat16)),
        "existing_out must be like the result, float32 (64, 16), got float32 (2,)": dict(existing_out=jnp.ones(2)),
    }
    assert_refused(gmm, dict(lhs=lhs, rhs=rhs, group_sizes=SIZES, **options), refused)
