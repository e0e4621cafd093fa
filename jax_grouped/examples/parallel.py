"""The programs of a run for one device or several: where the state lies, and how devices share a step."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import jax_grouped as jg
from jax_grouped.examples.model import LanguageModel, Variables, language_model
from jax_grouped.examples.settings import Devices, Settings
from jax_grouped.examples.step import create_state, gradients_and_loss, mean_held_out_loss

#: Mesh axes. Batches are split over both, experts over the second.
DATA, EXPERT = "data", "expert"

#: Layers whose every array has the experts as its first axis.
_EXPERT_LAYERS = {"gate_up", "down"}


@dataclasses.dataclass(frozen=True)
class Programs:
    """What a run computes. Arrays are whole: each is one `jax.Array`, wherever its parts lie.

    Attributes:
        initialise: makes the state before the first step.
        take_step: `(state, batch)` to the next state and the loss in nats per byte, `f32[]`, before the step.
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
    """The programs of a run."""
    chosen = jax.devices()[: devices.total]
    if settings.parallel == "expert":
        grid = np.array(chosen).reshape(-1, devices.expert)
        return _with_expert_parallelism(settings, Mesh(grid, (DATA, EXPERT)))
    return _with_pmap(settings, chosen) if settings.parallel == "pmap" else _on_one_device(settings, chosen[0])


def _on_one_device(settings: Settings, device: jax.Device) -> Programs:
    model = language_model(settings)

    def take_step(state: TrainState, batch: jax.Array) -> tuple[TrainState, jax.Array]:
        gradients, loss = gradients_and_loss(model, state.params, batch, devices=1)
        return state.apply_gradients(grads=gradients), loss

    def held_out_loss(state: TrainState, batch: jax.Array) -> jax.Array:
        return mean_held_out_loss(model, state.params, batch)

    initialise, state = _initialisation(settings, model, lambda _: SingleDeviceSharding(device))
    return Programs(
        initialise,
        jax.jit(take_step, donate_argnums=0),
        jax.jit(held_out_loss),
        lambda windows: _microbatches(windows, settings, 1)[:, 0],
        state,
    )


def _with_pmap(settings: Settings, devices: list[jax.Device]) -> Programs:
    """Every device has the whole state, and its own part of the batch."""
    model = language_model(settings, batch_axes=(DATA,))

    def take_step(state: TrainState, batch: jax.Array) -> tuple[TrainState, jax.Array]:
        gradients, loss = gradients_and_loss(model, state.params, batch, len(devices))
        gradients = jg.reduce_gradients(gradients, DATA, mean=False)
        return state.apply_gradients(grads=gradients), jax.lax.psum(loss, DATA)

    def held_out_loss(state: TrainState, batch: jax.Array) -> jax.Array:
        return jax.lax.pmean(mean_held_out_loss(model, state.params, batch), DATA)

    # The state has no axis of devices: it is the same on all of them.
    pmap = functools.partial(jax.pmap, axis_name=DATA, in_axes=(None, 1), out_axes=None, devices=devices)
    replicated = NamedSharding(Mesh(np.array(devices), (DATA,)), P())
    initialise, state = _initialisation(settings, model, lambda _: replicated)
    return Programs(
        initialise,
        pmap(take_step, donate_argnums=0),
        pmap(held_out_loss),
        lambda windows: _microbatches(windows, settings, len(devices)),
        state,
    )


def _with_expert_parallelism(settings: Settings, mesh: Mesh) -> Programs:
    """Every device has its experts, everything of the other layers, and its own part of the batch."""
    both = (DATA, EXPERT)
    model = language_model(settings, expert_axis=EXPERT, batch_axes=both)

    def local_gradients(variables: Variables, batch: jax.Array) -> tuple[Variables, jax.Array]:
        # As copies that may differ, parameters have gradients that are added up after the last microbatch, not in each.
        variables = jax.tree.map_with_path(
            lambda path, x: jax.lax.pcast(x, DATA if _is_split(path) else both, to="varying"), variables
        )
        gradients, loss = gradients_and_loss(model, variables, batch, mesh.size)
        return _reduced(gradients), jax.lax.psum(loss, both)

    def local_held_out_loss(variables: Variables, batch: jax.Array) -> jax.Array:
        return jax.lax.pmean(mean_held_out_loss(model, variables, batch), both)

    def sharded(function: Callable[..., Any], out_specs: Any) -> Callable[..., Any]:
        return jax.shard_map(function, mesh=mesh, in_specs=(specs, P(None, both)), out_specs=out_specs)

    def take_step(state: TrainState, batch: jax.Array) -> tuple[TrainState, jax.Array]:
        # The optimizer sees whole arrays: so the norm by which gradients are clipped is that of all experts.
        gradients, loss = sharded(local_gradients, (specs, P()))(state.params, batch)
        return state.apply_gradients(grads=gradients), loss

    def held_out_loss(state: TrainState, batch: jax.Array) -> jax.Array:
        return sharded(local_held_out_loss, P())(state.params, batch)

    initialise, state = _initialisation(settings, model, lambda path: NamedSharding(mesh, _spec(path)))
    specs = jax.tree.map_with_path(lambda path, _: _spec(path), state.params)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    split, whole = NamedSharding(mesh, P(None, both)), NamedSharding(mesh, P())
    return Programs(
        initialise,
        jax.jit(take_step, donate_argnums=0, in_shardings=(shardings, split), out_shardings=(shardings, whole)),
        jax.jit(held_out_loss, in_shardings=(shardings, split), out_shardings=whole),
        lambda windows: _microbatches(windows, settings, 1)[:, 0],
        state,
    )


def _initialisation(
    settings: Settings, model: LanguageModel, sharding: Callable[[Any], Sharding]
) -> tuple[Callable[[], TrainState], TrainState]:
    """The program that makes the state, and what it makes; `sharding` says where each of its paths goes."""

    def initialise() -> TrainState:
        return create_state(settings, model)

    state = jax.tree.map_with_path(
        lambda path, leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding(path)),
        jax.eval_shape(initialise),
    )
    return jax.jit(initialise, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, state)), state


def _microbatches(windows: np.ndarray, settings: Settings, devices: int) -> np.ndarray:
    """`[N, S + 1]` as `[microbatches, devices, sequences, S + 1]`; a microbatch has the same windows on all devices."""
    sequences = settings.batch // settings.microbatches // devices
    return windows.reshape(-1, devices, sequences, windows.shape[-1])


def _is_split(path: Any) -> bool:
    """Whether an array at this path of a state is split over the expert axis."""
    return not _EXPERT_LAYERS.isdisjoint(jax.tree_util.keystr(path, simple=True, separator="/").split("/"))


def _spec(path: Any) -> P:
    return P(EXPERT) if _is_split(path) else P()


def _reduced(gradients: Variables) -> Variables:
    """The gradients of the whole batch: those of experts are already made of all tokens that came to them."""

    def part(is_split: bool) -> Variables:
        return jax.tree.map_with_path(lambda path, leaf: leaf if _is_split(path) == is_split else None, gradients)

    experts = jg.reduce_gradients(part(True), DATA, mean=False)
    others = jg.reduce_gradients(part(False), (DATA, EXPERT), mean=False)
    return jax.tree.map(lambda a, b: b if a is None else a, experts, others, is_leaf=lambda leaf: leaf is None)
