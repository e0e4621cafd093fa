"""`quantize_kernel`: both orientations bit for bit against NumPy, and caches that microbatches share."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped as jg
from jax_grouped import ScalingMode
from tests import quantize_oracle
from tests.ops.quantize_cases import INPUT_TYPES, assert_quantized, assert_same_trees, some
from tests.quantize_oracle import assert_same_bits

pytestmark = pytest.mark.slow

RECIPES = {
    "block": jg.Float8BlockScaling(),
    "block-any-scale": jg.Float8BlockScaling(fwd_dtype="float8_e5m2", pow2_scales=False, amax_epsilon=0.5),
    "current": jg.Float8CurrentScaling(),
    "current-pow2": jg.Float8CurrentScaling(pow2_scales=True, amax_epsilon=0.5),
    "delayed": jg.DelayedScaling(),
    "mx": jg.MXFP8BlockScaling(),
}
each_recipe = pytest.mark.parametrize("recipe", list(RECIPES.values()), ids=list(RECIPES))
SHAPE = (3, 144, 272)


def kernels(seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    magnitudes = rng.permutation(np.geomspace(1e-3, 1e3, SHAPE[0])).astype(np.float32)
    return rng.standard_normal(SHAPE, np.float32) * magnitudes[:, None, None]


def given_scale(recipe: jg.DelayedScaling | Any) -> np.ndarray | None:
    return np.array([3.0, 0.1, np.inf], np.float32) if isinstance(recipe, jg.DelayedScaling) else None


def quantize(kernel: np.ndarray | jax.Array, recipe: Any, **options: Any) -> jg.KernelCache:
    scale = given_scale(recipe)
    return jg.quantize_kernel(
        jnp.asarray(kernel), recipe, scale=None if scale is None else jnp.asarray(scale), **options
    )


def cache_of_zeros(recipe: Any) -> jg.KernelCache:
    cache = jax.eval_shape(lambda kernel: quantize(kernel, recipe), kernels())
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), cache)


def assert_is_quantized(got: jg.KernelCache, kernel: np.ndarray, recipe: Any) -> None:
    expected = quantize_oracle.quantize(
        kernel,
        None,
        recipe.kernel_mode,
        dtype=recipe.fwd_dtype.name,
        pow2_scales=getattr(recipe, "pow2_scales", False),
        amax_epsilon=getattr(recipe, "amax_epsilon", 0.0),
        scale=given_scale(recipe),
        swizzled_scales=isinstance(recipe, jg.MXFP8BlockScaling),
    )
    assert_quantized("", got, expected)


def test_kernels_of_every_type(backend: str) -> None:
    for dtype in some(backend, INPUT_TYPES.values(), 0, count=2):
        kernel = kernels().astype(dtype)
        assert_is_quantized(quantize(kernel, jg.Float8BlockScaling()), kernel, jg.Float8BlockScaling())


@each_recipe
def test_skip_keeps_the_previous_bytes(backend: str, recipe: Any) -> None:
    def step(kernel: jax.Array, previous: jg.KernelCache, skip: jax.Array) -> jg.KernelCache:
        return quantize(kernel, recipe, previous=previous, skip=skip)

    for function in some(backend, [step, jax.jit(step)], list(RECIPES.values()).index(recipe)):
        first = function(jnp.asarray(kernels(0)), cache_of_zeros(recipe), jnp.array(False))
        assert_is_quantized(first, kernels(0), recipe)
        assert_same_trees(function(jnp.full(SHAPE, jnp.nan), first, jnp.array(True)), first)
        assert_is_quantized(function(jnp.asarray(kernels(1)), first, jnp.array(False)), kernels(1), recipe)


@pytest.mark.parametrize(
    "recipe", [jg.Float8BlockScaling(pow2_scales=False), jg.Float8CurrentScaling()], ids=["block", "current"]
)
def test_both_orientations_are_the_same_numbers(backend: str, recipe: Any) -> None:
    cache = quantize(kernels(), recipe)
    rowwise, columnwise = jg.grouped_dequantize(cache.rowwise), jg.grouped_dequantize(cache.columnwise)
    assert rowwise.shape == SHAPE
    assert_same_bits("columnwise", columnwise, np.asarray(rowwise))
    if recipe.kernel_mode == ScalingMode.BLOCK_2D:
        # 144 rows are two blocks, 272 features three; the rest of the regions is padding.
        columnwise_scales = np.asarray(cache.columnwise.scale_inv)[:, :3, :2].swapaxes(1, 2)
        assert_same_bits("scales", columnwise_scales, np.asarray(cache.rowwise.scale_inv)[:, :2, :3])


@pytest.mark.parametrize("recipe", [jg.Float8BlockScaling(), jg.MXFP8BlockScaling()], ids=["block", "mx"])
def test_microbatches_of_a_scan_share_one_quantization(backend: str, recipe: Any) -> None:
    kernel = jnp.asarray(kernels())

    def microbatch(cache: jg.KernelCache, index: jax.Array) -> tuple[jg.KernelCache, jax.Array]:
        # Any but the first kernel would have another amax.
        cache = quantize(kernel * (index + 1), recipe, previous=cache, skip=index > 0)
        return cache, cache.amax

    cache, amax = jax.jit(lambda cache: jax.lax.scan(microbatch, cache, jnp.arange(3)))(cache_of_zeros(recipe))
    assert_is_quantized(cache, kernels(), recipe)
    np.testing.assert_array_equal(amax, np.broadcast_to(cache.amax, (3, 3)))


def test_no_kernels_give_an_empty_cache(backend: str) -> None:
    for recipe in (jg.Float8BlockScaling(), jg.Float8CurrentScaling(), jg.MXFP8BlockScaling()):
        cache = jg.quantize_kernel(jnp.ones((0, 16, 32)), recipe)
        assert (cache.rowwise.shape, cache.columnwise.shape) == ((0, 16, 32), (0, 16, 32))
        assert jg.grouped_dequantize(cache.columnwise).shape == (0, 16, 32)
        again = jg.quantize_kernel(jnp.ones((0, 16, 32)), recipe, previous=cache, skip=True)
        assert_same_trees(again, cache)
