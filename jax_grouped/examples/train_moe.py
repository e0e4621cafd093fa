"""Trains a byte-level mixture-of-experts language model: `python3 -m jax_grouped.examples.train_moe --help`.

The modules: `moe_lm` and `moe_lm_nnx` are the model, behind the interface in `model`. `parallel` is a step of it on one
device or several, and `training` is the loop. `text_data` reads the text, `run_folder` and `loss_curve` keep the files
of a run, and `settings` parses the command line.
"""

import math
import signal
import sys
import textwrap
from collections.abc import Sequence

import jax

import jax_grouped as jg
from jax_grouped.examples.settings import UsageError, count_devices, parse
from jax_grouped.examples.text_data import read_corpus


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program with these arguments, by default those of the process, and returns its exit status.

    It is 0; or, after one line that says why, 2 for what the user can put right, 130 for Ctrl-C and 143 for SIGTERM.
    """
    # Python's own handler waits for the end of a compilation. While a run trains, another one saves its last step.
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        return _run(sys.argv[1:] if argv is None else argv)
    except ModuleNotFoundError as error:
        message = f"{str(error.name).partition('.')[0]} is missing: python3 -m pip install 'jax_grouped[examples]'"
    except UsageError as error:
        message = str(error)
    except OSError as error:
        message = f"cannot read or write {error.filename}: {error.strerror}" if error.filename else str(error)
    finally:
        signal.signal(signal.SIGINT, before)
    print(f"train_moe: error: {message}", file=sys.stderr)
    return 2


def _run(argv: Sequence[str]) -> int:
    settings = parse(argv)
    # Slow to load, and not needed to reject a flag.
    from jax_grouped.examples.run_folder import RunFolder
    from jax_grouped.examples.training import backend_name, prepare, sample, train

    backend = backend_name()
    folder = RunFolder(settings.out)
    # Before the folder is made: a wrong option leaves nothing behind.
    if settings.resume:
        folder.check(resume=True)
    else:
        corpus = read_corpus(settings.data, settings.sequence)
        count_devices(settings, jax.device_count())
    with folder.locked():
        if settings.resume:
            recorded, text_sha256 = folder.read_settings()
            settings = parse(argv, recorded)
            corpus = read_corpus(settings.data, settings.sequence)
            if corpus.sha256 != text_sha256:
                raise UsageError(f"--resume: {corpus.name} has changed since the run in {folder.path} began")
        else:
            folder.check(resume=False)
        run = prepare(settings, count_devices(settings, jax.device_count()))
        print(f"jax_grouped {jg.__version__}, JAX {jax.__version__}, {backend}")
        print(f"text: {corpus.name}, {len(corpus.train):,} bytes to train on, {len(corpus.held_out):,} held out")
        print(f"model: {run.model}")
        print(f"run: {settings.steps} steps of {settings.batch} x {settings.sequence} bytes in {folder.path}")
        step, state, bytes_per_second, number = train(run, corpus, folder)
    if number is not None:
        print(f"train_moe: interrupted at step {step}, which is saved; --resume continues from there", file=sys.stderr)
        return 128 + number  # As shells report a process that a signal has ended.
    for row in folder.losses:
        if row.held_out is not None and row.step in (0, step):
            when = "after" if row.step else "before"
            print(f"held-out loss {when}: {row.held_out:.3f} nats = {row.held_out / math.log(2):.3f} bits per byte")
    if bytes_per_second is None:
        print(f"note: the run was at step {step} already; a larger --steps continues it")
    else:
        print(f"speed: {bytes_per_second:,.0f} bytes (tokens) per second")
    print(f"files: loss.csv, loss.png, metrics.jsonl, load.png and checkpoints/{step} in {folder.path}")
    if settings.sample:
        prompt, text = sample(run, corpus, state)
        print(f"sample, after a held-out text that ends in {prompt!r}:")
        print(textwrap.indent(text, "    "))
    return 0


if __name__ == "__main__":
    sys.exit(main())
