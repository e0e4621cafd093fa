"""Arrays of more than 2^31 elements and thousands of groups, checked where a 32-bit offset would go wrong; and tens of
thousands of tiles that take little time each, all of them checked."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped as jg
from benchmarks import shapes
from jax_grouped.fp8.recipes import Recipe
from tests import oracle, quantize_oracle

BLOCK, CURRENT = jg.Float8BlockScaling(), jg.Float8CurrentScaling()

pytestmark = pytest.mark.gpu


def random(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


@jax.jit
def products(x: jax.Array, kernel: jax.Array, dy: jax.Array, sizes: jax.Array) -> tuple[jax.Array, ...]:
    y, vjp = jax.vjp(lambda x, kernel: jg.ragged_dot(x, kernel, sizes), x, kernel)
    return y, *vjp(dy)


def test_token_arrays_of_more_than_2_31_elements() -> None:
    tokens, in_features, features = 70_000, 16, 32_768
    sizes = np.array([30_000, 5, 39_000], np.int32)  # and a tail of 995 rows
    assert tokens * features > 2**31
    x, kernel = random(0, tokens, in_features), random(1, 3, in_features, features)
    dy = random(2, tokens, features).at[int(sizes.sum()) :].set(jnp.nan)
    y, dx, dkernel = products(x, kernel, dy, jnp.asarray(sizes))

    group_of = np.repeat([0, 1, 2], sizes)
    for row in (0, 29_999, 30_000, 30_004, 30_005, 65_535, 65_536, 69_004):
        weights = np.asarray(kernel[group_of[row]], np.float64)
        assert oracle.relative_error(y[row], np.asarray(x[row], np.float64) @ weights) < 4e-3, f"y, row {row}"
        assert oracle.relative_error(dx[row], np.asarray(dy[row], np.float64) @ weights.T) < 4e-3, f"dx, row {row}"
    assert not bool(jnp.any(y[69_005:]))
    assert not bool(jnp.any(dx[69_005:]))
    rows = slice(30_005, 69_005)
    columns = slice(features - 64, features)
    expected = np.asarray(x[rows], np.float64).T @ np.asarray(dy[rows, columns], np.float64)
    assert oracle.relative_error(dkernel[2][:, columns], expected) < 4e-3


def test_kernels_of_more_than_2_31_elements() -> None:
    groups, features = 2100, 1024
    assert groups * features * features > 2**31
    sizes = np.full(groups, 2, np.int32)
    sizes[[0, 1, groups - 2]] = [0, 5, 0]
    tokens = int(sizes.sum()) + 3
    x, dy = random(0, tokens, features), random(1, tokens, features)
    kernel = random(2, groups, features, features)
    y, dx, dkernel = products(x, kernel, dy, jnp.asarray(sizes))

    starts = np.concatenate([[0], np.cumsum(sizes)])
    for group in (0, 1, 2, 2047, 2048, groups - 2, groups - 1):
        rows = slice(starts[group], starts[group + 1])
        weights = np.asarray(kernel[group], np.float64)
        x_rows, dy_rows = np.asarray(x[rows], np.float64), np.asarray(dy[rows], np.float64)
        assert oracle.relative_error(y[rows], x_rows @ weights) < 4e-3, f"y, group {group}"
        assert oracle.relative_error(dx[rows], dy_rows @ weights.T) < 4e-3, f"dx, group {group}"
        assert oracle.relative_error(dkernel[group], x_rows.T @ dy_rows) < 4e-3, f"dkernel, group {group}"


@pytest.mark.parametrize(("groups", "skew"), [(1024, "lognormal"), (4096, "alternate_empty"), (4096, "one_hot")])
def test_thousands_of_groups(groups: int, skew: str) -> None:
    shape = shapes.Shape("many", groups, tokens=10_007, K=64, N=72)
    sizes = shapes.group_sizes(shape, skew)
    x, dy, kernel = random(0, shape.tokens, shape.K), random(1, shape.tokens, shape.N), random(2, groups, 64, 72)
    y, dx, dkernel = products(x, kernel, dy, jnp.asarray(sizes))
    x64, dy64, kernel64 = (np.asarray(a, np.float64) for a in (x, dy, kernel))
    oracle.assert_groups_close(y, oracle.fprop(x64, kernel64, sizes), sizes, groups, 4e-3)
    oracle.assert_groups_close(dx, oracle.dgrad(dy64, kernel64, sizes), sizes, groups, 4e-3)
    oracle.assert_kernels_close(dkernel, oracle.wgrad(x64, dy64, sizes, groups), 4e-3)


@functools.partial(jax.jit, static_argnums=0)
def fp8_products(
    recipe: Recipe, x: jax.Array, kernel: jax.Array, dy: jax.Array, sizes: jax.Array
) -> tuple[jax.Array, ...]:
    y, vjp = jax.vjp(lambda x, kernel: jg.grouped_dense(x, kernel, sizes, recipe=recipe), x, kernel)
    return y, *vjp(dy)


def quantized(recipe: Recipe, x: Any, sizes: np.ndarray | None, *, gradient: bool = False) -> quantize_oracle.Quantized:
    """Quantizes tokens, gradients, or kernels if there are no sizes, as `recipe` says."""
    mode = recipe.kernel_mode if sizes is None else recipe.token_mode
    dtype = jnp.dtype(recipe.grad_dtype if gradient else recipe.fwd_dtype).name
    pow2_scales = getattr(recipe, "pow2_scales", False)
    return quantize_oracle.quantize(np.asarray(x), sizes, mode, dtype=dtype, pow2_scales=pow2_scales)


def test_token_arrays_of_more_than_2_31_elements_in_fp8() -> None:
    tokens, in_features, features = 70_000, 16, 32_768
    sizes = np.array([30_000, 5, 39_000], np.int32)  # and a tail of 995 rows
    assert tokens * features > 2**31
    x, kernel = random(0, tokens, in_features), random(1, 3, in_features, features).astype(jnp.float32)
    dy = random(2, tokens, features).at[int(sizes.sum()) :].set(jnp.nan)
    y, dx, dkernel = fp8_products(BLOCK, x, kernel, dy, jnp.asarray(sizes))

    weights = quantized(BLOCK, kernel, None)
    group_of = np.repeat([0, 1, 2], sizes)
    for row in (0, 29_999, 30_000, 30_004, 30_005, 65_535, 65_536, 69_004):
        # Rowwise blocks do not depend on other rows.
        group, alone = group_of[row], np.array([1])
        x_row = quantized(BLOCK, x[row : row + 1], alone).rowwise.dequantized
        dy_row = quantized(BLOCK, dy[row : row + 1], alone, gradient=True).rowwise.dequantized
        expected = x_row.astype(np.float64) @ weights.columnwise.dequantized[group]
        assert oracle.relative_error(y[row : row + 1], expected) < 5e-3, f"y, row {row}"
        expected = dy_row.astype(np.float64) @ weights.rowwise.dequantized[group].T
        assert oracle.relative_error(dx[row : row + 1], expected) < 5e-3, f"dx, row {row}"
    assert not bool(jnp.any(y[69_005:]))
    assert not bool(jnp.any(dx[69_005:]))

    # Columnwise blocks do not depend on other features, and begin at the group's first row.
    last, columns = slice(30_005, 69_005), slice(features - 64, features)
    x_last = quantized(BLOCK, x[last], sizes[2:]).columnwise.dequantized
    dy_last = quantized(BLOCK, dy[last, columns], sizes[2:], gradient=True).columnwise.dequantized
    expected = x_last.astype(np.float64).T @ dy_last
    assert oracle.relative_error(dkernel[2][:, columns], expected) < oracle.fp8_tolerance()


@pytest.mark.parametrize(
    ("skew", "recipe"), [("lognormal", BLOCK), ("alternate_empty", CURRENT), ("one_hot", BLOCK)], ids=str
)
def test_thousands_of_groups_in_fp8(skew: str, recipe: Recipe) -> None:
    shape = shapes.Shape("many", 4096, tokens=10_007, K=64, N=80)
    sizes, groups = shapes.group_sizes(shape, skew), shape.num_groups
    x, dy, kernel = random(0, shape.tokens, shape.K), random(1, shape.tokens, shape.N), random(2, groups, 64, 80)
    y, dx, dkernel = fp8_products(recipe, x, kernel, dy, jnp.asarray(sizes))
    qx, qdy = quantized(recipe, x, sizes), quantized(recipe, dy, sizes, gradient=True)
    weights = quantized(recipe, kernel, None)
    expected = oracle.fprop(qx.rowwise.dequantized, weights.columnwise.dequantized, sizes)
    oracle.assert_groups_close(y, expected, sizes, groups, 5e-3)
    expected = oracle.dgrad(qdy.rowwise.dequantized, weights.rowwise.dequantized, sizes)
    oracle.assert_groups_close(dx, expected, sizes, groups, 5e-3)
    expected = oracle.wgrad(qx.columnwise.dequantized, qdy.columnwise.dequantized, sizes, groups)
    oracle.assert_kernels_close(dkernel, expected, 5e-3)


@pytest.mark.parametrize("features", [2_097_120, 2_097_127, 16_777_344])
def test_bias_gradients_of_more_columns_than_a_launch_has_rows_of_blocks(features: int) -> None:
    def loss(bias: jax.Array) -> jax.Array:
        y = jg.grouped_dense(jnp.ones((8, 8), jnp.bfloat16), kernel, jnp.array([5]), bias)
        return jnp.sum(y, dtype=jnp.float32)

    kernel = jnp.zeros((1, 8, features), jnp.bfloat16)
    dbias = jax.jit(jax.grad(loss))(jnp.zeros((1, features), jnp.bfloat16))
    assert bool(jnp.all(dbias == 5))


def test_every_tile_of_short_groups_is_computed() -> None:
    groups, features, hidden = 32, 7168, 4096
    sizes = jnp.full(groups, 128, jnp.int32)  # one step of a kernel's loop over tokens
    x, dy = random(0, groups * 128, features), random(1, groups * 128, hidden)
    columns = jax.jit(lambda x: jg.grouped_quantize(x, sizes, BLOCK.token_mode, columnwise=True).columnwise)
    operands = columns(x), columns(dy)
    product = jax.jit(lambda x, dy: jg.scaled_ragged_dot(x, dy, sizes))
    expected = jnp.einsum("etk,etn->ekn", *(a.reshape(groups, 128, -1) for a in (x, dy)))

    @jax.jit
    def largest_error_of_a_box(got: jax.Array, expected: jax.Array) -> jax.Array:
        boxes = [a.astype(jnp.float32).reshape(groups, features // 64, 64, -1, 64) for a in (got - expected, expected)]
        error, size = (jnp.linalg.norm(box, axis=(2, 4)) for box in boxes)
        return jnp.max(error / size)

    # Two numbers in FP8 differ by some 4 % from those in bfloat16.
    for _ in range(30):
        assert largest_error_of_a_box(product(*operands), expected) < 0.1
