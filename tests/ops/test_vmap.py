"""`jax.vmap`: the batch becomes more groups of one call, and every element gets what the plain call gives it."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped as jg
from benchmarks import shapes
from jax_grouped import ScalingMode
from tests import quantize_oracle
from tests.ops.quantize_cases import MODES, SHAPE, assert_quantized, assert_same_trees, each_mode, some, tokens
from tests.oracle import assert_trees_close
from tests.quantize_oracle import assert_same_bits

BATCH, TOKENS, IN, OUT = 3, 24, 16, 8
#: Group sizes of three batch elements. One element's groups add up to all rows, and two leave a tail. There are three
#: kernels for five groups.
SIZES = np.array([[4, 0, 9, 3, 5], [0, 11, 0, 0, 13], [7, 2, 1, 0, 0]], np.int32)
OFFSETS = np.array([[1], [2], [0]], np.int32)


@pytest.fixture(autouse=True)
def _backend(backend: str) -> None:
    """Runs every test of this module on every backend."""


def operands(dtype: jax.typing.DTypeLike = jnp.float32) -> tuple[jax.Array, ...]:
    """Returns `x`, `kernel`, `bias`, `dy`, `sizes`, `offset` of every batch element; NaN in the rows of no group."""
    rng = np.random.default_rng(0)
    x, dy = (rng.standard_normal((BATCH, TOKENS, features), np.float32) for features in (IN, OUT))
    for element, sizes in enumerate(SIZES):
        for array in (x, dy):
            array[element, sizes.sum() :] = np.nan
    kernel, bias = rng.standard_normal((BATCH, 3, IN, OUT), np.float32), rng.standard_normal((BATCH, 3, OUT))
    return *(jnp.asarray(array, dtype) for array in (x, kernel, bias, dy)), jnp.asarray(SIZES), jnp.asarray(OFFSETS)


def forward_and_backward(
    x: jax.Array, kernel: jax.Array, bias: jax.Array, dy: jax.Array, sizes: jax.Array, offset: jax.Array
) -> tuple[jax.Array, ...]:
    """Computes `y`, `dx`, `dkernel` and `dbias`."""

    def dense(x: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
        return jg.grouped_dense(x, kernel, sizes, bias, group_offset=offset, precision="highest")

    y, vjp = jax.vjp(dense, x, kernel, bias)
    return y, *vjp(dy)


def stacked(trees: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def element(tree: Any, index: int | tuple[int, ...]) -> Any:
    return jax.tree.map(lambda leaf: leaf[index], tree)


MAPPED = {
    "all but kernel and bias": (0, None, None, 0, 0, 0),
    "all but sizes and offset": (0, 0, 0, 0, None, None),
    "other axes": (1, 3, 2, 2, 1, 1),
    "kernel": (None, 0, None, None, None, None),
    "offset": (None, None, None, None, None, 0),
}


@pytest.mark.parametrize("mapped", MAPPED)
def test_grouped_dense_and_its_gradients(mapped: str) -> None:
    axes, arrays = MAPPED[mapped], operands()
    plain = jax.jit(forward_and_backward)
    expected = [
        plain(*(x[0 if axis is None else i] for x, axis in zip(arrays, axes, strict=True))) for i in range(BATCH)
    ]
    batch = [x[0] if axis is None else jnp.moveaxis(x, 0, axis) for x, axis in zip(arrays, axes, strict=True)]
    got = jax.jit(jax.vmap(forward_and_backward, axes))(*batch)
    assert_trees_close(got, stacked(expected))
    y, dx, *_ = got
    for i, sizes in enumerate(SIZES if axes[4] is not None else SIZES[[0] * BATCH]):
        assert not np.any(y[i, sizes.sum() :])
        assert not np.any(dx[i, sizes.sum() :])


@pytest.mark.parametrize("kernel_axes", [(None, None), (0, None), (None, 0), (0, 0)], ids=str)
def test_nested_vmap_with_kernels_of_the_outer_and_of_the_inner_one(kernel_axes: tuple[int | None, ...]) -> None:
    outer, inner = kernel_axes
    rng = np.random.default_rng(0)
    x, kernel = rng.standard_normal((2, 3, TOKENS, IN)), rng.standard_normal((2, 3, 5, IN, OUT))
    dot = jax.vmap(jax.vmap(jg.ragged_dot, (0, inner, 0)), (0, outer, None))
    at = (0 if outer is None else slice(None), 0 if inner is None else slice(None))
    got = jax.jit(dot)(x.astype(jnp.bfloat16), kernel[at].astype(jnp.bfloat16), SIZES)
    for i, j in np.ndindex(2, 3):
        own = kernel[0 if outer is None else i, 0 if inner is None else j]
        expected = jg.ragged_dot(x[i, j].astype(jnp.bfloat16), own.astype(jnp.bfloat16), SIZES[j])
        assert_trees_close(got[i, j], expected, 2e-2)


def test_gradients_of_a_shared_kernel_add_up_in_a_scan() -> None:
    x, kernel, _, _, sizes, offset = operands()
    kernel = kernel[0]

    def loss(kernel: jax.Array, x: jax.Array, sizes: jax.Array, offset: jax.Array) -> jax.Array:
        y = jg.ragged_dot(x, kernel, sizes, precision="highest", group_offset=offset)
        return jnp.sum(jnp.sin(y))

    def step(total: jax.Array, factor: jax.Array) -> tuple[jax.Array, None]:
        losses = jax.vmap(loss, (None, 0, 0, 0))
        return total + jax.grad(lambda kernel: losses(kernel, factor * x, sizes, offset).sum())(kernel), None

    got, _ = jax.jit(lambda: jax.lax.scan(step, jnp.zeros_like(kernel), jnp.array([1.0, 2.0])))()
    gradient = jax.jit(jax.grad(loss))
    each = [gradient(kernel, factor * x[i], sizes[i], offset[i]) for factor in (1.0, 2.0) for i in range(BATCH)]
    assert_trees_close(got, sum(each), 1e-4)


@pytest.mark.parametrize("size", [0, 1])
def test_a_batch_of_none_or_one(size: int) -> None:
    def everything(x: jax.Array, kernel: jax.Array, sizes: jax.Array) -> Any:
        y, vjp = jax.vjp(lambda x, kernel: jg.ragged_dot(x, kernel, sizes), x, kernel)
        quantized = jg.grouped_quantize(x, sizes, ScalingMode.MX, columnwise=True, dbias=True)
        # Flat arrays are unspecified past the last region.
        return y, vjp(y), quantized.rowwise.data, quantized.dbias, jg.grouped_dequantize(quantized.columnwise)

    x, kernel, *_, sizes, _ = operands(jnp.bfloat16)
    got = jax.jit(jax.vmap(everything, (0, None, 0)))(x[:size], kernel[0], sizes[:size, :3])
    expected = jax.eval_shape(everything, x[0], kernel[0], sizes[0, :3])
    assert jax.tree.map(jnp.shape, got) == jax.tree.map(lambda leaf: (size, *leaf.shape), expected)
    if size:
        assert_same_trees(element(got, 0), jax.jit(everything)(x[0], kernel[0], sizes[0, :3]))


SKEWS = ("hostile", "empty_first", "all_empty")


def batch_of_tokens() -> tuple[np.ndarray, np.ndarray]:
    """Returns tokens and sizes of every batch element, with poison in the rows of no group."""
    sizes = np.stack([shapes.group_sizes(SHAPE, skew) for skew in SKEWS])
    return np.stack([tokens(SHAPE, n, seed=seed) for seed, n in enumerate(sizes)]), sizes


@each_mode
def test_quantize_and_dequantize(backend: str, mode: ScalingMode) -> None:
    x, sizes = batch_of_tokens()
    got = jax.jit(jax.vmap(lambda x, sizes: jg.grouped_quantize(x, sizes, mode, columnwise=True), (1, 0)))(
        np.moveaxis(x, 0, 1), sizes
    )
    expected = [quantize_oracle.quantize(*case, mode) for case in zip(x, sizes, strict=True)]
    for i, skew in enumerate(SKEWS):
        assert_quantized(f"{skew},", element(got, i), expected[i])
    for name in some(backend, ["rowwise", "columnwise"], MODES.index(mode)):
        numbers = jax.vmap(jg.grouped_dequantize)(getattr(got, name))
        assert_same_bits(name, numbers, np.stack([getattr(copies, name).dequantized for copies in expected]))


def test_quantize_one_array_by_sizes_of_each() -> None:
    x, sizes = batch_of_tokens()
    got = jax.vmap(lambda sizes: jg.grouped_quantize(x[0], sizes, ScalingMode.BLOCK_1D))(sizes[:, ::-1])
    for i, skew in enumerate(SKEWS):
        expected = quantize_oracle.quantize(x[0], sizes[i, ::-1], ScalingMode.BLOCK_1D)
        assert_same_bits(f"{skew} rowwise", got.rowwise.data[i].view(jnp.uint8), expected.rowwise.data)


def test_quantize_arrays_of_each_by_the_same_sizes_and_scales_of_each_in_two_vmaps() -> None:
    x, sizes = batch_of_tokens()
    scales = np.array([[1, 2, 3, 4, 5], [5, 4, 3, 2, 1]], np.float32)

    def quantize(x: jax.Array, scale: jax.Array) -> jg.GroupedQuantized:
        return jg.grouped_quantize(x, sizes[0], ScalingMode.TENSOR, columnwise=True, scale=scale)

    got = jax.vmap(jax.vmap(quantize, (0, None)), (None, 0))(x, scales)
    for i, j in np.ndindex(2, BATCH):
        expected = quantize_oracle.quantize(x[j], sizes[0], ScalingMode.TENSOR, scale=scales[i])
        assert_quantized(f"scales {i}, tokens {j},", element(got, (i, j)), expected)


def test_activations_and_dbias(backend: str) -> None:
    x, sizes = (jnp.asarray(array) for array in batch_of_tokens())

    def quantize(x: jax.Array, sizes: jax.Array, backward: bool) -> tuple[jax.Array, ...]:
        gate_and_up = jnp.concatenate([x, 0.5 * x], axis=1)
        got = jg.grouped_quantize(
            x if backward else gate_and_up,
            sizes,
            ScalingMode.BLOCK_2D,
            dbias=True,
            activation="swiglu",
            activation_input=gate_and_up if backward else None,
        )
        return got.rowwise.data, jg.grouped_dequantize(got.rowwise), got.amax, got.dbias

    for backward in some(backend, [True, False], 0):
        plain = jax.jit(functools.partial(quantize, backward=backward))
        got = jax.jit(jax.vmap(plain))(x, sizes)
        assert_same_trees(got, stacked([plain(*case) for case in zip(x, sizes, strict=True)]))


RECIPES = {"block": jg.Float8BlockScaling(), "current": jg.Float8CurrentScaling(), "mx": jg.MXFP8BlockScaling()}


@pytest.mark.parametrize("name", RECIPES)
def test_caches_of_kernels_with_skip_of_each(backend: str, name: str) -> None:
    recipe = RECIPES[name]
    kernels = np.random.default_rng(0).standard_normal((BATCH, 2, 48, 144), np.float32)
    cache = jax.eval_shape(lambda kernel: jg.quantize_kernel(kernel, recipe), kernels[0])
    skip = np.array([True, False, True])

    def step(kernel: jax.Array, previous: jg.KernelCache, skip: jax.Array) -> jg.KernelCache:
        return jg.quantize_kernel(kernel, recipe, previous=previous, skip=skip)

    # The batch has a kernel for each element, or one for all.
    for new, axis in some(backend, [(kernels, 0), (kernels[1], None)], list(RECIPES).index(name)):
        previous = jax.tree.map(lambda leaf: jnp.ones((BATCH, *leaf.shape), leaf.dtype), cache)
        got = jax.jit(jax.vmap(step, (axis, 0, 0)), donate_argnums=1)(new, previous, skip)
        for i in np.flatnonzero(skip):
            assert_same_trees(element(got, i), jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), cache))
        pow2_scales = getattr(recipe, "pow2_scales", False)
        expected = quantize_oracle.quantize(
            kernels[1], None, recipe.kernel_mode, pow2_scales=pow2_scales, swizzled_scales=name == "mx"
        )
        assert_quantized(f"axis {axis},", element(got, 1), expected)
