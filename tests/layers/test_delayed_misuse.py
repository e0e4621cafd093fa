"""`DelayedScaling` with a state that something other than its gradient changes: an error or NaN, never a worse loss."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.linen.fp8_ops import fp32_max_grad

import jax_grouped as jg

pytestmark = pytest.mark.slow

RECIPE = jg.DelayedScaling(amax_history_len=4)
SIZES = jnp.array([20, 12])
NAMES_THE_CAUSE = "fp8_state must be replaced by its gradient"


def tokens() -> jax.Array:
    return jax.random.normal(jax.random.key(0), (32, 16))


def train_linen(optimizer: Any, steps: int = 4) -> list[float]:
    """Returns the losses of steps on changing tokens, with all variables under one optimizer."""
    layer = jg.linen.GroupedDense(16, 2, recipe=RECIPE)
    variables = jax.jit(layer.init)(jax.random.key(1), tokens(), SIZES)
    state = jax.jit(optimizer.init)(variables)

    @jax.jit
    def step(variables: Any, state: Any, x: jax.Array) -> Any:
        loss, gradients = jax.value_and_grad(lambda v: jnp.mean((layer.apply(v, x, SIZES) - x) ** 2))(variables)
        updates, state = optimizer.update(gradients, state, variables)
        return optax.apply_updates(variables, updates), state, loss

    losses = []
    for i in range(steps):
        variables, state, loss = step(variables, state, (1 + i % 3) * tokens())
        losses.append(float(loss))
    return losses


def train_nnx(optimizer: Any, steps: int = 4) -> list[float]:
    """Trains the same model in NNX, with its optimizer of parameters."""
    model = jg.nnx.GroupedDense(16, 16, 2, recipe=RECIPE, rngs=nnx.Rngs(1))
    of_model = nnx.Optimizer(model, optimizer, wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, of_model: Any, x: jax.Array) -> jax.Array:
        loss, gradients = nnx.value_and_grad(lambda model: jnp.mean((model(x, SIZES) - x) ** 2))(model)
        of_model.update(model, gradients)
        return loss

    return [float(step(model, of_model, (1 + i % 3) * tokens())) for i in range(steps)]


def clip_first(optimizer: Any) -> Any:
    return optax.chain(optax.clip_by_global_norm(1.0), jg.overwrite_with_gradient(optimizer))


def clip_elements(optimizer: Any) -> Any:
    # Clip at 1, whose square is itself.
    return optax.chain(optax.clip(1.0), jg.overwrite_with_gradient(optimizer))


def scale_last(optimizer: Any) -> Any:
    return optax.chain(jg.overwrite_with_gradient(optimizer), optax.scale(0.5))


def accumulate_outside(optimizer: Any) -> Any:
    return optax.MultiSteps(jg.overwrite_with_gradient(optimizer), 2)


def decay_last(wrapped: Any) -> Any:
    return optax.chain(wrapped, optax.add_decayed_weights(0.1))


MISUSES = {
    "no wrapper": lambda optimizer: optimizer,
    "clip": clip_first,
    "clip elements": clip_elements,
    "scale": scale_last,
    "mean": accumulate_outside,
}


@pytest.fixture(params=MISUSES)
def misused(request: pytest.FixtureRequest) -> Any:
    """Gives an optimizer that does more than overwrite the state."""
    return MISUSES[request.param](optax.adam(0.01))


def test_arithmetic_on_a_state_makes_nan_of_the_loss(misused: Any) -> None:
    assert jnp.isnan(train_linen(misused)[-1])


def test_a_check_names_the_cause(misused: Any) -> None:
    with jg.config.override(check=True), pytest.raises(jax.errors.JaxRuntimeError, match=NAMES_THE_CAUSE):
        train_linen(misused)


@pytest.mark.parametrize("optimizer", [optax.sgd(0.1), optax.adam(0.01)], ids=["sgd", "adam"])
def test_nnx_leaves_no_state_to_an_optimizer_of_parameters(optimizer: Any) -> None:
    # Optimizers with moments are refused by NNX itself: it cannot lay out those of a state.
    if len(jax.tree.leaves(optimizer.init(jnp.ones(2)))) > 1:
        with pytest.raises(ValueError, match="fp8_state"):
            train_nnx(optimizer)
    else:
        assert jnp.isnan(train_nnx(optimizer)[-1])


@pytest.mark.parametrize("train", [train_linen, train_nnx])
@pytest.mark.parametrize("inner", [optax.adam(0.01), optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.01))])
def test_what_only_overwrites_trains(train: Callable[..., list[float]], inner: Any) -> None:
    with jg.config.override(check=True):
        losses = train(jg.overwrite_with_gradient(inner))
    assert jnp.all(jnp.isfinite(jnp.array(losses)))


def test_microbatches_and_devices_combine_by_maximum_without_marks() -> None:
    states = []
    for factor in (1.0, 3.0):
        x, kernel = factor * tokens(), jnp.ones((2, 16, 16))

        @jax.jit
        @jax.grad
        def next_state(state: jg.Fp8State, x: jax.Array = x, kernel: jax.Array = kernel) -> jax.Array:
            return jg.grouped_dense(x, kernel, SIZES, recipe=RECIPE, fp8_state=state).sum()

        states.append(next_state(jg.Fp8State.initial(RECIPE, 2)))
    assert jnp.all(jnp.stack(jax.tree.map(jnp.maximum, *states).intact()))
    for combined in (jax.tree.map(lambda a, b: (a + b) / 2, *states), jax.tree.map(jnp.add, *states)):
        assert not jnp.any(combined.intact().input)


class CallsLayer(nn.Module):
    """Calls one layer several times."""

    times: int
    layer_class: Any = jg.linen.GroupedDense

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        layer = self.layer_class(16, num_groups=2, recipe=RECIPE)
        for _ in range(self.times):
            x = layer(x, SIZES)
        return x


class CallsMlp(nn.Module):
    """Calls a layer of a module that it keeps, the first time without an effect on the loss."""

    def setup(self) -> None:
        self.mlp = jg.linen.MoEMlp(2, 16, jg.moe.Router(1, normalize=False), recipe=RECIPE)

    def again(self, x: jax.Array) -> jax.Array:
        return self.mlp(x)[0]

    def __call__(self, x: jax.Array) -> jax.Array:
        self.mlp(2 * x)
        return self.again(self.again(x))


class CallsNnx(nnx.Module):
    """Calls one layer of NNX twice."""

    def __init__(self) -> None:
        self.layer = jg.nnx.GroupedDense(16, 16, 2, recipe=RECIPE, rngs=nnx.Rngs(1))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.layer(self.layer(x, SIZES), SIZES)


def in_type_of_maximum(trained: Any) -> Any:
    """Returns variables with states in Flax's type whose sum is the maximum."""

    def converted(path: Any, leaf: jax.Array) -> jax.Array:
        is_state = "amax" in jax.tree_util.keystr(path) or "_scale" in jax.tree_util.keystr(path)
        return jax.lax.convert_element_type(leaf, fp32_max_grad) if is_state else leaf

    return jax.tree.map_with_path(converted, trained)


