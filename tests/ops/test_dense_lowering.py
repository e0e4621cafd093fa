"""Programs with FP8 `grouped_dense`, lowered for CUDA: their computations, residuals and casts."""

import contextlib
import functools
import io
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import partial_eval

import jax_grouped as jg
from tests.ops.dense_cases import BIAS, BLOCK, CACHE, GROUPS, KERNEL, SIZES, X
from tests.programs import custom_calls, lowered, products, struct


def dense(x: Any, kernel: Any, bias: Any, sizes: Any, cache: Any = None) -> jax.Array:
    return jg.grouped_dense(x, kernel, sizes, bias, recipe=BLOCK, kernel_cache=cache)


def loss(*arguments: Any) -> jax.Array:
    # The gradient depends on the result, so the forward product stays.
    return jnp.sum(jnp.sin(dense(*arguments).astype(jnp.float32)))


def summary(function: Callable[..., Any], *arguments: Any) -> list[str]:
    """Returns a word for every custom call of the lowered program, with its results."""
    words = []
    for call in custom_calls(lowered(function, *arguments)):
        if "@jax_grouped_quantize(" in call:
            makes = [name for name in ("rowwise", "columnwise", "dbias") if f" {name} = true" in call]
            stack = "stack_rows = 0 " not in call
            words.append(f"{'kernel' if stack else 'tokens'} {'+'.join(makes)}")
        else:
            words.append("".join(products(call)) or "bias_grad")
    return sorted(words)


BOTH = "rowwise+columnwise"


def test_nothing_is_computed_that_nobody_asks_for() -> None:
    every = jax.grad(loss, (0, 1, 2))
    quantized = [f"tokens {BOTH}", f"tokens {BOTH}+dbias"]
    for function, cache, expected in (
        (dense, (), ["fprop", "kernel columnwise", "tokens rowwise"]),
        (dense, (CACHE,), ["fprop", "tokens rowwise"]),
        (every, (), ["dgrad", "fprop", f"kernel {BOTH}", *quantized, "wgrad"]),
        (every, (CACHE,), ["dgrad", "fprop", *quantized, "wgrad"]),
        (jax.grad(loss, 0), (), ["dgrad", "fprop", f"kernel {BOTH}", "tokens rowwise", "tokens rowwise"]),
        (jax.grad(loss, 1), (), ["fprop", "kernel columnwise", "tokens columnwise", f"tokens {BOTH}", "wgrad"]),
        (jax.grad(loss, 2), (), ["fprop", "kernel columnwise", "tokens rowwise", "tokens rowwise+dbias"]),
    ):
        assert summary(function, X, KERNEL, BIAS, GROUPS, *cache) == expected


def test_a_result_that_nobody_differentiates_is_left_alone() -> None:
    @jax.custom_vjp
    def total(y: jax.Array) -> jax.Array:
        return jnp.sum(y)

    total.defvjp(lambda y: (total(y), None), lambda *_: (None,))
    gradient = jax.grad(lambda *arguments: total(dense(*arguments)), (0, 1, 2))
    assert not {"dgrad", "wgrad"} & set(summary(gradient, X, KERNEL, BIAS, GROUPS))


def test_master_weights_get_their_gradient_straight_from_the_matmul() -> None:
    text = lowered(jax.grad(loss, argnums=1), X, KERNEL, BIAS, GROUPS)
    (call,) = [call for call in custom_calls(text) if products(call) == ["wgrad"]]
    assert "-> (tensor<4x144x272xf32>" in call
    assert f"return {call.split(':')[0].strip()}#0" in text, "no cast or other operation may follow the matmul"


