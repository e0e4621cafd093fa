"""The GPU's own clock: how long a block of calls takes on the device, and how much of that its main kernel.

A host's clock also counts dispatching the first call and waiting for the last one, which matters when a block is as
short as those that the rates in `benchmarks.cublaslt_rates` were measured with.
"""

import collections
import statistics
import tempfile
from pathlib import Path

import jax

from benchmarks.timing import Work


class DeviceClock:
    """Work whose blocks are timed from the start of the first kernel to the end of the last, as a profile shows them.

    Attributes:
        kernel_shares: for each block so far, the fraction of its time in the kernel that takes longest: the product
            itself, so that 1 means that nothing else takes time.
    """

    def __init__(self, work: Work):
        self._work = work
        self.kernel_shares: list[float] = []

    def results(self) -> tuple[jax.Array, ...]:
        return self._work.results()

    def block(self, calls: int) -> float:
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                self._work.block(calls)
            (profile,) = Path(folder).rglob("*.xplane.pb")
            spans = _kernel_spans(profile)
        if not spans:
            raise RuntimeError("the profiler recorded no kernel on a GPU")
        total = max(end for _, _, end in spans) - min(start for _, start, _ in spans)
        by_kernel: collections.Counter[str] = collections.Counter()
        for name, start, end in spans:
            by_kernel[name] += end - start
        self.kernel_shares.append(max(by_kernel.values()) / total)
        return total / 1e9

    @property
    def kernel_share(self) -> float:
        """The median of `kernel_shares`."""
        return statistics.median(self.kernel_shares)


def _kernel_spans(profile: Path) -> list[tuple[str, int, int]]:
    """Name, start and end in nanoseconds of every kernel and copy on a GPU."""
    data = jax.profiler.ProfileData.from_file(str(profile))
    return [
        (event.name, event.start_ns, event.end_ns)
        for plane in data.planes
        if plane.name.startswith("/device:GPU")
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
    ]
