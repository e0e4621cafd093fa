"""Recipes: static under `jit`, so frozen, hashable and equal when they mean the same."""

import copy
import dataclasses
import pickle
import re
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jax_grouped as jg
from jax_grouped import ScalingMode

RECIPES = [jg.Float8BlockScaling, jg.Float8CurrentScaling, jg.DelayedScaling, jg.MXFP8BlockScaling]
each_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.__name__)


@each_recipe
@pytest.mark.parametrize(
    "spelling",
    [jnp.float8_e5m2, "float8_e5m2", jnp.dtype("float8_e5m2"), ml_dtypes.float8_e5m2],
    ids=["jnp", "name", "dtype", "ml_dtypes"],
)
def test_types_are_equal_however_they_are_spelled(recipe: Any, spelling: Any) -> None:
    one = recipe(fwd_dtype=spelling, grad_dtype=spelling)
    other = recipe(fwd_dtype=jnp.float8_e5m2, grad_dtype=jnp.float8_e5m2)
    assert one == other
    assert hash(one) == hash(other)
    assert (one.fwd_dtype, one.grad_dtype) == (jnp.float8_e5m2, jnp.float8_e5m2)
    assert one != recipe(fwd_dtype="float8_e4m3fn", grad_dtype="float8_e5m2")


def test_recipes_of_different_kinds_differ() -> None:
    assert len({recipe(fwd_dtype="float8_e5m2", grad_dtype="float8_e5m2") for recipe in RECIPES}) == len(RECIPES)


@each_recipe
def test_recipes_are_frozen(recipe: Any) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe().fwd_dtype = jnp.float8_e5m2


@each_recipe
def test_recipes_can_be_copied_and_changed(recipe: Any) -> None:
    assert copy.deepcopy(recipe()) == recipe()
    assert pickle.loads(pickle.dumps(recipe())) == recipe()
    changed = dataclasses.replace(recipe(), fwd_dtype="float8_e5m2")
    assert changed == recipe(fwd_dtype=jnp.float8_e5m2)
    assert changed != recipe()


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


@each_recipe
def test_recipes_are_static_arguments(recipe: Any) -> None:
    traced = []

    def mode_of(x: jax.Array, recipe: Any) -> jax.Array:
        traced.append(recipe)
        return x.astype(recipe.fwd_dtype)

    function = jax.jit(mode_of, static_argnames="recipe")
    for dtype in ("float8_e4m3fn", jnp.float8_e4m3fn, "float8_e5m2", jnp.float8_e5m2):
        assert function(jnp.ones(2), recipe=recipe(fwd_dtype=dtype)).dtype == dtype
    assert len(traced) == 2, "equal recipes share one compilation"


@pytest.mark.parametrize("name", ["fwd_dtype", "grad_dtype"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3b11fnuz", "float8_e8m0fnu", "int8"])
@each_recipe
def test_other_types_are_refused(recipe: Any, dtype: str, name: str) -> None:
    message = f"{name} must be float8_e4m3fn or float8_e5m2, got {dtype}."
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        recipe(**{name: dtype})


@pytest.mark.parametrize("dtype", ["fp8", None], ids=repr)
@each_recipe
def test_what_is_no_type_is_refused(recipe: Any, dtype: Any) -> None:
    message = f"fwd_dtype must be float8_e4m3fn or float8_e5m2, got {dtype!r}."
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        recipe(fwd_dtype=dtype)


@pytest.mark.parametrize(
    ("recipe", "field"),
    [(jg.Float8BlockScaling, "amax_epsilon"), (jg.Float8CurrentScaling, "amax_epsilon"), (jg.DelayedScaling, "margin")],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_text_is_no_number(recipe: Any, field: str) -> None:
    message = f"{field} must be a number, known when the program is traced, got '1'."
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        recipe(**{field: "1"})


@pytest.mark.parametrize("value", ["no", 1], ids=repr)
@pytest.mark.parametrize("recipe", [jg.Float8BlockScaling, jg.Float8CurrentScaling])
def test_texts_and_numbers_are_no_booleans(recipe: Any, value: Any) -> None:
    with pytest.raises(TypeError, match=rf"^pow2_scales must be True or False, got {value!r}\.$"):
        recipe(pow2_scales=value)


@pytest.mark.parametrize("value", [True, np.True_], ids=["Python's", "NumPy's"])
@pytest.mark.parametrize("field", ["amax_history_len", "margin"])
def test_booleans_are_no_numbers(field: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"^{field} must be an? (integer|number), known when the program is traced"):
        jg.DelayedScaling(**{field: value})


def test_numbers_of_numpy_make_equal_recipes() -> None:
    recipe = jg.DelayedScaling(margin=np.float32(1), amax_history_len=np.int64(4))
    assert recipe == jg.DelayedScaling(margin=1.0, amax_history_len=4)
    assert hash(recipe) == hash(jg.DelayedScaling(margin=1.0, amax_history_len=4))


@pytest.mark.parametrize("value", [-1.0, -1e-30, float("inf"), float("nan")])
@pytest.mark.parametrize("recipe", [jg.Float8BlockScaling, jg.Float8CurrentScaling])
def test_an_epsilon_that_is_no_size_is_refused(recipe: Any, value: float) -> None:
    message = f"amax_epsilon must be finite in float32 and not negative, got {value}."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        recipe(amax_epsilon=value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(amax_history_len=0), "amax_history_len must be at least 1, got 0."),
        (dict(amax_history_len=-3), "amax_history_len must be at least 1, got -3."),
        (dict(amax_compute_algo="mean"), "amax_compute_algo must be 'max' or 'most_recent', got 'mean'."),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_delayed_scaling_refuses(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        jg.DelayedScaling(**arguments)


def test_modes_have_the_names_that_programs_show() -> None:
    assert [mode.value for mode in ScalingMode] == ["tensor", "block_1d", "block_2d", "mx"]
    assert ScalingMode("block_1d") is ScalingMode.BLOCK_1D
    with pytest.raises(ValueError, match=r"^'block' is not a valid ScalingMode$"):
        ScalingMode("block")