def test_microbatches_quantize_the_kernel_once() -> None:
    def step(xs: jax.Array, kernel: jax.Array, bias: jax.Array, sizes: jax.Array) -> jax.Array:
        cache = jg.quantize_kernel(kernel, BLOCK)

        def microbatch(total: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
            return total + jax.grad(loss, 1)(x, kernel, bias, sizes, cache), None

        return jax.lax.scan(microbatch, jnp.zeros(kernel.shape, kernel.dtype), xs)[0]

    arguments = struct((3, 300, 144)), KERNEL, BIAS, GROUPS
    # In the one orientation that is read.
    assert [word for word in summary(step, *arguments) if "kernel" in word] == ["kernel columnwise"]
    before, loop = lowered(step, *arguments).split("stablehlo.while")
    assert "stack_rows = 144 " in before
    assert "stack_rows = 144 " not in loop


def test_only_fp8_waits_for_the_backward_pass() -> None:
    residuals = jax.eval_shape(
        lambda *arguments: jax.vjp(functools.partial(dense, sizes=SIZES), *arguments)[1], X, KERNEL, BIAS
    )
    kept = sorted((leaf.dtype.name, leaf.shape) for leaf in jax.tree.leaves(residuals) if leaf.size > 5000)
    assert kept == [("float8_e4m3fn", (4, 144, 272)), ("float8_e4m3fn", (16 * 22 * 144,))]


def test_names_choose_what_a_policy_keeps() -> None:
    tokens, kernels = r"f8_?e4m3fn\[50688\]", r"f8_?e4m3fn\[4,144,272\]"
    for name, kept, left in (("jax_grouped_x", tokens, kernels), ("jax_grouped_kernel", kernels, tokens)):
        assert name in jg.CHECKPOINT_NAMES
        policy = jax.checkpoint_policies.save_only_these_names(name)
        saved = io.StringIO()
        with contextlib.redirect_stdout(saved):
            jax.ad_checkpoint.print_saved_residuals(jax.checkpoint(loss, policy=policy), X, KERNEL, BIAS, GROUPS)
        assert re.search(kept, saved.getvalue()), saved.getvalue()
        assert not re.search(left, saved.getvalue()), saved.getvalue()


def test_a_policy_that_keeps_what_has_a_name_has_nothing_quantized_again() -> None:
    recipe = jg.DelayedScaling(amax_history_len=4)
    state = jg.Fp8State.initial(recipe, KERNEL.shape[0])

    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(*jg.CHECKPOINT_NAMES))
    def dense(x: Any, kernel: Any, state: jg.Fp8State, sizes: Any) -> jax.Array:
        return jg.grouped_dense(x, kernel, sizes, recipe=recipe, fp8_state=state)

    gradient = jax.grad(lambda *arguments: jnp.sum(jnp.sin(dense(*arguments).astype(jnp.float32))), (0, 1, 2))
    quantized = [word for word in summary(gradient, X, KERNEL, state, GROUPS) if word.startswith(("tokens", "kernel"))]
    assert quantized == [f"kernel {BOTH}", f"tokens {BOTH}", f"tokens {BOTH}"]


def test_what_is_quantized_again_is_made_in_the_other_orientation() -> None:
    def again(*arguments: Any) -> jax.Array:
        return jnp.sum(jnp.sin(jax.checkpoint(dense)(*arguments).astype(jnp.float32)))

    tokens = ["tokens columnwise", "tokens rowwise", f"tokens {BOTH}+dbias"]
    words = ["dgrad", "fprop", "kernel columnwise", "kernel rowwise", *tokens, "wgrad"]
    assert summary(jax.grad(again, (0, 1, 2)), X, KERNEL, BIAS, GROUPS) == sorted(words)


def test_largest_values_alone_take_one_orientation() -> None:
    def largest(x: Any, sizes: Any) -> jax.Array:
        return jg.grouped_quantize(x, sizes, jg.ScalingMode.BLOCK_1D, columnwise=True, dbias=True).amax

    jaxpr, _ = partial_eval.dce_jaxpr(jax.make_jaxpr(largest)(X, GROUPS).jaxpr, [True])
    assert re.findall(r"rowwise=(\w+), columnwise=(\w+), dbias=(\w+)", str(jaxpr)) == [("True", "False", "False")]


def test_gradients_pass_by_a_cache_that_is_made_on_the_way() -> None:
    def whole(kernel: jax.Array, x: jax.Array, bias: jax.Array, sizes: jax.Array) -> jax.Array:
        return loss(x, kernel, bias, sizes, jg.quantize_kernel(kernel, BLOCK))

    words = ["fprop", "kernel columnwise", "tokens columnwise", f"tokens {BOTH}", "wgrad"]
    assert summary(jax.grad(whole), KERNEL, X, BIAS, GROUPS) == words
