"""Trains a byte-level mixture-of-experts language model: `python3 -m jax_grouped.examples.train_moe --help`.

The parts: `moe_lm` and `moe_lm_nnx` are the model, behind the interface in `model`; `step` is what a device computes,
`parallel` how devices share it, and `training` the loop; `text_data` is the text, `run_folder` and `loss_curve` are the
files of a run, and `settings` and `command_line` say what it does.
"""

import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax

import jax_grouped as jg
from jax_grouped.examples.command_line import parse, parse_resumed
from jax_grouped.examples.settings import Settings, UsageError, devices_of
from jax_grouped.examples.text_data import Corpus, read_corpus

if TYPE_CHECKING:
    from jax_grouped.examples.run_folder import RunFolder


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program with these arguments, by default those of the process.

    Returns:
        The exit status: 0, 2 after one line about something the user can put right, 130 after Ctrl-C.
    """
    try:
        _run(argv)
    except UsageError as error:
        print(f"train_moe: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("train_moe: interrupted; --resume continues from the latest checkpoint, if there is one", file=sys.stderr)
        return 130
    return 0


def _run(argv: Sequence[str] | None) -> None:
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
        settings, corpus = _resumed(argv, folder)
    else:
        corpus = read_corpus(settings.data, settings.sequence)
    devices = devices_of(settings, jax.device_count())
    folder.create()
    run = training.prepare(settings, devices)
    if settings.resume:
        folder.resume(settings, corpus.sha256)
    elif moved := folder.start(settings, corpus.sha256):
        print(f"note: the earlier run in {folder.path} has been moved to {moved}")
    print(f"jax_grouped {jg.__version__}, JAX {jax.__version__}, {backend}, {run.placement}")
    print(f"text: {corpus.name}, {len(corpus.train):,} bytes to train on, {len(corpus.held_out):,} held out")
    print(
        f"model: {run.parameter_count:,} parameters, {settings.layers} layers, "
        f"{settings.top_k} of {settings.experts} experts per byte, recipe {settings.recipe}, Flax {settings.layer}"
    )
    print(f"run: {settings.steps} steps of {settings.batch} x {settings.sequence} bytes in {folder.path}", flush=True)
    _report(folder, settings.steps, training.train(run, corpus, folder))
    if settings.scaling:
        scaling = training.measure_scaling(run, corpus)
        print(
            f"scaling: {scaling.together:,.0f} bytes per second on {scaling.devices} devices, {scaling.alone:,.0f} on "
            f"one with its part of the batch: {100 * scaling.efficiency:.1f} % efficiency"
        )


def _resumed(argv: Sequence[str] | None, folder: "RunFolder") -> tuple[Settings, Corpus]:
    """The settings and the text to continue the run in the folder with."""
    step, recorded = folder.recorded()
    settings = parse_resumed(argv, recorded)
    if settings.steps < step:
        raise UsageError(f"--resume: the run in {folder.path} is at step {step}, past --steps {settings.steps}")
    corpus = read_corpus(settings.data, settings.sequence)
    if corpus.sha256 != recorded["text_sha256"]:
        raise UsageError(f"--resume: {corpus.name} has changed since the run in {folder.path} began")
    print(f"note: resuming at step {step}")
    return settings, corpus


def _report(folder: "RunFolder", step: int, bytes_per_second: float | None) -> None:
    """Prints what the run came to; `bytes_per_second` is None if it had been finished before."""
    held_out = folder.curve.held_out()
    for when, (_, loss) in (("before", held_out[0]), ("after", held_out[-1])):
        print(f"held-out loss {when}: {loss:.3f} nats per byte = {loss / math.log(2):.3f} bits per byte")
    if bytes_per_second is None:
        print(f"note: the run was at step {step} already; a larger --steps continues it")
    else:
        print(f"speed: {bytes_per_second:,.0f} bytes (tokens) per second")
    print(f"curve: {folder.curve.plot_path} and {folder.curve.csv_path}")
    print(f"checkpoint: {folder.checkpoint_path(step)}")


if __name__ == "__main__":
    sys.exit(main())
