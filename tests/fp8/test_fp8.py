"""Recipes, the division behind scales, and how arrays and states are printed."""

import copy
import dataclasses
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jax_grouped as jg
from jax_grouped import ScalingMode
from jax_grouped.fp8 import numerics
from tests.refusals import assert_refused

RECIPES = [jg.Float8BlockScaling, jg.Float8CurrentScaling, jg.DelayedScaling, jg.MXFP8BlockScaling]


def test_recipes_are_equal_however_their_types_are_spelled() -> None:
    recipe: Any
    for recipe in RECIPES:
        other = recipe(fwd_dtype=jnp.float8_e5m2, grad_dtype=jnp.float8_e5m2)
        for spelling in ("float8_e5m2", jnp.dtype("float8_e5m2"), ml_dtypes.float8_e5m2):
            one = recipe(fwd_dtype=spelling, grad_dtype=spelling)
            assert (one, hash(one)) == (other, hash(other))
            assert (one.fwd_dtype, one.grad_dtype) == (jnp.float8_e5m2, jnp.float8_e5m2)
        assert other != recipe(fwd_dtype="float8_e4m3fn", grad_dtype="float8_e5m2")
        assert copy.deepcopy(other) == pickle.loads(pickle.dumps(other)) == other
        assert dataclasses.replace(recipe(), fwd_dtype="float8_e5m2") == recipe(fwd_dtype=jnp.float8_e5m2) != recipe()
        with pytest.raises(dataclasses.FrozenInstanceError):
            other.fwd_dtype = jnp.float8_e4m3fn
    assert len({recipe(fwd_dtype="float8_e5m2", grad_dtype="float8_e5m2") for recipe in RECIPES}) == len(RECIPES)
    recipe = jg.DelayedScaling(margin=np.float32(1), amax_history_len=np.int64(4))
    other = jg.DelayedScaling(margin=1.0, amax_history_len=4)
    assert (recipe, hash(recipe)) == (other, hash(other))


def test_defaults() -> None:
    for recipe, fields, kernel_mode in (
        (jg.Float8BlockScaling, ("float8_e4m3fn", "float8_e4m3fn", True, 0.0), ScalingMode.BLOCK_2D),
        (jg.Float8CurrentScaling, ("float8_e4m3fn", "float8_e5m2", False, 0.0), ScalingMode.TENSOR),
        (jg.DelayedScaling, ("float8_e4m3fn", "float8_e5m2", 1024, "max", 0.0), ScalingMode.TENSOR),
        (jg.MXFP8BlockScaling, ("float8_e4m3fn", "float8_e4m3fn"), ScalingMode.MX),
    ):
        assert recipe() == recipe(*fields)
        assert recipe().kernel_mode == kernel_mode


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.__name__)
def test_recipes_refuse(recipe: Any) -> None:
    refused: dict[str, dict[str, Any]] = {}
    for name in ("fwd_dtype", "grad_dtype"):
        for dtype in ("bfloat16", "float8_e4m3b11fnuz", "float8_e8m0fnu", "int8"):
            refused[f"{name} must be float8_e4m3fn or float8_e5m2, got {dtype}."] = {name: dtype}
    for value in ("fp8", None):
        refused[f"fwd_dtype must be float8_e4m3fn or float8_e5m2, got {value!r}."] = dict(fwd_dtype=value)
    if hasattr(recipe, "pow2_scales"):
        for value in ("no", 1):
            refused[f"pow2_scales must be True or False, got {value!r}."] = dict(pow2_scales=value)
        number = "amax_epsilon must be a number, known when the program is traced, got '1'."
        refused[number] = dict(amax_epsilon="1")
        for value in (-1.0, -1e-30, float("inf"), float("nan")):
            message = f"amax_epsilon must be finite in float32 and not negative, got {value}."
            refused[message] = dict(amax_epsilon=value)
    if recipe is jg.DelayedScaling:
        refused |= {
            "margin must be a number, known when the program is traced, got '1'.": dict(margin="1"),
            "margin must be a number, known when the program is traced": dict(margin=True),
            "margin must be a number between -126 and 126, got 127.": dict(margin=127),
            "amax_history_len must be an integer, known when the program is traced": dict(amax_history_len=np.True_),
            "amax_history_len must be at least 1, got 0.": dict(amax_history_len=0),
            "amax_compute_algo must be 'max' or 'most_recent', got 'mean'.": dict(amax_compute_algo="mean"),
        }
    assert_refused(recipe, {}, refused)


def test_integers_divide_as_numpy_does_and_only_cpus_divide_in_floating_point() -> None:
    rng = np.random.default_rng(0)
    mantissas = np.concatenate([np.arange(512), 2**23 - 1 - np.arange(512), rng.integers(0, 2**23, 100_000)])
    exponents = np.concatenate([np.arange(1, 255), rng.integers(1, 255, mantissas.size - 254)])
    x = (exponents << 23 | mantissas).astype(np.int32).view(np.float32)
    for numerator, exponent in ((1, 0), (7, 6), (7, 13)):  # 1, 448 and 57344.
        quotient = jax.jit(numerics.divide_integers, static_argnums=(0, 1))(numerator, exponent, x)

        with np.errstate(over="ignore"):
            expected = np.clip(np.float32(numerator * 2.0**exponent) / x, np.float32(2.0**-126), np.float32(2.0**126))
        np.testing.assert_array_equal(quotient, expected)

    traced = jax.jit(numerics.reciprocal).trace(jax.ShapeDtypeStruct((8,), jnp.float32))
    for platform in ("cpu", "cuda", "tpu"):
        program = traced.lower(lowering_platforms=(platform,)).as_text()
        assert ("stablehlo.remainder" in program) == (platform != "cpu"), platform


def test_arrays_caches_and_residuals_are_printed_on_one_line() -> None:
    x, kernel, sizes, delayed = jnp.ones((16, 32)), jnp.ones((2, 32, 16)), jnp.array([10, 4]), jg.DelayedScaling()

    def make() -> list[Any]:
        quantized = jg.grouped_quantize(x, sizes, ScalingMode.BLOCK_1D)
        cache, state = jg.quantize_kernel(kernel, jg.Float8CurrentScaling()), jg.Fp8State.initial(delayed, 2)
        y, residuals = jg.grouped_dense_fwd(x, kernel, sizes, recipe=delayed, fp8_state=state)
        _, pending = jg.grouped_dense_dgrad(residuals, y)
        made = [quantized, cache, state, residuals, pending, jg.moe.group_by_expert(jnp.array([[1, 0]]), 2)]
        printed.extend(map(repr, made))
        return made

    printed: list[str] = []
    values = jax.eval_shape(make)
    data = "data=float8_e4m3fn[16,32], scale_inv=float32[20], group_sizes=int32[2], layout=BLOCK_1D rowwise"
    expected = f"GroupedQuantized(rowwise=ScaledArray({data}), columnwise=None, amax=float32[2], dbias=None)"
    assert printed[0] == expected
    assert printed[1].startswith("KernelCache(rowwise=ScaledArray(data=float8_e4m3fn[2,32,16], scale_inv=float32[2]")
    assert repr(jg.Fp8State.initial(delayed, 2)) == printed[2]
    assert printed[3].endswith("amax={input: float32[2], kernel: float32[2]})")
    for value, text in zip(values, printed, strict=True):
        assert "\n" not in text
        assert repr(value) == text
        for leaf in (object(), None, "leaf", 1, {"a": [1]}):
            text = repr(jax.tree.map(lambda _, leaf=leaf: leaf, value))
            assert repr(leaf).replace("'", "") in text.replace("'", "")
