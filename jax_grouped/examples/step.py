"""One device's part of a training step: the state, the loss, and its gradients over microbatches."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

import jax_grouped as jg
from jax_grouped.examples.model import LanguageModel, Variables
from jax_grouped.examples.settings import Settings

#: Weight of the load-balancing loss, as in Switch Transformers.
BALANCE_WEIGHT = 0.01

WARM_UP_STEPS = 20
MAX_GRADIENT_NORM = 1.0


def create_state(settings: Settings, model: LanguageModel) -> TrainState:
    """Returns the state before the first step, with all of the model's variables as `params`.

    Adam and the clipping of gradients see the parameters alone: delayed scaling's variables are replaced.
    """
    optimizer = optax.chain(optax.clip_by_global_norm(MAX_GRADIENT_NORM), optax.adam(learning_rate(settings)))
    variables = model.init(jax.random.key(settings.seed))
    return TrainState.create(apply_fn=model.apply, params=variables, tx=optimizer)


def learning_rate(settings: Settings) -> optax.Schedule:
    """Returns a short warm-up, then a constant rate, so that a run can be extended, unless it is to cool down.

    The cool-down is linear (Hägele et al., https://arxiv.org/abs/2405.18392).
    """
    rate = settings.learning_rate
    warm_up = optax.linear_schedule(rate / WARM_UP_STEPS, rate, WARM_UP_STEPS)
    if settings.cool_down == 0:
        return warm_up
    start = settings.steps - settings.cool_down
    cool_down = optax.linear_schedule(rate, 0.0, settings.cool_down, transition_begin=start)
    return lambda step: jnp.minimum(warm_up(step), cool_down(step))


def mean_loss(model: LanguageModel, variables: Variables, windows: jax.Array, **caching: Any) -> tuple[jax.Array, Any]:
    """Returns the mean loss of predicting the bytes of `uint8[B, S + 1]`, in nats; the balance loss and the cache."""
    tokens = windows.astype(jnp.int32)
    logits, *rest = model.apply(variables, tokens[:, :-1], **caching)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])), rest


def gradients_and_loss(
    model: LanguageModel, variables: Variables, microbatches: jax.Array, devices: int
) -> tuple[Variables, jax.Array]:
    """Returns one device's part of the gradients and of the loss of a batch.

    The loss of a microbatch counts with its part of the whole batch before anything is differentiated. So gradients add
    up over microbatches and devices, and FP8 sees the same numbers on however many.

    Args:
        model: the model that is trained.
        variables: of the model.
        microbatches: `uint8[M, B, S + 1]`, this device's sequences.
        devices: their number, each with as many sequences.

    Returns:
        The parameters' gradients, in the places of delayed scaling's states their next values, and `f32[]`, the loss in
        nats per byte: its sum over the devices is the batch's.
    """
    parts = devices * len(microbatches)

    def objective(
        variables: Variables, windows: jax.Array, cache: Any, is_first: jax.Array | bool | None
    ) -> tuple[jax.Array, tuple[jax.Array, Any]]:
        loss, (balance_loss, cache) = mean_loss(model, variables, windows, cache=cache, is_first_microbatch=is_first)
        return (loss + BALANCE_WEIGHT * balance_loss) / parts, (loss / parts, cache)

    differentiate = jax.grad(objective, has_aux=True)
    if len(microbatches) == 1:
        gradients, (loss, _) = differentiate(variables, microbatches[0], None, None)
        return gradients, loss

    empty = None
    if model.shares_kernels:
        # The first microbatch fills it: only shapes and types count here.
        filled = jax.eval_shape(lambda: objective(variables, microbatches[0], None, is_first=True)[1][1])
        empty = jax.tree.map(jnp.zeros_like, filled)

    def add(carry: tuple[Variables, Any], microbatch: tuple[jax.Array, jax.Array]) -> tuple[Any, jax.Array]:
        total, cache = carry
        number, windows = microbatch
        is_first = number == 0 if model.shares_kernels else None
        gradients, (loss, cache) = differentiate(variables, windows, cache, is_first)
        return (jg.accumulate_gradients(total, gradients), cache), loss

    numbered = jnp.arange(len(microbatches)), microbatches
    (gradients, _), losses = jax.lax.scan(add, (jax.tree.map(jnp.zeros_like, variables), empty), numbered)
    return gradients, jnp.sum(losses)


def mean_held_out_loss(model: LanguageModel, variables: Variables, batches: jax.Array) -> jax.Array:
    """Returns the loss in nats per byte over this device's `uint8[N, B, S + 1]`, a batch at a time."""
    return jnp.mean(jax.lax.map(lambda windows: mean_loss(model, variables, windows)[0], batches))
