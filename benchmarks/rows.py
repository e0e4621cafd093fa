"""Results as data: one row per case, and what it was measured with, kept in JSON."""

import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
from pathlib import Path
from typing import Any

import jax

from benchmarks import cublaslt_rates
from benchmarks.cases import OPERATIONS, Case
from benchmarks.shapes import Shape
from jax_grouped.kernels.extension import cublas_version, cuda_devices

_PACKAGES = (
    "jax_grouped",
    "jax",
    "jaxlib",
    "numpy",
    "torch",
    "triton",
    "transformer_engine",
    "sonic-moe",
    "deep_gemm",
    "quack-kernels",
    "nvidia-cublas",
)


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
    parts: dict[str, float] | None = None  # Milliseconds per call in each of `benchmarks.runner.PARTS`, if profiled.
    difference: float | None = None  # Relative Frobenius norm of the difference from this library's result.
    note: str = ""  # Reason for missing figures.

    @property
    def unit(self) -> str:
        """Unit of the rate: TFLOP/s or GB/s, or GiB of memory, which is not timed."""
        return OPERATIONS[self.case.operation].unit

    @property
    def rate(self) -> float | None:
        """Count per time in the row's unit; None if the figure is missing."""
        time = 1.0 if self.unit == "GiB" else self.milliseconds
        scale = {"TFLOP/s": 1e9, "GB/s": 1e6, "GiB": 2**30}[self.unit]
        return self.count / time / scale if self.count and time else None


@dataclasses.dataclass
class Record:
    """A run of a suite: its rows, and what they depend on besides."""

    suite: str
    date: str
    device: str
    versions: dict[str, str]
    settings: dict[str, Any]
    rows: list[Row] = dataclasses.field(default_factory=list)

    @classmethod
    def new(cls, suite: str, device: str | None, settings: dict[str, Any]) -> "Record":
        """Returns a record of this process and, by default, of JAX's device, without rows."""
        versions = {}
        for package in _PACKAGES:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                versions[package] = importlib.metadata.version(package)
        if cuda_devices() and (loaded := cublas_version()):
            versions["cuBLASLt"] = ".".join(map(str, loaded))
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        return cls(suite, date, device or jax.devices()[0].device_kind, versions, settings)

    def write(self, path: Path) -> None:
        """Writes all of it as JSON, replacing the file in one step."""
        draft = path.with_name(path.name + ".part")
        draft.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")
        draft.replace(path)

    @classmethod
    def read(cls, path: Path) -> "Record":
        """Reads a record that `write` left."""
        fields = json.loads(path.read_text())
        for row in fields["rows"]:
            row["case"] = Case(**{**row["case"], "shape": Shape(**row["case"]["shape"])})
        return cls(**{**fields, "rows": [Row(**row) for row in fields["rows"]]})

    def speed(self, row: Row, against: str) -> float | None:
        """Returns how many times as fast the row is as the variant `against` in the same case."""
        case = dataclasses.replace(row.case, variant=against)
        base = next((of.milliseconds for of in self.rows if of.case == case), None)
        return base / row.milliseconds if base and row.milliseconds else None

    def of_copy(self, row: Row) -> float | None:
        """Returns the share of the rate of a copy in the same run; None for the copy itself."""
        copied = next((of.rate for of in self.rows if of.case.operation == "copy" and of is not row), None)
        return row.rate / copied if row.rate and copied else None

    def on_reference(self) -> bool:
        """Tells if the rates of `benchmarks.cublaslt_rates` hold for the device."""
        return cublaslt_rates.DEVICE in self.device

    def cublaslt_rate(self, row: Row) -> float | None:
        """Returns the TFLOP/s of a bare cuBLASLt call on the same kind of device, if it was measured.

        They hold for short blocks and the device's clock: a chip that is kept busy for longer runs slower.
        """
        rates = cublaslt_rates.RATES.get(row.case.operation, {}).get(row.case.skew, {})
        return rates.get(row.case.shape.name) if self.on_reference() and row.clock == "device" else None
