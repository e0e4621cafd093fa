"""The training loop of `train_moe`: a run that can be continued, its held-out loss, and the speed of its steps."""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
import numpy as np
from flax.training.train_state import TrainState
from tqdm import tqdm

from jax_grouped.__main__ import choose_backend
from jax_grouped.examples.events import events
from jax_grouped.examples.loss_curve import Losses, train_points
from jax_grouped.examples.metrics import Metrics, metrics_of
from jax_grouped.examples.model import language_model
from jax_grouped.examples.parallel import Programs, programs
from jax_grouped.examples.run_folder import RunFolder, Start
from jax_grouped.examples.sample import continuation, printable
from jax_grouped.examples.settings import Devices, Settings, UsageError
from jax_grouped.examples.step import StepMetrics
from jax_grouped.examples.stopping import InterruptionError, Stop
from jax_grouped.examples.text_data import Corpus, even_windows, random_windows

HELD_OUT_BATCHES = 8

#: Steps that `measure_scaling` times, after one that is not.
SCALING_STEPS = 20


def backend_name() -> str:
    """Names the backend of `jax_grouped` on the default device, and that device.

    Raises:
        UsageError: there is no backend: JAX does not start, or the kernels cannot run on this machine's GPUs.
    """
    backend, *reasons = choose_backend()
    if backend.startswith("none"):
        raise UsageError(f"{backend.removeprefix('none: ')}: {' '.join(reasons)}")
    return f"{backend} backend on {jax.devices()[0].device_kind}"


