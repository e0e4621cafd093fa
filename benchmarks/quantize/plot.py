"""Results as a picture: a line per case, shape and skew, on it a dot per peer."""

from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.plot import heading
from benchmarks.quantize.records import Row
from benchmarks.records import Record


def plot(record: Record[Row], path: Path) -> None:
    """Draws the fractions of the copy's rate into a PNG file."""
    rows = [row for row in record.rows if row.of_copy is not None]
    # Like cases together, however the run was ordered.
    cases = list(dict.fromkeys(row.case for row in rows))
    lines = sorted(dict.fromkeys(map(_line, rows)), key=lambda line: cases.index(line[0]))
    figure = Figure(figsize=(9, 1.5 + 0.2 * len(lines)), layout="constrained")
    axes = figure.subplots()
    for peer in dict.fromkeys(row.peer for row in rows):
        dots = [(100 * (row.of_copy or 0), lines.index(_line(row))) for row in rows if row.peer == peer]
        axes.scatter([x for x, _ in dots], [y for _, y in dots], label=peer)
    axes.axvline(100, color="gray", linestyle="dashed", label="copy")
    axes.set_yticks(range(len(lines)), [", ".join(line) for line in lines], fontsize="small")
    axes.invert_yaxis()
    axes.margins(y=0.5 / max(len(lines), 1))
    axes.set_xlim(left=0)
    axes.grid(axis="y", alpha=0.3)
    axes.set_xlabel("% of the copy's GB/s")
    axes.legend(fontsize="small", loc="lower left", bbox_to_anchor=(0, 1), ncols=4)
    figure.suptitle(heading(record), fontsize="medium")
    figure.savefig(path, dpi=150)


def _line(row: Row) -> tuple[str, str, str]:
    return row.case, row.shape.name, row.skew
