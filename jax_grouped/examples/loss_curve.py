"""The losses of a run as CSV, and pictures of them and of the load of its experts."""

import csv
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from jax_grouped.examples.settings import UsageError

HEADER = ["step", "train_loss", "held_out_loss"]


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


def read_losses(path: Path) -> list[Losses]:
    """Returns the rows of a `loss.csv`, or raises a UsageError if it is something else."""
    try:
        header, *rows = csv.reader(path.read_text().splitlines())
        if header != HEADER:
            raise ValueError
        return [Losses(int(step), *(float(loss) if loss else None for loss in losses)) for step, *losses in rows]
    except (TypeError, ValueError):
        raise UsageError(f"{path} is not a loss curve of this program") from None


def format_losses(rows: Iterable[Losses]) -> str:
    """Returns the content of a `loss.csv`."""
    cells = ((row.step, *("" if loss is None else f"{loss:.6f}" for loss in row[1:])) for row in rows)
    return "".join(",".join(map(str, row)) + "\n" for row in (HEADER, *cells))


def format_metrics(losses: Iterable[Losses], metrics: Iterable[Mapping[str, Any]]) -> str:
    """Returns the content of a `metrics.jsonl`: a line per step, with the losses and metrics that it has."""
    others = {row["step"]: row for row in metrics}
    lines = []
    for row in losses:
        named = ((name, value) for name, value in zip(HEADER, row, strict=True) if value is not None)
        finite = {name: value if math.isfinite(value) else None for name, value in named}
        lines.append(json.dumps({**finite, **others.get(row.step, {})}) + "\n")
    return "".join(lines)


def train_points(rows: Iterable[Losses]) -> list[tuple[int, float]]:
    """Returns the steps with a training loss, and its values."""
    return [(row.step, row.train) for row in rows if row.train is not None]


def held_out_points(rows: Iterable[Losses]) -> list[tuple[int, float]]:
    """Returns the steps with a held-out loss, and its values."""
    return [(row.step, row.held_out) for row in rows if row.held_out is not None]


def draw(rows: Sequence[Losses], title: str) -> Figure:
    """Returns a picture of the curve: a line through the steps, and a dot per evaluation."""
    # A Figure of its own, without pyplot, needs no display and leaves nothing global behind.
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(*np.transpose(train_points(rows)), linewidth=1, label="training batch")
    axes.plot(*np.transpose(held_out_points(rows)), "o", markersize=4, label="held out")
    axes.set(xlabel="step", ylabel="loss (nats per byte)")
    axes.set_title(title, fontsize="small")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def draw_load(rows: Sequence[Mapping[str, Any]], title: str) -> Figure:
    """Returns a picture of the experts' load in metrics of several steps, a panel per block: 1 is an even share."""
    loads = np.array([row["expert_load"] for row in rows])  # [step, block, expert]
    blocks, experts = loads.shape[1:]
    shown = range(0, len(rows), math.ceil(len(rows) / 10))
    figure = Figure(figsize=(7, 1 + 1.5 * blocks), layout="constrained")
    for block, axes in enumerate(figure.subplots(blocks, sharex=True, squeeze=False)[:, 0]):
        load = loads[:, block].T * experts
        image = axes.imshow(load, aspect="auto", interpolation="nearest", vmin=0, vmax=2, cmap="coolwarm")
        axes.set(ylabel=f"block {block}\nexpert")
        axes.set_xticks(shown, [rows[index]["step"] for index in shown])
        axes.locator_params(axis="y", integer=True)
    axes.set(xlabel="step")
    figure.colorbar(image, ax=figure.axes, label="load / even share", extend="max")
    figure.suptitle(title, fontsize="small")
    return figure
