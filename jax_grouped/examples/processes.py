"""The processes of a run: how they start together, and how an error or a signal ends all of them."""

import contextlib
import os
import signal
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from jax_grouped.examples.settings import Settings, UsageError

#: Time in which all processes must have started; JAX's own limit is 300.
JOIN_SECONDS = 240


def join_processes(s: Settings) -> None:
    """Joins the processes that options name, or that srun or mpirun has started; one alone has nothing to join."""
    variables = ["OMPI_COMM_WORLD_SIZE"]
    if "SLURM_STEP_NODELIST" in os.environ:  # A batch script itself has SLURM_NTASKS too, and is one process.
        variables += ["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"]
    tasks = next((int(os.environ[name]) for name in variables if name in os.environ), 1)
    named = (s.coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS"), s.num_processes, s.process_id)
    if s.num_processes == 1 or (tasks == 1 and named == (None, None, None)) or jax.distributed.is_initialized():
        return
    remedy = "name them with --coordinator HOST:PORT, --num-processes N and --process-id I, or train alone with N = 1"
    late = f"\ntrain_moe: error: the other processes have not come in {JOIN_SECONDS} seconds: {remedy}\n"
    # JAX itself would abort.
    timer = threading.Timer(JOIN_SECONDS, lambda: (os.write(2, late.encode()), os._exit(2)))
    timer.start()
    try:
        # An error ends its process, and after these seconds the processes that wait for it.
        jax.distributed.initialize(s.coordinator, s.num_processes, s.process_id, shutdown_timeout_seconds=60)
    except (LookupError, RuntimeError, ValueError) as error:
        raise UsageError(f"cannot join the other processes ({' '.join(str(error).split())}): {remedy}") from None
    finally:
        timer.cancel()
    # JAX has replaced what Python does at SIGTERM.
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))


def agree(*numbers: int) -> list[int]:
    """Returns the largest of each number in all processes."""
    return multihost_utils.process_allgather(np.array(numbers)).max(axis=0).tolist()


@contextlib.contextmanager
def in_all_processes() -> Iterator[list[object]]:
    """Ends all processes if one has an error, or if what they add to the list differs; one of them raises the error."""
    same: list[object] = []
    error: Exception | None = None
    try:
        yield same
    except Exception as caught:
        error = caught
    mine = np.array([error is not None, zlib.crc32(repr(same).encode()) >> 1], np.int32)
    failed, digests = multihost_utils.process_allgather(mine).T
    if not failed.any() and np.ptp(digests):
        error, failed = UsageError("the processes differ in their options or in their text"), np.ones_like(failed)
    if error is not None and np.argmax(failed) == jax.process_index():
        raise error
    if failed.any():
        raise SystemExit(2)


def saved_steps(folder: Path) -> list[int]:
    """Returns the steps of the checkpoints in the folder of a run."""
    # Not by a manager, which deletes what another process may be writing.
    return [int(path.name) for path in (folder / "checkpoints").glob("*") if path.name.isdigit()]


class Signals:
    """The `numbers` of the signals that have come. While it `trains`, a process ends at once only at a second one."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.trains, self.prints = False, True

    @contextlib.contextmanager
    def handled(self, folder: Path) -> Iterator[None]:
        """Handles signals until the end of the context; a process that ends at once says what the folder has."""
        receiver, sender = os.pipe()
        os.set_blocking(sender, False)

        def watch() -> None:
            first = 0.0
            while received := os.read(receiver, 1):
                now = time.monotonic()
                # `timeout` of GNU sends a process each signal twice.
                if not self.trains or (first and now - first > 1):
                    if self.prints:
                        os.write(2, f"\ntrain_moe: interrupted: {_describe(folder)}\n".encode())
                    os._exit(128 + received[0])
                first = first or now
            os.close(receiver)

        # A thread does not wait for the end of a compilation, as Python's handlers do.
        threading.Thread(target=watch, daemon=True).start()
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        before_sender = signal.set_wakeup_fd(sender)
        for number in before:
            signal.signal(number, lambda number, _: self.numbers.append(number))
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(before_sender)
            os.close(sender)


def _describe(folder: Path) -> str:
    """Says what is saved of a run that ends at once, and how it goes on."""
    if steps := saved_steps(folder):
        return f"step {max(steps)} is saved; --resume continues from there"
    if (folder / "settings.json").exists():
        return f"nothing is saved; delete {folder} or choose another --out, and start again"
    return "nothing is saved; the same command starts again"
