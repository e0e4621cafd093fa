"""`jg.linen.GroupedDense` with a recipe, and delayed scaling's variables in Flax's training loop."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from flax.training.train_state import TrainState

import jax_grouped as jg
from tests.layers.pure import filled

E, K, N = 3, 32, 16
SIZES = jnp.array([20, 0, 40])
DELAYED = jg.DelayedScaling(amax_history_len=4)

Variables = dict[str, Any]


@pytest.fixture
def x() -> jax.Array:
    return jax.random.normal(jax.random.key(1), (64, K))


def a_layer(recipe: jg.Recipe | None) -> jg.linen.GroupedDense:
    return jg.linen.GroupedDense(N, E, dtype=jnp.bfloat16, bias_init=nn.initializers.normal(1.0), recipe=recipe)


def initialised(layer: nn.Module, x: jax.Array) -> Variables:
    return jax.jit(layer.init)(jax.random.key(0), x, SIZES)


def assert_same(actual: Any, expected: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.parametrize("recipe", [jg.Float8BlockScaling(), DELAYED], ids=lambda recipe: type(recipe).__name__)
def test_a_layer_computes_what_grouped_dense_computes(recipe: jg.Recipe, backend: str, x: jax.Array) -> None:
    layer = a_layer(recipe)
    variables = initialised(layer, x)
    params = variables["params"]
    state = jg.Fp8State.initial(recipe, E) if recipe is DELAYED else None

    y = jax.jit(layer.apply)(variables, x, SIZES)

    functional = jax.jit(functools.partial(jg.grouped_dense, recipe=recipe, fp8_state=state))
    expected = functional(x.astype(jnp.bfloat16), params["kernel"], SIZES, params["bias"])
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(y, expected)


def test_only_delayed_scaling_has_variables_beside_parameters(x: jax.Array) -> None:
    for recipe in [None, jg.Float8BlockScaling(), jg.Float8CurrentScaling(), jg.MXFP8BlockScaling(), DELAYED]:
        variables = jax.eval_shape(a_layer(recipe).init, jax.random.key(0), x, SIZES)
        collections = {"params", OVERWRITE_WITH_GRADIENT} if recipe is DELAYED else {"params"}
        assert variables.keys() == collections, recipe
    expected = dataclasses.asdict(jg.Fp8State.initial(DELAYED, E))
    assert_same(initialised(a_layer(DELAYED), x)[OVERWRITE_WITH_GRADIENT], expected)


@pytest.mark.parametrize("remat", [False, True], ids=["plain", "remat"])
def test_the_gradient_of_delayed_scalings_variables_is_their_next_value(remat: bool, x: jax.Array) -> None:
    layer = (nn.remat(jg.linen.GroupedDense) if remat else jg.linen.GroupedDense)(N, E, recipe=DELAYED)
    variables = initialised(layer, x)

    gradients = jax.jit(jax.grad(lambda variables: jnp.mean(layer.apply(variables, x, SIZES) ** 2)))(variables)

    state = jg.Fp8State(**gradients[OVERWRITE_WITH_GRADIENT])
    amax = [jnp.max(jnp.abs(x[:20])), 0, jnp.max(jnp.abs(x[20:60]))]
    np.testing.assert_array_equal(state.input_amax_history[:, 0], jnp.array(amax))
    kernel = variables["params"]["kernel"]
    np.testing.assert_array_equal(state.kernel_amax_history[:, 0], jnp.max(jnp.abs(kernel), axis=(1, 2)))
    np.testing.assert_array_equal(state.output_grad_amax_history[:, 0] > 0, jnp.array([True, False, True]))


def test_layers_under_scan_have_a_state_each(x: jax.Array) -> None:
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jg.linen.GroupedDense(K, E, recipe=DELAYED)(x, SIZES), None

    stack = nn.scan(
        Block, variable_axes={"params": 0, OVERWRITE_WITH_GRADIENT: 0}, split_rngs={"params": True}, length=2
    )()
    variables = jax.jit(stack.init)(jax.random.key(0), x, None)

    gradients = jax.jit(jax.grad(lambda variables: jnp.sum(stack.apply(variables, x, None)[0] ** 2)))(variables)

    (state,) = gradients[OVERWRITE_WITH_GRADIENT].values()
    assert state["input_amax_history"].shape == (2, E, 4)
    first = jnp.max(jnp.abs(x[:20]))
    np.testing.assert_array_equal(state["input_amax_history"][:, 0, 0] == first, jnp.array([True, False]))


def test_missing_variables_are_named(x: jax.Array) -> None:
    params = initialised(a_layer(None), x)

    message = f"^DelayedScaling needs the collection {OVERWRITE_WITH_GRADIENT}, which init makes beside params: pass "
    for mutable in (False, True):  # If it is, Flax would make a new state in every step.
        with pytest.raises(ValueError, match=message):
            a_layer(DELAYED).apply(params, x, SIZES, mutable=mutable)


def test_a_plain_train_state_replaces_delayed_scalings_variables(backend: str, x: jax.Array) -> None:
    layer = jg.linen.GroupedDense(N, E, recipe=DELAYED)
    targets = jg.ragged_dot(x, jax.random.normal(jax.random.key(2), (E, K, N)), SIZES)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.03))
    state = TrainState.create(apply_fn=layer.apply, params=initialised(layer, x), tx=optimizer)
    moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim]
    assert len(moments) == 2 * len(state.params["params"])

    @jax.jit
    def step(state: TrainState) -> tuple[TrainState, jax.Array, Variables]:
        def loss(variables: Variables) -> jax.Array:
            return jnp.mean((state.apply_fn(variables, x, SIZES) - targets) ** 2)

        value, gradients = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=gradients), value, gradients

    losses = []
    for _ in range(200):
        state, value, gradients = step(state)
        losses.append(float(value))
        assert_same(state.params[OVERWRITE_WITH_GRADIENT], gradients[OVERWRITE_WITH_GRADIENT])
    assert losses[-1] < 0.02 * losses[0]


def test_a_checkpoint_is_read_on_another_backend(backend: str, x: jax.Array, tmp_path: Path) -> None:
    layer = jg.linen.GroupedDense(N, E, recipe=DELAYED)
    variables = filled(jax.eval_shape(layer.init, jax.random.key(0), x, SIZES))
    known = jax.tree.map(lambda leaf: leaf + 8, variables[OVERWRITE_WITH_GRADIENT])
    variables = variables | {OVERWRITE_WITH_GRADIENT: known}
    y = jax.jit(layer.apply)(variables, x, SIZES)

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "variables", variables)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "variables", jax.eval_shape(lambda: variables))
    with jg.config.override(backend="xla"):
        again = jax.jit(lambda variables: layer.apply(variables, x, SIZES))(restored)

    assert_same(restored, variables)
    np.testing.assert_allclose(again, y, rtol=1e-3, atol=1e-3)
