"""Results as text."""

from collections.abc import Callable

import tabulate

from benchmarks import cublaslt_rates
from benchmarks.peers import OURS
from benchmarks.records import Record, Row


def _number(template: str, value: float | None) -> str:
    return "" if value is None else template.format(value)


def _spread(row: Row) -> str:
    if not row.milliseconds or row.fastest is None or row.slowest is None:
        return ""
    return f"{(row.slowest - row.fastest) / row.milliseconds:.1%}"


def table(record: Record, against: str) -> str:
    """One line per row, and one about the device and the versions.

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
        "ms": lambda row: _number("{:.3f}", row.milliseconds),
        "spread": _spread,
        "TFLOP/s": lambda row: _number("{:.4g}", row.tflops),
        "of dense": lambda row: _number("{:.0%}", row.of_dense),
        "vs cuBLASLt": lambda row: _number("{:.1%}", row.of_cublaslt),
        "in kernel": lambda row: _number("{:.1%}", row.kernel_share),
        f"speed vs {against}": speed,
        "difference": lambda row: _number("{:.1e}", row.difference),
        "note": lambda row: row.reason or "",
    }
    lines = [[text(row) for text in columns.values()] for row in record.rows]
    # A column that no row fills (no H200, no --verify) is left out.
    shown = [i for i in range(len(columns)) if any(line[i] for line in lines)]
    headers = list(columns)
    body = tabulate.tabulate(
        [[line[i] for i in shown] for line in lines],
        headers=[headers[i] for i in shown],
        disable_numparse=True,
        colalign=["right" if headers[i] in ("ms", "spread", "TFLOP/s") else "left" for i in shown],
    )
    versions = ", ".join(f"{name} {version}" for name, version in record.versions.items())
    return f"{body}\n\n{record.device}, bfloat16, seed {record.settings['seed']}, {record.date}\n{versions}"


def cublaslt_summary(record: Record) -> str | None:
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
