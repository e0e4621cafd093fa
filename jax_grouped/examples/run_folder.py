"""The folder of a training run: settings, losses, metrics and checkpoints, kept so that the run can be continued."""

import contextlib
import hashlib
import io
import json
import logging
import os
import re
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import jax
import orbax.checkpoint as ocp
from filelock import FileLock, Timeout
from flax.training.train_state import TrainState

from jax_grouped.examples.loss_curve import HEADER, Losses, draw, lines_of, read_losses
from jax_grouped.examples.metrics import Metrics, draw_load, line_of, read_metrics
from jax_grouped.examples.settings import Settings, UsageError

#: Older checkpoints are deleted.
CHECKPOINTS_KEPT = 2

#: A file in each checkpoint, with the checksums of the others.
_CHECKSUMS = "sha256.json"

_Row = TypeVar("_Row")


class Start(NamedTuple):
    """A point from which a run goes on.

    Attributes:
        step: number of steps that have been taken.
        state: the state after them.
        unreadable: reasons why later checkpoints cannot be read, by their steps.
    """

    step: int
    state: TrainState
    unreadable: Mapping[int, str] = MappingProxyType({})


class RunFolder:
    """A folder with one run in it, or none.

    Every method that writes raises a UsageError if the system refuses.

    Attributes:
        path: the folder.
        csv_path, plot_path: the loss curve, as rows and as a picture.
        metrics_path, load_path: the metrics, as lines of JSON, and a picture of the experts' load.
        events_path: the folder of TensorBoard's event files.
        rows: the rows of the loss curve.
        metrics: the metrics of the steps after which the model was evaluated.
    """

    def __init__(self, path: str):
        self.path = Path(path)
        self.csv_path = self.path / "loss.csv"
        self.plot_path = self.path / "loss.png"
        self.metrics_path = self.path / "metrics.jsonl"
        self.load_path = self.path / "load.png"
        self.events_path = self.path / "tensorboard"
        self.rows: list[Losses] = []
        self.metrics: list[Metrics] = []
        self._settings_path = self.path / "settings.json"
        self._checkpoints_path = self.path / "checkpoints"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Makes the folder if there is none, and keeps other processes out of it until this one leaves or ends.

        Raises:
            UsageError: another process is in it.
        """
        lock = self.path / "train_moe.lock"
        with contextlib.ExitStack() as stack:
            try:
                with _writing(self.path):
                    self.path.mkdir(parents=True, exist_ok=True)
                    stack.enter_context(FileLock(lock, timeout=0))
            except Timeout:
                holder = lock.read_text() or "another process"
                raise UsageError(f"--out: {self.path} is in use by {holder}, which has locked {lock}") from None
            # For the message above. The lock itself is the system's, which takes it back however the process ends.
            with contextlib.suppress(OSError):
                lock.write_text(f"process {os.getpid()}")
            yield

    def check_empty(self) -> None:
        """Raises a UsageError if there is a run in the folder, or anything with the name of its files."""
        results = self.csv_path, self.plot_path, self.metrics_path, self.load_path, self.events_path
        for path in (self._settings_path, self._checkpoints_path, *results):
            if os.path.lexists(path):
                raise UsageError(f"--out: {path} exists already: continue that run with --resume, or name a new folder")

    def start(self, settings: Settings, text_sha256: str) -> None:
        """Writes the files of a new run."""
        with _writing(self.path):
            self._checkpoints_path.mkdir()
            self._record(settings, text_sha256)
            self.extend()

    def latest_step(self) -> int:
        """Returns the step of the latest checkpoint. Raises a UsageError if there is none."""
        return self._steps()[-1]

    def _steps(self) -> list[int]:
        with contextlib.suppress(OSError):
            names = [path.name for path in self._checkpoints_path.iterdir()]
            if steps := sorted(int(name) for name in names if re.fullmatch(r"0|[1-9][0-9]*", name)):
                return steps
        raise UsageError(f"--resume: there is no checkpoint in {self.path}")

    def recorded(self) -> tuple[dict[str, Any], str]:
        """Returns the recorded settings of the run, and its `text_sha256`. Raises a UsageError if they are damaged."""
        try:
            settings = dict(json.loads(self._settings_path.read_text()))
            return settings, settings.pop("text_sha256")
        except (KeyError, OSError, TypeError, ValueError):
            raise UsageError(
                f"--resume: {self._settings_path} is missing or damaged: restore it, or start anew in another folder"
            ) from None

    def restore(self, like: TrainState) -> Start:
        """Reads the latest checkpoint that can be read, and losses and metrics up to it; nothing on disk changes.

        Args:
            like: the structure, shapes, types and shardings of the state that was saved.

        Raises:
            UsageError: no checkpoint can be read, or the losses or the metrics cannot.
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
                self.rows = _read("losses", self.csv_path, read_losses, step)
                self.metrics = _read("metrics", self.metrics_path, read_metrics, step)
                return Start(step, state, unreadable)
        reasons = "; ".join(f"of step {step}: {reason}" for step, reason in unreadable.items())
        raise UsageError(f"--resume: no checkpoint in {self._checkpoints_path} can be read ({reasons})")

    def resume(self, settings: Settings, text_sha256: str, start: Start) -> Path | None:
        """Records the settings, and sets checkpoints, losses and metrics back to the start.

        Returns:
            The new folder of the checkpoints that cannot be read, or None if there are none.
        """
        moved = None
        with _writing(self.path):
            if start.unreadable:
                moved = Path(tempfile.mkdtemp(prefix="unreadable-", dir=self.path))
                for step in start.unreadable:
                    self.checkpoint_path(step).rename(moved / str(step))
            self._record(settings, text_sha256)
            self.extend()
        return moved

    def _record(self, settings: Settings, text_sha256: str) -> None:
        text = json.dumps({**settings.recorded(), "text_sha256": text_sha256}, indent=2)
        _replace(self._settings_path, f"{text}\n".encode())

    def extend(self, rows: Sequence[Losses] = (), metrics: Sequence[Metrics] = ()) -> None:
        """Adds rows to the loss curve, and metrics."""
        rows, metrics = [*self.rows, *rows], [*self.metrics, *metrics]
        texts = {self.csv_path: HEADER + lines_of(rows)}
        if metrics or self.metrics_path.exists():
            texts[self.metrics_path] = "".join(map(line_of, metrics))
        for path, text in texts.items():
            with _writing(path):
                _replace(path, text.encode())
        self.rows, self.metrics = rows, metrics

    def plot(self, title: str) -> None:
        """Draws the loss curve, and the load of the experts where metrics have been kept."""
        pictures = {self.plot_path: draw(self.rows, title)}
        if self.metrics:
            pictures[self.load_path] = draw_load(self.metrics, title)
        for path, figure in pictures.items():
            picture = io.BytesIO()
            figure.savefig(picture, dpi=150)
            with _writing(path):
                _replace(path, picture.getvalue())

    def checkpoint_path(self, step: int) -> Path:
        """Returns the path of the checkpoint of a step."""
        return self._checkpoints_path / str(step)

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
            # TensorStore reports a refusal of the system as a ValueError.
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
            _replace(unfinished / _CHECKSUMS, json.dumps(_checksums(unfinished), indent=2).encode())


