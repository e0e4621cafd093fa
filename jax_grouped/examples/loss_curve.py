"""The losses of a run: in memory, as CSV that survives an interruption, and as a picture."""

import csv
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure

from jax_grouped.examples.settings import UsageError

_HEADER = "step,train_loss,held_out_loss\n"


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

    def cut(self, step: int) -> None:
        """Keeps the rows on disk up to this step and drops the later ones.

        Raises:
            UsageError: the file is not a loss curve.
        """
        self.rows = read_losses(self.csv_path, step) if self.csv_path.exists() else []
        replace_file(self.csv_path, _HEADER + _csv(self.rows))

    def extend(self, rows: Iterable[Losses]) -> None:
        """Adds rows, on disk too."""
        rows = list(rows)
        self.rows += rows
        with self.csv_path.open("a") as file:
            file.write(_csv(rows))

    def held_out(self) -> list[tuple[int, float]]:
        """The steps at which the held-out loss was evaluated, and its values."""
        return held_out_points(self.rows)

    def plot(self) -> None:
        """Draws the curve so far."""
        train = train_points(self.rows)
        # A Figure of its own, without pyplot, needs no display and leaves nothing global behind.
        figure = Figure(figsize=(7, 4.5), layout="constrained")
        axes = figure.subplots()
        for points, style, label in ((train, "-", "training batch"), (self.held_out(), "o-", "held out")):
            axes.plot([step for step, _ in points], [loss for _, loss in points], style, label=label, linewidth=1)
        axes.set(xlabel="step", ylabel="loss (nats per byte)")
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(self.plot_path, dpi=150)


def read_losses(path: Path, last_step: float = math.inf) -> list[Losses]:
    """The rows of a `loss.csv` up to a step. What follows it is not read, for an interruption can leave half a row.

    Raises:
        OSError: it cannot be read.
        UsageError: it is not a loss curve.
    """
    rows: list[Losses] = []
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            try:
                losses = Losses(int(row["step"]), _value(row["train_loss"]), _value(row["held_out_loss"]))
            except (KeyError, TypeError, ValueError):
                raise UsageError(f"{path} is not a loss curve of this program") from None
            if losses.step > last_step:
                break
            rows.append(losses)
    return rows


def train_points(rows: Iterable[Losses]) -> list[tuple[int, float]]:
    """The steps with a training loss, and its values."""
    return [(row.step, row.train) for row in rows if row.train is not None]


def held_out_points(rows: Iterable[Losses]) -> list[tuple[int, float]]:
    """The steps with a held-out loss, and its values."""
    return [(row.step, row.held_out) for row in rows if row.held_out is not None]


def replace_file(path: Path, text: str) -> None:
    """Writes a file so that an interruption leaves the old one or the new one, never half of it."""
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    os.replace(part, path)


def _value(cell: str) -> float | None:
    return float(cell) if cell else None


def _csv(rows: Iterable[Losses]) -> str:
    def cell(value: float | None) -> str:
        return "" if value is None else f"{value:.6f}"

    return "".join(f"{row.step},{cell(row.train)},{cell(row.held_out)}\n" for row in rows)
