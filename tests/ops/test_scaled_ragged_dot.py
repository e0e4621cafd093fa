"""`scaled_ragged_dot`: the products of `grouped_dense` from the same quantized arrays, bit by bit."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped as jg
from tests.refusals import assert_refused

T, K, N, E = 96, 256, 128, 4
SIZES = jnp.array([40, 0, 33, 11], jnp.int32)  # 12 rows are of no group.
RECIPES = {
    "current": jg.Float8CurrentScaling(),
    "block": jg.Float8BlockScaling(),
    "mx": jg.MXFP8BlockScaling(),
}
each_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


@functools.cache
def operands() -> tuple[jax.Array, ...]:
    """Returns tokens, kernels and a gradient of the result."""
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (T, K), (E, K, N), (T, N)
    return tuple(jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True))


def quantized(x: jax.Array, recipe: jg.Recipe, dtype: Any = jnp.float8_e4m3fn) -> jg.GroupedQuantized:
    """Returns both orientations of tokens or of a stack, as `grouped_dense` makes them."""
    stack = x.ndim == 3
    return jg.grouped_quantize(
        x,
        None if stack else SIZES,
        recipe.kernel_mode if stack else recipe.token_mode,
        dtype=dtype,
        columnwise=True,
        pow2_scales=getattr(recipe, "pow2_scales", False),
        swizzled_scales=isinstance(recipe, jg.MXFP8BlockScaling),
    )


@each_recipe
def test_a_rule_of_ones_own_gives_the_bits_of_grouped_dense(backend: str, recipe: jg.Recipe) -> None:
    x, kernel, dy = operands()

    @jax.jit
    def own(x: jax.Array, kernel: jax.Array, dy: jax.Array) -> tuple[jax.Array, ...]:
        tokens, gradient = quantized(x, recipe), quantized(dy, recipe, recipe.grad_dtype)
        kernels = quantized(kernel, recipe)
        return (
            jg.scaled_ragged_dot(tokens.rowwise, kernels.columnwise, SIZES),
            jg.scaled_ragged_dot(gradient.rowwise, kernels.rowwise, SIZES),
            jg.scaled_ragged_dot(tokens.columnwise, gradient.columnwise, SIZES),
        )

    @jax.jit
    def expected(x: jax.Array, kernel: jax.Array, dy: jax.Array) -> tuple[jax.Array, ...]:
        y, pull_back = jax.vjp(lambda x, kernel: jg.grouped_dense(x, kernel, SIZES, recipe=recipe), x, kernel)
        return y, *pull_back(dy)

    for got, dense_result in zip(own(x, kernel, dy), expected(x, kernel, dy), strict=True):
        assert got.dtype == jnp.bfloat16
        np.testing.assert_array_equal(got, dense_result)
    # The result is not that of nothing.
    np.testing.assert_allclose(own(x, kernel, dy)[0], jg.ragged_dot(x, kernel, SIZES), rtol=0.2, atol=3)


def test_a_cache_of_kernels_is_an_operand(backend: str) -> None:
    x, kernel, _ = operands()
    cache = jg.quantize_kernel(kernel, RECIPES["block"])
    tokens = quantized(x, RECIPES["block"]).rowwise

    y = jg.scaled_ragged_dot(tokens, cache.columnwise, SIZES, preferred_element_type=jnp.float32)

    dense = functools.partial(jg.grouped_dense, recipe=RECIPES["block"], preferred_element_type=jnp.float32)
    np.testing.assert_array_equal(y, dense(x, kernel, SIZES))


@each_recipe
def test_the_product_is_added_to_an_accumulator(backend: str, recipe: jg.Recipe) -> None:
    x, _, dy = operands()
    pair = quantized(x, recipe).columnwise, quantized(dy, recipe).columnwise
    product = functools.partial(jg.scaled_ragged_dot, *pair, SIZES, preferred_element_type=jnp.float32)
    start = jnp.arange(E * K * N, dtype=jnp.float32).reshape(E, K, N) / 1000

    got = product(accumulator=start)

    np.testing.assert_allclose(got, start + product(), rtol=1e-6, atol=1e-4)
    np.testing.assert_array_equal(got[1], start[1])


def test_batches_are_more_groups(backend: str) -> None:
    x, kernel, _ = operands()
    kernels = quantized(kernel, RECIPES["block"]).columnwise

    def product(x: jax.Array) -> jax.Array:
        return jg.scaled_ragged_dot(quantized(x, RECIPES["block"]).rowwise, kernels, SIZES)

    got = jax.vmap(product)(jnp.stack([x, 2 * x]))

    np.testing.assert_array_equal(got, jnp.stack([product(x), product(2 * x)]))


def test_what_does_not_fit_is_named() -> None:
    x, kernel, dy = operands()
    block, current = RECIPES["block"], RECIPES["current"]
    tokens, gradient, kernels = (quantized(array, block) for array in (x, dy, kernel))
    e5m2 = [quantized(array, current, jnp.float8_e5m2) for array in (x, kernel)]
    mx = [
        jg.grouped_quantize(array, sizes, jg.ScalingMode.MX, columnwise=True)
        for array, sizes in ((x, SIZES), (kernel, None))
    ]
    refused: dict[str, dict[str, Any]] = {
        "lhs must be a ScaledArray, got ArrayImpl.": dict(lhs=x),
        "The operands must be rowwise tokens and a stack, or two columnwise arrays of tokens, got columnwise tokens "
        "and a columnwise stack.": dict(lhs=tokens.columnwise),
        "lhs and rhs must have as many groups, and the same size along the axis of the sum, got 4 groups of (96, 128) "
        "and 4 of (4, 256, 128).": dict(lhs=gradient.rowwise),
        "This product has no operands of ScalingMode.BLOCK_1D and ScalingMode.TENSOR.": dict(
            rhs=quantized(kernel, current).columnwise
        ),
        "Of lhs and rhs, only one may be float8_e5m2.": dict(lhs=e5m2[0].rowwise, rhs=e5m2[1].columnwise),
        "group_sizes must have one entry per group of lhs, which holds 4, got 3": dict(group_sizes=SIZES[:3]),
        "accumulator is for the product of two columnwise arrays of tokens.": dict(accumulator=x),
        "accumulator must be like the result, bfloat16 (4, 256, 128), got bfloat16": dict(
            lhs=tokens.columnwise, rhs=gradient.columnwise, accumulator=x
        ),
        "With ScalingMode.MX, both operands need swizzled_scales.": dict(lhs=mx[0].rowwise, rhs=mx[1].columnwise),
    }
    given = dict(lhs=tokens.rowwise, rhs=kernels.columnwise, group_sizes=SIZES)
    assert_refused(jg.scaled_ragged_dot, given, refused)


def test_there_is_no_derivative() -> None:
    x, kernel, _ = operands()
    tokens, kernels = quantized(x, RECIPES["block"]).rowwise, quantized(kernel, RECIPES["block"]).columnwise

    def loss(scales: jax.Array) -> jax.Array:
        scaled = dataclasses.replace(tokens, scale_inv=scales)
        return jnp.sum(jg.scaled_ragged_dot(scaled, kernels, SIZES, preferred_element_type=jnp.float32))

    with pytest.raises(NotImplementedError, match="jax_grouped_gemm has no derivative of its own"):
        jax.grad(loss)(tokens.scale_inv)
