"""The experts of `moe_mlp` against its public steps one by one, and what they keep."""

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
from jax_grouped.kernels import primitive
from jax_grouped.kernels.activations import Activation, is_gated
from tests import oracle
from tests.activations import by_jax
from tests.operands import normal
from tests.ops.quantize_cases import ACTIVATIONS, some
from tests.programs import custom_calls, lowered, products, struct, types

pytestmark = pytest.mark.slow

T, E, TOP_K, K, F = 96, 6, 3, 48, 32
ROUTER = moe.Router(TOP_K)
RECIPES = {
    "block": jg.Float8BlockScaling(),
    "current": jg.Float8CurrentScaling(),
    "delayed": jg.DelayedScaling(amax_history_len=2),
    "mxfp8": jg.MXFP8BlockScaling(),
}
NAMES = ("x", "logits", "gate_up", "gate_up_bias", "down", "down_bias")

Layer = Callable[..., jax.Array]


@functools.cache
def arrays() -> dict[str, jax.Array]:
    shapes = [(T, K), (T, E), (E, K, 2 * F), (E, 2 * F), (E, F, K), (E, K)]
    with jax.ensure_compile_time_eval():  # The first call may be inside of a transformation.
        made = {name: normal(seed, shape) for seed, (name, shape) in enumerate(zip(NAMES, shapes, strict=True))}
        made["gate_up"], made["down"] = made["gate_up"] * K**-0.5, made["down"] * F**-0.5
        return made | {"dy": normal(len(NAMES), (T, K))}


def weights(arrays: dict[str, Any], states: Any = (None, None)) -> list[moe.Weights]:
    return [
        moe.Weights(arrays[name], arrays[f"{name}_bias"], fp8_state=state)
        for name, state in zip(("gate_up", "down"), states, strict=True)
    ]


def by_steps(arrays: dict[str, Any], states: Any, recipe: Any, capacity: int, shared: Any = None) -> jax.Array:
    routing = moe.top_k_routing(arrays["logits"], ROUTER)
    permutation = moe.group_by_expert(routing.experts, E, capacity=capacity)
    rows = moe.permute(arrays["x"], permutation)
    rows = moe.grouped_mlp(rows, *weights(arrays, states), permutation.group_sizes, recipe=recipe)
    y = moe.unpermute(rows, permutation, routing.weights)
    return y if shared is None else y + shared


def whole(arrays: dict[str, Any], states: Any, recipe: Any, capacity: int, **options: Any) -> jax.Array:
    router = moe.Router(TOP_K, capacity_factor=capacity / (T * TOP_K))
    up, down = weights(arrays, states)
    return moe.moe_mlp(arrays["x"], arrays["logits"], up, down, router=router, recipe=recipe, **options)[0]


@functools.cache
def result_and_gradients(backend: str, layer: Layer, recipe: Any, capacity: int) -> tuple[jax.Array, Any]:
    """Returns what a layer with the tokens as its shared result computes; each backend has its own."""
    del backend
    states = (None, None)
    if isinstance(recipe, jg.DelayedScaling):
        states = (jg.Fp8State.initial(recipe, E), jg.Fp8State.initial(recipe, E))

    def loss(arrays: dict[str, Any], states: Any) -> tuple[jax.Array, jax.Array]:
        y = layer(arrays, states, recipe, capacity, shared=arrays["x"])
        return jnp.sum(y * arrays["dy"]), y

    (_, y), made = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(arrays(), states)
    return y, made


