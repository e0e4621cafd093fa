"""Measures grouped products of this library and of its peers: `python3 -m benchmarks --help`."""

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import cublaslt_rates
from benchmarks.cases import OPS
from benchmarks.peers import LOADERS, OURS, load
from benchmarks.plot import plot
from benchmarks.records import Record, new_record
from benchmarks.runner import Plan, run
from benchmarks.shapes import SHAPES, SKEWS
from benchmarks.table import cublaslt_summary, table

_DESCRIPTION = """\
Measures grouped matmuls: prints a table, and writes the rows as JSON and as a plot.

Operands are normally distributed bfloat16. A figure is the median of several blocks of back-to-back calls after a
warm-up. TFLOP/s count useful operations only, 2 K N for every row that belongs to a group."""

_EPILOG = """\
JAX and torch share one GPU here, so JAX takes memory only as it needs it (XLA_PYTHON_CLIENT_PREALLOCATE=false) unless
the environment says otherwise. Peers that cannot be imported are skipped."""


def _positive(convert: type[int] | type[float]) -> Callable[[str], float]:
    def parse(text: str) -> float:
        value = convert(text)
        if value <= 0:
            raise argparse.ArgumentTypeError(f"must be positive, got {text}")
        return value

    # Argparse names the type when the text is no number at all.
    parse.__name__ = convert.__name__
    return parse


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python3 -m benchmarks",
        usage="%(prog)s [options]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    def choices(name: str, options: Sequence[str], default: Sequence[str]) -> None:
        listed = ", ".join(repr(option) if " " in option else option for option in options)
        metavar = name.removesuffix("s").upper()
        parser.add_argument(
            f"--{name}", nargs="+", choices=options, default=default, metavar=metavar, help=f"among {listed}"
        )

    choices("shapes", list(SHAPES), cublaslt_rates.SHAPES)
    choices("skews", SKEWS, ("equal", "lognormal"))
    choices("ops", list(OPS), ("fprop", "wgrad", "wgrad f32", "backward"))
    choices("peers", list(LOADERS), tuple(LOADERS))
    parser.add_argument(
        "--against", choices=list(LOADERS), default=OURS, metavar="PEER", help="give speeds relative to this peer"
    )
    parser.add_argument("--seed", type=int, default=0, help="of operands and group sizes")
    parser.add_argument("--seconds", type=_positive(float), default=1.0, help="budget of one measurement (default: 1)")
    parser.add_argument("--calls", type=_positive(int), help="calls per block (default: what fits in the budget)")
    parser.add_argument(
        "--clock",
        choices=("host", "device"),
        default="host",
        help="the host's clock, or the GPU's own by a profile of each block (default: host)",
    )
    parser.add_argument("--verify", action="store_true", help=f"compare every result with that of {OURS} first")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the rows into this PNG")
    parser.add_argument("--load", type=Path, metavar="FILE", help="measure nothing, show the rows of an earlier run")
    return parser


def _measure(arguments: argparse.Namespace) -> Record:
    peers, reasons = load(arguments.peers)
    for name, reason in reasons.items():
        print(f"skipped {name}: {reason}")
    plan = Plan(
        shapes=[SHAPES[name] for name in arguments.shapes],
        skews=arguments.skews,
        ops=arguments.ops,
        peers=peers,
        seed=arguments.seed,
        seconds=arguments.seconds,
        calls=arguments.calls,
        device_clock=arguments.clock == "device",
        reference=load([OURS])[0][OURS] if arguments.verify else None,
    )
    record = new_record({"seed": plan.seed, "seconds": plan.seconds, "calls": plan.calls, "clock": arguments.clock})
    for row in run(plan) if peers else ():
        record.rows.append(row)
        result = row.reason or f"{row.milliseconds:.3f} ms"
        print(f"{row.shape.name}, {row.skew}, {row.op}, {row.peer}: {result}", flush=True)
        if arguments.json:
            record.write(arguments.json)  # After every row: a run that is cut short leaves what it measured.
    return record


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program with these arguments, or those of the command line, and returns its exit status."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    for path in (arguments.json, arguments.plot):
        if path and not path.parent.is_dir():
            parser.error(f"{path}: there is no folder {path.parent}")
    # Read when JAX first looks for devices, which nothing has done yet.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if arguments.load:
        try:
            record = Record.read(arguments.load)
        except (OSError, ValueError, TypeError, KeyError) as error:
            parser.error(f"--load: {error}")
    else:
        record = _measure(arguments)
    if not record.rows:
        parser.error("nothing was measured: none of the chosen peers can run here")
    print(f"\n{table(record, arguments.against)}")
    if summary := cublaslt_summary(record):
        print(summary)
    if arguments.plot:
        plot(record, arguments.plot)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
