"""Recipes: static under `jit`, so frozen, hashable and equal when they mean the same."""

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
from tests.refusals import assert_refused

RECIPES = [jg.Float8BlockScaling, jg.Float8CurrentScaling, jg.DelayedScaling, jg.MXFP8BlockScaling]
each_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.__name__)


@each_recipe
def test_recipes_are_equal_however_their_types_are_spelled(recipe: Any) -> None:
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


def test_recipes_of_different_kinds_differ() -> None:
    assert len({recipe(fwd_dtype="float8_e5m2", grad_dtype="float8_e5m2") for recipe in RECIPES}) == len(RECIPES)


def test_numbers_of_numpy_make_equal_recipes() -> None:
    recipe = jg.DelayedScaling(margin=np.float32(1), amax_history_len=np.int64(4))
    assert recipe == jg.DelayedScaling(margin=1.0, amax_history_len=4)
    assert hash(recipe) == hash(jg.DelayedScaling(margin=1.0, amax_history_len=4))


@pytest.mark.parametrize(
    ("recipe", "fields", "kernel_mode"),
    [
        (jg.Float8BlockScaling, ("float8_e4m3fn", "float8_e4m3fn", True, 0.0), ScalingMode.BLOCK_2D),
        (jg.Float8CurrentScaling, ("float8_e4m3fn", "float8_e5m2", False, 0.0), ScalingMode.TENSOR),
        (jg.DelayedScaling, ("float8_e4m3fn", "float8_e5m2", 1024, "max", 0.0), ScalingMode.TENSOR),
        (jg.MXFP8BlockScaling, ("float8_e4m3fn", "float8_e4m3fn"), ScalingMode.MX),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_defaults(recipe: Any, fields: tuple[Any, ...], kernel_mode: ScalingMode) -> None:
    assert recipe() == recipe(*fields)
    assert recipe().kernel_mode == kernel_mode


def test_recipes_are_static_arguments() -> None:
    traced = []

    def cast(x: jax.Array, recipe: Any) -> jax.Array:
        traced.append(recipe)
        return x.astype(recipe.fwd_dtype)

    function = jax.jit(cast, static_argnames="recipe")
    for dtype in ("float8_e4m3fn", jnp.float8_e4m3fn, "float8_e5m2", jnp.float8_e5m2):
        assert function(jnp.ones(2), recipe=jg.Float8BlockScaling(fwd_dtype=dtype)).dtype == dtype
    assert len(traced) == 2, "equal recipes share one compilation"


@each_recipe
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
            "amax_history_len must be an integer, known when the program is traced": dict(amax_history_len=np.True_),
            "amax_history_len must be at least 1, got 0.": dict(amax_history_len=0),
            "amax_compute_algo must be 'max' or 'most_recent', got 'mean'.": dict(amax_compute_algo="mean"),
        }
    assert_refused(recipe, {}, refused)


def test_modes_have_the_names_that_programs_show() -> None:
    assert [mode.value for mode in ScalingMode] == ["tensor", "block_1d", "block_2d", "mx"]
    assert ScalingMode("block_1d") is ScalingMode.BLOCK_1D
