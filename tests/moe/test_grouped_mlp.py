"""`jg.moe.grouped_mlp`: two products with an activation in between, which a recipe makes part of quantization."""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped as jg
from jax_grouped import moe
from jax_grouped.kernels.activations import Activation, is_gated
from jax_grouped.kernels.rows import activate
from tests import oracle
from tests.activations import GPT_OSS
from tests.operands import normal
from tests.ops.quantize_cases import some
from tests.refusals import assert_refused
from tests.states import NAMES, fp8_state

pytestmark = pytest.mark.slow

E, T, K, F, N = 4, 300, 48, 144, 32
SIZES = np.array([37, 0, 200, 1], np.int32)
RECIPES = {
    "none": None,
    "block": jg.Float8BlockScaling(),
    "current": jg.Float8CurrentScaling(),
    "delayed": jg.DelayedScaling(amax_history_len=2),
    "mxfp8": jg.MXFP8BlockScaling(),
}

Arrays = dict[str, jax.Array]


@functools.cache
def arrays(dtype: str = "float32", activation: Activation = "swiglu") -> Arrays:
    """Returns tokens with NaN in the tail, and weights; those of the second expert are a hundred times as large."""
    features = 2 * F if is_gated(activation) else F
    magnitude = jnp.array([1.0, 1.0, 100.0, 1.0])[:, None]
    x, dy = normal(0, (T, K)).at[SIZES.sum() :].set(jnp.nan), normal(5, (T, N))
    return {
        "x": x.astype(dtype),
        "gate_up": normal(1, (E, K, features)) * K**-0.5 * magnitude[..., None],
        "gate_up_bias": normal(2, (E, features)) * magnitude,
        "down": normal(3, (E, F, N)) * F**-0.5,
        "down_bias": normal(4, (E, N)),
        "dy": dy.astype(dtype),
    }


def states(recipe: Any) -> tuple[Any, Any]:
    if not isinstance(recipe, jg.DelayedScaling):
        return None, None
    initial = jg.Fp8State.initial(recipe, E)
    history = jnp.full_like(initial.input_amax_history, 8)
    up = {**vars(initial), **{f"{name}_amax_history": history for name in NAMES}}
    return fp8_state(**up), fp8_state(**{**vars(initial), "input_amax_history": 500 * history})


def fused(recipe: Any, a: Arrays, up_state: Any, down_state: Any, activation: Activation = "swiglu") -> jax.Array:
    up = moe.Weights(a["gate_up"], a["gate_up_bias"], fp8_state=up_state)
    down = moe.Weights(a["down"], a["down_bias"], fp8_state=down_state)
    return moe.grouped_mlp(a["x"], up, down, SIZES, activation=activation, recipe=recipe)


def composed(recipe: Any, a: Arrays, up_state: Any, down_state: Any, activation: Activation = "swiglu") -> jax.Array:
    dense = functools.partial(jg.grouped_dense, group_sizes=SIZES, recipe=recipe)
    hidden = dense(a["x"], a["gate_up"], bias=a["gate_up_bias"], fp8_state=up_state)
    return dense(activate(hidden, activation), a["down"], bias=a["down_bias"], fp8_state=down_state)


def forward_and_backward(mlp: Callable, recipe: Any, activation: Activation = "swiglu") -> Callable:
    @jax.jit
    def run(a: Arrays, *states: Any) -> tuple[jax.Array, Any]:
        function = functools.partial(mlp, recipe, activation=activation)
        y, vjp = jax.vjp(function, {k: v for k, v in a.items() if k != "dy"}, *states)
        return y, vjp(a["dy"])

    return run


@functools.cache
def fused_in_float32(backend: str, name: str, activation: Activation = "swiglu") -> Any:
    del backend
    a = arrays("float32", activation)
    return forward_and_backward(fused, RECIPES[name], activation)(a, *states(RECIPES[name]))


def test_result_gradients_and_states_are_those_of_the_parts(backend: str) -> None:
    cases: list[tuple[str, Activation]] = [
        ("none", "swiglu"),
        ("current", "swiglu"),
        ("block", "swiglu"),
        ("mxfp8", "swiglu"),
        ("delayed", "relu_squared"),
        ("block", GPT_OSS),
    ]
    for name, activation in some(backend, cases, 1, 2):
        # In float32 nothing is rounded between the parts, so quantization sees the same numbers but for the
        # activation's last bit.
        recipe = RECIPES[name]

        y, (gradients, *new_states) = fused_in_float32(backend, name, activation)

        run = forward_and_backward(composed, recipe, activation)
        expected_y, (expected, *expected_states) = run(arrays("float32", activation), *states(recipe))
        oracle.assert_groups_close(y, np.asarray(expected_y), SIZES, E, 1e-3)
        oracle.assert_groups_close(gradients["x"], np.asarray(expected["x"]), SIZES, E, 2e-3)
        for part in ("gate_up", "gate_up_bias", "down", "down_bias"):
            oracle.assert_kernels_close(gradients[part], np.asarray(expected[part]), 2e-3)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-3), new_states, expected_states)


