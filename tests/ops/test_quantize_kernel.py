"""`quantize_kernel`: both orientations bit for bit against NumPy, and caches that microbatches share."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped as jg
from tests import quantize_oracle
from tests.ops.quantize_cases import INPUT_TYPES, assert_quantized, assert_same_trees, some

pytestmark = pytest.mark.slow

RECIPES = {
    "block": jg.Float8BlockScaling(),
    "block-any-scale": jg.Float8BlockScaling(fwd_dtype="float8_e5m2", pow2_scales=False, amax_epsilon=0.5),
    "current": jg.Float8CurrentScaling(),
    "current-pow2": jg.Float8CurrentScaling(pow2_scales=True, amax_epsilon=0.5),
    "delayed": jg.DelayedScaling(),
    "mx": jg.MXFP8BlockScaling(),
}
SHAPE = (3, 144, 272)


def kernels(seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    magnitudes = rng.permutation(np.geomspace(1e-3, 1e3, SHAPE[0])).astype(np.float32)
    return rng.standard_normal(SHAPE, np.float32) * magnitudes[:, None, None]


def given_scale(recipe: Any) -> np.ndarray | None:
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
    options = {name: getattr(recipe, name) for name in ("pow2_scales", "amax_epsilon") if hasattr(recipe, name)}
    options |= dict(dtype=recipe.fwd_dtype.name, scale=given_scale(recipe))
    expected = quantize_oracle.quantize(kernel, None, recipe.kernel_mode, **options)
    assert_quantized("", got, expected)


def test_kernels_of_16_bits(backend: str) -> None:
    for dtype in some(backend, ("bfloat16", "float16"), 0):
        kernel = kernels().astype(INPUT_TYPES[dtype])
        assert_is_quantized(quantize(kernel, RECIPES["block"]), kernel, RECIPES["block"])


@pytest.mark.parametrize("name", RECIPES)
def test_skip_keeps_the_previous_bytes(backend: str, name: str) -> None:
    recipe = RECIPES[name]

    def step(kernel: jax.Array, previous: jg.KernelCache, skip: jax.Array) -> jg.KernelCache:
        return quantize(kernel, recipe, previous=previous, skip=skip)

    for function in some(backend, [step, jax.jit(step)], list(RECIPES).index(name)):
        first = function(jnp.asarray(kernels(0)), cache_of_zeros(recipe), jnp.array(False))
        assert_is_quantized(first, kernels(0), recipe)
        assert_same_trees(function(jnp.full(SHAPE, jnp.nan), first, jnp.array(True)), first)
        assert_is_quantized(function(jnp.asarray(kernels(1)), first, jnp.array(False)), kernels(1), recipe)


def test_microbatches_of_a_scan_share_one_quantization(backend: str) -> None:
    for recipe in some(backend, [RECIPES["block"], RECIPES["mx"]], 0):

        def microbatch(
            cache: jg.KernelCache, index: jax.Array, recipe: Any = recipe
        ) -> tuple[jg.KernelCache, jax.Array]:
            # Any but the first kernel would have another amax.
            cache = quantize(jnp.asarray(kernels()) * (index + 1), recipe, previous=cache, skip=index > 0)
            return cache, cache.amax

        cache, amax = jax.jit(functools.partial(jax.lax.scan, microbatch))(cache_of_zeros(recipe), jnp.arange(3))
        assert_is_quantized(cache, kernels(), recipe)
        np.testing.assert_array_equal(amax, np.broadcast_to(cache.amax, (3, 3)))


def test_no_kernels_give_an_empty_cache(backend: str) -> None:
    for recipe in (jg.Float8BlockScaling(), jg.Float8CurrentScaling(), jg.MXFP8BlockScaling()):
        cache = jg.quantize_kernel(jnp.ones((0, 16, 32)), recipe)
        assert (cache.rowwise.shape, cache.columnwise.shape) == ((0, 16, 32), (0, 16, 32))
        assert jg.grouped_dequantize(cache.columnwise).shape == (0, 16, 32)
        again = jg.quantize_kernel(jnp.ones((0, 16, 32)), recipe, previous=cache, skip=True)
        assert_same_trees(again, cache)
