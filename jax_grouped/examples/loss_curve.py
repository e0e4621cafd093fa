"""The losses of a run: in memory, as CSV that survives an interruption, and as a picture."""

import io
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure

from jax_grouped.examples.settings import UsageError

_HEADER = "step,train_loss,held_out_loss"


class Losses(NamedTuple):
    """A row of the curve, in nats per byte.

    Attributes:
        step: how many steps have been taken.
        train: the loss of the last step's batch, before that step; None before the first step.
        held_out: the held-out loss after the step, or None where it was not evaluated.
    """

    step: int
    train: float | None
    held_out: float | None


class LossCurve:
    """The losses of the run in a folder, `loss.csv` and `loss.png`."""

    def __init__(self, folder: Path):
        self.csv_path = folder / "loss.csv"
        self.plot_path = folder / "loss.png"
        self.rows: list[Losses] = []

    def read(self, step: int) -> None:
        """Reads the rows on disk up to this step; there are none if there is no file.

        Raises:
            UsageError: the file is not a loss curve.
        """
        self.rows = read_losses(self.csv_path, step) if self.csv_path.exists() else []

    def missing(self, step: int) -> int:
        """Number of steps up to this one that have no training loss."""
        return step - sum(row.train is not None for row in self.rows)

    def write(self) -> None:
        """Replaces the file on disk by the rows."""
        replace_file(self.csv_path, f"{_HEADER}\n{_csv(self.rows)}".encode())

    def extend(self, rows: Iterable[Losses]) -> None:
        """Adds rows, on disk too; an error leaves the file as it was."""
        rows = list(rows)
        size = self.csv_path.stat().st_size
        try:
            with self.csv_path.open("a") as file:
                file.write(_csv(rows))
        except OSError:
            os.truncate(self.csv_path, size)
            raise
        self.rows += rows

    def held_out(self) -> list[tuple[int, float]]:
        """The steps at which the held-out loss was evaluated, and its values."""
        return held_out_points(self.rows)

    def plot(self, title: str) -> None:
        """Draws the curve so far."""
        picture = io.BytesIO()
        self.figure(title).savefig(picture, dpi=150)
        replace_file(self.plot_path, picture.getvalue())

    def figure(self, title: str) -> Figure:
        """The curve so far: a line through consecutive steps, and a dot per evaluation."""
        # A Figure of its own, without pyplot, needs no display and leaves nothing global behind.
        figure = Figure(figsize=(7, 4.5), layout="constrained")
        axes = figure.subplots()
        train = _with_breaks(train_points(self.rows))
        for points, style, label in ((train, "-", "training batch"), (self.held_out(), "o", "held out")):
            steps, losses = [step for step, _ in points], [loss for _, loss in points]
            axes.plot(steps, losses, style, label=label, linewidth=1, markersize=4)
        axes.set(xlabel="step", ylabel="loss (nats per byte)")
        axes.set_title(title, fontsize="small")
        axes.grid(alpha=0.3)
        axes.legend()
        return figure


def read_losses(path: Path, last_step: float = math.inf) -> list[Losses]:
    """The rows of a `loss.csv` up to a step. An interruption can leave half a row at the end, which is not read.

    Raises:
        OSError: it cannot be read.
        UsageError: it is not a loss curve.
    """
    rows: list[Losses] = []
    try:
        header, *lines = path.read_text().split("\n")[:-1]
        if header != _HEADER:
            raise ValueError
        for line in lines:
            step, train, held_out = line.split(",")
            losses = Losses(int(step), _value(train), _value(held_out))
            if losses.step > last_step:
                break
            if rows and losses.step <= rows[-1].step:
                raise ValueError
            rows.append(losses)
    except ValueError:
        raise UsageError(f"{path} is not a loss curve of this program") from None
    return rows


def train_points(rows: Iterable[Losses]) -> list[tuple[int, float]]:
    """The steps with a training loss, and its values."""
    return [(row.step, row.train) for row in rows if row.train is not None]


def held_out_points(rows: Iterable[Losses]) -> list[tuple[int, float]]:
    """The steps with a held-out loss, and its values."""
    return [(row.step, row.held_out) for row in rows if row.held_out is not None]


def replace_file(path: Path, content: bytes) -> None:
    """Writes a file so that an interruption or an error leaves the old one or the new one, never half of it."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_bytes(content)
        os.replace(part, path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def _with_breaks(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """The points with a NaN, which ends a line, wherever steps are missing."""
    broken: list[tuple[int, float]] = []
    for step, loss in points:
        if broken and step > broken[-1][0] + 1:
            broken.append((step - 1, math.nan))
        broken.append((step, loss))
    return broken


def _value(cell: str) -> float | None:
    return float(cell) if cell else None


def _csv(rows: Iterable[Losses]) -> str:
    def cell(value: float | None) -> str:
        return "" if value is None else f"{value:.6f}"

    return "".join(f"{row.step},{cell(row.train)},{cell(row.held_out)}\n" for row in rows)
