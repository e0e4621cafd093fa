"""How long one call takes when calls follow one another without a pause."""

import dataclasses
import statistics
from typing import Protocol

import jax

BLOCKS = 5
MOST_CALLS = 1000
# A measurement that would take more than so many times its budget is given up.
_PATIENCE = 10


class Work(Protocol):
    """A peer's program for one case, ready to run."""

    def results(self) -> tuple[jax.Array, ...]:
        """What one call on the first set of operands returns."""

    def block(self, calls: int) -> float:
        """Runs that many calls back to back and returns the seconds they took together."""


@dataclasses.dataclass(frozen=True)
class Timing:
    """Milliseconds per call: the median of the blocks, the fastest and the slowest one; and the calls in a block."""

    milliseconds: float
    fastest: float
    slowest: float
    calls: int


class TooSlowError(Exception):
    """One call takes so long that the measurement would exceed its budget by far."""


def measure(work: Work, seconds: float, calls: int | None = None, most_calls: int = MOST_CALLS) -> Timing:
    """Times a few blocks of calls after a warm-up of the same length as one block.

    Args:
        work: what to time.
        seconds: about how long all blocks together may take.
        calls: calls per block; by default what fits in `seconds`.
        most_calls: at most so many fit.

    Raises:
        TooSlowError: even one call per block takes far longer than `seconds`.
    """
    work.block(1)  # Compiles.
    estimate = work.block(1)
    if BLOCKS * estimate > _PATIENCE * seconds:
        raise TooSlowError(f"one call takes {estimate:.3g} s, too long for --seconds {seconds:g}")
    if calls is None:
        calls = max(1, min(most_calls, int(seconds / (BLOCKS * max(estimate, 1e-9)))))
    work.block(calls)
    blocks = sorted(1e3 * work.block(calls) / calls for _ in range(BLOCKS))
    return Timing(statistics.median(blocks), blocks[0], blocks[-1], calls)
