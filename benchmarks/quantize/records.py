"""The rows of a run: what was quantized how, by whom, and how fast."""

import dataclasses
from typing import Any

from benchmarks import cublaslt_rates
from benchmarks.quantize.cases import Tokens
from benchmarks.timing import Timing


@dataclasses.dataclass(frozen=True)
class Row:
    """One measurement, or why there is none.

    Attributes:
        shape: the static sizes.
        skew, seed: what the group sizes follow from.
        dtype: of the tokens.
        case: the quantization's name, or `copy`.
        mode, orientation: of the quantization.
        peer: who ran it.
        backend: on what.
        clock: whose clock was read: `host` or `device`.
        bytes_moved: bytes that must move.
        milliseconds, fastest, slowest: per call: the median of the blocks, and the outermost of them.
        calls: per block.
        gbps: GB/s over the bytes that must move.
        of_copy: fraction of the rate of a copy in the same run.
        of_reference: fraction of the rate of a copy on the same kind of device, as measured once.
        reason: why figures are missing.
    """

    shape: Tokens
    skew: str
    seed: int
    dtype: str
    case: str
    mode: str
    orientation: str
    peer: str
    backend: str
    clock: str
    bytes_moved: int
    milliseconds: float | None = None
    fastest: float | None = None
    slowest: float | None = None
    calls: int | None = None
    gbps: float | None = None
    of_copy: float | None = None
    of_reference: float | None = None
    reason: str | None = None

    @property
    def labels(self) -> tuple[str, ...]:
        """What tells the row from all others."""
        return self.shape.name, self.skew, self.case, self.peer

    @classmethod
    def parse(cls, fields: dict[str, Any]) -> "Row":
        """The row that a record in JSON holds as these fields."""
        return cls(**{**fields, "shape": Tokens(**fields["shape"])})


def with_timing(row: Row, timing: Timing, copy_gbps: float | None, device: str) -> Row:
    """The row with everything that follows from the time that it took on that device, where a copy has this rate."""
    gbps = row.bytes_moved / timing.milliseconds / 1e6
    return dataclasses.replace(
        row,
        milliseconds=timing.milliseconds,
        fastest=timing.fastest,
        slowest=timing.slowest,
        calls=timing.calls,
        gbps=gbps,
        of_copy=gbps / copy_gbps if copy_gbps else None,
        of_reference=gbps / cublaslt_rates.COPY if cublaslt_rates.DEVICE in device else None,
    )
