"""A JAX function as work that can be timed."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

Results = tuple[jax.Array, ...]


class JaxWork:
    """Calls of one compiled program, each on the next of several sets of arguments."""

    def __init__(self, program: Callable[..., Results], sets: Sequence[tuple[Any, ...]]):
        self._program = jax.jit(program)
        self._sets = sets

    def results(self) -> Results:
        return self._program(*self._sets[0])

    def block(self, calls: int) -> float:
        start = time.perf_counter()
        for call in range(calls):
            # Only the latest results are kept; the device runs its programs in order.
            latest = self._program(*self._sets[call % len(self._sets)])
        jax.block_until_ready(latest)
        return time.perf_counter() - start