def test_result_and_gradients_are_as_near_to_exact_ones_as_those_of_the_steps(backend: str) -> None:
    # Some tokens lose a row in a capacity of 200.
    cases = [("block", 200), ("current", 200), ("delayed", 200), ("mxfp8", T * TOP_K), ("delayed", T * TOP_K)]
    for name, capacity in some(backend, cases, 0, 2):
        recipe = RECIPES[name]
        exact_y, (exact, _) = result_and_gradients(backend, by_steps, None, capacity)
        y, (got, states) = result_and_gradients(backend, whole, recipe, capacity)
        steps_y, (steps, steps_states) = result_and_gradients(backend, by_steps, recipe, capacity)

        # The same rounding to FP8; biases are added after the weighted sum, not before.
        assert oracle.relative_error(y, steps_y) < 1e-6, name
        assert oracle.relative_error(y, exact_y) < 0.1, name
        for argument in NAMES:
            error, step_error = (oracle.relative_error(one[argument], exact[argument]) for one in (got, steps))
            # The gradient of a routing weight is that of numbers in the recipe's precision: three bits, or two.
            bound = (1.6 if argument == "logits" else 1.3) * step_error + 1e-6
            assert error < bound, (name, argument)
        for state, step_state in zip(jax.tree.leaves(states), jax.tree.leaves(steps_states), strict=True):
            assert state.shape == step_state.shape
            assert np.all(np.isfinite(state))


def test_without_a_recipe_gradients_of_both_orders_are_those_of_the_steps(backend: str) -> None:
    def first_and_second(layer: Layer, capacity: int, is_shared: bool) -> Any:
        def loss(arrays: dict[str, Any]) -> jax.Array:
            shared = arrays["x"] if is_shared else None
            with jax.default_matmul_precision("highest"):
                return jnp.sum(jnp.sin(layer(arrays, (None, None), None, capacity, shared=shared)) * arrays["dy"])

        def gradient_sum(arrays: dict[str, Any]) -> tuple[jax.Array, Any]:
            gradient = jax.grad(loss)(arrays)
            return sum(jnp.sum(jnp.cos(leaf)) for leaf in jax.tree.leaves(gradient)), gradient

        return jax.jit(jax.grad(gradient_sum, has_aux=True))(arrays())

    for case in some(backend, [(200, True), (T * TOP_K, False)], 0):
        for got, expected in zip(first_and_second(whole, *case), first_and_second(by_steps, *case), strict=True):
            for name in NAMES:
                error = oracle.relative_error(got[name], expected[name])
                assert error < 1e-4 * (backend == "cuda") + 3e-6, (name, case)


