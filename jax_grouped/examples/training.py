"""The training loop of `train_moe`: a run that can be continued, and text of its model."""

import dataclasses
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.training.train_state import TrainState
from jax.experimental import multihost_utils
from tensorboardX import SummaryWriter
from tqdm import tqdm

from jax_grouped.__main__ import choose_backend
from jax_grouped.examples.loss_curve import Losses
from jax_grouped.examples.model import language_model
from jax_grouped.examples.parallel import Programs, StepMetrics, programs
from jax_grouped.examples.processes import Signals, agree
from jax_grouped.examples.run_folder import RunFolder
from jax_grouped.examples.settings import Devices, Settings, UsageError
from jax_grouped.examples.text_data import Corpus, even_windows, random_windows

HELD_OUT_BATCHES = 8

#: Divides the logits of text that the model writes: below 1, likely bytes become likelier.
TEMPERATURE = 0.7


def backend_name() -> str:
    """Names the backend of `jax_grouped` and the default device, or raises a UsageError that says why none can run."""
    backend, *reasons = choose_backend()
    if backend.startswith("none"):
        raise UsageError(f"{backend.removeprefix('none: ')}: {' '.join(reasons)}")
    return f"{backend} backend on {jax.devices()[0].device_kind}"


class Run(NamedTuple):
    """A run that is ready to start: its settings, numbers of devices and programs, and the training step, lowered."""

    settings: Settings
    devices: Devices
    programs: Programs
    step: jax.stages.Lowered

    @property
    def model(self) -> str:
        """Description of the model and of the devices that a step uses."""
        s, several = self.settings, counted(self.devices.total, "device")
        if jax.process_count() > 1:
            several += f" of {jax.process_count()} processes"
        expert = f"{several} with the experts over {self.devices.expert}"
        placement = {"none": "one device", "pmap": f"pmap over {several}", "expert": expert}[s.parallel]
        parameters = sum(leaf.size for leaf in jax.tree.leaves(self.programs.state.params["params"]))
        sizes = f"{parameters:,} parameters, {counted(s.layers, 'layer')}, {s.top_k} of {s.experts} experts per byte"
        return f"{sizes}, recipe {s.recipe}, Flax {s.layer}, {placement}"

    def batch(self, corpus: Corpus, step: int) -> Any:
        """Returns the batch of the step after this number of steps."""
        s = self.settings
        return self.programs.split(random_windows(corpus.train, s.sequence, s.batch, s.seed, step))


def counted(number: int, noun: str) -> str:
    """Returns a number and its noun, which gets an `s` as its plural."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def prepare(settings: Settings, devices: Devices) -> Run:
    """Plans a run, or raises a UsageError if this machine's GPUs or their libraries cannot compute it."""
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


def train(
    run: Run, corpus: Corpus, folder: RunFolder, signals: Signals
) -> tuple[int, TrainState, float | None, int | None]:
    """Trains to step `settings.steps` and keeps `folder` current; with `settings.resume`, from its latest checkpoint.

    Losses, metrics and checkpoints are written after all is compiled. From then on a signal ends the run after its
    step or, in several processes, after the same step in all of them, about a second later.

    Returns:
        The number of steps that have been taken; the state after them, which is saved; bytes per second, not counting
        compilation, evaluation and files, or None if no step was left to take; the signal that has ended it, or None.

    Raises:
        OSError, UsageError: a file of the folder cannot be read or written.
    """
    settings, size, step = run.settings, run.settings.batch * run.settings.sequence, 0
    if settings.resume:
        step, state = folder.restore(run.programs.state)
        print(f"note: resuming at step {step}", flush=True)
        if step >= settings.steps:
            return step, state, None, None
    print("compiling, which can take minutes", flush=True)
    held_out = run.programs.split(even_windows(corpus.held_out, settings.sequence, HELD_OUT_BATCHES * settings.batch))
    evaluate = run.programs.held_out_loss.lower(run.programs.state, held_out).compile()
    take_step = run.step.compile()
    first_step, asks_at, number, seconds = step, step + 1, 0, 0.0
    losses: list[jax.Array] = []
    silent, end = jax.process_index() > 0, settings.steps * size
    logs = settings.log == "tensorboard" and not silent
    events = SummaryWriter(str(folder.path / "tensorboard"), purge_step=step + 1, write_to_disk=logs)
    bar = tqdm(initial=step * size, total=end, unit="byte", unit_scale=True, dynamic_ncols=True, disable=silent)
    signals.trains = True
    with events, bar:
        folder.write_settings(settings, corpus.sha256)
        if step == 0:
            state = run.programs.initialise()
            rows = [Losses(0, None, float(evaluate(state, held_out)))]
            folder.add(rows, [])
            _add_events(events, rows, [])
        began = started = time.perf_counter()
        while step < settings.steps:
            state, metrics = take_step(state, run.batch(corpus, step))
            losses.append(metrics.loss)
            step += 1
            bar.set_description(f"step {step}/{settings.steps}", refresh=False)
            if len(losses) > 1:
                # Reading the loss of the step before leaves the device with one to work on.
                bar.set_postfix_str(f"loss {float(losses[-2]):.3f}", refresh=False)
            bar.update(size)
            if step == asks_at:
                # Several processes agree once a second, after as many steps as a second has: each time takes some.
                pace = (step - first_step - 1) / (time.perf_counter() - began) if jax.process_count() > 1 else 0
                number, pace = agree((signals.numbers or [0])[0], int(pace))
                asks_at = step + 1 + pace
            stops = number > 0 or step == settings.steps
            evaluates = step % settings.eval_every == 0 or step == settings.steps
            saves = step % settings.save_every == 0 or stops
            if not evaluates and not saves:
                continue
            rows = [Losses(step - len(losses) + i, float(loss), None) for i, loss in enumerate(losses, start=1)]
            losses.clear()
            seconds += time.perf_counter() - started
            shown = []
            if evaluates:
                shown = [_metrics_row(step, jax.device_get(metrics))]
                rows[-1] = rows[-1]._replace(held_out=float(evaluate(state, held_out)))
                bar.write(f"step {step}: loss {rows[-1].train:.3f}, held-out loss {rows[-1].held_out:.3f}")
            folder.add(rows, shown)
            _add_events(events, rows, shown)
            if saves:
                folder.save(step, state, f"MoE language model: {run.model}")
            if stops:
                break
            started = time.perf_counter()
    signals.trains = False
    return step, state, (step - first_step) * size / seconds, number if step < settings.steps else None


