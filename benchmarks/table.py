"""Results as text."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import tabulate

from benchmarks import cublaslt_rates
from benchmarks.peers import OURS
from benchmarks.records import MeasuredRow, Record, Row

R = TypeVar("R")


def number(template: str, value: float | None) -> str:
    """The number in this format; nothing if there is none."""
    return "" if value is None else template.format(value)


def spread(row: MeasuredRow[Any]) -> str:
    """How far the outermost blocks lie apart, as a share of the median."""
    if not row.milliseconds or row.fastest is None or row.slowest is None:
        return ""
    return f"{(row.slowest - row.fastest) / row.milliseconds:.1%}"


def render(rows: Sequence[R], columns: dict[str, Callable[[R], str]], right: Collection[str]) -> str:
    """One line per row.

    Args:
        rows: what the lines are about.
        columns: what each column says of a row; one that no row fills is left out.
        right: the columns that are aligned to the right.
    """
    lines = [[text(row) for text in columns.values()] for row in rows]
    shown = [i for i in range(len(columns)) if any(line[i] for line in lines)]
    headers = list(columns)
    body: str = tabulate.tabulate(
        [[line[i] for i in shown] for line in lines],
        headers=[headers[i] for i in shown],
        disable_numparse=True,
        colalign=["right" if headers[i] in right else "left" for i in shown],
    )
    return body


def footer(record: Record[Any]) -> str:
    """Two lines about the device and the versions."""
    versions = ", ".join(f"{name} {version}" for name, version in record.versions.items())
    return f"{record.device}, bfloat16, seed {record.settings['seed']}, {record.date}\n{versions}"


def table(record: Record[Row], against: str) -> str:
    """The table of grouped products.

    Args:
        record: the rows.
        against: the peer whose time is divided by each row's time.
    """
    reference = {row.case: row.milliseconds for row in record.rows if row.peer == against}

    def speed(row: Row) -> str:
        base = reference.get(row.case)
        return f"{base / row.milliseconds:.2f}x" if base and row.milliseconds else ""

    columns: dict[str, Callable[[Row], str]] = {
        "shape": lambda row: row.shape.name,
        "sizes": lambda row: row.shape.dims,
        "skew": lambda row: row.skew,
        "op": lambda row: row.op,
        "peer": lambda row: row.peer,
        "ms": lambda row: number("{:.3f}", row.milliseconds),
        "spread": spread,
        "TFLOP/s": lambda row: number("{:.4g}", row.tflops),
        "of dense": lambda row: number("{:.0%}", row.of_dense),
        "vs cuBLASLt": lambda row: number("{:.1%}", row.of_cublaslt),
        "in kernel": lambda row: number("{:.1%}", row.kernel_share),
        f"speed vs {against}": speed,
        "difference": lambda row: number("{:.1e}", row.difference),
        "note": lambda row: row.reason or "",
    }
    return f"{render(record.rows, columns, right=('ms', 'spread', 'TFLOP/s'))}\n\n{footer(record)}"


def cublaslt_summary(record: Record[Row]) -> str | None:
    """Whether this library keeps the expected share of cuBLASLt's own rate; None if no row can be compared."""
    fractions = [(row.of_cublaslt, row.case) for row in record.rows if row.peer == OURS and row.of_cublaslt is not None]
    if not fractions:
        return None
    expected = cublaslt_rates.EXPECTED_FRACTION
    enough = sum(fraction >= expected for fraction, _ in fractions)
    lowest, case = min(fractions)
    return (
        f"{OURS} keeps at least {expected:.0%} of the bare cuBLASLt rate in {enough} of {len(fractions)} rows; "
        f"the lowest is {lowest:.1%} ({', '.join(case)})."
    )
