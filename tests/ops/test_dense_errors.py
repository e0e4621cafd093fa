"""Types and errors of FP8 `grouped_dense`."""

import functools
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import export

import jax_grouped as jg
from tests.ops.dense_cases import BIAS, BLOCK, CACHE, CURRENT, KERNEL, SIZES, X
from tests.programs import struct
from tests.refusals import assert_refused

DELAYED = jg.DelayedScaling(amax_history_len=4)
STATE = jg.Fp8State.initial(DELAYED, 2)


def test_types() -> None:
    types = "bfloat16", "float16", "float32"
    for i, (x_dtype, kernel_dtype) in enumerate(itertools.product(types, types)):
        out_dtype = (None, "float16", "float32")[i % 3]

        def step(x: jax.Array, kernel: jax.Array, bias: jax.Array, out_dtype: Any = out_dtype) -> tuple[jax.Array, ...]:
            options = dict(recipe=CURRENT, preferred_element_type=out_dtype)
            dense = functools.partial(jg.grouped_dense, group_sizes=SIZES, **options)
            y, pull_back = jax.vjp(lambda x, kernel, bias: dense(x, kernel, bias=bias), x, kernel, bias)
            return y, *pull_back(y)

        results = jax.eval_shape(step, struct(X.shape, x_dtype), struct(KERNEL.shape, kernel_dtype), BIAS)
        assert [result.dtype for result in results] == [out_dtype or x_dtype, x_dtype, kernel_dtype, "bfloat16"]


def test_grouped_dense_refuses() -> None:
    no_recipe = "recipe must be a recipe such as Float8BlockScaling(), or None, got "
    same = "kernel_cache must be of the same shape and recipe as kernel: "
    kernel = jnp.ones((2, 32, 48))
    delayed_cache = jax.eval_shape(lambda k: jg.quantize_kernel(k, DELAYED, scale=jnp.ones(2)), kernel)
    refused: dict[str, dict[str, Any]] = {
        f"{no_recipe}'fp8'.": dict(recipe="fp8"),
        f"{no_recipe}the class DelayedScaling: pass DelayedScaling().": dict(recipe=jg.DelayedScaling),
        "bias must be an array [G, N] or None, got a recipe: recipe is keyword-only.": dict(bias=BLOCK, recipe=None),
        "bias must have shape [G, N] = (2, 48), got (3,).": dict(bias=jnp.ones(3)),
        "kernel must be an array, got None.": dict(kernel=None),
        "DelayedScaling needs fp8_state: start with jax_grouped.Fp8State.initial(recipe, num_groups=2).": dict(
            recipe=DELAYED
        ),
        "fp8_state is for DelayedScaling, got recipe Float8CurrentScaling(": dict(recipe=CURRENT, fp8_state=STATE),
        "fp8_state must be a jax_grouped.Fp8State, got dict.": dict(recipe=DELAYED, fp8_state={}),
        "fp8_state.input_amax_history must have shape (2, 1024) for 2 groups and amax_history_len 1024, got": dict(
            recipe=jg.DelayedScaling(), fp8_state=STATE
        ),
        "fp8_state.input_amax_history must be float32, got bfloat16.": dict(
            recipe=DELAYED, fp8_state=jax.tree.map(lambda x: x.astype(jnp.bfloat16), STATE)
        ),
        "dkernel_accumulator must have the kernel's shape (2, 32, 48), got (2, 48, 32).": dict(
            dkernel_accumulator=jnp.ones((2, 48, 32))
        ),
        "dkernel_accumulator must be float32 for this kernel, got bfloat16.": dict(
            dkernel_accumulator=jnp.ones((2, 32, 48), jnp.bfloat16)
        ),
        "recipe.fwd_dtype must be float8_e4m3fn, got float8_e5m2 with grad_dtype float8_e5m2: of the two operands of a "
        "product only one may be float8_e5m2, and x and kernel both have fwd_dtype.": dict(
            recipe=jg.Float8CurrentScaling(fwd_dtype="float8_e5m2")
        ),
        "N must be a multiple of 16, got 24 from kernel (2, 32, 24); pad": dict(kernel=jnp.ones((2, 32, 24))),
        "K must be a multiple of 16, got 24 from kernel (2, 24, 48); pad": dict(
            x=jnp.ones((6, 24)), kernel=jnp.ones((2, 24, 48))
        ),
        "precision is for recipe=None; FP8 products have only one. Got 'highest'.": dict(precision="highest"),
        "kernel_cache needs a recipe, the one that it was made with.": dict(recipe=None, kernel_cache=CACHE),
        "Without a recipe kernel_cache must be kernel in the type of x, ((2, 32, 48), 'float32'), got ": dict(
            recipe=None, kernel_cache=jnp.ones((2, 32, 48), jnp.bfloat16)
        ),
        "kernel_cache must be a KernelCache, got int.": dict(kernel_cache=3),
        same: dict(kernel_cache=CACHE),
        f"{same}recipe must be Float8CurrentScaling, got DelayedScaling.": dict(
            recipe=CURRENT, kernel_cache=delayed_cache
        ),
    }
    given = dict(x=jnp.ones((6, 32)), kernel=kernel, group_sizes=jnp.array([2, 3]), recipe=BLOCK)
    assert_refused(jg.grouped_dense, given, refused)


def test_a_recipe_needs_to_know_the_number_of_tokens() -> None:
    (tokens,) = export.symbolic_shape("t")
    x, kernel = jax.ShapeDtypeStruct((tokens, 32), jnp.float32), jax.ShapeDtypeStruct((2, 32, 48), jnp.float32)
    message = "With a recipe the number of tokens must be known when the program is traced, got x (t, 32)."
    with pytest.raises(ValueError, match=re.escape(message)):
        export.export(jax.jit(lambda x, kernel: jg.grouped_dense(x, kernel, SIZES[:2], recipe=BLOCK)))(x, kernel)


@pytest.mark.parametrize("recipe", [BLOCK, None], ids=["recipe", "accumulator"])
def test_second_derivatives_that_do_not_exist_say_so(recipe: jg.Recipe | None) -> None:
    x, kernel = jnp.ones((6, 32)), jnp.ones((2, 32, 48))
    accumulator = None if recipe else kernel

    def slope(kernel: jax.Array) -> jax.Array:
        def loss(kernel: jax.Array) -> jax.Array:
            y = jg.grouped_dense(x, kernel, SIZES[:2], recipe=recipe, dkernel_accumulator=accumulator)
            return jnp.sum(y**2)

        return jnp.sum(jax.grad(loss)(kernel))

    with pytest.raises(NotImplementedError, match="of first order with a recipe or a dkernel_accumulator"):
        jax.grad(slope)(kernel)