def _read(what: str, path: Path, reader: Callable[[Path, int], list[_Row]], step: int) -> list[_Row]:
    """Returns what the file of a run holds up to a step; nothing if there is no file."""
    if not path.exists():
        return []
    try:
        return reader(path, step)
    except (OSError, UsageError) as error:
        reason = error if isinstance(error, UsageError) else f"cannot read {path}: {error.strerror}"
        remedy = f"restore it, or move it away to continue without the {what} so far"
        raise UsageError(f"--resume: {reason}; {remedy}") from None


def _replace(path: Path, content: bytes) -> None:
    """Writes a file so that an interruption or an error leaves the old one or the new one, never half of it."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_bytes(content)
        os.replace(part, path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Raises a UsageError if the system refuses to write."""
    try:
        yield
    except Timeout:
        raise
    except OSError as error:
        raise UsageError(f"--out: cannot write {error.filename or path}: {error.strerror or error}") from None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps errors that Orbax raises from being printed too.

    It logs its errors with their tracebacks; so do TensorStore and asyncio for each array that has not been written,
    some of them while the process ends. They stay quiet after a UsageError, which is enough to read.
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
    """Returns the SHA-256 of each file of the arrays. Orbax still changes the files beside their folder."""

    def checksum(path: Path) -> str:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    files = sorted(path for path in (checkpoint / "default").rglob("*") if path.is_file())
    return {path.relative_to(checkpoint).as_posix(): checksum(path) for path in files}


def _check(checkpoint: Path, like: TrainState) -> None:
    """Raises unless these are the bytes that were saved, and the arrays have the wanted shapes.

    TensorStore does not see every byte that has changed, and prints errors about arrays that it cannot read.
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
    """Returns the message of a library in a line of a readable length."""
    if os_error := re.search(r"os_error_code='(\d+)'", str(error)):
        return os.strerror(int(os_error[1]))
    lines = str(error).splitlines() or [type(error).__name__]
    return textwrap.shorten(lines[0], 200)
