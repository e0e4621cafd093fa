"""Measures a training step of one layer, by recipe: `python3 -m benchmarks.step --help`."""

import argparse
import os
from collections.abc import Sequence

from benchmarks import cli, cublaslt_rates
from benchmarks.cases import LAYERS
from benchmarks.records import Record
from benchmarks.shapes import SHAPES, SKEWS
from benchmarks.step.plot import plot
from benchmarks.step.records import Row
from benchmarks.step.runner import Plan, run
from benchmarks.step.table import parts_table, table
from benchmarks.step.variants import BASE, LOADERS, SLOW

_DESCRIPTION = f"""\
Measures the step of one layer, from x, its kernel and dy to y, dx and the kernel's gradient, quantization included:
prints a table, and writes the rows as JSON and as a plot.

Operands are normally distributed; x and dy are bfloat16. A figure is the median of several blocks of back-to-back calls
after a warm-up, and is held against {BASE}, which is the same step without a recipe. TFLOP/s count useful operations
only, 3 * 2 K N for every row that belongs to a group. The layer `accumulating` adds its kernel's gradient to that of
earlier steps; `mlp` has a gate-up projection of that size, SwiGLU and a projection of half of it back to K features.
With --clock device, a second table tells where the time goes; --clock call is for steps so short that the host can't
dispatch them one right after the other: each is a CUDA graph, and what lies between them does not count."""

_EPILOG = """\
`cached` variants are given the quantized kernel, as microbatches are. Peers compute in bfloat16; those that cannot be
imported are skipped."""

_KERNELS = ("bfloat16", "float32")


def _parser() -> argparse.ArgumentParser:
    parser = cli.new_parser("python3 -m benchmarks.step", _DESCRIPTION, _EPILOG)
    cli.add_choices(parser, "shapes", list(SHAPES), cublaslt_rates.SHAPES)
    cli.add_choices(parser, "layers", list(LAYERS), ("dense",))
    cli.add_choices(parser, "skews", SKEWS, ("equal", "lognormal"))
    cli.add_choices(parser, "kernels", _KERNELS, _KERNELS)
    cli.add_choices(parser, "variants", list(LOADERS), [name for name in LOADERS if name not in SLOW])
    cli.add_measurement_options(parser, seconds=1.0, device_clock="each block", call_clock=True)
    return parser


def _measure(arguments: argparse.Namespace) -> Record[Row]:
    if arguments.clock == "call":
        # Read when JAX is first used: every step is one CUDA graph, however few kernels it has.
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_graph_min_graph_size=1"
    variants = cli.load_peers(arguments.variants, LOADERS)
    plan = Plan(
        shapes=[SHAPES[name] for name in arguments.shapes],
        skews=arguments.skews,
        kernels=arguments.kernels,
        variants=variants,
        **cli.how(arguments),
        layers=arguments.layers,
        single_calls=arguments.clock == "call",
    )
    return cli.collect(arguments, run(plan) if variants else ())


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program with these arguments, or those of the command line, and returns its exit status."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    record = cli.obtain(parser, arguments, Row.parse, _measure)
    cli.show(arguments, record, plot, table(record), parts_table(record))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
