"""`jg.moe.grouped_mlp`: two products with an activation in between, which a recipe makes part of quantization."""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_grouped as jg
from jax_grouped import moe
from jax_grouped.kernels.activations import Activation, is_gated
from jax_grouped.kernels.rows import activate
from tests import oracle, quantize_oracle
from tests.activations import GPT_OSS, by_jax
from tests.meshes import data_mesh
from tests.ops.quantize_cases import each_activation, some
from tests.programs import custom_calls, lowered, struct
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
    keys = jax.random.split(jax.random.key(0), 6)
    magnitude = jnp.array([1.0, 1.0, 100.0, 1.0])[:, None]

    def normal(key: jax.Array, *shape: int) -> jax.Array:
        return jax.random.normal(key, shape)

    x, dy = normal(keys[0], T, K).at[SIZES.sum() :].set(jnp.nan), normal(keys[5], T, N)
    return {
        "x": x.astype(dtype),
        "gate_up": normal(keys[1], E, K, features) * K**-0.5 * magnitude[..., None],
        "gate_up_bias": normal(keys[2], E, features) * magnitude,
        "down": normal(keys[3], E, F, N) * F**-0.5,
        "down_bias": normal(keys[4], E, N),
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


@pytest.mark.parametrize("names", [("none",), ("block", "current", "mxfp8"), ("delayed",)], ids=lambda names: names[0])
def test_result_gradients_and_states_are_those_of_the_parts(backend: str, names: tuple[str, ...]) -> None:
    for name in some(backend, names, 0):
        check_parts(backend, name)


@pytest.mark.parametrize("activation", [GPT_OSS, "relu_squared"], ids=str)
def test_other_activations_have_the_results_and_gradients_of_their_parts(backend: str, activation: Activation) -> None:
    for name in some(backend, ["block", "delayed"], 0):
        check_parts(backend, name, activation)


def check_parts(backend: str, name: str, activation: Activation = "swiglu") -> None:
    # In float32 nothing is rounded between the parts, so quantization sees the same numbers but for the activation's
    # last bit.
    recipe = RECIPES[name]

    y, (gradients, *new_states) = fused_in_float32(backend, name, activation)

    run = forward_and_backward(composed, recipe, activation)
    expected_y, (expected, *expected_states) = run(arrays("float32", activation), *states(recipe))
    oracle.assert_groups_close(y, np.asarray(expected_y), SIZES, E, 1e-3)
    oracle.assert_groups_close(gradients["x"], np.asarray(expected["x"]), SIZES, E, 2e-3)
    for part in ("gate_up", "gate_up_bias", "down", "down_bias"):
        oracle.assert_kernels_close(gradients[part], np.asarray(expected[part]), 2e-3)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-3), new_states, expected_states)


@each_activation
def test_each_expert_is_a_network_with_its_activation(backend: str, activation: Activation) -> None:
    a = {key: np.asarray(value, np.float64) for key, value in arrays("bfloat16", activation).items()}

    y = jax.jit(functools.partial(fused, None, activation=activation))(arrays("bfloat16", activation), None, None)

    hidden = oracle.add_bias(oracle.fprop(a["x"], a["gate_up"], SIZES), a["gate_up_bias"], SIZES)
    down = oracle.fprop(quantize_oracle.activation(activation, hidden), a["down"], SIZES)
    assert y.dtype == jnp.bfloat16
    oracle.assert_groups_close(y, oracle.add_bias(down, a["down_bias"], SIZES), SIZES, E, 0.02)


@pytest.mark.parametrize(("name", "activation"), [("block", "swiglu"), ("delayed", "swiglu"), ("block", "gelu")])
def test_an_activation_and_its_gradient_are_never_written_in_a_wider_type(name: str, activation: Activation) -> None:
    run = forward_and_backward(fused, RECIPES[name], activation)

    program = str(run.trace(arrays("bfloat16", activation), *states(RECIPES[name])).jaxpr)

    # x, the activation's result, dy, the gradient of the activation's input, and two kernels.
    assert program.count("jax_grouped_quantize[") == 6
    assert program.count(f"activation='{activation}'") == 2
    assert not re.search(r"\b(logistic|exp|tanh)\b", program)


@pytest.mark.parametrize(
    ("wanted", "products", "quantizations"),
    [
        (["x"], 2 + 2, 6),
        (["down"], 2 + 1, 5),
        (["gate_up"], 2 + 2, 6),
        (["gate_up_bias"], 2 + 1, 6),
        (["down_bias"], 2, 5),
        (["gate_up", "down"], 2 + 3, 6),
    ],
    ids=str,
)
def test_only_what_is_wanted_is_computed(wanted: list[str], products: int, quantizations: int) -> None:
    a = arrays()

    def loss(parts: Arrays) -> jax.Array:
        return jnp.sum(fused(RECIPES["block"], a | parts, None, None) * a["dy"])

    calls = custom_calls(lowered(jax.value_and_grad(loss), {name: a[name] for name in wanted}))

    assert sum("@jax_grouped_gemm(" in call for call in calls) == products
    assert sum("@jax_grouped_quantize(" in call for call in calls) == quantizations


def test_nothing_is_computed_twice_under_the_checkpoint_names() -> None:
    policy = jax.checkpoint_policies.save_only_these_names(*jg.CHECKPOINT_NAMES)
    remat = jax.checkpoint(functools.partial(fused, RECIPES["block"]), policy=policy)

    program = str(jax.make_jaxpr(jax.grad(lambda a: jnp.sum(remat(a, None, None))))(arrays()))

    assert program.count("gemm[") == 6
    assert program.count("jax_grouped_quantize[") == 6


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


