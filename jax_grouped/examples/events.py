"""The losses and metrics of a run as TensorBoard's event files."""

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from tensorboardX import SummaryWriter

from jax_grouped.examples.loss_curve import Losses
from jax_grouped.examples.metrics import Metrics
from jax_grouped.examples.settings import UsageError


class Events:
    """Writes event files, or nothing where there is no folder for them."""

    def __init__(self, writer: SummaryWriter | None):
        self._writer = writer

    def losses(self, rows: Iterable[Losses]) -> None:
        """Adds rows of the loss curve."""
        for row in rows:
            for name, loss in (("train", row.train), ("held_out", row.held_out)):
                if loss is not None:
                    self._scalar(f"loss/{name}", loss, row.step)

    def metrics(self, metrics: Iterable[Metrics]) -> None:
        """Adds metrics."""
        for row in metrics:
            self._scalar("gradient_norm", row.gradient_norm, row.step)
            for name in ("balance_loss", "dropped", "amax"):
                for block, value in enumerate(getattr(row, name)):
                    self._scalar(f"{name}/block_{block}", value, row.step)
            for block, load in enumerate(row.expert_load):
                for expert, share in enumerate(load):
                    self._scalar(f"expert_load/block_{block}/expert_{expert}", share, row.step)

    def _scalar(self, name: str, value: float | None, step: int) -> None:
        if self._writer is not None and value is not None:
            self._writer.add_scalar(name, value, step)


@contextlib.contextmanager
def events(folder: Path | None, step: int) -> Iterator[Events]:
    """Yields a writer of the events after `step`. TensorBoard forgets later ones that are in the folder already.

    Raises:
        UsageError: the folder cannot be written.
    """
    if folder is None:
        yield Events(None)
        return
    try:
        writer = SummaryWriter(str(folder), purge_step=step + 1)
    except OSError as error:
        raise UsageError(f"--log: cannot write {folder}: {error.strerror}") from None
    with writer:
        yield Events(writer)
