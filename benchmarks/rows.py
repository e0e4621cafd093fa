"""Results as data, kept in JSON, and as text: a row per case, and what it was measured with."""

import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import tomllib
from pathlib import Path
from typing import Any

import jax
import tabulate

from benchmarks.cases import OPERATIONS, Case
from benchmarks.shapes import Shape
from jax_grouped.kernels.primitive import cublas_version, cuda_devices

#: Rates of an H200 and of bare cuBLASLt calls; the file explains them.
RATES: dict[str, Any] = tomllib.loads(Path(__file__).with_name("cublaslt_rates.toml").read_text())
PARTS = ("product", "quantize", "setup", "other")  # Of a call, by the work of its kernels.
_PACKAGES = ["jax_grouped", "jax", "jaxlib", "numpy", "torch", "triton", "transformer_engine", "sonic-moe", "deep_gemm"]
_PACKAGES += ["quack-kernels", "nvidia-cublas"]
_LEFT = ("shape", "sizes", "operation", "kernel", "skew", "variant", "backend", "clock", "note")


@dataclasses.dataclass
class Row:
    """One measurement, or why there is none."""

    case: Case
    clock: str = ""
    backend: str = ""  # Backend that the variant ran on.
    count: int | None = None  # Useful operations of a call, bytes that it must move, or bytes that it needs.
    milliseconds: float | None = None  # Median of the blocks, per call.
    fastest: float | None = None
    slowest: float | None = None
    calls: int | None = None  # Calls per block.
    parts: dict[str, float] | None = None  # Milliseconds per call in each of `PARTS`, if profiled.
    difference: float | None = None  # Relative Frobenius norm of the difference from this library's result.
    note: str = ""  # Reason for missing figures.

    @property
    def unit(self) -> str:
        return OPERATIONS[self.case.operation].unit

    @property
    def rate(self) -> float | None:
        """Count per time in the row's unit, but GiB are not timed; None if the figure is missing."""
        time = 1.0 if self.unit == "GiB" else self.milliseconds
        scale = {"TFLOP/s": 1e9, "GB/s": 1e6, "GiB": 2**30}[self.unit]
        return self.count / time / scale if self.count and time else None


@dataclasses.dataclass
class Record:
    """A run of a suite, or of another command: its rows, and what they depend on besides."""

    suite: str
    date: str
    device: str
    versions: dict[str, str]
    settings: dict[str, Any]
    rows: list[Any] = dataclasses.field(default_factory=list)

    @classmethod
    def new(cls, suite: str, settings: dict[str, Any], device: str | None = None) -> "Record":
        """Returns a record of this process and, by default, of JAX's device, without rows."""
        versions = {}
        for package in _PACKAGES:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                versions[package] = importlib.metadata.version(package)
        if cuda_devices() and (loaded := cublas_version()):
            versions["cuBLASLt"] = ".".join(map(str, loaded))
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        return cls(suite, date, device or jax.devices()[0].device_kind, versions, settings)

    def add(self, row: Any, figure: str, path: Path | None) -> None:
        """Adds a row, prints its figure, and writes all rows: a run that is cut short leaves what it measured."""
        self.rows.append(row)
        print(figure, flush=True)
        if path:
            draft = path.with_name(path.name + ".part")
            draft.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")
            draft.replace(path)  # In one step, whenever the process ends.

    @classmethod
    def read(cls, path: Path) -> "Record":
        fields = json.loads(path.read_text())
        for row in fields["rows"]:
            row["case"] = Case(**{**row["case"], "shape": Shape(**row["case"]["shape"])})
        return cls(**{**fields, "rows": [Row(**row) for row in fields["rows"]]})

    def speed(self, row: Row, against: str) -> float | None:
        """Returns how many times as fast the row is as the variant `against` in the same case."""
        case = dataclasses.replace(row.case, variant=against)
        base = next((other.milliseconds for other in self.rows if other.case == case), None)
        return base / row.milliseconds if base and row.milliseconds else None

    def share_of_copy(self, row: Row) -> float | None:
        """Returns the share of the rate of a copy in the same run; None for the copy itself."""
        copied = next((other.rate for other in self.rows if other.case.operation == "copy" and other is not row), None)
        return row.rate / copied if row.rate and copied else None

    @property
    def is_on_reference(self) -> bool:
        """Tells if `RATES` hold for the device."""
        return RATES["device"] in self.device

    def cublaslt_rate(self, row: Row) -> float | None:
        """Returns the TFLOP/s of a bare cuBLASLt call on the same kind of device, if it was measured."""
        # They hold for short blocks and the device's clock: a chip that is kept busy for longer runs slower.
        rates = RATES["rates"].get(row.case.operation, {}).get(row.case.skew, {})
        return rates.get(row.case.shape.name) if self.is_on_reference and row.clock == "device" else None


def table(record: Record, against: str) -> str:
    """Returns a line per row with all that was measured, and two lines about the device and the versions."""

    def share(value: float | None, reference: float | None) -> float | None:
        return value / reference if value and reference and record.is_on_reference else None

    columns: dict[str, list[str]] = {}
    for row in record.rows:
        case, time, parts = row.case, row.milliseconds, row.parts or {}
        operations, moved, needed = (row.rate if row.unit == unit else None for unit in ("TFLOP/s", "GB/s", "GiB"))
        figures = {
            "shape": ("{}", case.shape.name),
            "sizes": ("{}", case.shape.dims),
            "operation": ("{}", case.operation),
            "kernel": ("{}", case.kernel_dtype),
            "skew": ("{}", case.skew),
            "variant": ("{}", case.variant),
            "backend": ("{}", row.backend),
            "clock": ("{}", row.clock),
            "GiB": ("{:.2f}", needed),
            "MB": ("{:.4g}", row.count / 1e6 if moved else None),
            "ms": ("{:.4g}", time),
            "spread": ("{:.1%}", (row.slowest - row.fastest) / time if time else None),
            f"vs {against}": ("{:.2f}x", record.speed(row, against)),
            "TFLOP/s": ("{:.4g}", operations),
            "of dense": ("{:.0%}", share(operations, RATES["dense_bf16"])),
            "vs cuBLASLt": ("{:.1%}", share(operations, record.cublaslt_rate(row))),
            "GB/s": ("{:.4g}", moved),
            "of copy": ("{:.1%}", record.share_of_copy(row)),
            f"of {RATES['copy'] / 1e3:g} TB/s": ("{:.1%}", share(moved, RATES["copy"])),
            **{part: ("{:.3f}", parts.get(part)) for part in PARTS},
            "gaps": ("{:.3f}", time - sum(parts.values()) if parts else None),
            "in product": ("{:.1%}", parts["product"] / time if parts else None),
            "difference": ("{:.1e}", row.difference),
            "note": ("{}", row.note),
        }
        for name, (template, value) in figures.items():
            columns.setdefault(name, []).append("" if value is None else template.format(value))
    # Columns without a figure are left out.
    filled = {name: cells for name, cells in columns.items() if any(cells)}
    alignment = ["left" if name in _LEFT else "right" for name in filled]
    body = tabulate.tabulate(filled, headers="keys", disable_numparse=True, colalign=alignment)
    versions = ", ".join(f"{name} {version}" for name, version in record.versions.items())
    return f"{body}\n\n{record.device}, bfloat16, seed {record.settings['seed']}, {record.date}\n{versions}"
