"""Results as text."""

from collections.abc import Callable
from typing import Any

import tabulate

from benchmarks import cublaslt_rates
from benchmarks.rows import Record, Row
from benchmarks.runner import PARTS

_LEFT = ("shape", "sizes", "operation", "kernel", "skew", "variant", "backend", "clock", "note")


def table(record: Record, against: str) -> str:
    """Returns a line per row with all that was measured, and two lines about the device and the versions.

    Speeds are relative to the variant `against`.
    """

    def rate(row: Row, unit: str) -> float | None:
        return row.rate if row.unit == unit else None

    def share(row: Row, unit: str, reference: float | None) -> float | None:
        value = rate(row, unit)
        return value / reference if value and reference and record.on_reference() else None

    def part(name: str) -> Callable[[Row], float | None]:
        return lambda row: row.parts.get(name) if row.parts else None

    columns: dict[str, tuple[str, Callable[[Any], Any]]] = {
        "shape": ("{}", lambda row: row.case.shape.name),
        "sizes": ("{}", lambda row: row.case.shape.dims),
        "operation": ("{}", lambda row: row.case.operation),
        "kernel": ("{}", lambda row: row.case.kernel_dtype),
        "skew": ("{}", lambda row: row.case.skew),
        "variant": ("{}", lambda row: row.case.variant),
        "backend": ("{}", lambda row: row.backend),
        "clock": ("{}", lambda row: row.clock),
        "GiB": ("{:.2f}", lambda row: rate(row, "GiB")),
        "MB": ("{:.4g}", lambda row: row.count / 1e6 if rate(row, "GB/s") else None),
        "ms": ("{:.4g}", lambda row: row.milliseconds),
        "spread": ("{:.1%}", lambda row: row.milliseconds and (row.slowest - row.fastest) / row.milliseconds),
        f"vs {against}": ("{:.2f}x", lambda row: record.speed(row, against)),
        "TFLOP/s": ("{:.4g}", lambda row: rate(row, "TFLOP/s")),
        "of dense": ("{:.0%}", lambda row: share(row, "TFLOP/s", cublaslt_rates.DENSE_BF16)),
        "vs cuBLASLt": ("{:.1%}", lambda row: share(row, "TFLOP/s", record.cublaslt_rate(row))),
        "GB/s": ("{:.4g}", lambda row: rate(row, "GB/s")),
        "of copy": ("{:.1%}", record.of_copy),
        f"of {cublaslt_rates.COPY / 1e3:g} TB/s": ("{:.1%}", lambda row: share(row, "GB/s", cublaslt_rates.COPY)),
        **{name: ("{:.3f}", part(name)) for name in PARTS},
        "gaps": ("{:.3f}", lambda row: row.parts and row.milliseconds - sum(row.parts.values())),
        "in product": ("{:.1%}", lambda row: row.parts and row.parts["product"] / row.milliseconds),
        "difference": ("{:.1e}", lambda row: row.difference),
        "note": ("{}", lambda row: row.note),
    }
    cells = {
        name: [template.format(value) if (value := of(row)) is not None else "" for row in record.rows]
        for name, (template, of) in columns.items()
    }
    filled = {name: texts for name, texts in cells.items() if any(texts)}
    alignment = ["left" if name in _LEFT else "right" for name in filled]
    body = tabulate.tabulate(filled, headers="keys", disable_numparse=True, colalign=alignment)
    versions = ", ".join(f"{name} {version}" for name, version in record.versions.items())
    return f"{body}\n\n{record.device}, bfloat16, seed {record.settings['seed']}, {record.date}\n{versions}"