class Run(NamedTuple):
    """A run that is ready to start.

    Attributes:
        settings, devices: its settings, and its numbers of devices.
        programs: its computations.
        step: the training step, lowered.
    """

    settings: Settings
    devices: Devices
    programs: Programs
    step: jax.stages.Lowered

    @property
    def parameter_count(self) -> int:
        """Number of parameters."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.programs.state.params["params"]))

    @property
    def model(self) -> str:
        """Description of the model."""
        settings = self.settings
        return (
            f"{self.parameter_count:,} parameters, {settings.layers} layers, {settings.top_k} of {settings.experts} "
            f"experts per byte, recipe {settings.recipe}, Flax {settings.layer}"
        )

    @property
    def placement(self) -> str:
        """Description of the devices that a step uses."""
        count, expert = self.devices
        return {
            "none": "one device",
            "pmap": f"pmap over {count} devices",
            "expert": f"{count} devices with the experts over {expert}",
        }[self.settings.parallel]


def prepare(settings: Settings, devices: Devices) -> Run:
    """Plans a run.

    Raises:
        UsageError: this machine's GPUs or their libraries cannot compute it.
    """
    computed = programs(settings, devices)
    windows = np.zeros((settings.batch, settings.sequence + 1), np.uint8)
    try:
        step = computed.take_step.lower(computed.state, computed.split(windows))
    except jax.errors.JaxRuntimeError:
        raise
    except RuntimeError as error:
        # jax_grouped raises it when a program is lowered for a GPU that cannot run it.
        raise UsageError(str(error)) from None
    return Run(settings, devices, computed, step)


class Compiled(NamedTuple):
    """The programs of a run, ready to execute.

    Attributes:
        take_step: `(state, batch)` to the next state and the metrics of the step.
        held_out_loss: a state to the held-out loss.
    """

    take_step: jax.stages.Compiled
    held_out_loss: Callable[[TrainState], float]


class Trained(NamedTuple):
    """The end of a run.

    Attributes:
        state: the state after the last step.
        bytes_per_second: trained on, not counting compilation, evaluation and files; None if no step was left to take.
    """

    state: TrainState
    bytes_per_second: float | None


def train(run: Run, corpus: Corpus, folder: RunFolder, stop: Stop) -> Trained:
    """Trains to step `settings.steps` and keeps `folder` current; with `settings.resume`, from its latest checkpoint.

    No file of the run changes before all is compiled. Until then a signal ends the process at once.

    Raises:
        InterruptionError: a signal has asked for it; the last step is saved.
        UsageError: a file of the folder cannot be read or written.
    """
    start = None
    if run.settings.resume:
        start = folder.restore(run.programs.state)
        if start.step >= run.settings.steps:
            return Trained(start.state, None)
    print("compiling, which can take minutes", flush=True)
    compiled = _compile(run, corpus)
    start = start or Start(0, run.programs.initialise())
    with stop.deferred():
        _open(folder, run, corpus, start)
        return _train(run, compiled, start, corpus, folder, stop)


def _compile(run: Run, corpus: Corpus) -> Compiled:
    batches = _held_out_batches(run, corpus)
    evaluate = run.programs.held_out_loss.lower(run.programs.state, batches).compile()
    return Compiled(run.step.compile(), lambda state: float(evaluate(state, batches)))


def _open(folder: RunFolder, run: Run, corpus: Corpus, start: Start) -> None:
    """Prepares the folder for the run, and prints what a resumed run lacks."""
    if not run.settings.resume:
        folder.start(run.settings, corpus.sha256)
        return
    moved = folder.resume(run.settings, corpus.sha256, start)
    for step, reason in start.unreadable.items():
        print(f"note: the checkpoint of step {step} cannot be read ({reason}) and has been moved to {moved}")
    if missing := start.step - len(train_points(folder.rows)):
        print(f"note: {folder.csv_path} lacks {missing} of the {start.step} steps")
    print(f"note: resuming at step {start.step}", flush=True)


def _train(run: Run, compiled: Compiled, start: Start, corpus: Corpus, folder: RunFolder, stop: Stop) -> Trained:
    """Takes the steps, as `train` says."""
    settings, step, state = run.settings, start.step, start.state
    batches = _batches(run, corpus)
    seconds, signal = 0.0, None
    size = settings.batch * settings.sequence
    done, total = step * size, settings.steps * size
    progress = tqdm(
        desc=_steps(done, total, size), initial=done, total=total, unit="byte", unit_scale=True, dynamic_ncols=True
    )
    events_path = folder.events_path if settings.log == "tensorboard" else None
    with folder.saving() as save, progress as bar, events(events_path, step) as log:

        def keep(rows: Sequence[Losses], metrics: Sequence[Metrics] = ()) -> None:
            folder.extend(rows, metrics)
            log.losses(rows)
            log.metrics(metrics)

        if step == 0:
            keep([Losses(0, None, compiled.held_out_loss(state))])
        while step < settings.steps and signal is None:
            planned = range(step, _next_stop(step, settings))
            started = time.perf_counter()
            state, losses, shown = _advance(compiled.take_step, state, map(batches, planned), bar, size, stop)
            seconds += time.perf_counter() - started

            # Read once for all that follows: a signal can come at any time.
            signal = stop.signal
            rows = [Losses(number, loss, None) for number, loss in enumerate(losses, start=step + 1)]
            step += len(losses)
            metrics = []
            if _is_due(step, settings.eval_every, settings):
                metrics = [metrics_of(step, jax.device_get(shown))]
                rows[-1] = rows[-1]._replace(held_out=compiled.held_out_loss(state))
                bar.write(f"step {step}: loss {rows[-1].train:.3f}, held-out loss {rows[-1].held_out:.3f}")
            keep(rows, metrics)
            if signal or _is_due(step, settings.save_every, settings):
                save(step, state)
                folder.plot(f"MoE language model: {run.model}\n{run.placement}")
    if signal:
        raise InterruptionError(signal, step)
    return Trained(state, (step - start.step) * size / seconds)


def sample(run: Run, corpus: Corpus, state: TrainState) -> tuple[str, str]:
    """Returns the last line of a held-out text, and what the model of a state predicts after it."""
    prompt = corpus.held_out[: run.settings.sequence]
    variables = jax.device_put(state.params, jax.devices()[0])
    model = language_model(dataclasses.replace(run.settings, capacity_factor=None))
    text = continuation(model, variables, prompt, run.settings.sample, run.settings.seed)
    return printable(prompt).splitlines()[-1], text


def _batches(run: Run, corpus: Corpus) -> Callable[[int], np.ndarray]:
    """Returns a function from the number of a step to its batch."""
    settings = run.settings
    windows = functools.partial(random_windows, corpus.train, settings.sequence, settings.batch, settings.seed)
    return lambda step: run.programs.split(windows(step))


def _held_out_batches(run: Run, corpus: Corpus) -> np.ndarray:
    count = HELD_OUT_BATCHES * run.settings.batch
    return run.programs.split(even_windows(corpus.held_out, run.settings.sequence, count))


def _is_due(step: int, every: int, settings: Settings) -> bool:
    return step % every == 0 or step == settings.steps


def _next_stop(step: int, settings: Settings) -> int:
    """Returns the next step after which there is something to evaluate or to save."""
    return min(settings.steps, *(every * (step // every + 1) for every in (settings.eval_every, settings.save_every)))


def _steps(done: int, total: int, size: int) -> str:
    return f"step {done // size}/{total // size}"


def _advance(
    take_step: jax.stages.Compiled,
    state: TrainState,
    batches: Iterable[np.ndarray],
    bar: tqdm,
    size: int,
    stop: Stop,
) -> tuple[TrainState, list[float], StepMetrics]:
    """Takes a step per batch of `size` bytes, none after a signal.

    Returns:
        The next state, the loss of each step, and the metrics of the last one.
    """
    losses: list[jax.Array] = []
    for batch in batches:
        state, metrics = take_step(state, batch)
        losses.append(metrics.loss)
        if len(losses) > 1:
            # Reading the loss of the step before leaves the device with one to work on.
            bar.set_postfix_str(f"loss {float(losses[-2]):.3f}", refresh=False)
        bar.set_description(_steps(bar.n + size, bar.total, size), refresh=False)
        bar.update(size)
        if stop.signal is not None:
            break
    return state, [float(loss) for loss in losses], metrics


class Scaling(NamedTuple):
    """Weak scaling: the same work per device on several and on one.

    Attributes:
        devices: their number.
        together: bytes per second on all of them.
        alone: bytes per second on one, with its part of the batch.
    """

    devices: int
    together: float
    alone: float

    @property
    def efficiency(self) -> float:
        """Speed of a device beside the others, relative to its speed alone."""
        return self.together / (self.devices * self.alone)


def measure_scaling(run: Run, corpus: Corpus) -> Scaling:
    """Times steps of this run, and the same code on one device with its part of the batch and all experts."""
    count = run.devices.total
    alone = prepare(dataclasses.replace(run.settings, batch=run.settings.batch // count), Devices(1, 1))
    return Scaling(count, _bytes_per_second(run, corpus), _bytes_per_second(alone, corpus))


def _bytes_per_second(run: Run, corpus: Corpus) -> float:
    take_step = run.step.compile()
    batches = list(map(_batches(run, corpus), range(1 + SCALING_STEPS)))
    state, metrics = take_step(run.programs.initialise(), batches[0])
    jax.block_until_ready(metrics)
    started = time.perf_counter()
    for batch in batches[1:]:
        state, metrics = take_step(state, batch)
    jax.block_until_ready(state)
    return SCALING_STEPS * run.settings.batch * run.settings.sequence / (time.perf_counter() - started)
