"""Trains a byte-level mixture-of-experts language model: `python3 -m jax_grouped.examples.train_moe --help`.

The modules: `moe_lm` and `moe_lm_nnx` are the model, behind the interface in `model`, and `sample` has it write.
`step` is the work of one device, `parallel` divides it between devices, and `training` is the loop. `text_data` reads
the text; `run_folder`, `loss_curve`, `metrics` and `events` keep the files of a run, `stopping` handles signals, and
`settings` parses the command line.
"""

import functools
import math
import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax

import jax_grouped as jg
from jax_grouped.examples.settings import Settings, UsageError, devices_of, parse
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
    argv = sys.argv[1:] if argv is None else argv
    settings = parse(argv)
    try:
        # Slow to load, and not needed to reject a flag.
        import jax_grouped.examples.run_folder as run_folder
        import jax_grouped.examples.training as training
    except ModuleNotFoundError as error:
        raise UsageError(f"{error.name} is missing: python3 -m pip install 'jax_grouped[examples]'") from None
    backend = training.backend_name()

    folder = run_folder.RunFolder(settings.out)
    if settings.resume:
        # Raises where there is no run, and so nothing to lock.
        folder.latest_step()
    else:
        # Before the folder is made: a wrong option leaves nothing behind.
        corpus = read_corpus(settings.data, settings.sequence)
        devices_of(settings, jax.device_count())
    with folder.locked():
        if settings.resume:
            settings, corpus = _resumed(argv, folder)
        else:
            folder.check_empty()
        run = training.prepare(settings, devices_of(settings, jax.device_count()))
        print(f"jax_grouped {jg.__version__}, JAX {jax.__version__}, {backend}, {run.placement}")
        print(f"text: {corpus.name}, {len(corpus.train):,} bytes to train on, {len(corpus.held_out):,} held out")
        print(f"model: {run.model}")
        print(
            f"run: {settings.steps} steps of {settings.batch} x {settings.sequence} bytes in {folder.path}", flush=True
        )
        trained = training.train(run, corpus, folder, stop)
        _report(folder, settings.steps, trained.bytes_per_second)
    if settings.sample:
        prompt, text = training.sample(run, corpus, trained.state)
        print(f"sample, after a held-out text that ends in {prompt!r}:")
        print(textwrap.indent(text, "    "))
    del trained  # Frees the state before others are made.
    if settings.scaling:
        scaling = training.measure_scaling(run, corpus)
        print(
            f"scaling: {scaling.together:,.0f} bytes per second on {scaling.devices} devices, {scaling.alone:,.0f} on "
            f"one with its part of the batch: {100 * scaling.efficiency:.1f} % efficiency"
        )


def _resumed(argv: Sequence[str], folder: "RunFolder") -> tuple[Settings, Corpus]:
    """Returns the settings and the text to continue the run in the folder with."""
    step, (recorded, text_sha256) = folder.latest_step(), folder.recorded()
    settings = parse(argv, recorded)
    if settings.steps < step:
        raise UsageError(f"--resume: the run in {folder.path} is at step {step}, past --steps {settings.steps}")
    corpus = read_corpus(settings.data, settings.sequence)
    if corpus.sha256 != text_sha256:
        raise UsageError(f"--resume: {corpus.name} has changed since the run in {folder.path} began")
    return settings, corpus


def _report(folder: "RunFolder", step: int, bytes_per_second: float | None) -> None:
    """Prints the results of the run; `bytes_per_second` is None if it had been finished before."""
    held_out = {row.step: row.held_out for row in folder.rows}
    for when, evaluated in (("before", 0), ("after", step)):
        if loss := held_out.get(evaluated):
            print(f"held-out loss {when}: {loss:.3f} nats per byte = {loss / math.log(2):.3f} bits per byte")
    if bytes_per_second is None:
        print(f"note: the run was at step {step} already; a larger --steps continues it")
    else:
        print(f"speed: {bytes_per_second:,.0f} bytes (tokens) per second")
    print(f"curve: {folder.plot_path} and {folder.csv_path}")
    if folder.metrics:
        print(f"metrics: {folder.metrics_path}, and the load of the experts {folder.load_path}")
    print(f"checkpoint: {folder.checkpoint_path(step)}")


if __name__ == "__main__":
    sys.exit(main())
