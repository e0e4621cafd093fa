"""The training step and the held-out loss, on one device or several."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_grouped as jg
from jax_grouped.examples.model import LanguageModel, Variables, language_model
from jax_grouped.examples.moe_lm import BlockMetrics
from jax_grouped.examples.settings import Devices, Settings

#: Mesh axes. Batches are split over both, experts over the second.
DATA, EXPERT = "data", "expert"
BOTH = (DATA, EXPERT)

#: On GPUs of one process, copy engines move the sums of experts, so that NCCL holds no multiprocessors meanwhile.
COPY_ENGINES = {"xla_gpu_use_memcpy_local_p2p": True}

#: Weight of the load-balancing loss, as in Switch Transformers.
BALANCE_WEIGHT = 0.01

WARM_UP_STEPS = 20
MAX_GRADIENT_NORM = 1.0


class StepMetrics(NamedTuple):
    """Metrics of a step: of its whole batch, or of a part of it.

    Attributes:
        loss: `f32[]`, in nats per byte, before the step.
        gradient_norm: `f32[]`, before it is clipped; zero in parts of a batch.
        blocks: metrics of all blocks, stacked.
    """

    loss: jax.Array
    gradient_norm: jax.Array
    blocks: BlockMetrics

    def combined(self, add: Callable[..., jax.Array], largest: Callable[..., jax.Array]) -> "StepMetrics":
        """Combines the metrics of parts of a batch: `largest` reduces `amax`, and `add` the rest."""
        total = jax.tree.map(add, self)
        return total._replace(blocks=total.blocks._replace(amax=largest(self.blocks.amax)))


class Programs(NamedTuple):
    """The programs of a run. Arrays are whole: each is one `jax.Array`, wherever its parts lie.

    Attributes:
        initialise: makes the state before the first step.
        take_step: `(state, batch)` to the next state and the metrics of the step.
        held_out_loss: `(state, batch)` to the loss in nats per byte.
        split: `uint8[N, S + 1]` windows as `batch`: in microbatches, and these over devices. All processes have all
            windows, and each one copies to its devices what is theirs.
        state: shapes, types and shardings of the state.
    """

    initialise: Callable[[], TrainState]
    take_step: Any
    held_out_loss: Any
    split: Callable[[np.ndarray], Any]
    state: TrainState


def programs(settings: Settings, devices: Devices) -> Programs:
    """Returns the programs of a run."""
    mesh = Mesh(np.array(jax.devices()[: devices.total]).reshape(-1, devices.expert), BOTH)
    axes = {"none": (), "pmap": (DATA,), "expert": BOTH}[settings.parallel]
    model = language_model(settings, jg.moe.Parallel(experts=EXPERT if EXPERT in axes else None, batch=axes))
    sequences = settings.batch // settings.microbatches
    microbatch = (mesh.size, sequences // mesh.size) if settings.parallel == "pmap" else (sequences,)

    def create_state() -> TrainState:
        # All of the model's variables are `params`. Adam and the clipping of gradients see the parameters alone:
        # delayed scaling's variables are replaced.
        optimizer = optax.chain(optax.clip_by_global_norm(MAX_GRADIENT_NORM), optax.adam(learning_rate(settings)))
        return TrainState.create(apply_fn=model.apply, params=model.init(jax.random.key(settings.seed)), tx=optimizer)

    def split(windows: np.ndarray) -> Any:
        batch = windows.reshape(-1, *microbatch, windows.shape[-1])
        if settings.parallel == "pmap":
            return batch
        return jax.make_array_from_process_local_data(NamedSharding(mesh, P(None, BOTH)), batch, batch.shape)

    def gradients_and_metrics(variables: Variables, batch: jax.Array) -> tuple[Variables, StepMetrics]:
        if EXPERT in axes:
            # As copies that may differ, parameters have gradients that are added up once, not in each microbatch.
            varying = functools.partial(jax.lax.pcast, to="varying")
            variables = jax.tree.map_with_path(lambda path, x: varying(x, DATA if _is_split(path) else BOTH), variables)
        gradients, metrics = _local_gradients_and_metrics(model, variables, batch, mesh.size)
        add, largest = (functools.partial(reduce, axis_name=axes) for reduce in (jax.lax.psum, jax.lax.pmax))
        return _reduced(gradients, axes), metrics.combined(add, largest)

    def mean_loss(variables: Variables, batch: jax.Array) -> jax.Array:
        losses = jax.lax.map(lambda windows: _mean_loss(model, variables, windows)[0], batch)
        return jax.lax.pmean(jnp.mean(losses), axes)

    def place(path: Any, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return x.update(sharding=NamedSharding(mesh, P(EXPERT) if _is_split(path) else P()))

    state = jax.tree.map_with_path(place, jax.eval_shape(create_state))
    if EXPERT in axes:
        specs = jax.tree.map(lambda x: x.sharding.spec, state.params)
        sharded = functools.partial(jax.shard_map, mesh=mesh, in_specs=(specs, P(None, BOTH)))
        gradients_and_metrics = sharded(gradients_and_metrics, out_specs=(specs, P()))
        mean_loss = sharded(mean_loss, out_specs=P())

    def take_step(state: TrainState, batch: jax.Array) -> tuple[TrainState, StepMetrics]:
        # Outside of shard_map the optimizer sees whole arrays: the norm that clips gradients is that of all experts.
        gradients, metrics = gradients_and_metrics(state.params, batch)
        norm = optax.tree.norm(gradients["params"])
        return state.apply_gradients(grads=gradients), metrics._replace(gradient_norm=norm)

    def held_out_loss(state: TrainState, batch: jax.Array) -> jax.Array:
        return mean_loss(state.params, batch)

    shardings, whole = jax.tree.map(lambda x: x.sharding, state), NamedSharding(mesh, P())
    initialise = jax.jit(create_state, out_shardings=shardings)
    if settings.parallel == "pmap":
        # The state has no axis of devices: it is the same on all of them.
        used = [*mesh.devices.flat]
        pmap = functools.partial(jax.pmap, axis_name=DATA, in_axes=(None, 1), out_axes=None, devices=used)
        return Programs(initialise, pmap(take_step, donate_argnums=0), pmap(held_out_loss), split, state)
    inputs = shardings, NamedSharding(mesh, P(None, BOTH))
    options = COPY_ENGINES if jax.process_count() == 1 else None
    jit = functools.partial(jax.jit, in_shardings=inputs, compiler_options=options)
    step = jit(take_step, donate_argnums=0, out_shardings=(shardings, whole))
    return Programs(initialise, step, jit(held_out_loss, out_shardings=whole), split, state)


def learning_rate(settings: Settings) -> optax.Schedule:
    """Returns a warm-up, then a constant rate, then a linear cool-down, if any (https://arxiv.org/abs/2405.18392)."""
    rate = settings.learning_rate
    warm_up = optax.linear_schedule(rate / WARM_UP_STEPS, rate, WARM_UP_STEPS)
    if settings.cool_down == 0:
        return warm_up
    start = settings.steps - settings.cool_down
    cool_down = optax.linear_schedule(rate, 0.0, settings.cool_down, transition_begin=start)
    return lambda step: jnp.minimum(warm_up(step), cool_down(step))


def _mean_loss(model: LanguageModel, variables: Variables, windows: jax.Array, **caching: Any) -> tuple[jax.Array, Any]:
    """Returns the mean loss in nats of predicting the bytes of `uint8[B, S + 1]`; the blocks' metrics and the cache."""
    tokens = windows.astype(jnp.int32)
    logits, *rest = model.apply(variables, tokens[:, :-1], **caching)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])), rest