def _metrics_row(step: int, metrics: StepMetrics) -> dict[str, Any]:
    """Returns metrics as `metrics.jsonl` has them: numbers and lists, one per block; None for what is not finite.

    `expert_load` and `dropped` are parts of the pairs of a token and an expert.
    """
    blocks = metrics.blocks
    pairs = np.sum(blocks.expert_load, axis=1)
    values = {
        "gradient_norm": metrics.gradient_norm,
        "balance_loss": blocks.balance_loss,
        "expert_load": blocks.expert_load / pairs[:, None],
        "dropped": blocks.dropped / pairs,
        "amax": blocks.amax,
    }
    line: dict[str, Any] = {"step": step}
    for name, value in values.items():
        numbers = np.asarray(value, np.float64)
        line[name] = np.where(np.isfinite(numbers), numbers.astype(object), np.array(None, object)).tolist()
    return line


def _add_events(events: SummaryWriter, losses: list[Losses], metrics: list[dict[str, Any]]) -> None:
    curve = [{"step": row.step, "loss/train": row.train, "loss/held_out": row.held_out} for row in losses]
    for row in [*curve, *metrics]:
        for name, values in row.items():
            for index, value in np.ndenumerate(np.array(values, object)):
                if value is not None and name != "step":
                    parts = (f"/{part}_{i}" for part, i in zip(("block", "expert"), index, strict=False))
                    events.add_scalar(name + "".join(parts), value, row["step"])


def sample(run: Run, corpus: Corpus, state: TrainState) -> tuple[str, str]:
    """Returns the last line of a held-out text, and what the model of a state predicts after it, byte by byte."""
    settings = run.settings
    prompt = corpus.held_out[: settings.sequence]
    model = language_model(dataclasses.replace(settings, capacity_factor=None))

    @jax.jit
    def predict(variables: Any, window: jax.Array, key: jax.Array) -> jax.Array:
        byte = jax.random.categorical(key, model.apply(variables, window[None])[0][0, -1] / TEMPERATURE)
        return jnp.append(window[1:], byte)

    whole = multihost_utils.process_allgather(state.params, tiled=True)
    variables, window, text = jax.device_put(whole, jax.local_devices()[0]), jnp.asarray(prompt, jnp.int32), []
    for key in jax.random.split(jax.random.key(settings.seed), settings.sample):
        window = predict(variables, window, key)
        text.append(window[-1])
    return _printable(prompt).splitlines()[-1], _printable(np.array(text))


def _printable(data: np.ndarray) -> str:
    """Returns the text of bytes, with `\N{REPLACEMENT CHARACTER}` for what cannot be printed."""
    text = data.astype(np.uint8).tobytes().decode(errors="replace")
    return "".join(each if each.isprintable() or each == "\n" else "\N{REPLACEMENT CHARACTER}" for each in text)