def one_layer(x: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
    return moe.grouped_mlp(x, gate_up, down, SIZES)


def scanned_layers(x: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda x, kernels: (one_layer(x, *kernels), None), x, (gate_up, down))[0]


@pytest.mark.parametrize(("layers", "stack"), [(one_layer, ()), (scanned_layers, (3,))], ids=["one layer", "scan"])
def test_without_a_recipe_swiglu_keeps_only_the_first_products_result(layers: Callable, stack: tuple[int, ...]) -> None:
    x, gate_up, down = (struct(shape) for shape in ((T, K), (*stack, E, K, 2 * F), (*stack, E, F, K)))

    residuals = jax.eval_shape(lambda *arguments: jax.vjp(layers, *arguments)[1], x, gate_up, down)

    kept = sorted((leaf.dtype.name, leaf.shape) for leaf in jax.tree.leaves(residuals) if leaf.shape[-2:-1] == (T,))
    # The operands of the two weight gradients, and the input of SwiGLU.
    assert kept == [("bfloat16", (*stack, T, features)) for features in (K, F, 2 * F)]


def swiglu(gate_up: jax.Array) -> jax.Array:
    return activate(gate_up, "swiglu")


def swiglu_by_jax(gate_up: jax.Array) -> jax.Array:
    return by_jax(gate_up.astype(jnp.float32), "swiglu").astype(gate_up.dtype)


TRANSFORMATIONS: dict[str, Callable[[Callable], Callable]] = {
    "vmap": jax.vmap,
    "scan": lambda function: lambda xs: jax.lax.scan(lambda carry, x: (carry, function(x)), None, xs)[1],
    "checkpoint": jax.checkpoint,
    "policy": functools.partial(
        jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(*jg.CHECKPOINT_NAMES)
    ),
    "shard_map": lambda function: jax.shard_map(function, mesh=data_mesh(2), in_specs=P("data"), out_specs=P("data")),
}


@pytest.mark.parametrize("transform", TRANSFORMATIONS.values(), ids=TRANSFORMATIONS)
def test_derivatives_of_swiglu_are_those_of_jax_to_the_second_order(transform: Callable[[Callable], Callable]) -> None:
    gate_up = 3 * jax.random.normal(jax.random.key(0), (2, 5, 8))

    def derivatives(function: Callable) -> Any:
        function = transform(function)
        first = jax.grad(lambda x: jnp.sum(jnp.sin(function(x))))
        return jax.jit(lambda x: (function(x), first(x), jax.grad(lambda x: jnp.sum(jnp.sin(first(x))))(x)))(gate_up)

    for got, expected in zip(derivatives(swiglu), derivatives(swiglu_by_jax), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_gradient_of_swiglu_is_rounded_once(dtype: str) -> None:
    gate_up, dy = (jax.random.normal(jax.random.key(n), (6, n)).astype(dtype) for n in (32, 16))

    def gradient(function: Callable, gate_up: jax.Array, dy: jax.Array) -> jax.Array:
        return jax.vjp(function, gate_up)[1](dy)[0]

    got = gradient(swiglu, gate_up, dy)

    expected = gradient(swiglu_by_jax, gate_up.astype(jnp.float32), dy.astype(jnp.float32))
    np.testing.assert_array_equal(got, expected.astype(dtype), strict=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            dict(gate_up=jnp.ones((E, K, 2 * F - 16))),
            r"shapes \[E, K, 2 F\] and \[E, F, N\] for swiglu, got \(4, 48, 272\) and \(4, 144, 32\)\.$",
        ),
        (dict(activation="relu"), r"shapes \[E, K, F\] and \[E, F, N\] for relu, got \(4, 48, 288\) and"),
        (
            dict(activation="swish"),
            r"^activation must be one of \('swiglu', .*, 'relu_squared'\), a jax_grouped.SwiGLU, got 'swish'\.$",
        ),
        (dict(down=jnp.ones((E - 1, F, N))), r"shapes \[E, K, 2 F\] and \[E, F, N\]"),
        (dict(gate_up=jnp.ones((E, K + 1, 2 * F))), r"gate_up.shape\[1\] must equal x.shape\[1\] \(K\)"),
        (dict(group_sizes=SIZES[1:]), "one entry per group of (gate_up|kernel), which holds 4, got 3"),
        (
            dict(down=jnp.ones((E, F, N + 1)), recipe=RECIPES["block"]),
            r"^N must be a multiple of 16, got 33 from down \(4, 144, 33\)",
        ),
        (
            dict(gate_up=jnp.ones((E, K, 40)), down=jnp.ones((E, 20, N)), recipe=RECIPES["block"]),
            r"^F must be a multiple of 16, got 20 from down \(4, 20, 32\)",
        ),
        (dict(recipe=RECIPES["delayed"]), "DelayedScaling needs fp8_state"),
    ],
    ids=["gate and up", "no gate", "activation", "experts", "K", "sizes", "alignment", "hidden features", "state"],
)
def test_what_does_not_fit_is_named(change: dict[str, Any], message: str) -> None:
    a = arrays()
    arguments = dict(x=a["x"], gate_up=a["gate_up"], down=a["down"], group_sizes=SIZES) | change

    with pytest.raises(ValueError, match=message):
        moe.grouped_mlp(**arguments)
