"""Types and errors of FP8 `grouped_dense`."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import export

import jax_grouped as jg
from tests.ops.dense_cases import BIAS, BLOCK, CACHE, CURRENT, KERNEL, SIZES, X
from tests.programs import struct

DELAYED = jg.DelayedScaling(amax_history_len=4)
STATE = jg.Fp8State.initial(DELAYED, 2)


@pytest.mark.parametrize("out_dtype", [None, "float16", "float32"])
@pytest.mark.parametrize("kernel_dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("x_dtype", ["bfloat16", "float16", "float32"])
def test_types(x_dtype: str, kernel_dtype: str, out_dtype: str | None) -> None:
    def step(x: jax.Array, kernel: jax.Array, bias: jax.Array) -> tuple[jax.Array, ...]:
        y, vjp = jax.vjp(
            lambda *a: jg.grouped_dense(*a[:2], SIZES, a[2], recipe=CURRENT, preferred_element_type=out_dtype),
            *(x, kernel, bias),
        )
        return y, *vjp(y)

    results = jax.eval_shape(step, struct(X.shape, x_dtype), struct(KERNEL.shape, kernel_dtype), BIAS)
    assert [r.dtype for r in results] == [out_dtype or x_dtype, x_dtype, kernel_dtype, "bfloat16"]


E5M2 = "float8_e5m2"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            dict(recipe="fp8"),
            TypeError,
            "recipe must be a recipe such as Float8BlockScaling(), or None, got 'fp8'.",
        ),
        (
            dict(recipe=jg.DelayedScaling),
            TypeError,
            "recipe must be a recipe such as Float8BlockScaling(), or None, got the class DelayedScaling: "
            "pass DelayedScaling().",
        ),
        (
            dict(bias=BLOCK, recipe=None),
            TypeError,
            "bias must be an array [G, N] or None, got a recipe: recipe is keyword-only.",
        ),
        (dict(bias="none"), TypeError, "bias must be an array, got 'none'."),
        (dict(kernel=None), TypeError, "kernel must be an array, got None."),
        (
            dict(recipe=DELAYED),
            ValueError,
            "DelayedScaling needs fp8_state: start with jax_grouped.Fp8State.initial(recipe, num_groups=2).",
        ),
        (
            dict(recipe=CURRENT, fp8_state=STATE),
            ValueError,
            "fp8_state is for DelayedScaling, got recipe Float8CurrentScaling(",
        ),
        (
            dict(recipe=DELAYED, fp8_state={}),
            TypeError,
            "fp8_state must be a jax_grouped.Fp8State, got dict.",
        ),
        (
            dict(recipe=jg.DelayedScaling(), fp8_state=STATE),
            ValueError,
            "fp8_state.input_amax_history must have shape (2, 1024) for 2 groups and amax_history_len 1024, got (2, 4)",
        ),
        (
            dict(recipe=DELAYED, fp8_state=jax.tree.map(lambda x: x.astype(jnp.bfloat16), STATE)),
            TypeError,
            "fp8_state.input_amax_history must be float32, got bfloat16.",
        ),
        (
            dict(dkernel_accumulator=jnp.ones((2, 48, 32))),
            ValueError,
            "dkernel_accumulator must have the kernel's shape (2, 32, 48), got (2, 48, 32).",
        ),
        (
            dict(dkernel_accumulator=jnp.ones((2, 32, 48), jnp.bfloat16)),
            TypeError,
            "dkernel_accumulator must be float32 for this kernel, got bfloat16.",
        ),
        (
            dict(recipe=jg.Float8CurrentScaling(fwd_dtype=E5M2)),
            TypeError,
            "recipe.fwd_dtype must be float8_e4m3fn, got float8_e5m2 with grad_dtype float8_e5m2: of the two operands "
            "of a product only one may be float8_e5m2, and x and kernel both have fwd_dtype.",
        ),
        (
            dict(kernel=jnp.ones((2, 32, 24))),
            ValueError,
            "N must be a multiple of 16, got 24 from kernel (2, 32, 24); pad the feature axis with ",
        ),
        (
            dict(x=jnp.ones((6, 24)), kernel=jnp.ones((2, 24, 48))),
            ValueError,
            "K must be a multiple of 16, got 24 from kernel (2, 24, 48); pad the feature axis with ",
        ),
        (
            dict(precision="highest"),
            ValueError,
            "precision is for recipe=None; FP8 products have only one. Got 'highest'.",
        ),
        (
            dict(recipe=None, kernel_cache=CACHE),
            ValueError,
            "kernel_cache needs a recipe, the one that it was made with.",
        ),
        (
            dict(recipe=None, kernel_cache=jnp.ones((2, 32, 48), jnp.bfloat16)),
            ValueError,
            "Without a recipe kernel_cache must be kernel in the type of x, ((2, 32, 48), 'float32'), got ",
        ),
        (dict(kernel_cache=3), TypeError, "kernel_cache must be a KernelCache, got int."),
        (
            dict(kernel_cache=CACHE),
            ValueError,
            "kernel_cache must be of the same shape and recipe as kernel: ",
        ),
        (
            dict(
                recipe=CURRENT,
                kernel_cache=jax.eval_shape(
                    lambda k: jg.quantize_kernel(k, DELAYED, scale=jnp.ones(2)), jnp.ones((2, 32, 48))
                ),
            ),
            ValueError,
            "kernel_cache must be of the same shape and recipe as kernel: recipe must be Float8CurrentScaling, got "
            "DelayedScaling.",
        ),
        (
            dict(
                recipe=CURRENT,
                kernel_cache=jax.eval_shape(lambda k: jg.quantize_kernel(k, BLOCK), jnp.ones((2, 32, 48))),
            ),
            ValueError,
            "kernel_cache must be of the same shape and recipe as kernel: recipe must be Float8CurrentScaling, ",
        ),
    ],
)
def test_rejects(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    given = dict(x=jnp.ones((6, 32)), kernel=jnp.ones((2, 32, 48)), group_sizes=jnp.array([2, 3]), recipe=BLOCK)
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        jg.grouped_dense(**(given | arguments))


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