def test_experts_of_every_activation_are_those_of_plain_jax(backend: str) -> None:
    def check(activation: Activation, recipe: Any, tolerance: float) -> None:
        features = 2 * F if is_gated(activation) else F
        # Numbers around the limit of clamping.
        magnitude = 2 if getattr(activation, "limit", None) == 2.5 else 6
        given = {**arrays(), "gate_up": magnitude * arrays()["gate_up"][..., :features]}
        given["gate_up_bias"] = given["gate_up_bias"][..., :features]

        def by_plain_jax(arrays: dict[str, Any]) -> jax.Array:
            routing = moe.top_k_routing(arrays["logits"], ROUTER)
            weights = jnp.zeros((T, E)).at[jnp.arange(T)[:, None], routing.experts].set(routing.weights)
            hidden = jnp.einsum("tk,ekf->etf", arrays["x"], arrays["gate_up"]) + arrays["gate_up_bias"][:, None]
            rows = jnp.einsum("etf,efk->etk", by_jax(hidden, activation), arrays["down"])
            return jnp.einsum("etk,te->tk", rows + arrays["down_bias"][:, None], weights)

        def gradients(layer: Layer) -> Any:
            def loss(arrays: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
                y = layer(arrays)
                return jnp.sum(y * arrays["dy"]), y

            with jax.default_matmul_precision("highest"):
                (_, y), made = jax.jit(jax.value_and_grad(loss, has_aux=True))(given)
            return {"y": y, **made}

        options = dict(states=(None, None), recipe=recipe, capacity=T * TOP_K, activation=activation)
        got, expected = gradients(functools.partial(whole, **options)), gradients(by_plain_jax)
        for name in ("y", *NAMES):
            assert oracle.relative_error(got[name], expected[name]) < tolerance, (activation, name)

    # FP8 moves some numbers across the limit of clamping, and their gradients with them.
    tolerances = [(RECIPES["block"], 0.2), (None, 1e-4)]
    for index, activation in enumerate(some(backend, ACTIVATIONS, 1, 3)):
        for recipe, tolerance in some(backend, tolerances, index):
            check(activation, recipe, tolerance)


def test_in_bfloat16_gradients_are_as_near_to_exact_ones_as_those_of_the_steps(backend: str) -> None:
    def gradients(layer: Layer, dtype: Any) -> Any:
        rounded = {name: array.astype(jnp.bfloat16).astype(dtype) for name, array in arrays().items()}

        def loss(arrays: dict[str, Any]) -> jax.Array:
            return jnp.sum((layer(arrays, (None, None), None, T * TOP_K) * rounded["dy"]).astype(jnp.float32))

        return jax.jit(jax.grad(loss))(rounded)

    exact, got, steps = gradients(by_steps, "float32"), gradients(whole, "bfloat16"), gradients(by_steps, "bfloat16")
    for name in NAMES:
        assert got[name].dtype == jnp.bfloat16
        errors = [oracle.relative_error(one[name].astype(jnp.float32), exact[name]) for one in (got, steps)]
        assert errors[0] < 1.3 * errors[1], (name, errors)


def test_shared_results_are_mapped_with_their_tokens(backend: str) -> None:
    up, down = (one._replace(bias=None) for one in weights(arrays()))

    def layer(x: jax.Array, shared: jax.Array) -> jax.Array:
        return moe.moe_mlp(x, x[:, :E], up, down, router=ROUTER, recipe=RECIPES["block"], shared=shared)[0]

    x = arrays()["x"].reshape(2, T // 2, K)

    got = jax.jit(jax.vmap(layer))(x, x[::-1])

    for one, *arguments in zip(got, x, x[::-1], strict=True):
        assert oracle.relative_error(one, jax.jit(layer)(*arguments)) < 1e-5


def test_states_have_the_largest_values_of_both_operands_of_every_product(backend: str) -> None:
    recipe, router = RECIPES["delayed"], moe.Router(TOP_K, scale=8.0)
    state = jg.Fp8State.initial(recipe, E)
    # Weights above 1: the activation times its weight, which wgrad reads, is then the largest.
    up, down = (one._replace(bias=None) for one in weights(arrays(), (state, state)))

    def loss(up: moe.Weights, down: moe.Weights) -> jax.Array:
        x, logits = arrays()["x"], arrays()["logits"]
        return jnp.sum(moe.moe_mlp(x, logits, up, down, router=router, recipe=recipe)[0])

    new_up, new_down = jax.jit(jax.grad(loss, (0, 1), allow_int=True))(up, down)

    routing = moe.top_k_routing(arrays()["logits"], router)
    permutation = moe.group_by_expert(routing.experts, E)
    hidden = jg.ragged_dot(moe.permute(arrays()["x"], permutation), up.kernel, permutation.group_sizes)
    gate, linear = jnp.split(hidden, 2, axis=1)
    weight = routing.weights.reshape(-1)[permutation.order]
    weighted = jnp.abs(jax.nn.silu(gate) * linear) * jnp.maximum(weight, 1)[:, None]
    expert = jnp.repeat(jnp.arange(E), permutation.group_sizes, total_repeat_length=T * TOP_K)
    expected = jax.ops.segment_max(jnp.max(weighted, axis=1), expert, E)
    np.testing.assert_allclose(new_down.fp8_state.input_amax_history[:, 0], expected, rtol=0.1)
    tokens = jax.ops.segment_max(jnp.max(jnp.abs(moe.permute(arrays()["x"], permutation)), axis=1), expert, E)
    np.testing.assert_array_equal(new_up.fp8_state.input_amax_history[:, 0], tokens)


@pytest.mark.parametrize("recipe", [None, RECIPES["block"]], ids=["bf16", "block"])
def test_experts_without_hidden_features_return_zeros(backend: str, recipe: Any) -> None:
    x, logits = jnp.ones((8, 16), jnp.bfloat16), jnp.ones((8, 2))
    gate_up, down = jnp.ones((2, 16, 0), jnp.bfloat16), jnp.ones((2, 0, 16), jnp.bfloat16)

    def layer(x: jax.Array) -> jax.Array:
        return moe.moe_mlp(x, logits, gate_up, down, router=moe.Router(1), recipe=recipe)[0]

    y, pull_back = jax.vjp(jax.jit(layer), x)
    assert not np.any(np.asarray([y, *pull_back(y)], np.float32))


@pytest.mark.parametrize("recipe", [None, RECIPES["block"]], ids=["bf16", "block"])
def test_the_first_product_computes_swiglu(monkeypatch: pytest.MonkeyPatch, recipe: Any) -> None:
    monkeypatch.setattr(primitive, "has_gathering_products", lambda: True)
    shapes = (1024, 128), (1024, 2), (2, 128, 256), (2, 128, 128)

    def layer(*given: jax.Array) -> jax.Array:
        return moe.moe_mlp(*given, router=moe.Router(2), recipe=recipe)[0]

    def gradients(x: jax.Array, *more: jax.Array) -> Any:
        return jax.value_and_grad(lambda x: jnp.sum(layer(x, *more).astype(jnp.float32)))(x)

    for function in (layer, gradients):
        calls = custom_calls(lowered(function, *map(struct, shapes)), "jax_grouped_gemm")
        assert sum("swiglu = true" in call for call in calls) == 1


def block_loss(x: jax.Array, logits: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
    y = moe.moe_mlp(x, logits, gate_up, down, router=moe.Router(2), recipe=RECIPES["block"])[0]
    return jnp.sum(y.astype(jnp.float32))


@pytest.mark.parametrize(
    ("experts", "hidden", "gathering"),
    [(2, 128, ["fprop", "dgrad"]), (8, 128, []), (2, 1152, ["dgrad"]), (2, 2176, [])],
    ids=["gathered", "few tokens", "many features", "many features of both"],
)
def test_products_gather_fp8_tokens_where_that_is_faster(
    monkeypatch: pytest.MonkeyPatch, experts: int, hidden: int, gathering: list[str]
) -> None:
    monkeypatch.setattr(primitive, "has_gathering_products", lambda: True)
    shapes = (512, 128), (512, experts), (experts, 128, 2 * hidden), (experts, hidden, 128)

    text = lowered(jax.grad(block_loss), *map(struct, shapes))

    calls = [call for call in custom_calls(text) if "gathered = 1 : i32" in call]
    assert [name for call in calls for name in products(call)] == gathering
    # Rows that are not gathered are quantized for the forward pass, and in both orientations for the backward pass.
    assert len(custom_calls(text, "jax_grouped_quantize_permuted")) == ("fprop" not in gathering)


def test_batch_elements_share_the_weights_of_products_that_gather_fp8_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(primitive, "has_gathering_products", lambda: True)
    shapes = (3, 512, 128), (3, 512, 2), (2, 128, 256), (2, 128, 128)

    text = lowered(jax.vmap(jax.grad(block_loss), (0, 0, None, None)), *map(struct, shapes))

    calls = [call for call in custom_calls(text) if "gathered = 1 : i32" in call]
    tokens = "1536x128xf8E4M3FN"
    assert [types(call)[0][:2] for call in calls] == [[tokens, f"2x{n}x128xf8E4M3FN"] for n in (256, 128)]
    # Indices count rows from those of the first element.
    assert "stablehlo.iota dim = 0 : tensor<3xi32>" in text


def test_a_weight_of_zero_has_a_gradient(backend: str) -> None:
    # The second choice's score underflows to a weight of zero.
    logits = jnp.where(jnp.arange(E) == 2, 0.0, -200.0) * jnp.ones((T, 1))
    up, down = weights(arrays())

    def loss(weights: jax.Array) -> jax.Array:
        permutation = moe.group_by_expert(moe.top_k_routing(logits, moe.Router(2)).experts, E)
        network = moe.experts.Network(up, down, recipe=RECIPES["block"])
        return jnp.sum(moe.experts.routed_mlp(arrays()["x"], network, permutation, weights))

    gradient = jax.jit(jax.grad(loss))(jnp.tile(jnp.array([1.0, 0.0]), (T, 1)))

    assert jnp.all(gradient[:, 1] != 0)


def lowered_step(recipe: Any, trained: tuple[int, ...] = (0, 1, 2, 3)) -> str:
    state = jg.Fp8State.initial(recipe, E) if isinstance(recipe, jg.DelayedScaling) else None
    up, down = (moe.Weights(struct(shape), fp8_state=state) for shape in ((E, K, 2 * F), (E, F, K)))

    def step(x: jax.Array, logits: jax.Array, up: moe.Weights, down: moe.Weights) -> Any:
        def loss(*arguments: Any) -> jax.Array:
            y = moe.moe_mlp(*arguments, router=ROUTER, recipe=recipe)[0]
            return jnp.sum(y.astype(jnp.float32) ** 2)

        return jax.grad(loss, trained, allow_int=True)(x, logits, up, down)

    return lowered(step, struct((T, K)), struct((T, E)), up, down)


def test_rows_are_written_in_fp8_alone_and_no_more_than_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    for recipe in ("block", "delayed"):
        calls = custom_calls(lowered_step(RECIPES[recipe]), "jax_grouped_quantize")
        gathered = [types(call)[0][0] for call in calls if re.search(r"_permuted\(|gathered = true", call)]
        # The tokens forward and backward, and the gradient of the result.
        assert gathered == 3 * [f"{T}x{K}xbf16"], recipe
        # The forward pass reads each token once.
        assert sum("_permuted(" in call for call in calls) == 1, recipe

    # Tokens and their weights; one kernel, and the other.
    for trained, backward in (((0, 1), ["dgrad", "dgrad"]), ((2,), ["dgrad", "wgrad"]), ((3,), ["wgrad"])):
        text = lowered_step(RECIPES["block"], trained)
        assert products(text) == ["fprop", "fprop", *backward], trained
        assert ("backward = true" in text) == (trained != (3,))

    # Hopper has products that gather rows.
    monkeypatch.setattr(primitive, "has_gathering_products", lambda: True)
    text = lowered_step(None)
    assert not custom_calls(text, "jax_grouped_permute_rows")
    # The first product and both wgrads, and the second product's dgrad.
    calls = [call for call in custom_calls(text) if re.search(r"gathered = [12] : i32", call)]
    assert sorted(name for call in calls for name in products(call)) == ["dgrad", "fprop", "wgrad", "wgrad"]


def test_policies_keep_and_offload_what_has_a_name() -> None:
    x, logits, gate_up, down = jnp.ones((32, 64)), jnp.ones((32, 4)), jnp.ones((4, 64, 64)), jnp.ones((4, 32, 64))

    def gradient(policy: Callable[..., Any], recipe: jg.Recipe | None = None) -> Callable[..., Any]:
        @functools.partial(jax.checkpoint, policy=policy)
        def loss(*arrays: jax.Array) -> jax.Array:
            return jnp.sum(moe.moe_mlp(arrays[0], logits, *arrays[1:], router=moe.Router(2), recipe=recipe)[0] ** 2)

        return jax.grad(loss, (0, 1, 2))

    policies = jax.checkpoint_policies
    for recipe in (None, RECIPES["block"]):
        # Without names, the result and the input of the activation are computed again.
        for names, count in (((), 8), (jg.CHECKPOINT_NAMES, 7), ((*jg.CHECKPOINT_NAMES, jg.OUTPUT_NAME), 6)):
            program = jax.make_jaxpr(gradient(policies.save_only_these_names(*names), recipe))(x, gate_up, down)
            assert str(program).count("gemm[") == count, (recipe, names)
    offload = policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[*jg.CHECKPOINT_NAMES[:2], jg.OUTPUT_NAME],
        names_which_can_be_offloaded=[jg.CHECKPOINT_NAMES[2]],
        offload_src="device",
        offload_dst="pinned_host",
    )
    offloading = jax.jit(gradient(offload))
    assert "pinned_host" in lowered(offloading, x, gate_up, down)
    kept = jax.jit(gradient(policies.everything_saveable))(x, gate_up, down)
    for got, expected in zip(offloading(x, gate_up, down), kept, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5)
