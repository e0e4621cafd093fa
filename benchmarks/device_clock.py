"""The GPU's own clock: how long calls take on the device, and how much of that their main kernel.

A host's clock also counts dispatching the first call and waiting for the last one, which matters when a block is as
short as those that the rates in `benchmarks.cublaslt_rates` were measured with. Of calls that take the device less time
than the host needs to dispatch them, it measures nothing else.
"""

import collections
import statistics
import tempfile
from pathlib import Path
from typing import NamedTuple

import jax

from benchmarks.timing import Work

#: A profile of more calls takes long to read.
MOST_CALLS_IN_PROFILE = 100


class Span(NamedTuple):
    """A kernel or copy on the GPU, with its start and end in nanoseconds."""

    name: str
    start: float
    end: float


class DeviceClock:
    """Work whose blocks are timed from the start of the first kernel to the end of the last, as a profile shows them.

    Attributes:
        kernel_shares: for each block so far, the fraction of its time in the kernel that takes longest: the product
            itself, so that 1 means that nothing else takes time.
    """

    def __init__(self, work: Work):
        self._work = work
        self.kernel_shares: list[float] = []
        self._blocks: list[tuple[float, dict[str, float]]] = []

    def results(self) -> tuple[jax.Array, ...]:
        return self._work.results()

    def block(self, calls: int) -> float:
        spans = profile(self._work, calls)
        total = _length(spans)
        nanoseconds: dict[str, float] = collections.defaultdict(float)
        for name, start, end in spans:
            nanoseconds[name] += end - start
        self.kernel_shares.append(max(nanoseconds.values()) / total)
        self._blocks.append((total / 1e6 / calls, {name: time / 1e6 / calls for name, time in nanoseconds.items()}))
        return total / 1e9

    def by_kernel(self, milliseconds: float) -> dict[str, float]:
        """Milliseconds per call by the kernel's name, of the block whose calls took closest to so long."""
        return min(self._blocks, key=lambda block: abs(block[0] - milliseconds))[1]

    @property
    def kernel_share(self) -> float:
        """The median of `kernel_shares`."""
        return statistics.median(self.kernel_shares)


class CallClock:
    """Work whose calls are timed one by one, each from the start of its first kernel to the end of its last.

    A block takes the sum of these: what lies between the kernels of one call counts, what lies between calls does not.
    """

    def __init__(self, work: Work):
        self._work = work

    def results(self) -> tuple[jax.Array, ...]:
        return self._work.results()

    def block(self, calls: int) -> float:
        """Raises RuntimeError if the kernels in the profile can't be divided evenly among the calls."""
        spans = profile(self._work, calls)
        per_call, rest = divmod(len(spans), calls)
        if rest:
            raise RuntimeError(f"the profiler recorded {len(spans)} kernels, no multiple of the {calls} calls")
        return sum(_length(spans[i * per_call : (i + 1) * per_call]) for i in range(calls)) / 1e9


def profile(work: Work, calls: int) -> list[Span]:
    """What a block of calls runs on the GPU, in the order in which it starts.

    Raises:
        RuntimeError: the profile shows nothing, as on a CPU.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            work.block(calls)
        (path,) = Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(path))
        spans = [
            Span(event.name, event.start_ns, event.end_ns)
            for plane in data.planes
            if plane.name.startswith("/device:GPU")
            for line in plane.lines
            if line.name.startswith("Stream")
            for event in line.events
        ]
    if not spans:
        raise RuntimeError("the profiler recorded no kernel on a GPU")
    return sorted(spans, key=lambda span: span.start)


def _length(spans: list[Span]) -> float:
    """Nanoseconds from the first start to the last end."""
    return max(span.end for span in spans) - min(span.start for span in spans)
