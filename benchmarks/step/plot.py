"""Results as a picture: one panel per type of the kernel, a bar per variant for every shape and skew."""

from pathlib import Path

from benchmarks.plot import draw_bars, panels
from benchmarks.records import Record
from benchmarks.step.records import Row, speeds
from benchmarks.step.variants import BASE


def plot(record: Record[Row], path: Path) -> None:
    """Draws the speeds relative to `BASE` into a PNG file."""
    relative = speeds(record.rows, BASE)
    kernels = list(dict.fromkeys(row.kernel_dtype for row in record.rows))
    variants = list(dict.fromkeys(row.variant for row in record.rows))
    figure = panels(record, len(kernels), len(variants))
    for axes, kernel in zip(figure.axes, kernels, strict=True):
        rows = [row for row in record.rows if row.kernel_dtype == kernel]
        bars = [(row.title, row.skew, row.variant, relative.get(row.labels, 0.0)) for row in rows]
        draw_bars(axes, bars, variants)
        axes.axhline(1, color="gray", linestyle="dashed")
        axes.set_title(f"{kernel} kernel")
        axes.set_ylabel(f"speed relative to {BASE}")
        axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path, dpi=150)
