"""Results as a picture: one panel per operation, a bar per peer for every shape and skew."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks import cublaslt_rates
from benchmarks.records import Record, Row


def plot(record: Record[Row], path: Path) -> None:
    """Draws TFLOP/s into a PNG file. On the device they hold for, cuBLASLt's own rates are drawn as well."""
    ops = list(dict.fromkeys(row.op for row in record.rows))
    peers = list(dict.fromkeys(row.peer for row in record.rows))
    figure = panels(record, len(ops), len(peers))
    on_reference = cublaslt_rates.DEVICE in record.device
    for axes, op in zip(figure.axes, ops, strict=True):
        _panel(axes, [row for row in record.rows if row.op == op], peers, on_reference)
        axes.set_title(op)
    figure.savefig(path, dpi=150)


def panels(record: Record[Any], count: int, bars: int) -> Figure:
    """A figure with that many panels, one above the other, for so many bars for each shape and skew."""
    groups = len({(row.shape.name, row.skew) for row in record.rows})
    # Wide enough for the names of the groups, however few their bars are.
    width = max(6.0, 2 + groups * max(0.95, 0.15 * (bars + 1)))
    figure = Figure(figsize=(width, 1 + 2.8 * count), layout="constrained")
    figure.subplots(count)
    figure.suptitle(heading(record), fontsize="medium")
    return figure


def heading(record: Record[Any]) -> str:
    """What all rows of the record depend on, in one line."""
    shown = [name for name in ("jax", "torch", "cuBLASLt") if name in record.versions]
    versions = ", ".join(f"{name} {record.versions[name]}" for name in shown)
    return f"{record.device}, bfloat16, {versions}, {record.date[:10]}"


def _panel(axes: Axes, rows: list[Row], peers: list[str], on_reference: bool) -> None:
    groups = draw_bars(axes, [(row.shape.name, row.skew, row.peer, row.tflops or 0.0) for row in rows], peers)
    if on_reference:
        compared = {(row.shape.name, row.skew) for row in rows if row.of_cublaslt}
        marks = {i: cublaslt_rates.RATES[*group, rows[0].op] for i, group in enumerate(groups) if group in compared}
        if marks:
            starts, ends = [i - 0.42 for i in marks], [i + 0.42 for i in marks]
            axes.hlines(list(marks.values()), starts, ends, colors="black", label="cuBLASLt alone")
        axes.axhline(cublaslt_rates.DENSE_BF16, color="gray", linestyle="dashed", label="dense 8192³")
    axes.set_ylabel("TFLOP/s")
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))


def draw_bars(axes: Axes, bars: list[tuple[str, str, str, float]], labels: list[str]) -> list[tuple[str, str]]:
    """Draws a bar per shape, skew, label and height; those of one shape and skew stand together, in the labels' order.

    Returns:
        The shapes and skews from left to right, each one wide, the first around 0.
    """
    groups = list(dict.fromkeys((shape, skew) for shape, skew, _, _ in bars))
    width = 0.8 / len(labels)
    for index, label in enumerate(labels):
        of_label = {groups.index((shape, skew)): height for shape, skew, name, height in bars if name == label}
        places = [place - 0.4 + (index + 0.5) * width for place in of_label]
        axes.bar(places, list(of_label.values()), width, label=label)
    axes.set_xticks(range(len(groups)), [f"{shape}\n{skew}" for shape, skew in groups], fontsize="small")
    return groups
