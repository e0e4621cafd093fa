"""Trains a byte-level mixture-of-experts language model: `python3 -m jax_grouped.examples.train_moe --help`.

The parts: `moe_lm` and `moe_lm_nnx` are the model, behind the interface in `model`; `step` is what a device computes,
`parallel` how devices share it, and `training` the loop; `text_data` is the text, `run_folder` and `loss_curve` are the
files of a run, `stopping` ends it early, and `settings` and `command_line` say what it does.
"""

import functools
import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax

import jax_grouped as jg
from jax_grouped.examples.command_line import parse, parse_resumed
from jax_grouped.examples.settings import Settings, UsageError, devices_of
from jax_grouped.examples.stopping import InterruptionError, Stop, run_until_signal
from jax_grouped.examples.text_data import Corpus, read_corpus

if TYPE_CHECKING:
    from jax_grouped.examples.run_folder import RunFolder


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program with these arguments, by default those of the process.

    Returns:
        The exit status: 0; after one line that says why, 2 for something the user can put right, 130 for Ctrl-C,
        143 for SIGTERM.
    """
    try:
        run_until_signal(functools.partial(_run, argv))
    except UsageError as error:
        print(f"train_moe: error: {error}", file=sys.stderr)
        return 2
    except InterruptionError as interruption:
        print(f"train_moe: {interruption}", file=sys.stderr)
        return interruption.exit_status
    return 0


def _run(argv: Sequence[str] | None, stop: Stop) -> None:
    settings = parse(argv)
    try:
        # Slow to load, and not needed to reject a flag.
        import jax_grouped.examples.run_folder as run_folder
        import jax_grouped.examples.training as training
    except ModuleNotFoundError as error:
        raise UsageError(f"{error.name} is missing: python3 -m pip install 'jax_grouped[examples]'") from None
    try:
        backend = training.backend_name()
    except RuntimeError as error:
        raise UsageError(str(error)) from None

    folder = run_folder.RunFolder(settings.out)
    if settings.resume:
        # Raises where there is no run, and so nothing to lock.
        folder.latest_step()
    else:
        # Before the folder is made, for what is wrong with flags leaves nothing behind.
        corpus = read_corpus(settings.data, settings.sequence)
        devices_of(settings, jax.device_count())
        folder.create()
    with folder.locked():
        if settings.resume:
            settings, corpus = _resumed(argv, folder)
        run = training.prepare(settings, devices_of(settings, jax.device_count()))
        print(f"jax_grouped {jg.__version__}, JAX {jax.__version__}, {backend}, {run.placement}")
        print(f"text: {corpus.name}, {len(corpus.train):,} bytes to train on, {len(corpus.held_out):,} held out")
        print(f"model: {run.model}")
        print(
            f"run: {settings.steps} steps of {settings.batch} x {settings.sequence} bytes in {folder.path}", flush=True
        )
        _report(folder, settings.steps, training.train(run, corpus, folder, stop))
    if settings.scaling:
        scaling = training.measure_scaling(run, corpus)
        print(
            f"scaling: {scaling.together:,.0f} bytes per second on {scaling.devices} devices, {scaling.alone:,.0f} on "
            f"one with its part of the batch: {100 * scaling.efficiency:.1f} % efficiency"
        )


def _resumed(argv: Sequence[str] | None, folder: "RunFolder") -> tuple[Settings, Corpus]:
    """The settings and the text to continue the run in the folder with."""
    step, (recorded, text_sha256) = folder.latest_step(), folder.recorded()
    settings = parse_resumed(argv, recorded)
    if settings.steps < step:
        raise UsageError(f"--resume: the run in {folder.path} is at step {step}, past --steps {settings.steps}")
    corpus = read_corpus(settings.data, settings.sequence)
    if corpus.sha256 != text_sha256:
        raise UsageError(f"--resume: {corpus.name} has changed since the run in {folder.path} began")
    return settings, corpus


def _report(folder: "RunFolder", step: int, bytes_per_second: float | None) -> None:
    """Prints what the run came to; `bytes_per_second` is None if it had been finished before."""
    held_out = dict(folder.curve.held_out())
    for when, evaluated in (("before", 0), ("after", step)):
        if loss := held_out.get(evaluated):
            print(f"held-out loss {when}: {loss:.3f} nats per byte = {loss / math.log(2):.3f} bits per byte")
    if bytes_per_second is None:
        print(f"note: the run was at step {step} already; a larger --steps continues it")
    else:
        print(f"speed: {bytes_per_second:,.0f} bytes (tokens) per second")
    print(f"curve: {folder.curve.plot_path} and {folder.curve.csv_path}")
    print(f"checkpoint: {folder.checkpoint_path(step)}")


if __name__ == "__main__":
    sys.exit(main())
