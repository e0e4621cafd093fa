"""The programs of a run for one device or several: where the state lies, and how devices share a step."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_grouped as jg
from jax_grouped.examples.model import LanguageModel, Variables, language_model
from jax_grouped.examples.settings import Devices, Settings
from jax_grouped.examples.step import (
    StepMetrics,
    apply_gradients,
    create_state,
    gradients_and_metrics,
    mean_held_out_loss,
)

#: Mesh axes. Batches are split over both, experts over the second.
DATA, EXPERT = "data", "expert"
BOTH = (DATA, EXPERT)

#: On GPUs of one process, copy engines move the sums of experts, so that NCCL holds no multiprocessors meanwhile.
COPY_ENGINES = {"xla_gpu_use_memcpy_local_p2p": True}

#: Layers whose every array has the experts as its first axis.
_EXPERT_LAYERS = {"gate_up", "down"}

#: A step and an evaluation, as in `Programs`.
_Pair = tuple[Any, Any]


class Programs(NamedTuple):
    """The programs of a run. Arrays are whole: each is one `jax.Array`, wherever its parts lie.

    Attributes:
        initialise: makes the state before the first step.
        take_step: `(state, batch)` to the next state and the metrics of the step.
        held_out_loss: `(state, batch)` to the loss in nats per byte.
        split: `uint8[N, S + 1]` windows as `batch`: in microbatches, and these over devices where that is an axis.
        state: shapes, types and shardings of the state.
    """

    initialise: Callable[[], TrainState]
    take_step: Any
    held_out_loss: Any
    split: Callable[[np.ndarray], np.ndarray]
    state: TrainState


def programs(settings: Settings, devices: Devices) -> Programs:
    """Returns the programs of a run."""
    mesh = Mesh(np.array(jax.devices()[: devices.total]).reshape(-1, devices.expert), BOTH)
    make, expert_axis, batch_axes = {
        "none": (_on_one_device, None, ()),
        "pmap": (_with_pmap, None, (DATA,)),
        "expert": (_with_expert_parallelism, EXPERT, BOTH),
    }[settings.parallel]
    model = language_model(settings, expert_axis=expert_axis, batch_axes=batch_axes)
    sequences = settings.batch // settings.microbatches
    microbatch = (devices.total, sequences // devices.total) if settings.parallel == "pmap" else (sequences,)

    def initialise() -> TrainState:
        return create_state(settings, model)

    def split(windows: np.ndarray) -> np.ndarray:
        return windows.reshape(-1, *microbatch, windows.shape[-1])

    state = jax.tree.map_with_path(
        lambda path, x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, _spec(path))),
        jax.eval_shape(initialise),
    )
    shardings = jax.tree.map(lambda x: x.sharding, state)
    return Programs(jax.jit(initialise, out_shardings=shardings), *make(model, mesh, state), split, state)


def _on_one_device(model: LanguageModel, _mesh: Mesh, _state: TrainState) -> _Pair:
    def take_step(state: TrainState, batch: jax.Array) -> tuple[TrainState, StepMetrics]:
        return apply_gradients(state, *gradients_and_metrics(model, state.params, batch, devices=1))

    def held_out_loss(state: TrainState, batch: jax.Array) -> jax.Array:
        return mean_held_out_loss(model, state.params, batch)

    return jax.jit(take_step, donate_argnums=0), jax.jit(held_out_loss)


def _with_pmap(model: LanguageModel, mesh: Mesh, _state: TrainState) -> _Pair:
    """Gives every device the whole state, and its own part of the batch."""

    def take_step(state: TrainState, batch: jax.Array) -> tuple[TrainState, StepMetrics]:
        gradients, metrics = gradients_and_metrics(model, state.params, batch, mesh.size)
        gradients = jg.reduce_gradients(gradients, DATA, mean=False)
        return apply_gradients(state, gradients, _of_all(metrics, DATA))

    def held_out_loss(state: TrainState, batch: jax.Array) -> jax.Array:
        return jax.lax.pmean(mean_held_out_loss(model, state.params, batch), DATA)

    # The state has no axis of devices: it is the same on all of them.
    devices = mesh.devices.ravel().tolist()
    pmap = functools.partial(jax.pmap, axis_name=DATA, in_axes=(None, 1), out_axes=None, devices=devices)
    return pmap(take_step, donate_argnums=0), pmap(held_out_loss)


def _with_expert_parallelism(model: LanguageModel, mesh: Mesh, state: TrainState) -> _Pair:
    """Gives every device its experts, everything of the other layers, and its own part of the batch."""

    def local_gradients(variables: Variables, batch: jax.Array) -> tuple[Variables, StepMetrics]:
        # As copies that may differ, parameters have gradients that are added up after the last microbatch, not in each.
        variables = jax.tree.map_with_path(
            lambda path, x: jax.lax.pcast(x, DATA if _is_split(path) else BOTH, to="varying"), variables
        )
        gradients, metrics = gradients_and_metrics(model, variables, batch, mesh.size)
        return _reduced(gradients), _of_all(metrics, BOTH)

    def local_held_out_loss(variables: Variables, batch: jax.Array) -> jax.Array:
        return jax.lax.pmean(mean_held_out_loss(model, variables, batch), BOTH)

    specs = jax.tree.map(lambda x: x.sharding.spec, state.params)
    sharded = functools.partial(jax.shard_map, mesh=mesh, in_specs=(specs, P(None, BOTH)))

    def take_step(state: TrainState, batch: jax.Array) -> tuple[TrainState, StepMetrics]:
        # The optimizer sees whole arrays: so the norm by which gradients are clipped is that of all experts.
        return apply_gradients(state, *sharded(local_gradients, out_specs=(specs, P()))(state.params, batch))

    def held_out_loss(state: TrainState, batch: jax.Array) -> jax.Array:
        return sharded(local_held_out_loss, out_specs=P())(state.params, batch)

    shardings = jax.tree.map(lambda x: x.sharding, state)
    whole, inputs = NamedSharding(mesh, P()), (shardings, NamedSharding(mesh, P(None, BOTH)))
    return (
        jax.jit(
            take_step,
            donate_argnums=0,
            in_shardings=inputs,
            out_shardings=(shardings, whole),
            compiler_options=COPY_ENGINES,
        ),
        jax.jit(held_out_loss, in_shardings=inputs, out_shardings=whole, compiler_options=COPY_ENGINES),
    )


def _of_all(metrics: StepMetrics, axes: str | tuple[str, ...]) -> StepMetrics:
    """Returns the metrics of the devices along these axes, combined."""
    add, largest = (functools.partial(of, axis_name=axes) for of in (jax.lax.psum, jax.lax.pmax))
    return metrics.combined(add, largest)


def _is_split(path: Any) -> bool:
    """Tells if an array at this path of a state is split over the expert axis."""
    return not _EXPERT_LAYERS.isdisjoint(jax.tree_util.keystr(path, simple=True, separator="/").split("/"))


def _spec(path: Any) -> P:
    return P(EXPERT) if _is_split(path) else P()


def _reduced(gradients: Variables) -> Variables:
    """Returns the gradients of the whole batch: those of experts are already made of all tokens that came to them."""

    def part(is_split: bool) -> Variables:
        return jax.tree.map_with_path(lambda path, x: x if _is_split(path) == is_split else None, gradients)

    experts = jg.reduce_gradients(part(True), DATA, mean=False)
    others = jg.reduce_gradients(part(False), BOTH, mean=False)
    return jax.tree.map(lambda a, b: b if a is None else a, experts, others, is_leaf=lambda leaf: leaf is None)