def _local_gradients_and_metrics(
    model: LanguageModel, variables: Variables, microbatches: jax.Array, devices: int
) -> tuple[Variables, StepMetrics]:
    """Returns one device's part of the gradients and of the metrics of a batch, of its `uint8[M, B, S + 1]`.

    The loss of a microbatch counts with its part of the whole batch before anything is differentiated. So gradients add
    up over microbatches and devices, and FP8 sees the same numbers on however many. In the places of delayed scaling's
    states the gradients have their next values.
    """
    parts = devices * len(microbatches)

    def objective(
        variables: Variables, windows: jax.Array, cache: Any, is_first: jax.Array | bool | None
    ) -> tuple[jax.Array, tuple[StepMetrics, Any]]:
        loss, (blocks, cache) = _mean_loss(model, variables, windows, cache=cache, is_first_microbatch=is_first)
        blocks = blocks._replace(balance_loss=blocks.balance_loss / parts)
        metrics = StepMetrics(loss / parts, jnp.zeros(()), blocks)
        return metrics.loss + BALANCE_WEIGHT * jnp.mean(blocks.balance_loss), (metrics, cache)

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


def _is_split(path: Any) -> bool:
    """Tells if an array at this path of a state is split over the expert axis: its first axis is the experts."""
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    return "/gate_up/" in name or "/down/" in name


def _reduced(gradients: Variables, axes: tuple[str, ...]) -> Variables:
    """Returns the gradients of the whole batch: those of experts are already made of all tokens that came to them."""

    def select(is_split: bool) -> Variables:
        return jax.tree.map_with_path(lambda path, x: x if _is_split(path) == is_split else None, gradients)

    experts = jg.reduce_gradients(select(True), tuple(axis for axis in axes if axis != EXPERT), mean=False)
    others = jg.reduce_gradients(select(False), axes, mean=False)
    return jax.tree.map(lambda a, b: b if a is None else a, experts, others, is_leaf=lambda leaf: leaf is None)