def test_an_activation_and_its_gradient_are_never_written_in_a_wider_type() -> None:
    activations: list[tuple[str, Activation]] = [("block", "gelu"), ("delayed", "swiglu")]
    for name, activation in activations:
        run = forward_and_backward(fused, RECIPES[name], activation)

        program = str(run.trace(arrays("bfloat16", activation), *states(RECIPES[name])).jaxpr)

        # x, the activation's result, dy, the gradient of the activation's input, and two kernels.
        assert program.count("jax_grouped_quantize[") == 6
        assert program.count(f"activation='{activation}'") == 2
        assert not re.search(r"\b(logistic|exp|tanh)\b", program)


def test_caches_and_accumulators_serve_their_own_product(backend: str) -> None:
    recipe, a, names = RECIPES["block"], arrays(), ("gate_up", "down")
    caches = [jg.quantize_kernel(a[name], recipe) for name in names]

    @jax.jit
    def gradients(kernels: list[jax.Array], totals: list[jax.Array]) -> list[jax.Array]:
        def mlp(kernels: list[jax.Array]) -> jax.Array:
            biases = [a[f"{name}_bias"] for name in names]
            parts = zip(kernels, biases, caches, totals, strict=True)
            up, down = (moe.Weights(kernel, bias, cache, None, total) for kernel, bias, cache, total in parts)
            return moe.grouped_mlp(a["x"], up, down, SIZES, recipe=recipe)

        return jax.vjp(mlp, kernels)[1](a["dy"])[0]

    # With a cache no kernel is read.
    got = gradients([jnp.full_like(a[name], jnp.nan) for name in names], [jnp.ones_like(a[name]) for name in names])

    _, (expected, *_) = fused_in_float32(backend, "block")
    for name, one in zip(names, got, strict=True):
        oracle.assert_kernels_close(one, np.asarray(expected[name], np.float64) + 1, oracle.fp8_tolerance())


def test_where_the_result_does_not_reach_the_loss_gradients_are_zero() -> None:
    def loss(a: Arrays) -> jax.Array:
        return jax.lax.stop_gradient(fused(RECIPES["block"], a, None, None)).sum() + a["x"][0, 0]

    gradients = jax.jit(jax.grad(loss))(arrays())
    assert not any(jnp.any(gradients[name]) for name in ("gate_up", "gate_up_bias", "down", "down_bias"))


def test_what_does_not_fit_is_named() -> None:
    a = arrays()
    shapes = "gate_up and down must have shapes"
    refused: dict[str, dict[str, Any]] = {
        f"{shapes} [E, K, 2 F] and [E, F, N] for swiglu, got (4, 48, 272) and (4, 144, 32).": dict(
            gate_up=jnp.ones((E, K, 2 * F - 16))
        ),
        f"{shapes} [E, K, F] and [E, F, N] for relu, got (4, 48, 288) and": dict(activation="relu"),
        "activation must be one of ('swiglu', ": dict(activation="swish"),
        f"{shapes} [E, K, 2 F] and [E, F, N]": dict(down=jnp.ones((E - 1, F, N))),
        "gate_up.shape[1] must equal x.shape[1] (K)": dict(gate_up=jnp.ones((E, K + 1, 2 * F))),
        "group_sizes must have one entry per group of kernel, which holds 4, got 3": dict(group_sizes=SIZES[1:]),
        "N must be a multiple of 16, got 33 from down (4, 144, 33)": dict(
            down=jnp.ones((E, F, N + 1)), recipe=RECIPES["block"]
        ),
        "F must be a multiple of 16, got 20 from down (4, 20, 32)": dict(
            gate_up=jnp.ones((E, K, 40)), down=jnp.ones((E, 20, N)), recipe=RECIPES["block"]
        ),
        "DelayedScaling needs fp8_state": dict(recipe=RECIPES["delayed"]),
    }
    assert_refused(moe.grouped_mlp, dict(x=a["x"], gate_up=a["gate_up"], down=a["down"], group_sizes=SIZES), refused)
