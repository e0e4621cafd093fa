"""The folder of a training run: settings, loss curve and checkpoints, kept so that the run can be continued."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from jax_grouped.examples.loss_curve import LossCurve, replace_file
from jax_grouped.examples.settings import Settings, UsageError

#: Older checkpoints are deleted.
CHECKPOINTS_KEPT = 2


class RunFolder:
    """A folder with one run in it, or none, and earlier runs in its subfolders `earlier-1`, `earlier-2`, ..."""

    def __init__(self, path: str):
        self.path = Path(path)
        self.curve = LossCurve(self.path)
        self._settings_path = self.path / "settings.json"
        self._checkpoints_path = self.path / "checkpoints"

    def create(self) -> None:
        """Makes the folder where there is none.

        Raises:
            UsageError: it cannot be.
        """
        with _writing():
            self.path.mkdir(parents=True, exist_ok=True)

    def start(self, settings: Settings, text_sha256: str) -> Path | None:
        """Makes room for a new run in the folder, which is there.

        Returns:
            Where an earlier run that was in the way is now, or None.

        Raises:
            UsageError: the folder cannot be written.
        """
        with _writing():
            moved = self._move_earlier_run()
            self._checkpoints_path.mkdir()
            self._record(settings, text_sha256)
            self.curve.cut(step=0)
        return moved

    def _move_earlier_run(self) -> Path | None:
        run = (self._settings_path, self._checkpoints_path, self.curve.csv_path, self.curve.plot_path)
        there = [path for path in run if path.exists()]
        if not there:
            return None
        number = 1
        while (earlier := self.path / f"earlier-{number}").exists():
            number += 1
        earlier.mkdir()
        for path in there:
            path.rename(earlier / path.name)
        return earlier

    def recorded(self) -> tuple[int, dict[str, Any]]:
        """The latest checkpoint's step, and the settings of the run with its `text_sha256`.

        Raises:
            UsageError: there is none to continue.
        """
        step = self._latest_step()
        if step is None:
            raise UsageError(f"--resume: there is no checkpoint in {self.path}")
        try:
            return step, dict(json.loads(self._settings_path.read_text()))
        except (OSError, TypeError, ValueError):
            raise UsageError(f"--resume: {self._settings_path} is missing or damaged") from None

    def resume(self, settings: Settings, text_sha256: str) -> None:
        """Records the settings and sets the loss curve back to the latest checkpoint.

        Raises:
            UsageError: the folder cannot be written, or its loss curve is damaged.
        """
        with _writing():
            self._record(settings, text_sha256)
            self.curve.cut(self._latest_step() or 0)

    def _record(self, settings: Settings, text_sha256: str) -> None:
        text = json.dumps({**settings.recorded(), "text_sha256": text_sha256}, indent=2)
        replace_file(self._settings_path, text + "\n")

    def _latest_step(self) -> int | None:
        if not self._checkpoints_path.is_dir():
            return None
        with self.checkpoints() as manager:
            step: int | None = manager.latest_step()
        return step

    def checkpoints(self) -> ocp.CheckpointManager:
        """The run's checkpoints; leaving their `with` block waits until they are written."""
        # A process that was killed while saving has left a folder that nothing else would delete.
        options = ocp.CheckpointManagerOptions(max_to_keep=CHECKPOINTS_KEPT, create=False, cleanup_tmp_directories=True)
        return ocp.CheckpointManager(self._checkpoints_path.absolute(), options=options)

    def checkpoint_path(self, step: int) -> Path:
        """Where the checkpoint of a step lies."""
        return self._checkpoints_path / str(step)


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(f"--out: cannot write {error.filename}: {error.strerror}") from None


def save(manager: ocp.CheckpointManager, step: int, state: Any) -> None:
    """Saves a pytree of arrays. It is copied at once and written while training goes on."""
    manager.save(step, args=ocp.args.StandardSave(state))


def restore(manager: ocp.CheckpointManager, step: int, like: Any) -> Any:
    """The pytree saved at `step`, with the structure, shapes, types and shardings of `like`."""
    return manager.restore(step, args=ocp.args.StandardRestore(like))
