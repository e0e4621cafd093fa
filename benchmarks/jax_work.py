"""A JAX function as work that can be timed."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

Results = tuple[jax.Array, ...]


class JaxWork:
    """Calls of one compiled program, each on the next of several sets of arguments.

    Args:
        program: gives a tuple of arrays.
        sets: its arguments.
        carried: a further argument for the first call, if the program takes one that it returns as its last result.
            Each call takes that of the last one and uses its memory again.
    """

    def __init__(self, program: Callable[..., tuple[Any, ...]], sets: Sequence[tuple[Any, ...]], carried: Any = None):
        self._program = jax.jit(program, donate_argnums=() if carried is None else len(sets[0]))
        self._sets = sets
        self._carried = carried

    def results(self) -> Results:
        return self._call(0)

    def _call(self, index: int) -> Results:
        arguments = self._sets[index % len(self._sets)]
        if self._carried is None:
            return self._program(*arguments)
        *results, self._carried = self._program(*arguments, self._carried)
        return *results, *jax.tree.leaves(self._carried)

    def block(self, calls: int) -> float:
        start = time.perf_counter()
        for call in range(calls):
            # Only the latest results are kept; the device runs its programs in order.
            latest = self._call(call)
        jax.block_until_ready(latest)
        return time.perf_counter() - start
