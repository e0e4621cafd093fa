"""Results as data: one row per measurement, and what it was measured with, kept in JSON."""

import abc
import dataclasses
import datetime
import importlib.metadata
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar

import jax

from benchmarks import cublaslt_rates
from benchmarks.cases import Case
from benchmarks.shapes import Shape
from benchmarks.timing import Timing
from jax_grouped.backends.extension import cublas_version, cuda_devices

_PACKAGES = ("jax_grouped", "jax", "jaxlib", "numpy", "torch", "transformer_engine", "nvidia-cublas")


S = TypeVar("S")


@dataclasses.dataclass(frozen=True)
class MeasuredRow(abc.ABC, Generic[S]):
    """One measurement, or why there is none: what the rows of every program have.

    Attributes:
        shape: the static sizes.
        skew, seed: what the group sizes follow from.
        dtype: of the tokens.
        milliseconds, fastest, slowest: per call: the median of the blocks, and the outermost of them.
        calls: per block.
        reason: why figures are missing.
    """

    shape_type: ClassVar[type]

    shape: S
    skew: str
    seed: int
    dtype: str
    _: dataclasses.KW_ONLY
    milliseconds: float | None = None
    fastest: float | None = None
    slowest: float | None = None
    calls: int | None = None
    reason: str | None = None

    @property
    @abc.abstractmethod
    def labels(self) -> tuple[str, ...]:
        """What tells the row from all others."""

    @classmethod
    def parse(cls, fields: dict[str, Any]) -> Self:
        """The row that a record in JSON holds as these fields."""
        return cls(**{**fields, "shape": cls.shape_type(**fields["shape"])})

    def timed(self, timing: Timing) -> Self:
        """The row with this timing."""
        return dataclasses.replace(self, **dataclasses.asdict(timing))


@dataclasses.dataclass(frozen=True)
class Row(MeasuredRow[Shape]):
    """One measurement of a grouped product.

    Attributes:
        op: the operation.
        peer: who ran it.
        tflops: TFLOP/s over the useful operations.
        of_dense: fraction of the rate of a dense product on the same kind of device.
        of_cublaslt: fraction of the rate of a bare cuBLASLt call on the same kind of device.
        kernel_share: fraction of the time in the product's own kernel, if the device's clock was read.
        difference: relative Frobenius norm of the difference from this library's result.
    """

    shape_type = Shape

    op: str
    peer: str
    tflops: float | None = None
    of_dense: float | None = None
    of_cublaslt: float | None = None
    kernel_share: float | None = None
    difference: float | None = None

    @property
    def case(self) -> tuple[str, str, str]:
        """What rows of different peers share."""
        return self.shape.name, self.skew, self.op

    @property
    def labels(self) -> tuple[str, ...]:
        """What tells the row from all others."""
        return *self.case, self.peer


R = TypeVar("R")


@dataclasses.dataclass(frozen=True)
class Record(Generic[R]):
    """A run: its rows, which are dataclasses, and what they depend on besides."""

    date: str
    device: str
    versions: dict[str, str]
    settings: dict[str, float | int | str | None]
    rows: list[R]

    def write(self, path: Path) -> None:
        """Writes all of it as JSON, replacing the file in one step."""
        draft = path.with_name(path.name + ".part")
        draft.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")
        draft.replace(path)

    @classmethod
    def read(cls, path: Path, parse: Callable[[dict[str, Any]], R]) -> "Record[R]":
        """The record that `write` left there; `parse` makes a row of its fields."""
        fields = json.loads(path.read_text())
        return cls(**{**fields, "rows": [parse(row) for row in fields["rows"]]})


def new_record(settings: dict[str, float | int | str | None]) -> Record[Any]:
    """A record of this process, still without rows."""
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return Record(date, jax.devices()[0].device_kind, _versions(), settings, [])


def _versions() -> dict[str, str]:
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if cuda_devices() and (loaded := cublas_version()):
        versions["cuBLASLt"] = ".".join(map(str, loaded))
    return versions


def with_timing(row: Row, timing: Timing, case: Case, device: str, *, device_clock: bool) -> Row:
    """The row with everything that follows from the time that its case took on that device.

    Its share of cuBLASLt's rate is left out without `device_clock`: those rates hold for short blocks and the device's
    clock, and a chip that is kept busy for longer runs slower.
    """
    tflops = case.tflops(timing.milliseconds)
    on_reference = cublaslt_rates.DEVICE in device
    rate = cublaslt_rates.RATES.get(row.case) if on_reference and device_clock else None
    return dataclasses.replace(
        row.timed(timing),
        tflops=tflops,
        of_dense=tflops / cublaslt_rates.DENSE_BF16 if on_reference else None,
        of_cublaslt=tflops / rate if rate else None,
    )
