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


@functools.partial(jax.jit, static_argnames="recipe")
def products(
    x: jax.Array, kernel: jax.Array, dy: jax.Array, sizes: jax.Array, recipe: Recipe | None = None
) -> tuple[jax.Array, ...]:
    y, vjp = jax.vjp(lambda x, kernel: jg.grouped_dense(x, kernel, sizes, recipe=recipe), x, kernel)
    return y, *vjp(dy)


def multiplied(
    recipe: Recipe | None, x: Any, sizes: np.ndarray | None, *, gradient: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Returns what products by rows and by columns read of tokens, gradients, or kernels if there are no sizes."""
    if recipe is None:
        return (np.asarray(x, np.float64),) * 2
    mode = recipe.kernel_mode if sizes is None else recipe.token_mode
    dtype = jnp.dtype(recipe.grad_dtype if gradient else recipe.fwd_dtype).name
    pow2_scales = getattr(recipe, "pow2_scales", False)
    got = quantize_oracle.quantize(np.asarray(x), sizes, mode, dtype=dtype, pow2_scales=pow2_scales)
    return got.rowwise.dequantized.astype(np.float64), got.columnwise.dequantized.astype(np.float64)


@pytest.mark.parametrize("recipe", [None, BLOCK], ids=str)
def test_token_arrays_of_more_than_2_31_elements(recipe: Recipe | None) -> None:
    tokens, in_features, features = 70_000, 16, 32_768
    sizes = np.array([30_000, 5, 39_000], np.int32)  # and a tail of 995 rows
    assert tokens * features > 2**31
    x, kernel = random(0, tokens, in_features), random(1, 3, in_features, features)
    dy = random(2, tokens, features).at[int(sizes.sum()) :].set(jnp.nan)
    kernel = kernel if recipe is None else kernel.astype(jnp.float32)
    y, dx, dkernel = products(x, kernel, dy, jnp.asarray(sizes), recipe)

    by_rows, by_columns = multiplied(recipe, kernel, None)
    groups = np.repeat([0, 1, 2], sizes)
    for row in (0, 29_999, 30_000, 30_004, 30_005, 65_535, 65_536, 69_004):
        # Rowwise blocks do not depend on other rows.
        alone, rows = np.array([1]), slice(row, row + 1)
        expected = multiplied(recipe, x[rows], alone)[0] @ by_columns[groups[row]]
        assert oracle.relative_error(y[rows], expected) < 5e-3, f"y, row {row}"
        expected = multiplied(recipe, dy[rows], alone, gradient=True)[0] @ by_rows[groups[row]].T
        assert oracle.relative_error(dx[rows], expected) < 5e-3, f"dx, row {row}"
    assert not bool(jnp.any(y[69_005:]))
    assert not bool(jnp.any(dx[69_005:]))

    # Columnwise blocks do not depend on other features, and begin at the group's first row.
    last, columns = slice(30_005, 69_005), slice(features - 64, features)
    x_last = multiplied(recipe, x[last], sizes[2:])[1]
    expected = x_last.T @ multiplied(recipe, dy[last, columns], sizes[2:], gradient=True)[1]
    tolerance = 4e-3 if recipe is None else oracle.fp8_tolerance()
    assert oracle.relative_error(dkernel[2][:, columns], expected) < tolerance


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


@pytest.mark.parametrize(
    ("groups", "skew", "recipe"),
    [
        (1024, "lognormal", None),
        (4096, "alternate_empty", None),
        (4096, "one_hot", None),
        (4096, "lognormal", BLOCK),
        (4096, "alternate_empty", CURRENT),
        (4096, "one_hot", BLOCK),
    ],
    ids=str,
)
def test_thousands_of_groups(groups: int, skew: str, recipe: Recipe | None) -> None:
    shape = shapes.Shape("many", groups, tokens=10_007, K=64, N=72 if recipe is None else 80)
    sizes = shapes.group_sizes(shape, skew)
    x, dy = random(0, shape.tokens, shape.K), random(1, shape.tokens, shape.N)
    kernel = random(2, groups, shape.K, shape.N)
    y, dx, dkernel = products(x, kernel, dy, jnp.asarray(sizes), recipe)
    x_row, x_column = multiplied(recipe, x, sizes)
    dy_row, dy_column = multiplied(recipe, dy, sizes, gradient=True)
    kernel_row, kernel_column = multiplied(recipe, kernel, None)
    oracle.assert_groups_close(y, oracle.fprop(x_row, kernel_column, sizes), sizes, groups, 5e-3)
    oracle.assert_groups_close(dx, oracle.dgrad(dy_row, kernel_row, sizes), sizes, groups, 5e-3)
    oracle.assert_kernels_close(dkernel, oracle.wgrad(x_column, dy_column, sizes, groups), 5e-3)


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
