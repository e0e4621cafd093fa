"""The losses of a run, as CSV and as a picture."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from jax_grouped.examples.settings import UsageError

HEADER = "step,train_loss,held_out_loss\n"


class Losses(NamedTuple):
    """A row of the curve, in nats per byte.

    Attributes:
        step: number of steps that have been taken.
        train: the loss of the last step's batch, before that step; None before the first step.
        held_out: the held-out loss after the step, or None where it was not evaluated.
    """

    step: int
    train: float | None
    held_out: float | None


def read_losses(path: Path, last_step: float = math.inf) -> list[Losses]:
    """Returns the rows of a `loss.csv` up to a step, without half a row that an interruption has left at the end.

    Raises:
        OSError: it cannot be read.
        UsageError: it is not a loss curve.
    """
    rows: list[Losses] = []
    try:
        header, *lines = path.read_text().split("\n")[:-1]
        if header != HEADER.rstrip():
            raise ValueError
        for line in lines:
            step, *losses = line.split(",")
            train, held_out = (float(loss) if loss else None for loss in losses)
            if int(step) > last_step:
                break
            if rows and int(step) <= rows[-1].step:
                raise ValueError
            rows.append(Losses(int(step), train, held_out))
    except ValueError:
        raise UsageError(f"{path} is not a loss curve of this program") from None
    return rows


def lines_of(rows: Iterable[Losses]) -> str:
    """Returns the lines of these rows in a `loss.csv`."""

    def cell(loss: float | None) -> str:
        return "" if loss is None else f"{loss:.6f}"

    return "".join(f"{row.step},{cell(row.train)},{cell(row.held_out)}\n" for row in rows)


def train_points(rows: Iterable[Losses]) -> list[tuple[int, float]]:
    """Returns the steps with a training loss, and its values."""
    return [(row.step, row.train) for row in rows if row.train is not None]


def held_out_points(rows: Iterable[Losses]) -> list[tuple[int, float]]:
    """Returns the steps with a held-out loss, and its values."""
    return [(row.step, row.held_out) for row in rows if row.held_out is not None]


def draw(rows: Sequence[Losses], title: str) -> Figure:
    """Returns a picture of the curve: a line through consecutive steps, and a dot per evaluation."""
    # A Figure of its own, without pyplot, needs no display and leaves nothing global behind.
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    # Steps without a loss are NaN, which ends a line.
    train = np.full(rows[-1].step + 1, np.nan)
    for step, loss in train_points(rows):
        train[step] = loss
    axes.plot(train, linewidth=1, label="training batch")
    axes.plot(*np.transpose(held_out_points(rows)), "o", markersize=4, label="held out")
    axes.set(xlabel="step", ylabel="loss (nats per byte)")
    axes.set_title(title, fontsize="small")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure
