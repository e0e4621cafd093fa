"""Metrics of a run at its evaluations: lines of JSON, and the load of its experts as a picture."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from jax_grouped.examples.settings import UsageError


class Metrics(NamedTuple):
    """A line of `metrics.jsonl`: the `StepMetrics` of a step as numbers and lists, one value per block.

    What is no finite number is None where it has been read from a file.

    Attributes:
        step: number of steps that have been taken.
        gradient_norm: of all parameters together, before it is clipped.
        balance_loss: one per block.
        expert_load: per block, the part of the pairs of a token and an expert that each expert has.
        dropped: per block, the part of the pairs that found no room.
        amax: per block, the largest absolute value of the tokens that go to the experts.
    """

    step: int
    gradient_norm: float | None
    balance_loss: list[float | None]
    expert_load: list[list[float]]
    dropped: list[float]
    amax: list[float | None]


def metrics_of(step: int, shown: Any) -> Metrics:
    """Returns the metrics of a step from its `StepMetrics`, of the whole batch, on any device."""
    pairs = np.sum(shown.expert_load, axis=1, keepdims=True)
    rest = shown.balance_loss, shown.expert_load / pairs, shown.dropped / pairs[:, 0], shown.amax
    return Metrics(step, float(shown.gradient_norm), *(np.asarray(value, np.float64).tolist() for value in rest))


def line_of(metrics: Metrics) -> str:
    """Returns the line of these metrics in a `metrics.jsonl`, with null for what is no finite number."""

    def valid(value: Any) -> Any:
        if isinstance(value, list):
            return [valid(each) for each in value]
        return value if value is not None and math.isfinite(value) else None

    return json.dumps({name: valid(value) for name, value in metrics._asdict().items()}) + "\n"


def read_metrics(path: Path, last_step: float = math.inf) -> list[Metrics]:
    """Returns the lines of a `metrics.jsonl` up to a step, without half a line that an interruption has left.

    Raises:
        OSError: it cannot be read.
        UsageError: it has something else in it.
    """
    try:
        rows = [Metrics(**json.loads(line)) for line in path.read_text().split("\n")[:-1]]
        if len({np.array(row.expert_load, float).shape for row in rows}) > 1:
            raise ValueError
        return [row for row in rows if row.step <= last_step]
    except (TypeError, ValueError):
        raise UsageError(f"{path} does not hold metrics of this program") from None


def draw_load(rows: Sequence[Metrics], title: str) -> Figure:
    """Returns a picture of the experts' load over the steps, a row of it per block: 1 is an even share."""
    loads = np.array([row.expert_load for row in rows])  # [step, block, expert]
    blocks, experts = loads.shape[1:]
    shown = range(0, len(rows), math.ceil(len(rows) / 10))
    figure = Figure(figsize=(7, 1 + 1.5 * blocks), layout="constrained")
    for block, axes in enumerate(figure.subplots(blocks, sharex=True, squeeze=False)[:, 0]):
        of_block = loads[:, block].T * experts
        image = axes.imshow(of_block, aspect="auto", interpolation="nearest", vmin=0, vmax=2, cmap="coolwarm")
        axes.set(ylabel=f"block {block}\nexpert")
        axes.set_xticks(shown, [rows[index].step for index in shown])
        axes.locator_params(axis="y", integer=True)
    axes.set(xlabel="step")
    figure.colorbar(image, ax=figure.axes, label="load / even share", extend="max")
    figure.suptitle(title, fontsize="small")
    return figure
