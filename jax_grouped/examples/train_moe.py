"""Trains a byte-level mixture-of-experts language model: `python3 -m jax_grouped.examples.train_moe --help`.

The modules: `moe_lm` and `moe_lm_nnx` are the model, behind the interface in `model`. `parallel` is a step of it on one
device or several, and `training` is the loop. `text_data` reads the text, `run_folder` and `loss_curve` keep the files
of a run, `processes` has what several processes need, and signals, and `settings` parses the command line.
"""

import contextlib
import dataclasses
import io
import math
import os
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import jax

import jax_grouped as jg
from jax_grouped.examples.processes import Signals, in_all_processes, join_processes
from jax_grouped.examples.settings import Settings, UsageError, count_devices, parse
from jax_grouped.examples.text_data import read_corpus


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program with these arguments, by default those of the process, and returns its exit status.

    It is 0; or, after one line that says why, 2 for what the user can put right, 130 for Ctrl-C and 143 for SIGTERM.
    If it must be told in one of several processes, the others end with 2 by a SystemExit.
    """
    argv, signals = sys.argv[1:] if argv is None else argv, Signals()
    try:
        settings = parse(argv)
        with signals.handled(Path(settings.out)):
            join_processes(settings)
            return _run(argv, settings, signals)
    except ModuleNotFoundError as error:
        message = f"{str(error.name).partition('.')[0]} is missing: python3 -m pip install 'jax_grouped[examples]'"
    except UsageError as error:
        message = str(error)
    except OSError as error:
        message = f"cannot read or write {error.filename}: {error.strerror}" if error.filename else str(error)
    print(f"train_moe: error: {message}", file=sys.stderr)
    if signals.trains and jax.process_count() > 1:
        # The other processes wait for this one, and Python's exit would wait for them.
        sys.stdout.flush()
        os._exit(2)
    return 2


def _run(argv: Sequence[str], settings: Settings, signals: Signals) -> int:
    # Slow to load, and not needed to reject a flag.
    from jax_grouped.examples.run_folder import RunFolder
    from jax_grouped.examples.training import backend_name, counted, prepare, sample, train

    backend, processes = backend_name(), jax.process_count()
    folder = RunFolder(settings.out)
    with contextlib.ExitStack() as stack:
        if jax.process_index() > 0:
            signals.prints = False
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        with in_all_processes() as same:
            # Before the folder is made: a wrong option leaves nothing behind.
            if settings.resume:
                folder.check(resume=True)
            else:
                corpus = read_corpus(settings.data, settings.sequence)
                settings = _joint(settings, processes)
                count_devices(settings, jax.device_count(), processes)
            stack.enter_context(folder.locked())
            if settings.resume:
                recorded, text_sha256 = folder.read_settings()
                settings = _joint(parse(argv, recorded), processes)
                corpus = read_corpus(settings.data, settings.sequence)
                if corpus.sha256 != text_sha256:
                    raise UsageError(f"--resume: {corpus.name} has changed since the run in {folder.path} began")
            else:
                folder.check(resume=False)
            run = prepare(settings, count_devices(settings, jax.device_count(), processes))
            same += [dataclasses.replace(settings, process_id=None), corpus.sha256]
        print(f"jax_grouped {jg.__version__}, JAX {jax.__version__}, {backend}")
        print(f"text: {corpus.name}, {len(corpus.train):,} bytes to train on, {len(corpus.held_out):,} held out")
        print(f"model: {run.model}")
        steps = counted(settings.steps, "step")
        print(f"run: {steps} of {settings.batch} x {settings.sequence} bytes in {folder.path}")
        step, state, bytes_per_second, number = train(run, corpus, folder, signals)
        if number is not None:
            text = f"train_moe: interrupted at step {step}, which is saved; --resume continues from there\n"
            sys.stderr.write(text if signals.prints else "")
            return 128 + number  # As shells report a process that a signal has ended.
        if bytes_per_second is None:
            print(f"note: the run was at step {step} already; a larger --steps continues it")
        else:
            print(f"done: step {step}, at {bytes_per_second:,.0f} bytes (tokens) per second")
        first, last = folder.losses[0].held_out, folder.losses[-1].held_out
        if first is not None and last is not None:
            after = f"{last:.3f} after, or {last / math.log(2):.3f} bits"
            print(f"held-out loss: {first:.3f} nats per byte before training, {after}")
        print(f"files in {folder.path}:")
        print("  loss.png and load.png show the losses, and how evenly the experts are used")
        print("  metrics.jsonl holds the numbers of both and more; loss.csv holds the losses alone")
        print(f"  checkpoints/{step} is the model; --resume with a larger --steps trains it further")
        if settings.sample:
            prompt, text = sample(run, corpus, state)
            print(f"sample, after a held-out text that ends in {prompt!r}:")
            print(textwrap.indent(text, "    "))
        return 0


def _joint(settings: Settings, processes: int) -> Settings:
    """Returns settings with which none of several processes trains alone."""
    alone = processes > 1 and settings.parallel == "none"
    return dataclasses.replace(settings, parallel="expert", devices=None) if alone else settings


if __name__ == "__main__":
    sys.exit(main())
