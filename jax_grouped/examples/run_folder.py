"""The folder of a training run: settings, loss curve and checkpoints, kept so that the run can be continued."""

import contextlib
import hashlib
import json
import logging
import os
import re
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from filelock import FileLock, Timeout
from flax.training.train_state import TrainState

from jax_grouped.examples.loss_curve import LossCurve, Losses, replace_file
from jax_grouped.examples.settings import Settings, UsageError

#: Older checkpoints are deleted.
CHECKPOINTS_KEPT = 2

#: A file in each checkpoint, with the checksums of the others.
_CHECKSUMS = "sha256.json"


class Start(NamedTuple):
    """A point from which a run goes on.

    Attributes:
        step: how many steps have been taken.
        state: the state after them.
        unreadable: the later steps whose checkpoints cannot be read, each with the reason.
    """

    step: int
    state: TrainState
    unreadable: Mapping[int, str] = MappingProxyType({})


class RunFolder:
    """A folder with one run in it, or none, and earlier runs in its subfolders `earlier-1`, `earlier-2`, ..."""

    def __init__(self, path: str):
        self.path = Path(path)
        self.curve = LossCurve(self.path)
        self._lock_path = self.path / "train_moe.lock"
        self._settings_path = self.path / "settings.json"
        self._checkpoints_path = self.path / "checkpoints"

    def create(self) -> None:
        """Makes the folder where there is none.

        Raises:
            UsageError: it cannot be.
        """
        with _writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other processes out of the folder, which is there, until this one leaves or ends in any way.

        Raises:
            UsageError: another process is in it, or the folder cannot be written.
        """
        with _writing(self._lock_path), contextlib.ExitStack() as stack:
            try:
                stack.enter_context(FileLock(self._lock_path, timeout=0))
            except Timeout:
                holder = self._lock_path.read_text() or "another process"
                raise UsageError(
                    f"--out: {self.path} is in use by {holder}, which has locked {self._lock_path}"
                ) from None
            # Only for the message above: the system has the lock, and takes it back however the process ends.
            with contextlib.suppress(OSError):
                self._lock_path.write_text(f"process {os.getpid()}")
            unlock = stack.pop_all()
        with unlock:
            yield

    def start(self, settings: Settings, text_sha256: str) -> Path | None:
        """Makes room for a new run in the folder, which is there.

        Returns:
            Where an earlier run that was in the way is now, or None.

        Raises:
            UsageError: the folder cannot be written.
        """
        run = (self._settings_path, self._checkpoints_path, self.curve.csv_path, self.curve.plot_path)
        there = [path for path in run if os.path.lexists(path)]
        with _writing(self.path):
            moved = self._move(there, "earlier") if there else None
            self._checkpoints_path.mkdir()
            self._record(settings, text_sha256)
            self.curve.write()
        return moved

    def _move(self, paths: list[Path], name: str) -> Path:
        """Moves what is in the folder to the first free subfolder `name-1`, `name-2`, ..."""
        number = 1
        while os.path.lexists(subfolder := self.path / f"{name}-{number}"):
            number += 1
        subfolder.mkdir()
        for path in paths:
            path.rename(subfolder / path.name)
        return subfolder

    def latest_step(self) -> int:
        """The step of the latest checkpoint.

        Raises:
            UsageError: there is none.
        """
        return self._steps()[-1]

    def _steps(self) -> list[int]:
        with contextlib.suppress(OSError):
            names = [path.name for path in self._checkpoints_path.iterdir()]
            if steps := sorted(int(name) for name in names if re.fullmatch(r"0|[1-9][0-9]*", name)):
                return steps
        raise UsageError(f"--resume: there is no checkpoint in {self.path}")

    def recorded(self) -> tuple[dict[str, Any], str]:
        """Returns what the run has recorded as its settings, and its `text_sha256`.

        Raises:
            UsageError: that cannot be read.
        """
        try:
            settings = dict(json.loads(self._settings_path.read_text()))
            return settings, settings.pop("text_sha256")
        except (KeyError, OSError, TypeError, ValueError):
            raise UsageError(
                f"--resume: {self._settings_path} is missing or damaged: restore it, or start anew without --resume"
            ) from None

    def restore(self, like: TrainState) -> Start:
        """Reads the latest checkpoint that can be read, and the losses up to it; nothing on disk changes.

        Args:
            like: the structure, shapes, types and shardings of the state that was saved.

        Raises:
            UsageError: no checkpoint can be read, or the losses cannot.
        """
        unreadable: dict[int, str] = {}
        for step in reversed(self._steps()):
            try:
                _check(self.checkpoint_path(step).absolute(), like)
                with _quiet(), self._manager() as manager:
                    state = manager.restore(step, args=ocp.args.StandardRestore(like))
                if state.step != step:
                    raise ValueError(f"it is of step {state.step}")
            except jax.errors.JaxRuntimeError:
                # The device's, for example of too little memory.
                raise
            except Exception as error:
                # Orbax has no error of its own for files that are damaged.
                unreadable[step] = _reason(error)
            else:
                self._read_curve(step)
                return Start(step, state, unreadable)
        reasons = "; ".join(f"of step {step}: {reason}" for step, reason in unreadable.items())
        raise UsageError(f"--resume: no checkpoint in {self._checkpoints_path} can be read ({reasons})")

    def _read_curve(self, step: int) -> None:
        remedy = "restore it, or move it away to continue without the losses so far"
        try:
            self.curve.read(step)
        except OSError as error:
            raise UsageError(f"--resume: cannot read {self.curve.csv_path}: {error.strerror}; {remedy}") from None
        except UsageError as error:
            raise UsageError(f"--resume: {error}; {remedy}") from None

    def resume(self, settings: Settings, text_sha256: str, start: Start) -> Path | None:
        """Records the settings, and sets checkpoints and loss curve back to the start.

        Returns:
            Where the checkpoints that cannot be read are now, or None.

        Raises:
            UsageError: the folder cannot be written.
        """
        unreadable = [self.checkpoint_path(step) for step in start.unreadable]
        with _writing(self.path):
            moved = self._move(unreadable, "unreadable") if unreadable else None
            self._record(settings, text_sha256)
            self.curve.write()
        return moved

    def _record(self, settings: Settings, text_sha256: str) -> None:
        text = json.dumps({**settings.recorded(), "text_sha256": text_sha256}, indent=2)
        replace_file(self._settings_path, f"{text}\n".encode())

    def extend_curve(self, rows: list[Losses]) -> None:
        """Adds losses to the curve.

        Raises:
            UsageError: they cannot be written.
        """
        with _writing(self.curve.csv_path):
            self.curve.extend(rows)

    def plot_curve(self, title: str) -> None:
        """Draws the curve so far.

        Raises:
            UsageError: the picture cannot be written.
        """
        with _writing(self.curve.plot_path):
            self.curve.plot(title)

    @contextlib.contextmanager
    def saving(self) -> Iterator[Callable[[int, TrainState], None]]:
        """Yields a function that saves a state as the checkpoint of a step.

        The state is copied at once and written while training goes on; leaving the `with` block waits for that.

        Raises:
            UsageError: a checkpoint cannot be written. Saving raises it at the latest for the checkpoint before.
        """
        with _quiet():
            with self._saving():
                manager = self._manager()

            def save(step: int, state: TrainState) -> None:
                with self._saving():
                    manager.save(step, args=ocp.args.StandardSave(state))

            try:
                yield save
            finally:
                with self._saving():
                    manager.close()

    @contextlib.contextmanager
    def _saving(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            # The latter is how TensorStore reports what the system refuses.
            raise UsageError(
                f"--out: cannot save a checkpoint in {self._checkpoints_path}: {_reason(error)}; "
                "--resume continues from the latest that is there"
            ) from None

    def _manager(self) -> ocp.CheckpointManager:
        options = ocp.CheckpointManagerOptions(
            max_to_keep=CHECKPOINTS_KEPT,
            create=False,
            # A process that was killed while saving has left a folder that nothing else would delete.
            cleanup_tmp_directories=True,
            # Called when all is written, before the checkpoint gets its name.
            async_options=ocp.AsyncOptions(post_finalization_callback=self._record_files),
        )
        return ocp.CheckpointManager(self._checkpoints_path.absolute(), options=options)

    def _record_files(self) -> None:
        for unfinished in self._checkpoints_path.glob("*.orbax-checkpoint-tmp*"):
            replace_file(unfinished / _CHECKSUMS, json.dumps(_checksums(unfinished), indent=2).encode())

    def checkpoint_path(self, step: int) -> Path:
        """Returns the path of the checkpoint of a step."""
        return self._checkpoints_path / str(step)


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(f"--out: cannot write {error.filename or path}: {error.strerror or error}") from None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps what Orbax raises from being printed too.

    It logs its errors with their tracebacks; so do TensorStore and asyncio for each array that has not been written,
    some of them while the process ends. After a UsageError, which tells it all, they therefore stay quiet.
    """
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    hooks = sys.excepthook, sys.unraisablehook
    sys.excepthook, sys.unraisablehook = lambda *_: None, lambda _: None
    ended = False
    try:
        yield
    except UsageError:
        ended = True
        raise
    finally:
        if not ended:
            sys.excepthook, sys.unraisablehook = hooks


