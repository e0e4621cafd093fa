"""Ctrl-C and SIGTERM: a run that trains saves its last step first, everything else ends at once."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any


class InterruptionError(Exception):
    """The end of a run after a signal; its text is one line that says so.

    Attributes:
        exit_status: the status that the process ends with.
    """

    def __init__(self, number: int, step: int):
        super().__init__(f"interrupted at step {step}, which is saved; --resume continues from there")
        self.exit_status = _exit_status(number)


class Stop:
    """The request to stop that a signal makes.

    Attributes:
        signal: the first signal that asked a run to stop after its step, or None.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._deferred = False
        self._time = 0.0

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Leaves it to what runs inside to look at `signal` and to stop; only a second signal ends the process."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False

    def handle(self, number: int, _: Any) -> None:
        """Handles a signal."""
        if self._deferred and self.signal is None:
            self.signal, self._time = number, time.monotonic()
            return
        if self._deferred and time.monotonic() - self._time < 1:
            # Still the first request: `timeout` of GNU sends a process each signal twice.
            return
        try:
            # A progress bar has no end of line.
            line_end = "\n" if self._deferred else ""
            print(
                f"{line_end}train_moe: interrupted; --resume continues from the latest checkpoint, if there is one",
                file=sys.stderr,
                flush=True,
            )
            sys.stdout.flush()
        finally:
            # Without cleaning up: nothing can be lost, since files are replaced as a whole.
            os._exit(_exit_status(number))


def _exit_status(number: int) -> int:
    # As shells report a process that a signal has ended.
    return 128 + number


def run_until_signal(function: Callable[[Stop], None]) -> None:
    """Calls a function, with SIGINT and SIGTERM as requests to stop.

    Python runs signal handlers in the main thread only, between two instructions: there a compilation, which is one
    call that can take minutes, would delay them, and an exception of theirs could leave a library's locks taken
    forever. So the function runs in a thread of its own, and the main thread does nothing but wait for signals.
    """
    stop = Stop()
    before = {number: signal.signal(number, stop.handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with ThreadPoolExecutor(max_workers=1) as pool:
            future = pool.submit(function, stop)
            # Wakes up now and then, for a signal alone does not end a wait on every platform.
            while not wait([future], timeout=0.1).done:
                pass
        future.result()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
