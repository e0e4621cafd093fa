"""Results as text."""

from collections.abc import Callable

from benchmarks import cublaslt_rates
from benchmarks.quantize.records import Row
from benchmarks.records import Record
from benchmarks.table import footer, number, render, spread


def table(record: Record[Row]) -> str:
    """The table of quantizations."""
    columns: dict[str, Callable[[Row], str]] = {
        "shape": lambda row: row.shape.name,
        "sizes": lambda row: row.shape.dims,
        "skew": lambda row: row.skew,
        "case": lambda row: row.case,
        "peer": lambda row: row.peer,
        "backend": lambda row: row.backend,
        "clock": lambda row: row.clock,
        "MB": lambda row: number("{:.4g}", row.bytes_moved / 1e6),
        "ms": lambda row: number("{:.4f}", row.milliseconds),
        "spread": spread,
        "GB/s": lambda row: number("{:.4g}", row.gbps),
        "of copy": lambda row: number("{:.1%}", row.of_copy),
        f"of {cublaslt_rates.COPY / 1e3:g} TB/s": lambda row: number("{:.1%}", row.of_reference),
        "note": lambda row: row.reason or "",
    }
    return f"{render(record.rows, columns, right=('MB', 'ms', 'spread', 'GB/s'))}\n\n{footer(record)}"
