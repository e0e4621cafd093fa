"""Results as text."""

import functools
from collections.abc import Callable

from benchmarks.records import Record
from benchmarks.step.records import PARTS, Row, speeds
from benchmarks.step.variants import BASE
from benchmarks.table import footer, number, render


def table(record: Record[Row]) -> str:
    """A line per shape, skew and type of the kernel, with every variant's time and its speed relative to `BASE`."""
    cases: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in record.rows:
        cases.setdefault(row.case, {})[row.variant] = row
    relative = speeds(record.rows, BASE)

    def first(case: dict[str, Row]) -> Row:
        return next(iter(case.values()))

    def cell(variant: str, case: dict[str, Row]) -> str:
        row = case.get(variant)
        if row is None or row.milliseconds is None:
            return ""
        return f"{row.milliseconds:.3f}" + number(" {:.2f}x", relative.get(row.labels))

    variants = list(dict.fromkeys(row.variant for row in record.rows))
    columns: dict[str, Callable[[dict[str, Row]], str]] = {
        "shape": lambda case: first(case).title,
        "sizes": lambda case: first(case).shape.dims,
        "skew": lambda case: first(case).skew,
        "kernel": lambda case: first(case).kernel_dtype,
        **{variant: functools.partial(cell, variant) for variant in variants},
        "note": lambda case: "; ".join(f"{row.variant}: {row.reason}" for row in case.values() if row.reason),
    }
    caption = f"Milliseconds per step, and the speed relative to {BASE}:"
    return f"{caption}\n\n{render(list(cases.values()), columns, right=variants)}\n\n{footer(record)}"


def parts_table(record: Record[Row]) -> str | None:
    """Where the time of each row goes; None if no profile tells."""
    rows = [row for row in record.rows if row.parts]
    if not rows:
        return None

    def milliseconds(part: str, row: Row) -> str:
        return number("{:.3f}", (row.parts or {}).get(part))

    def gaps(row: Row) -> str:
        return f"{(row.milliseconds or 0.0) - sum((row.parts or {}).values()):.3f}"

    columns: dict[str, Callable[[Row], str]] = {
        "shape": lambda row: row.title,
        "skew": lambda row: row.skew,
        "kernel": lambda row: row.kernel_dtype,
        "variant": lambda row: row.variant,
        "backend": lambda row: row.backend,
        "ms": lambda row: number("{:.3f}", row.milliseconds),
        **{part: functools.partial(milliseconds, part) for part in PARTS},
        "gaps": gaps,
        "TFLOP/s": lambda row: number("{:.4g}", row.tflops),
    }
    right = ("ms", *PARTS, "gaps", "TFLOP/s")
    return f"Milliseconds per step, by what its kernels do:\n\n{render(rows, columns, right)}"