def linen_model(model: nn.Module) -> tuple[Any, Callable[[Any], jax.Array]]:
    variables = jax.jit(model.init)(jax.random.key(1), tokens())
    return variables, lambda variables: jnp.mean(model.apply(variables, tokens()) ** 2)


def nnx_model() -> tuple[Any, Callable[[Any], jax.Array]]:
    definition, trained = nnx.split(CallsNnx())
    return trained, lambda trained: jnp.mean(nnx.merge(definition, trained)(tokens()) ** 2)


def eager(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


@pytest.mark.parametrize(
    ("model", "jit"),
    [
        (lambda: linen_model(CallsLayer(2)), eager),
        (lambda: linen_model(CallsLayer(3)), jax.jit),
        (lambda: linen_model(CallsMlp()), jax.jit),
        (nnx_model, eager),
        (nnx_model, jax.jit),
    ],
    ids=["linen, eager", "linen, three times", "linen, MoEMlp", "nnx, eager", "nnx"],
)
def test_calls_of_one_layer_have_one_next_state_the_maximum(model: Callable[..., Any], jit: Callable[..., Any]) -> None:
    trained, loss = model()

    got = jit(jax.grad(loss))(trained)

    expected = jax.jit(jax.grad(lambda trained: loss(in_type_of_maximum(trained))))(trained)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), got, expected)


