"""Measures this library and its peers: `python3 -m benchmarks --help`."""

import argparse
import dataclasses
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import fidelity, gpus, memory, model
from benchmarks.cases import OPERATIONS, PAGE, SUITES
from benchmarks.peers import VARIANTS
from benchmarks.plot import FIGURES, draw
from benchmarks.rows import Record, table
from benchmarks.runner import CLOCKS, run
from benchmarks.shapes import SHAPES, SKEWS
from jax_grouped.examples.settings import UsageError
from jax_grouped.kernels.primitive import cuda_devices

_DESCRIPTION = """\
Measures grouped products, training steps, quantization and memory. benchmarks/README.md tells how. JAX and torch share
one GPU, so JAX takes memory only as it needs it (XLA_PYTHON_CLIENT_PREALLOCATE=false) unless the environment says
otherwise. Variants that cannot be loaded are skipped, and have rows only for what they offer."""

#: By axis of the grids: options, and the names that they take.
_AXES: dict[str, tuple[tuple[str, ...], Sequence[str]]] = {
    "shapes": (("--shapes",), list(SHAPES)),
    "operations": (("--ops", "--layers", "--cases"), list(OPERATIONS)),
    "kernels": (("--kernels",), ("bfloat16", "float32")),
    "skews": (("--skews",), SKEWS),
    "variants": (("--variants", "--peers"), [*VARIANTS, *memory.VARIANTS]),
}
RESULTS = Path(__file__).with_name("results")
_SETTINGS = ("clock", "seconds", "calls", "verify")  # Fields of a suite that options replace.


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python3 -m benchmarks", description=_DESCRIPTION)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, command: Callable[[argparse.Namespace], int], help_: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=help_, description=help_)
        added.set_defaults(command=command, parser=added)
        return added

    runs = add("run", _run, "measure suites; several, each in a process of its own")
    help_ = f"{', '.join(SUITES)} (default: those of README.md)"
    runs.add_argument("suites", nargs="*", choices=SUITES, metavar="SUITE", help=help_)
    for axis, (flags, names) in _AXES.items():
        help_ = f"instead of the suite's: {', '.join(map(repr, names))}"
        runs.add_argument(*flags, dest=axis, nargs="+", choices=names, metavar="NAME", help=help_)
    runs.add_argument("--clock", choices=CLOCKS, help="(default: the suite's, but the host's without a GPU)")
    runs.add_argument("--seconds", type=float, help="budget of one measurement (default: the suite's)")
    runs.add_argument("--calls", type=int, help="calls per block (default: as many as fit in the budget)")
    runs.add_argument("--seed", type=int, default=0, help="of operands and group sizes")
    runs.add_argument("--verify", action="store_true", help="compare every result with that of jax_grouped first")
    runs.add_argument("--json", type=Path, metavar="FILE", help="write the rows here; {suite} is the suite's name")
    shows = add("show", _show, "show the rows of an earlier run")
    shows.add_argument("file", type=Path, metavar="FILE")
    for added in (runs, shows):
        added.add_argument("--against", metavar="VARIANT", help="give speeds relative to this variant")
    losses = add("fidelity", fidelity.compare, "compare what a model learns in FP8 and in bfloat16")
    losses.add_argument("--runs", type=Path, nargs="+", required=True, metavar="DIR", help="folders of finished runs")
    losses.add_argument("--within", type=float, default=1.0, help="percent of bf16's loss (default: 1)")
    scales = add("gpus", gpus.measure, "measure a layer on one GPU and on all, with as much work on each")
    scales.add_argument("--layers", nargs="+", choices=gpus.LAYERS, default=[*gpus.LAYERS], metavar="NAME")
    scales.add_argument("--variants", nargs="+", choices=gpus.RECIPES, default=[*gpus.RECIPES], metavar="NAME")
    scales.add_argument("--capacity-factor", type=float, default=1.25, help="of the layer (default: 1.25)")
    steps = add("model", model.measure, "measure training steps of whole models")
    steps.add_argument("--models", nargs="+", choices=model.MODELS, default=[*model.MODELS], metavar="NAME")
    steps.add_argument("--variants", nargs="+", choices=model.VARIANTS, default=[*model.VARIANTS], metavar="NAME")
    for added in (losses, scales, steps):
        added.add_argument("--json", type=Path, metavar="FILE", help="write the rows here")
    pictures = add("draw", _draw, f"draw the pictures of README.md from stored results: {', '.join(FIGURES)}")
    pictures.add_argument(
        "--results", type=Path, default=RESULTS, metavar="DIR", help="where PREFIX_layer.json and others are"
    )
    pictures.add_argument("--prefix", default="h200", help="of the files (default: h200)")
    pictures.add_argument("--to", type=Path, default=RESULTS, metavar="DIR", help="where the SVG files go")
    return parser


def _run(arguments: argparse.Namespace) -> int:
    names = arguments.suites or PAGE
    if len(names) > 1 or "{suite}" in str(arguments.json):
        if arguments.json and "{suite}" not in str(arguments.json):
            raise UsageError("the file of several suites needs {suite} in its name")
        options = [word for word in arguments.argv[1:] if word not in arguments.suites]
        failed = []  # They do not keep the others from running.
        for name in names:
            command = ["run", name, *(word.replace("{suite}", name) for word in options)]
            print(f"\n$ python3 -m benchmarks {shlex.join(command)}", flush=True)
            if subprocess.run([sys.executable, "-m", "benchmarks", *command], check=False).returncode != 0:
                failed.append(name)
        if failed:
            print(f"failed: {', '.join(failed)}", file=sys.stderr)
        return 1 if failed else 0
    suite = SUITES[names[0]]
    settings = {name: getattr(arguments, name) or getattr(suite, name) for name in _SETTINGS}
    if settings["clock"] == "graph":
        # Read when JAX is first used: every call is one CUDA graph, however few kernels it has.
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_graph_min_graph_size=1"
    if not arguments.clock and settings["clock"] != "none" and not cuda_devices():
        settings["clock"] = "host"
    suite = dataclasses.replace(suite, **settings)
    chosen = {axis: values for axis in _AXES if (values := getattr(arguments, axis))}
    record = Record.new(names[0], {"seed": arguments.seed, **settings}, suite.device)
    for row in run(suite.cases(arguments.seed, chosen), suite):
        figure = row.note or (f"{row.milliseconds:.4g} ms" if row.milliseconds else f"{row.rate:.2f} {row.unit}")
        record.add(row, f"{row.case}: {figure}", arguments.json)
    if not record.rows:
        raise UsageError("nothing was measured: no variant can run here and offers the chosen cases")
    return _print(record, arguments)


def _show(arguments: argparse.Namespace) -> int:
    try:
        record = Record.read(arguments.file)
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(f"{arguments.file} holds no rows that can be read: {error}") from None
    return _print(record, arguments)


def _print(record: Record, arguments: argparse.Namespace) -> int:
    against = arguments.against or SUITES[record.suite].against
    print(f"\n{table(record, against)}")
    return 0


def _draw(arguments: argparse.Namespace) -> int:
    written = draw(arguments.results, arguments.prefix, arguments.to)
    if not written:
        raise UsageError(f"{arguments.results} has no results named {arguments.prefix}_layer.json and the like")
    print(*written, sep="\n")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    arguments.argv = list(sys.argv[1:] if argv is None else argv)
    # Read when JAX first looks for devices, which nothing has done yet.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    try:
        return arguments.command(arguments)
    except (OSError, UsageError) as error:
        return arguments.parser.error(str(error))


if __name__ == "__main__":
    raise SystemExit(main())
