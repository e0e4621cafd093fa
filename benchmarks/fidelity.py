"""Compares what a model learns in FP8 with what it learns in bfloat16."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tabulate

from jax_grouped.examples.loss_curve import held_out_points, read_losses, train_points
from jax_grouped.examples.settings import UsageError

#: Settings that compared runs need not share: the recipe, the text's path, and those that do not shape the curve.
_FREE = ("recipe", "seed", "data", "eval_every", "save_every", "parallel", "devices", "expert_devices")


class Run(NamedTuple):
    """A finished run: its settings, with the text's fingerprint; losses in nats per byte, and differences, by step.

    `differences` are percent by which `held_out` is above that of the bf16 run.
    """

    label: str
    settings: dict[str, Any]
    train: list[tuple[int, float]]
    held_out: list[tuple[int, float]]
    differences: list[tuple[int, float]]


def _read(folder: Path) -> Run:
    """Reads the run in a folder, without differences; UsageError if there is none that has reached its last step."""
    try:
        settings = dict(json.loads((folder / "settings.json").read_text()))
        label, steps = f"{settings['recipe']}, seed {settings['seed']}", settings["steps"]
        rows = read_losses(folder / "loss.csv")
    except (KeyError, OSError, TypeError, ValueError) as error:
        raise UsageError(f"{folder} holds no run that can be read: {type(error).__name__}: {error}") from None
    run = Run(label, settings, train_points(rows), held_out_points(rows), [])
    if not run.train or not run.held_out or run.held_out[-1][0] != steps:
        raise UsageError(f"{folder}: the run has not come to the end of its {steps} steps")
    return run


def _with_differences(run: Run, runs: Sequence[Run]) -> Run:
    """Compares a run with that of bf16; UsageError without one that is alike but for the settings that may differ."""
    found = [other for other in runs if other.label == f"bf16, seed {run.settings['seed']}"]
    if len(found) != 1:
        raise UsageError(f"{run.label}: one bf16 run of this seed is needed to compare with, got {len(found)}")
    if differing := {name for name, _ in run.settings.items() ^ found[0].settings.items()}.difference(_FREE):
        raise UsageError(f"{run.label}: not the bf16 run's {', '.join(sorted(differing))}, so they cannot be compared")
    reference = dict(found[0].held_out)
    percent = [(step, 100 * (loss / reference[step] - 1)) for step, loss in run.held_out if step in reference]
    return run._replace(differences=percent)


def _record(run: Run) -> dict[str, Any]:
    """Returns all but the path of the text, which says nothing elsewhere, and the training losses."""
    settings = {name: value for name, value in run.settings.items() if name != "data"}
    final = {"final_held_out_loss": run.held_out[-1][1], "percent_from_bf16": run.differences[-1][1]}
    return {"settings": settings, **final, "held_out": dict(run.held_out)}


def compare(arguments: argparse.Namespace) -> int:
    """Prints, writes and draws the comparison; returns 1 if a run is further from bf16 than `--within`, else 0."""
    runs = [_read(folder) for folder in arguments.runs]
    runs = [_with_differences(run, runs) for run in runs]
    if arguments.json:
        arguments.json.write_text(json.dumps([_record(run) for run in runs], indent=1) + "\n")
    rows = [[*run.label.split(", seed "), *run.held_out[-1], run.differences[-1][1]] for run in runs]
    headers = ["recipe", "seed", "steps", "held-out loss", "% from bf16"]
    print(tabulate.tabulate(rows, headers, floatfmt=("", "", "", ".4f", "+.2f")))
    # Not `>`: a loss that is no number is not near anything.
    far = [run.label for run in runs if not abs(run.differences[-1][1]) <= arguments.within]
    if far:
        print(f"The final held-out loss is more than {arguments.within:g} % from that of bf16: {'; '.join(far)}.")
    return 1 if far else 0
