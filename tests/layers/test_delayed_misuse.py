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
from tests.operands import normal

pytestmark = pytest.mark.slow

RECIPE = jg.DelayedScaling(amax_history_len=4)
SIZES = jnp.array([20, 12])
NAMES_THE_CAUSE = "fp8_state must be replaced by its gradient"


def tokens() -> jax.Array:
    return normal(0, (32, 16))


@functools.cache
def linen_step(*, check: bool) -> tuple[Any, Any]:
    """Returns variables of a layer, and their loss and gradients as one program."""
    layer = jg.linen.GroupedDense(16, 2, recipe=RECIPE)

    def loss(variables: Any, x: jax.Array) -> jax.Array:
        return jnp.mean((layer.apply(variables, x, SIZES) - x) ** 2)

    with jg.config.override(check=check):
        variables = jax.jit(layer.init)(jax.random.key(1), tokens(), SIZES)
        return variables, jax.jit(jax.value_and_grad(loss)).lower(variables, tokens()).compile()


def train_linen(optimizer: Any, *, check: bool = False) -> list[float]:
    """Returns the losses of steps on changing tokens. Updates are traced: none sees numbers that would be an error."""
    variables, run = linen_step(check=check)
    state, losses = optimizer.init(variables), []
    for i in range(4):
        loss, gradients = run(variables, (1 + i % 3) * tokens())
        updates, state = jax.jit(optimizer.update)(gradients, state, variables)
        variables = optax.apply_updates(variables, updates)
        losses.append(float(loss))
    return losses


def train_nnx(optimizer: Any, *, check: bool = False) -> list[float]:
    """Trains the same model in NNX, with its optimizer of parameters."""
    model = jg.nnx.GroupedDense(16, 16, 2, recipe=RECIPE, rngs=nnx.Rngs(1))
    nnx_optimizer = nnx.Optimizer(model, optimizer, wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, nnx_optimizer: Any, x: jax.Array) -> jax.Array:
        loss, gradients = nnx.value_and_grad(lambda model: jnp.mean((model(x, SIZES) - x) ** 2))(model)
        nnx_optimizer.update(model, gradients)
        return loss

    with jg.config.override(check=check):
        return [float(step(model, nnx_optimizer, (1 + i % 3) * tokens())) for i in range(4)]


def clip_first(optimizer: Any) -> Any:
    return optax.chain(optax.clip_by_global_norm(1.0), jg.overwrite_with_gradient(optimizer))


#: Optimizers that do more than overwrite the state.
MISUSES = {
    "no wrapper": lambda optimizer: optimizer,
    "clip": clip_first,
    # Clip at 1, whose square is itself.
    "clip elements": lambda optimizer: optax.chain(optax.clip(1.0), jg.overwrite_with_gradient(optimizer)),
    "scale": lambda optimizer: optax.chain(jg.overwrite_with_gradient(optimizer), optax.scale(0.5)),
    "mean": lambda optimizer: optax.MultiSteps(jg.overwrite_with_gradient(optimizer), 2),
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_arithmetic_on_a_state_makes_nan_of_the_loss_and_a_check_names_it(misuse: str) -> None:
    optimizer = MISUSES[misuse](optax.adam(0.01))
    assert jnp.isnan(train_linen(optimizer)[-1])
    with pytest.raises(jax.errors.JaxRuntimeError, match=NAMES_THE_CAUSE):
        train_linen(optimizer, check=True)


def test_nnx_leaves_no_state_to_an_optimizer_of_parameters() -> None:
    assert jnp.isnan(train_nnx(optax.sgd(0.1))[-1])
    # Optimizers with moments are refused by NNX itself: it cannot lay out those of a state.
    with pytest.raises(ValueError, match="fp8_state"):
        train_nnx(optax.adam(0.01))


@pytest.mark.parametrize("train", [train_linen, train_nnx])
def test_what_only_overwrites_trains(train: Callable[..., list[float]]) -> None:
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.01))
    assert np.all(np.isfinite(train(jg.overwrite_with_gradient(inner), check=True)))


def test_microbatches_and_devices_combine_by_maximum_without_marks() -> None:
    @jax.jit
    @jax.grad
    def next_state(state: jg.Fp8State, x: jax.Array) -> jax.Array:
        return jg.grouped_dense(x, jnp.ones((2, 16, 16)), SIZES, recipe=RECIPE, fp8_state=state).sum()

    states = [next_state(jg.Fp8State.initial(RECIPE, 2), factor * tokens()) for factor in (1.0, 3.0)]
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
        return self.again(x)


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
    definition, trained = nnx.split(jg.nnx.GroupedDense(16, 16, 2, recipe=RECIPE, rngs=nnx.Rngs(1)))

    def loss(trained: Any) -> jax.Array:
        layer = nnx.merge(definition, trained)
        return jnp.mean(layer(layer(tokens(), SIZES), SIZES) ** 2)

    return trained, loss


@pytest.mark.parametrize(
    ("model", "is_jitted"),
    [
        (lambda: linen_model(CallsLayer(2)), False),
        (lambda: linen_model(CallsMlp()), True),
        (nnx_model, True),
    ],
    ids=["linen, eager", "linen, MoEMlp", "nnx"],
)
def test_calls_of_one_layer_have_one_next_state_the_maximum(model: Callable[..., Any], is_jitted: bool) -> None:
    trained, loss = model()

    gradient = jax.grad(loss)
    got = (jax.jit(gradient) if is_jitted else gradient)(trained)

    expected = jax.jit(jax.grad(lambda trained: loss(in_type_of_maximum(trained))))(trained)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), got, expected)


def test_calls_inside_a_transformation_are_named_and_have_a_remedy() -> None:
    trained, loss = linen_model(CallsLayer(2, nn.remat(jg.linen.GroupedDense)))
    optimizer = jg.overwrite_with_gradient(optax.sgd(0.1))
    named = r"has added several next values up .*: a layer with DelayedScaling was called twice between two updates"
    step = jax.jit(jax.value_and_grad(loss))

    _, summed = step(trained)
    maximum = jax.jit(jax.grad(lambda trained: loss(in_type_of_maximum(trained))))(trained)

    with pytest.raises(ValueError, match=named):
        optimizer.update(summed, optimizer.init(trained), trained)
    with jg.config.override(check=True), pytest.raises(jax.errors.JaxRuntimeError, match=named):
        jax.block_until_ready(jax.jit(loss)(jg.apply_updates(trained, summed)))
    updates, _ = optimizer.update(maximum, optimizer.init(trained), trained)
    assert jnp.isfinite(step(jg.apply_updates(trained, updates))[0])


def test_errors_of_optimizers_around_the_wrapper_have_the_remedy() -> None:
    trained, loss = linen_model(CallsLayer(1))
    gradients, wrapped = jax.jit(jax.grad(loss))(trained), jg.overwrite_with_gradient(optax.adam(0.01))
    remedy = r"put optax\.apply_if_finite and the like inside of jax_"
    for optimizer, message in (
        (clip_first(optax.adam(0.01)), rf"{NAMES_THE_CAUSE}.*GroupedDense_0.*wrap the whole optimizer, clipping"),
        (optax.apply_if_finite(wrapped, 3), remedy),
        (optax.chain(wrapped, optax.add_decayed_weights(0.1)), remedy),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
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
