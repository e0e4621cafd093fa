"""The rows of a run: which step was taken how, and how fast."""

import dataclasses

from benchmarks.cases import Case
from benchmarks.records import MeasuredRow
from benchmarks.shapes import Shape
from benchmarks.timing import Timing

# What tells a kernel's part is the first of these that has a word in its name. Those of the set-up run before a
# product or a quantization and read no more than group sizes.
_WORDS = {
    "setup": ("setup", "prepare"),
    "quantize": ("quantize", "findamax", "zeroscales"),
    "product": ("nvjet", "cutlass", "gemm", "matmul", "wgrad", "product"),
}

#: What the kernels of a step do. `other` is what XLA makes of the rest, such as converting the layer's kernel.
PARTS = ("product", "quantize", "setup", "other")


@dataclasses.dataclass(frozen=True)
class Row(MeasuredRow[Shape]):
    """One measurement of a step.

    Attributes:
        kernel_dtype: of the kernel and of its gradient.
        variant: recipe or peer.
        backend: on what it ran.
        layer: whose step.
        tflops: TFLOP/s over the useful operations.
        parts: milliseconds per call in each of `PARTS`, if the device's clock was read.
    """

    shape_type = Shape

    kernel_dtype: str
    variant: str
    backend: str
    layer: str = "dense"
    tflops: float | None = None
    parts: dict[str, float] | None = None

    @property
    def title(self) -> str:
        """The shape, and the layer if it is not a dense one."""
        return self.shape.name if self.layer == "dense" else f"{self.shape.name} {self.layer}"

    @property
    def case(self) -> tuple[str, str, str]:
        """What rows of different variants share."""
        return self.title, self.skew, self.kernel_dtype

    @property
    def labels(self) -> tuple[str, ...]:
        """What tells the row from all others."""
        return *self.case, self.variant


def with_timing(row: Row, timing: Timing, case: Case) -> Row:
    """The row with everything that follows from the time that its case took."""
    return dataclasses.replace(row.timed(timing), tflops=case.tflops(timing.milliseconds))


def parts(by_kernel: dict[str, float]) -> dict[str, float]:
    """The sum of these times in each of `PARTS`."""
    sums = dict.fromkeys(PARTS, 0.0)
    for name, time in by_kernel.items():
        sums[_part(name.lower())] += time
    return sums


def _part(name: str) -> str:
    return next((part for part, words in _WORDS.items() if any(word in name for word in words)), "other")


def speeds(rows: list[Row], base: str) -> dict[tuple[str, ...], float]:
    """By a row's labels, how many times as fast it is as the variant `base` in the same case."""
    reference = {row.case: row.milliseconds for row in rows if row.variant == base}
    timed = ((row, reference.get(row.case)) for row in rows)
    return {row.labels: time / row.milliseconds for row, time in timed if time and row.milliseconds}
