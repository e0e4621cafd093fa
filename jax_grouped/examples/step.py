"""One device's part of a training step: the state, the loss, and its gradients over microbatches."""

from collections.abc import Callable
from typing import Any, NamedTuple

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


class StepMetrics(NamedTuple):
    """Metrics of a step: of its whole batch, or of a part of it. `L` is the number of blocks.

    Attributes:
        loss: `f32[]`, in nats per byte, before the step.
        balance_loss: `f32[L]`.
        expert_load: `int32[L, E]`, pairs of a token and an expert, per expert.
        dropped: `int32[L]`, pairs that found no room.
        amax: `f32[L]`, the largest absolute value of the tokens that go to the experts.
        gradient_norm: `f32[]`, before it is clipped; zero in parts of a batch.
    """

    loss: jax.Array
    balance_loss: jax.Array
    expert_load: jax.Array
    dropped: jax.Array
    amax: jax.Array
    gradient_norm: jax.Array

    def combined(
        self, add: Callable[[jax.Array], jax.Array], largest: Callable[[jax.Array], jax.Array]
    ) -> "StepMetrics":
        """Combines the metrics of parts of a batch: `largest` reduces `amax`, and `add` the rest."""
        return StepMetrics(*map(add, self))._replace(amax=largest(self.amax))


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


def apply_gradients(state: TrainState, gradients: Variables, metrics: StepMetrics) -> tuple[TrainState, StepMetrics]:
    """Returns the state after a step with the gradients of a whole batch, and the metrics with their norm."""
    norm = optax.tree.norm(gradients["params"])
    return state.apply_gradients(grads=gradients), metrics._replace(gradient_norm=norm)


def mean_loss(model: LanguageModel, variables: Variables, windows: jax.Array, **caching: Any) -> tuple[jax.Array, Any]:
    """Returns the mean loss in nats of predicting the bytes of `uint8[B, S + 1]`; the blocks' metrics and the cache."""
    tokens = windows.astype(jnp.int32)
    logits, *rest = model.apply(variables, tokens[:, :-1], **caching)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])), rest


def gradients_and_metrics(
    model: LanguageModel, variables: Variables, microbatches: jax.Array, devices: int
) -> tuple[Variables, StepMetrics]:
    """Returns one device's part of the gradients and of the metrics of a batch.

    The loss of a microbatch counts with its part of the whole batch before anything is differentiated. So gradients add
    up over microbatches and devices, and FP8 sees the same numbers on however many.

    Args:
        model: the model that is trained.
        variables: of the model.
        microbatches: `uint8[M, B, S + 1]`, this device's sequences.
        devices: their number, each with as many sequences.

    Returns:
        The parameters' gradients, in the places of delayed scaling's states their next values, and the metrics: those
        of all devices, combined, are the batch's.
    """
    parts = devices * len(microbatches)

    def objective(
        variables: Variables, windows: jax.Array, cache: Any, is_first: jax.Array | bool | None
    ) -> tuple[jax.Array, tuple[StepMetrics, Any]]:
        loss, (blocks, cache) = mean_loss(model, variables, windows, cache=cache, is_first_microbatch=is_first)
        metrics = StepMetrics(
            loss / parts, blocks.balance_loss / parts, blocks.expert_load, blocks.dropped, blocks.amax, jnp.zeros(())
        )
        return (loss + BALANCE_WEIGHT * jnp.mean(blocks.balance_loss)) / parts, (metrics, cache)

    differentiate = jax.grad(objective, has_aux=True)
    if len(microbatches) == 1:
        gradients, (metrics, _) = differentiate(variables, microbatches[0], None, None)
        return gradients, metrics

    empty = None
    if model.shares_kernels:
        # The first microbatch fills it: only shapes and types count here.
        filled = jax.eval_shape(lambda: objective(variables, microbatches[0], None, is_first=True)[1][1])
        empty = jax.tree.map(jnp.zeros_like, filled)

    def add(carry: tuple[Variables, Any], microbatch: tuple[jax.Array, jax.Array]) -> tuple[Any, StepMetrics]:
        total, cache = carry
        number, windows = microbatch
        is_first = number == 0 if model.shares_kernels else None
        gradients, (metrics, cache) = differentiate(variables, windows, cache, is_first)
        return (jg.accumulate_gradients(total, gradients), cache), metrics

    numbered = jnp.arange(len(microbatches)), microbatches
    (gradients, _), metrics = jax.lax.scan(add, (jax.tree.map(jnp.zeros_like, variables), empty), numbered)
    return gradients, metrics.combined(lambda each: jnp.sum(each, axis=0), lambda each: jnp.max(each, axis=0))


def mean_held_out_loss(model: LanguageModel, variables: Variables, batches: jax.Array) -> jax.Array:
    """Returns the loss in nats per byte over this device's `uint8[N, B, S + 1]`, a batch at a time."""
    return jnp.mean(jax.lax.map(lambda windows: mean_loss(model, variables, windows)[0], batches))
