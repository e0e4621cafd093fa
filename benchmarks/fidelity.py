"""Compares what a model learns in FP8 with what it learns in bfloat16: `python3 -m benchmarks.fidelity --help`."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tabulate
from matplotlib.figure import Figure

from benchmarks import cli
from jax_grouped.examples.loss_curve import held_out_points, read_losses, train_points
from jax_grouped.examples.settings import UsageError

_DESCRIPTION = """\
Compares runs of jax_grouped.examples.train_moe that differ in --recipe, and beside it at most in --seed: prints every
run's final held-out loss and how far it is from that of the bf16 run of its seed. The exit status is 1 if that is more
than --within for one of them."""

#: Settings that compared runs need not share: what is compared, the text's path, and what does not shape the curve.
_FREE = ("recipe", "seed", "data", "eval_every", "save_every", "parallel", "devices", "expert_devices")


class Run(NamedTuple):
    """A finished run: its settings, with the text's fingerprint, and numbers by step.

    Attributes:
        label: recipe and seed.
        train, held_out: losses in nats per byte.
        differences: how far `held_out` is above that of the bf16 run, in percent.
    """

    label: str
    settings: dict[str, Any]
    train: list[tuple[int, float]]
    held_out: list[tuple[int, float]]
    differences: list[tuple[int, float]]

    def record(self) -> dict[str, Any]:
        """What is written: all but the path of the text, which says nothing elsewhere, and the training losses."""
        settings = {name: value for name, value in self.settings.items() if name != "data"}
        final = {"final_held_out_loss": self.held_out[-1][1], "percent_from_bf16": self.differences[-1][1]}
        return {"settings": settings, **final, "held_out": dict(self.held_out)}


def read_run(folder: Path) -> Run:
    """The run in a folder, not compared yet; UsageError if there is none that has reached its last step."""
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


def compare(run: Run, runs: Sequence[Run]) -> Run:
    """The run with its differences; UsageError without one bf16 run to compare with, alike but for what may differ."""
    found = [other for other in runs if other.label == f"bf16, seed {run.settings['seed']}"]
    if len(found) != 1:
        raise UsageError(f"{run.label}: one bf16 run of this seed is needed to compare with, got {len(found)}")
    if differing := {name for name, _ in run.settings.items() ^ found[0].settings.items()}.difference(_FREE):
        raise UsageError(f"{run.label}: not the bf16 run's {', '.join(sorted(differing))}, so they cannot be compared")
    reference = dict(found[0].held_out)
    percent = [(step, 100 * (loss / reference[step] - 1)) for step, loss in run.held_out if step in reference]
    return run._replace(differences=percent)


def plot(runs: Sequence[Run], path: Path) -> None:
    """Draws the losses, those of training smoothed, and the differences to bf16 into a PNG; one colour per recipe."""
    colours = {recipe: f"C{i}" for i, recipe in enumerate(dict.fromkeys(run.settings["recipe"] for run in runs))}
    figure = Figure(figsize=(9, 7), layout="constrained")
    losses, differences = figure.subplots(2, sharex=True, height_ratios=(3, 2))
    for run in runs:
        style = {"color": colours[run.settings["recipe"]], "linewidth": 0.8, "markersize": 3}
        steps, values = np.transpose(run.train)
        window = max(1, len(values) // 50)
        losses.plot(steps[window - 1 :], np.convolve(values, np.full(window, 1 / window), "valid"), **style)
        losses.plot(*np.transpose(run.held_out), "o", label=run.label, **style)
        differences.plot(*np.transpose(run.differences), "o-", **style)
    losses.set(ylabel="loss (nats per byte)", yscale="log")
    losses.legend(title="training, smoothed, and held out (dots)")
    differences.set(xlabel="step", ylabel="held-out loss, % above bf16")
    figure.savefig(path, dpi=150)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program with these arguments, or those of the command line, and returns its exit status."""
    parser = cli.new_parser("python3 -m benchmarks.fidelity", _DESCRIPTION, "")
    parser.add_argument("--runs", type=Path, nargs="+", required=True, metavar="DIR", help="folders of finished runs")
    parser.add_argument("--within", type=cli.positive(float), default=1.0, help="percent of bf16's loss (default: 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write settings and held-out losses here")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the curves into this PNG")
    arguments = parser.parse_args(argv)
    try:
        runs = [read_run(folder) for folder in arguments.runs]
        runs = [compare(run, runs) for run in runs]
        if arguments.json:
            arguments.json.write_text(json.dumps([run.record() for run in runs], indent=1) + "\n")
        if arguments.plot:
            plot(runs, arguments.plot)
    except (OSError, UsageError) as error:
        parser.error(str(error))
    rows = [[*run.label.split(", seed "), *run.held_out[-1], run.differences[-1][1]] for run in runs]
    headers = ["recipe", "seed", "steps", "held-out loss", "% from bf16"]
    print(tabulate.tabulate(rows, headers, floatfmt=("", "", "", ".4f", "+.2f")))
    # Not `>`: a loss that is no number is not near anything.
    far = [run.label for run in runs if not abs(run.differences[-1][1]) <= arguments.within]
    if far:
        print(f"The final held-out loss is more than {arguments.within:g} % from that of bf16: {'; '.join(far)}.")
    return 1 if far else 0


if __name__ == "__main__":
    raise SystemExit(main())
