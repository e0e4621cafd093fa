"""The rows of a run: what was quantized how, by whom, and how fast."""

import dataclasses

from benchmarks import cublaslt_rates
from benchmarks.quantize.cases import Tokens
from benchmarks.records import MeasuredRow
from benchmarks.timing import Timing


@dataclasses.dataclass(frozen=True)
class Row(MeasuredRow[Tokens]):
    """One measurement of a quantization.

    Attributes:
        case: the quantization's name, or `copy`.
        mode, orientation: of the quantization.
        peer: who ran it.
        backend: on what.
        clock: whose clock was read: `host` or `device`.
        bytes_moved: bytes that must move.
        gbps: GB/s over the bytes that must move.
        of_copy: fraction of the rate of a copy in the same run.
        of_reference: fraction of the rate of a copy on the same kind of device, as measured once.
    """

    shape_type = Tokens

    case: str
    mode: str
    orientation: str
    peer: str
    backend: str
    clock: str
    bytes_moved: int
    gbps: float | None = None
    of_copy: float | None = None
    of_reference: float | None = None

    @property
    def labels(self) -> tuple[str, ...]:
        """What tells the row from all others."""
        return self.shape.name, self.skew, self.case, self.peer


def with_timing(row: Row, timing: Timing, copy_gbps: float | None, device: str) -> Row:
    """The row with everything that follows from the time that it took on that device, where a copy has this rate."""
    gbps = row.bytes_moved / timing.milliseconds / 1e6
    return dataclasses.replace(
        row.timed(timing),
        gbps=gbps,
        of_copy=gbps / copy_gbps if copy_gbps else None,
        of_reference=gbps / cublaslt_rates.COPY if cublaslt_rates.DEVICE in device else None,
    )
