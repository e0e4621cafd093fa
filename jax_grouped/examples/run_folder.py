"""The folder of a training run: settings, losses, metrics and checkpoints, kept so that the run can be continued."""

import contextlib
import functools
import json
import logging
import os
import re
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from filelock import FileLock, Timeout
from flax.training.train_state import TrainState

from jax_grouped.examples.loss_curve import Losses, draw, draw_load, format_losses, format_metrics
from jax_grouped.examples.processes import agree, saved_steps
from jax_grouped.examples.settings import Settings, UsageError


class RunFolder:
    """A folder with one run in it, or none.

    A checkpoint holds the state, all losses and all metrics; of the other files only `settings.json` is ever read.
    Processes that train together save and restore together; all else is written by process 0 alone.
    Methods that write raise an OSError if the system refuses.

    Attributes:
        path: the folder.
        losses: the rows of `loss.csv`.
        metrics: the metrics of the steps after which the model was evaluated.
    """

    def __init__(self, path: str):
        self.path = Path(path)
        self.losses: list[Losses] = []
        self.metrics: list[dict[str, Any]] = []
        self._settings_path = self.path / "settings.json"
        self._checkpoints_path = self.path / "checkpoints"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Makes the folder if there is none, and keeps other processes out of it until this one leaves or ends."""
        with contextlib.ExitStack() as stack:
            if jax.process_index() == 0:
                self.path.mkdir(parents=True, exist_ok=True)
                try:
                    stack.enter_context(FileLock(self.path / "train_moe.lock", timeout=0))
                except Timeout:
                    raise UsageError(f"--out: {self.path} is in use by another process") from None
            yield

    def check(self, resume: bool) -> None:
        """Raises a UsageError if there is no run to resume, or anything with the name of a file of a new run."""
        if resume and not saved_steps(self.path):
            raise UsageError(f"--resume: there is no checkpoint in {self.path}")
        names = "settings.json checkpoints loss.csv loss.png metrics.jsonl load.png tensorboard"
        for path in (self.path / name for name in names.split()):
            if not resume and os.path.lexists(path):
                raise UsageError(f"--out: {path} exists already: continue that run with --resume, or name a new folder")

    def read_settings(self) -> tuple[dict[str, Any], str]:
        """Returns the recorded settings of the run, and its `text_sha256`, or raises a UsageError."""
        try:
            settings = dict(json.loads(self._settings_path.read_text()))
            return settings, settings.pop("text_sha256")
        except (KeyError, OSError, TypeError, ValueError):
            reason = f"{self._settings_path} is missing or damaged: restore it, or start anew in another folder"
            raise UsageError(f"--resume: {reason}") from None

    def write_settings(self, settings: Settings, text_sha256: str) -> None:
        """Records the settings."""
        record = {**settings.recorded(), "text_sha256": text_sha256}
        _replace(self._settings_path, json.dumps(record, indent=2) + "\n")

    def add(self, losses: Sequence[Losses], metrics: Sequence[dict[str, Any]]) -> None:
        """Adds rows to the loss curve, and metrics."""
        self.losses += losses
        self.metrics += metrics
        _replace(self.path / "loss.csv", format_losses(self.losses))
        _replace(self.path / "metrics.jsonl", format_metrics(self.losses, self.metrics))

    def save(self, step: int, state: TrainState, title: str) -> None:
        """Saves a checkpoint, or raises a UsageError; draws the loss curve and the load of the experts."""
        records = {"losses": self.losses, "metrics": self.metrics, "checksum": int(_checksum(state))}
        items = ocp.args.Composite(state=ocp.args.StandardSave(state), records=ocp.args.JsonSave(records))
        try:
            self._checkpoints.save(step, args=items)
        except (OSError, ValueError) as error:
            # TensorStore reports a refusal of the system as a ValueError.
            reason = f"{_reason(error)}; --resume continues from the latest that is there"
            raise UsageError(f"--out: cannot save a checkpoint in {self._checkpoints_path}: {reason}") from None
        if jax.process_index() > 0:
            return
        draw(self.losses, title).savefig(self.path / "loss.png", dpi=150)
        if self.metrics:
            draw_load(self.metrics, title).savefig(self.path / "load.png", dpi=150)

    def restore(self, like: TrainState) -> tuple[int, TrainState]:
        """Reads the latest checkpoint that can be read, with its losses and metrics, and moves later ones away.

        Returns the number of steps that have been taken, and the state after them, with shapes and shardings as in
        `like`; or raises a UsageError, and changes nothing on disk.
        """
        items = ocp.args.Composite(state=ocp.args.StandardRestore(like), records=ocp.args.JsonRestore())
        unreadable: dict[int, str] = {}
        for step in sorted(self._checkpoints.all_steps(), reverse=True):
            reason = ""
            try:
                restored = self._checkpoints.restore(step, args=items)
                state, records = restored.state, dict(restored.records)
            except jax.errors.JaxRuntimeError:
                # The device's, for example of too little memory.
                raise
            except Exception as error:
                # Orbax has no error of its own for files that are damaged.
                reason = _reason(error)
            # All processes compute the checksum together, or none does.
            readable = agree(bool(reason)) == [0]
            if readable and state.step == step and int(_checksum(state)) == records.get("checksum"):
                break
            unreadable[step] = reason or "it is not what was saved"
        else:
            reasons = "; ".join(f"of step {step}: {reason}" for step, reason in unreadable.items())
            raise UsageError(f"--resume: no checkpoint in {self._checkpoints_path} can be read ({reasons})")
        for damaged, reason in unreadable.items() if jax.process_index() == 0 else ():
            moved = tempfile.mkdtemp(prefix="unreadable-", dir=self.path)
            (self._checkpoints_path / str(damaged)).rename(Path(moved, str(damaged)))
            print(f"note: the checkpoint of step {damaged} cannot be read ({reason}) and has been moved to {moved}")
        agree(0)  # The other processes wait until they are gone.
        self._checkpoints.reload()
        self.losses, self.metrics = [Losses(*row) for row in records["losses"]], records["metrics"]
        return step, state

    @functools.cached_property
    def _checkpoints(self) -> ocp.CheckpointManager:
        _silence_orbax()
        options = ocp.CheckpointManagerOptions(
            max_to_keep=2,
            # A process that was killed while saving has left a folder that nothing else would delete.
            cleanup_tmp_directories=True,
            enable_async_checkpointing=False,
        )
        return ocp.CheckpointManager(self._checkpoints_path.absolute(), options=options)


@jax.jit
def _checksum(state: TrainState) -> jax.Array:
    """Returns the sum of all bits as integers: TensorStore does not see every byte of a file that has changed."""
    sums = [jnp.sum(jax.lax.bitcast_convert_type(x, jnp.uint32), dtype=jnp.uint32) for x in jax.tree.leaves(state)]
    return jnp.sum(jnp.stack(sums), dtype=jnp.uint32)


def _replace(path: Path, text: str) -> None:
    """Writes a file in process 0, so that an interruption leaves the old one or the new one, never half of it."""
    if jax.process_index() > 0:
        return
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    os.replace(part, path)


def _silence_orbax() -> None:
    """Keeps from the output what Orbax and TensorStore print about errors that they raise, also when a process ends."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    report, known = sys.unraisablehook, re.compile("Event loop is closed|error while reading array index")
    sys.unraisablehook = lambda error: None if known.search(str(error.exc_value)) else report(error)


def _reason(error: Exception) -> str:
    """Returns the message of a library in a line of a readable length."""
    if os_error := re.search(r"os_error_code='(\d+)'", str(error)):
        return os.strerror(int(os_error[1]))
    return textwrap.shorten(str(error) or type(error).__name__, 200)
