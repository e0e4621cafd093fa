"""The training loop of `train_moe`: one jitted step, the held-out loss, and a run that can be continued."""

import functools
import time
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from tqdm import tqdm

import jax_grouped as jg
from jax_grouped.backends import extension
from jax_grouped.examples.loss_curve import Losses
from jax_grouped.examples.moe_lm import MoELanguageModel
from jax_grouped.examples.run_folder import RunFolder, restore, save
from jax_grouped.examples.settings import RECIPES, Settings
from jax_grouped.examples.text_data import Corpus, even_windows, random_windows

#: Weight of the load-balancing loss, as in Switch Transformers.
BALANCE_WEIGHT = 0.01

WARM_UP_STEPS = 20
MAX_GRADIENT_NORM = 1.0
HELD_OUT_BATCHES = 8


def backend_name() -> str:
    """Which backend of `jax_grouped` runs on the default device, and that device, in words.

    Raises:
        RuntimeError: the kernels cannot run on this machine's GPUs.
    """
    device = jax.devices()[0]
    cuda = jg.config.backend == "auto" and device in extension.cuda_devices()
    if cuda:
        extension.require_usable()
    return f"{'cuda' if cuda else 'xla'} backend on {device.device_kind}"


def create_state(settings: Settings) -> TrainState:
    """The state before the first step, with all of the model's variables as `params`.

    Adam and the clipping of gradients see the parameters alone: delayed scaling's variables are replaced.
    """
    model = MoELanguageModel(
        d_model=settings.d_model,
        num_layers=settings.layers,
        num_heads=settings.heads,
        num_experts=settings.experts,
        top_k=settings.top_k,
        d_ff=settings.d_ff,
        dtype=jnp.bfloat16,
        recipe=RECIPES[settings.recipe],
    )
    params = model.init(jax.random.key(settings.seed), jnp.zeros((1, settings.sequence), jnp.int32))
    optimizer = optax.chain(optax.clip_by_global_norm(MAX_GRADIENT_NORM), optax.adam(learning_rate(settings)))
    return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)


def learning_rate(settings: Settings) -> optax.Schedule:
    """A short warm-up, then a constant rate, so that a run can be continued past its end, unless it is to cool down.

    The cool-down is linear (Hägele et al., https://arxiv.org/abs/2405.18392).
    """
    rate = settings.learning_rate
    warm_up = optax.linear_schedule(rate / WARM_UP_STEPS, rate, WARM_UP_STEPS)
    if settings.cool_down == 0:
        return warm_up
    start = settings.steps - settings.cool_down
    cool_down = optax.linear_schedule(rate, 0.0, settings.cool_down, transition_begin=start)
    return lambda step: jnp.minimum(warm_up(step), cool_down(step))


def _losses(state: TrainState, params: optax.Params, windows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The mean loss of predicting each next byte of `uint8[B, S + 1]`, in nats, and the balance loss."""
    tokens = windows.astype(jnp.int32)
    logits, balance_loss = state.apply_fn(params, tokens[:, :-1])
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])), balance_loss


@functools.partial(jax.jit, donate_argnums=0)
def train_step(state: TrainState, windows: jax.Array) -> tuple[TrainState, jax.Array]:
    """One step of Adam on `uint8[B, S + 1]`: the next state, and the loss in nats per byte before it."""

    def objective(params: optax.Params) -> tuple[jax.Array, jax.Array]:
        loss, balance_loss = _losses(state, params, windows)
        return loss + BALANCE_WEIGHT * balance_loss, loss

    gradients, loss = jax.grad(objective, has_aux=True)(state.params)
    return state.apply_gradients(grads=gradients), loss


@jax.jit
def held_out_loss(state: TrainState, batches: jax.Array) -> jax.Array:
    """The loss in nats per byte over `uint8[N, B, S + 1]`, a batch at a time."""
    return jnp.mean(jax.lax.map(lambda windows: _losses(state, state.params, windows)[0], batches))


def parameter_count(settings: Settings) -> int:
    """How many numbers the model learns."""
    state = jax.eval_shape(functools.partial(create_state, settings))
    return sum(leaf.size for leaf in jax.tree.leaves(state.params["params"]))


def train(settings: Settings, corpus: Corpus, folder: RunFolder) -> float | None:
    """Trains to step `settings.steps` and keeps `folder` current; with `settings.resume`, from its latest checkpoint.

    Returns:
        Bytes trained on per second, not counting compilation, evaluation and files; None if there was no step to take.
    """
    initialise = jax.jit(functools.partial(create_state, settings))
    with folder.checkpoints() as checkpoints:
        first = step = checkpoints.latest_step() or 0
        if step >= settings.steps:
            return None
        state = restore(checkpoints, step, jax.eval_shape(initialise)) if settings.resume else initialise()
        windows = functools.partial(random_windows, corpus.train, settings.sequence, settings.batch, settings.seed)
        take_step = train_step.lower(state, windows(step)).compile()
        held_out = _held_out_batches(settings, corpus)
        if step == 0:
            folder.curve.extend([Losses(0, None, float(held_out_loss(state, held_out)))])

        seconds = 0.0
        bytes_per_step = settings.batch * settings.sequence
        done, total = step * bytes_per_step, settings.steps * bytes_per_step
        with tqdm(initial=done, total=total, unit="byte", unit_scale=True, dynamic_ncols=True) as bar:
            while step < settings.steps:
                stop = _next_stop(step, settings)
                started = time.perf_counter()
                state, losses = _advance(take_step, state, map(windows, range(step, stop)), bar)
                seconds += time.perf_counter() - started

                rows = [Losses(number, loss, None) for number, loss in enumerate(losses, start=step + 1)]
                step = stop
                if _is_due(step, settings.eval_every, settings):
                    rows[-1] = rows[-1]._replace(held_out=float(held_out_loss(state, held_out)))
                    bar.write(f"step {step}: loss {rows[-1].train:.3f}, held-out loss {rows[-1].held_out:.3f}")
                folder.curve.extend(rows)
                if _is_due(step, settings.save_every, settings):
                    save(checkpoints, step, state)
                    folder.curve.plot()
    return (step - first) * bytes_per_step / seconds


def _held_out_batches(settings: Settings, corpus: Corpus) -> jax.Array:
    windows = even_windows(corpus.held_out, settings.sequence, HELD_OUT_BATCHES * settings.batch)
    return jnp.asarray(windows.reshape(HELD_OUT_BATCHES, settings.batch, -1))


def _is_due(step: int, every: int, settings: Settings) -> bool:
    return step % every == 0 or step == settings.steps


def _next_stop(step: int, settings: Settings) -> int:
    """The next step after which there is something to evaluate or to save."""
    return min(settings.steps, *(every * (step // every + 1) for every in (settings.eval_every, settings.save_every)))


def _advance(
    take_step: jax.stages.Compiled, state: TrainState, batches: Iterable[np.ndarray], bar: tqdm
) -> tuple[TrainState, list[float]]:
    """Takes one step per batch `uint8[B, S + 1]`; the next state, and the loss of each step."""
    losses: list[jax.Array] = []
    for batch in batches:
        state, loss = take_step(state, batch)
        losses.append(loss)
        if len(losses) > 1:
            # Reading the loss of the step before leaves the device with one to work on.
            bar.set_postfix_str(f"loss {float(losses[-2]):.3f}", refresh=False)
        bar.update(batch[:, 1:].size)
    return state, [float(loss) for loss in losses]
