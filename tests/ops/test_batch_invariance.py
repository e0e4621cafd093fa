"""Bits of a token's result and gradient, beside other tokens and in other numbers of them."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped as jg
from tests.programs import custom_calls, lowered, struct

T, E, F, TOP_K = 300, 8, 128, 2


@pytest.mark.parametrize("recipe", [None, jg.Float8BlockScaling()], ids=["bfloat16", "block"])
def test_bits_of_a_token_do_not_depend_on_the_others(backend: str, recipe: Any) -> None:
    # Deep enough that the fastest products are those of several kernels, by size.
    K = 4096 if backend == "cuda" else 256
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32) * (shape[1] ** -0.5 if len(shape) > 2 else 1))

    x, dy, logits = draw(T, K).astype(jnp.bfloat16), draw(T, K).astype(jnp.bfloat16), draw(T, E)
    logits += jnp.arange(E) / 2  # Groups of different sizes.
    gate_up, down = draw(E, K, 2 * F).astype(jnp.bfloat16), draw(E, F, K).astype(jnp.bfloat16)

    @jax.jit
    def result_and_gradient(x: jax.Array, dy: jax.Array, logits: jax.Array) -> Any:
        layer = functools.partial(jg.moe.moe_mlp, router=jg.moe.Router(TOP_K), recipe=recipe)
        y, pull_back = jax.vjp(lambda x: layer(x, logits, gate_up, down)[0], x)
        return y, pull_back(dy)[0]

    with jg.config.override(batch_invariant=True):
        expected = result_and_gradient(x, dy, logits)
        order = rng.permutation(T)
        # A GPU has kernels for few rows; plain JAX has one loop for all.
        for rows in [slice(0, 1), slice(3, 10)] * (backend == "cuda") + [slice(100, 200), order]:
            got = result_and_gradient(x[rows], dy[rows], logits[rows])
            for name, one, other in zip(("y", "dx"), got, expected, strict=True):
                np.testing.assert_array_equal(one, other[rows], err_msg=f"{name} of {rows}")
    for one, other in zip(result_and_gradient(x, dy, logits), expected, strict=True):
        np.testing.assert_allclose(one.astype(np.float32), other.astype(np.float32), rtol=0.05, atol=0.02)


def test_each_product_has_one_kernel_for_all_sizes_or_is_refused() -> None:
    def calls(x: jax.ShapeDtypeStruct, **options: Any) -> list[str]:
        function = functools.partial(jg.grouped_dense, **options)
        return custom_calls(lowered(function, x, struct((2, 32, 4096), x.dtype), struct((2,), "int32")))

    with jg.config.override(batch_invariant=True):
        (product,) = calls(struct((64, 32)))
        *_, in_fp8 = calls(struct((64, 32)), recipe=jg.Float8BlockScaling())
        with pytest.raises(NotImplementedError, match=r"^With batch_invariant, x and kernel must be "):
            calls(struct((64, 32), "float32"))

    assert "gathered = 1 : i32" in product
    assert all("batch_invariant = true" in call for call in (product, in_fp8))
    assert "batch_invariant = false" in calls(struct((64, 32)))[0]