def test_calls_inside_a_transformation_are_named_and_have_a_remedy() -> None:
    trained, loss = linen_model(CallsLayer(2, nn.remat(jg.linen.GroupedDense)))
    optimizer = jg.overwrite_with_gradient(optax.sgd(0.1))
    named = r"has added several next values up .*: a layer with DelayedScaling was called twice between two updates"

    summed = jax.jit(jax.grad(loss))(trained)
    maximum = jax.jit(jax.grad(lambda trained: loss(in_type_of_maximum(trained))))(trained)

    with pytest.raises(ValueError, match=named):
        optimizer.update(summed, optimizer.init(trained), trained)
    with jg.config.override(check=True), pytest.raises(jax.errors.JaxRuntimeError, match=named):
        jax.block_until_ready(jax.jit(loss)(jg.apply_updates(trained, summed)))
    updates, _ = optimizer.update(maximum, optimizer.init(trained), trained)
    assert jnp.isfinite(loss(jg.apply_updates(trained, updates)))


def test_the_first_update_names_what_was_clipped_before_it() -> None:
    trained, loss = linen_model(CallsLayer(1))
    gradients, optimizer = jax.jit(jax.grad(loss))(trained), clip_first(optax.adam(0.01))
    with pytest.raises(ValueError, match=rf"{NAMES_THE_CAUSE}.*GroupedDense_0.*wrap the whole optimizer, clipping"):
        optimizer.update(gradients, optimizer.init(trained), trained)


@pytest.mark.parametrize("around", [lambda inner: optax.apply_if_finite(inner, 3), decay_last], ids=["finite", "decay"])
def test_errors_of_optimizers_around_the_wrapper_have_the_remedy(around: Callable[..., Any]) -> None:
    trained, loss = linen_model(CallsLayer(1))
    gradients, optimizer = jax.jit(jax.grad(loss))(trained), around(jg.overwrite_with_gradient(optax.adam(0.01)))
    with pytest.raises((TypeError, ValueError), match=r"put optax\.apply_if_finite and the like inside of jax_"):
        optimizer.update(gradients, optimizer.init(trained), trained)


def test_a_kernel_that_is_trained_without_its_state_is_warned_of() -> None:
    x, kernel, state = tokens(), jnp.ones((2, 16, 16)), jg.Fp8State.initial(RECIPE, 2)

    def loss(kernel: jax.Array, x: jax.Array) -> jax.Array:
        return jg.grouped_dense(x, kernel, SIZES, recipe=RECIPE, fp8_state=state).sum()

    def mlp_loss(kernel: jax.Array, x: jax.Array) -> jax.Array:
        up, down = (jg.moe.Weights(array, fp8_state=state) for array in (jnp.tile(kernel, 2), kernel))
        return jg.moe.grouped_mlp(x, up, down, SIZES, recipe=RECIPE).sum()

    for train in (jax.grad(loss), jax.jit(jax.grad(jax.jit(loss))), jax.grad(jax.checkpoint(loss)), jax.grad(mlp_loss)):
        with pytest.warns(UserWarning, match="fp8_state is not differentiated with the kernel") as warned:
            jax.eval_shape(train, kernel, x)
        assert {warning.filename for warning in warned} == {__file__}
    # A frozen layer passes gradients on, and keeps its state.
    assert jnp.all(jnp.isfinite(jax.jit(jax.grad(loss, argnums=1))(kernel, x)))
