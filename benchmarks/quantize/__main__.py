"""Measures quantization by this library and by its peers: `python3 -m benchmarks.quantize --help`."""

import argparse
from collections.abc import Sequence

from benchmarks import cli
from benchmarks.quantize import cases
from benchmarks.quantize.cases import CASES, SHAPES, SKEWS, combinations
from benchmarks.quantize.peers import LOADERS
from benchmarks.quantize.plot import plot
from benchmarks.quantize.records import Row
from benchmarks.quantize.runner import Plan, run
from benchmarks.quantize.table import table
from benchmarks.records import Record

_DESCRIPTION = """\
Measures quantization to FP8: prints a table, and writes the rows as JSON and as a plot.

Tokens are normally distributed bfloat16. A figure is the median of several blocks of back-to-back calls after a
warm-up. GB/s count the bytes that must move: the input once (twice where the scale of a whole group must be found
first), and everything that is written, with its padding. They are held against a copy, which is measured first."""

_EPILOG = """\
Without options, all rows of the table are measured; --shapes, --skews and --cases choose among them. Calls that are too
short for the host's clock are timed on the GPU's own. Peers that cannot be imported are skipped, and have rows only for
what they offer."""


def _parser() -> argparse.ArgumentParser:
    parser = cli.new_parser("python3 -m benchmarks.quantize", _DESCRIPTION, _EPILOG)
    cli.add_choices(parser, "shapes", list(SHAPES), tuple(SHAPES))
    cli.add_choices(parser, "skews", SKEWS, SKEWS)
    cli.add_choices(parser, "cases", list(CASES), tuple(CASES))
    cli.add_choices(parser, "peers", list(LOADERS), tuple(LOADERS))
    cli.add_measurement_options(parser, seconds=0.2, device_clock="each call")
    return parser


def _measure(arguments: argparse.Namespace) -> Record[Row]:
    peers = cli.load_peers(arguments.peers, LOADERS)
    plan = Plan(
        copy=cases.COPY,
        combinations=combinations(arguments.shapes, arguments.skews, arguments.cases),
        peers=peers,
        **cli.how(arguments),
    )
    return cli.collect(arguments, run(plan) if peers else ())


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program with these arguments, or those of the command line, and returns its exit status."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if not combinations(arguments.shapes, arguments.skews, arguments.cases):
        parser.error("the table has no row with such a shape, skew and case")
    record = cli.obtain(parser, arguments, Row.parse, _measure)
    cli.show(arguments, record, plot, table(record))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
