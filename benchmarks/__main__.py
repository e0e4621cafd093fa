"""Measures grouped products of this library and of its peers: `python3 -m benchmarks --help`."""

import argparse
from collections.abc import Sequence

from benchmarks import cli, cublaslt_rates
from benchmarks.cases import OPS
from benchmarks.peers import FP8, LOADERS, OURS, load
from benchmarks.plot import plot
from benchmarks.records import Record, Row
from benchmarks.runner import Plan, run
from benchmarks.shapes import SHAPES, SKEWS
from benchmarks.table import cublaslt_summary, table

_DESCRIPTION = """\
Measures grouped matmuls: prints a table, and writes the rows as JSON and as a plot.

Operands are normally distributed bfloat16. A figure is the median of several blocks of back-to-back calls after a
warm-up. TFLOP/s count useful operations only, 2 K N for every row that belongs to a group."""

_EPILOG = """\
JAX and torch share one GPU here, so JAX takes memory only as it needs it (XLA_PYTHON_CLIENT_PREALLOCATE=false) unless
the environment says otherwise. Peers that cannot be imported are skipped. `fp8` ones and torch._scaled_grouped_mm (one
scale per row and per column) are given operands that are quantized already, and compute single products only."""


def _parser() -> argparse.ArgumentParser:
    parser = cli.new_parser("python3 -m benchmarks", _DESCRIPTION, _EPILOG)
    cli.add_choices(parser, "shapes", list(SHAPES), cublaslt_rates.SHAPES)
    cli.add_choices(parser, "skews", SKEWS, ("equal", "lognormal"))
    cli.add_choices(parser, "ops", list(OPS), ("fprop", "wgrad", "wgrad f32", "backward"))
    cli.add_choices(parser, "peers", list(LOADERS), [name for name in LOADERS if name not in FP8])
    parser.add_argument(
        "--against", choices=list(LOADERS), default=OURS, metavar="PEER", help="give speeds relative to this peer"
    )
    parser.add_argument("--verify", action="store_true", help=f"compare every result with that of {OURS} first")
    cli.add_measurement_options(parser, seconds=1.0, device_clock="each block")
    return parser


def _measure(arguments: argparse.Namespace) -> Record[Row]:
    peers = cli.load_peers(arguments.peers, LOADERS)
    plan = Plan(
        shapes=[SHAPES[name] for name in arguments.shapes],
        skews=arguments.skews,
        ops=arguments.ops,
        peers=peers,
        **cli.how(arguments),
        reference=load([OURS], LOADERS)[0][OURS] if arguments.verify else None,
    )
    return cli.collect(arguments, run(plan) if peers else ())


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program with these arguments, or those of the command line, and returns its exit status."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    record = cli.obtain(parser, arguments, Row.parse, _measure)
    texts = table(record, arguments.against), cublaslt_summary(record)
    cli.show(arguments, record, plot, "\n".join(filter(None, texts)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
