"""Measures how training steps scale with tokens, experts and skew: `python3 -m benchmarks.scaling --help`."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks import cli, cublaslt_rates
from benchmarks.cases import DTYPE
from benchmarks.plot import draw_bars, heading
from benchmarks.records import Record
from benchmarks.shapes import SHAPES, Shape
from benchmarks.step.records import Row
from benchmarks.step.runner import Plan, run
from benchmarks.step.table import table
from benchmarks.step.variants import LOADERS, Variant

_DESCRIPTION = """\
Measures the step of one layer as `python3 -m benchmarks.step` does, with a bfloat16 kernel, for 16 to 8192 tokens per
expert, for 1 to 512 experts that share as many tokens, and for group sizes from equal to all in one group. Draws the
three, and what they reach beside the limits of memory and of tensor cores."""

_EPILOG = "Variants that cannot run here are skipped."

#: Shapes by what differs among them.
SWEEPS: dict[str, list[Shape]] = {
    "tokens": [Shape(f"{2**i} tokens", 32, 32 * 2**i, 7168, 4096) for i in range(4, 14)],
    "experts": [Shape(f"{2**i} experts", 2**i, 32768, 2048, 1536) for i in range(10)],
    "skew": [SHAPES["dsv3 up"]],
}
_SKEWS = ("equal", "lognormal", "zipf", "alternate_empty", "one_hot")
_VARIANTS = ("bf16", "block", "block cached", "delayed cached", "torch._grouped_mm")


def intensity(shape: Shape) -> float:
    """Operations of a step in bfloat16 per byte that it must read or write: each of its six arrays once."""
    tokens, kernel = shape.tokens * (shape.K + shape.N), shape.num_groups * shape.K * shape.N
    return 3 * 2 * shape.tokens * shape.K * shape.N / (DTYPE.itemsize * 2 * (tokens + kernel))


def plot(record: Record[Row], path: Path) -> None:
    """Draws TFLOP/s into a PNG file."""
    rows = [row for row in record.rows if row.tflops]
    variants = list(dict.fromkeys(row.variant for row in rows))
    figure = Figure(figsize=(12, 9), layout="constrained")
    tokens, experts, skew, roofline = figure.subplots(2, 2).ravel()
    figure.suptitle(heading(record), fontsize="medium")
    _draw(tokens, _of(rows, "tokens"), variants, lambda shape: shape.tokens / shape.num_groups)
    same = SWEEPS["tokens"][0]
    tokens.set(xlabel="tokens per expert", title=f"{same.num_groups} experts, K {same.K}, N {same.N}")
    _draw(experts, _of(rows, "experts"), variants, lambda shape: shape.num_groups)
    same = SWEEPS["experts"][0]
    experts.set(xlabel="experts", title=f"{same.tokens} tokens, K {same.K}, N {same.N}")
    draw_bars(skew, [("", row.skew, row.variant, row.tflops or 0.0) for row in _of(rows, "skew")], variants)
    skew.set(title=f"{SWEEPS['skew'][0].name}, by group sizes")
    _draw(roofline, [row for row in rows if row.skew == "equal"], variants, intensity, style="o")
    roofline.set(xlabel="operations per byte in bfloat16", yscale="log", title="beside the limits of the device")
    if cublaslt_rates.DEVICE in record.device:
        _limits(roofline, sorted(intensity(row.shape) for row in rows))
    for axes in (tokens, experts, skew):
        axes.set_ylabel("TFLOP/s")
    tokens.legend(fontsize="small")
    figure.savefig(path, dpi=150)


def _of(rows: list[Row], sweep: str) -> list[Row]:
    return [row for row in rows if row.shape in SWEEPS[sweep] and (sweep == "skew" or row.skew == "equal")]


def _draw(axes: Axes, rows: list[Row], variants: list[str], place: Callable[[Shape], float], style: str = "o-") -> None:
    for index, variant in enumerate(variants):
        points = sorted((place(row.shape), row.tflops) for row in rows if row.variant == variant)
        if points:
            axes.plot(*zip(*points, strict=True), style, color=f"C{index}", markersize=3, linewidth=1, label=variant)
    axes.set_xscale("log", base=2)


def _limits(axes: Axes, intensities: list[float]) -> None:
    rates = {"dense bf16": cublaslt_rates.DENSE_BF16}
    rates |= {f"dense FP8, {scales}": rate for scales, rate in cublaslt_rates.DENSE_FP8.items()}
    for (name, rate), style in zip(rates.items(), (":", "--", "-."), strict=True):
        limit = [min(rate, one * cublaslt_rates.COPY / 1e3) for one in intensities]
        axes.plot(intensities, limit, style, color="gray", label=name)
    axes.legend(fontsize="small")


def _rows(arguments: argparse.Namespace, variants: dict[str, Variant]) -> Iterator[Row]:
    for sweep in arguments.sweeps:
        skews = list(_SKEWS) if sweep == "skew" else ["equal"]
        yield from run(Plan(SWEEPS[sweep], skews, [DTYPE.name], variants, **cli.how(arguments)))


def _measure(arguments: argparse.Namespace) -> Record[Row]:
    variants = cli.load_peers(arguments.variants, LOADERS)
    return cli.collect(arguments, _rows(arguments, variants) if variants else ())


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program with these arguments, or those of the command line, and returns its exit status."""
    parser = cli.new_parser("python3 -m benchmarks.scaling", _DESCRIPTION, _EPILOG)
    cli.add_choices(parser, "sweeps", list(SWEEPS), tuple(SWEEPS))
    cli.add_choices(parser, "variants", list(LOADERS), _VARIANTS)
    cli.add_measurement_options(parser, seconds=0.5, device_clock="each block")
    arguments = parser.parse_args(argv)
    record = cli.obtain(parser, arguments, Row.parse, _measure)
    cli.show(arguments, record, plot, table(record))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