def _checksums(checkpoint: Path) -> dict[str, str]:
    """The SHA-256 of each file that belongs to the arrays; Orbax still changes those beside their folder."""

    def checksum(path: Path) -> str:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    files = sorted(path for path in (checkpoint / "default").rglob("*") if path.is_file())
    return {path.relative_to(checkpoint).as_posix(): checksum(path) for path in files}


def _check(checkpoint: Path, like: TrainState) -> None:
    """Raises what Orbax may, or ValueError, unless these are the bytes that were saved and the arrays that are wanted.

    TensorStore does not see every byte that has changed.
    """
    saved = checkpoint / _CHECKSUMS
    # Earlier versions kept none.
    if saved.exists() and (changed := json.loads(saved.read_text()).items() ^ _checksums(checkpoint).items()):
        raise ValueError(f"{min(changed)[0]} is not what was saved")
    arrays = ocp.StandardCheckpointHandler().metadata(checkpoint / "default")
    if differing := _shapes(arrays) ^ _shapes(like):
        raise ValueError(f"it has another {min(differing)[0]} than the model of the settings")


def _shapes(tree: Any) -> set[tuple[str, tuple[int, ...]]]:
    leaves = jax.tree.leaves_with_path(tree)
    return {(jax.tree_util.keystr(path, simple=True, separator="/"), leaf.shape) for path, leaf in leaves}


def _reason(error: Exception) -> str:
    """Returns what a library says, in a line of a readable length."""
    if os_error := re.search(r"os_error_code='(\d+)'", str(error)):
        return os.strerror(int(os_error[1]))
    lines = str(error).splitlines() or [type(error).__name__]
    return textwrap.shorten(lines[0], 200)
