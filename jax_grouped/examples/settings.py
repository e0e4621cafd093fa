"""The settings of a training run: one field per option of the command line, and the rules that they obey."""

import argparse
import dataclasses
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from jax_grouped.core.groups import FP8_ALIGNMENT
from jax_grouped.fp8.recipes import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling, Recipe

#: Number formats of the experts' matmuls; None is bfloat16.
RECIPES: Mapping[str, Recipe | None] = {
    "bf16": None,
    "block": Float8BlockScaling(),
    "current": Float8CurrentScaling(),
    "delayed": DelayedScaling(),
    "mxfp8": MXFP8BlockScaling(),
}

#: Options that may change when a run is resumed; every other one shapes the loss curve.
CHANGEABLE = ("steps", "eval_every", "save_every", "parallel", "devices", "expert_devices")


class UsageError(Exception):
    """Something that the user can put right; its text is one line that says what."""


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


_DESCRIPTION = f"""\
Train a byte-level transformer whose feed-forward layers are mixtures of experts, each a MoEMlp of jax_grouped.

On a CPU the default sizes train for about a minute. The run's folder receives loss.csv and loss.png; settings.json and
checkpoints/; metrics.jsonl, with the losses and, of the steps after which the held-out loss is evaluated, the gradient
norm and, per block, the balance loss, the load of the experts, the part of dropped pairs and the largest value of the
tokens that go to the experts; and load.png, a picture of that load.
A new run never overwrites an earlier one: it ends at once where one of these exists.
Ctrl-C or SIGTERM ends a run after its current step, with a checkpoint. --resume continues it with its settings; only
{", ".join(map(_flag, CHANGEABLE))} may differ.

--recipe: with bf16, matmuls and activations are bfloat16; parameters, Adam, router and loss are float32. The others
compute the experts' matmuls in FP8, scaled per block of 128, per expert with the current or the delayed largest value,
or per block of 32.

--parallel: with pmap every device has the whole model and a part of the batch. With expert it has a part of the experts
and of the batch, and tokens travel to their experts and back; groups of --expert-devices share the batch. The curves
are the same but for rounding, without --capacity-factor, which drops rows that a device has no room for.

Tasks that srun or mpirun starts train together, with --parallel expert unless told otherwise. Processes that are
started by hand need --coordinator, --num-processes and --process-id. All of them see the folder --out and read the same
text; process 0 writes and prints.
"""


def _option(
    default: Any, text: str, kind: type | None = None, choices: Iterable[str] | None = None, metavar: str | None = None
) -> Any:
    """Returns a field of `Settings`; the default None says that others decide, and needs `kind`."""
    kind = kind or type(default)
    if kind is bool:
        return dataclasses.field(metadata={"action": "store_true", "help": text})
    metavar = None if choices else metavar or {int: "N", float: "X", str: "PATH"}[kind]
    text += "" if default is None else " (default: %(default)s)"
    return dataclasses.field(
        metadata={"default": default, "type": kind, "choices": choices, "metavar": metavar, "help": text}
    )


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of one run; each field is the option of the same name."""

    data: str | None = _option(None, "a text or a folder of texts (default: Python's standard library)", str)
    out: str = _option("runs/train_moe", "the run's folder")
    resume: bool = _option(False, "continue the run in the folder --out from its latest checkpoint")
    steps: int = _option(250, "optimizer steps, counted from the start of the run")
    eval_every: int = _option(50, "steps between evaluations of the held-out loss")
    log: str = _option("files", "tensorboard: write the folder tensorboard/ too", choices=("files", "tensorboard"))
    sample: int = _option(200, "bytes of text that the trained model writes in the end; 0 for none")
    save_every: int = _option(100, "steps between checkpoints; the last step is always saved")
    layer: str = _option("linen", "Flax's API of the model", choices=("linen", "nnx"))
    recipe: str = _option("bf16", "number formats, see above", choices=RECIPES)
    parallel: str = _option("none", "use of several devices, see above", choices=("none", "pmap", "expert"))
    devices: int | None = _option(None, "of --parallel pmap and expert (default: all that there are)", int)
    expert_devices: int | None = _option(None, "devices that the experts are split over (default: --devices)", int)
    coordinator: str | None = _option(None, "address of process 0, see above", str, metavar="HOST:PORT")
    num_processes: int | None = _option(None, "processes that train together; 1 ignores those of srun and mpirun", int)
    process_id: int | None = _option(None, "number of this process, from 0 on", int)
    seed: int = _option(0, "of the parameters and the data order")
    batch: int = _option(16, "sequences per step, on all devices together")
    microbatches: int = _option(1, "parts of the batch, taken one after another; they share quantized kernels")
    sequence: int = _option(128, "bytes per sequence")
    learning_rate: float = _option(None, "after the warm-up (default: 0.25 / d_model)", float)
    cool_down: int = _option(0, "last steps, over which the learning rate falls to zero; such a run cannot be extended")
    d_model: int = _option(128, "features per token")
    layers: int = _option(2, "transformer blocks")
    heads: int = _option(4, "attention heads per block")
    experts: int = _option(8, "experts per block")
    top_k: int = _option(2, "experts that each token uses")
    capacity_factor: float | None = _option(None, "rows of a device, in even shares (default: room for all)", float)
    d_ff: int = _option(None, "features inside an expert (default: the multiple of 16 nearest to 4/3 * d_model)", int)

    def recorded(self) -> dict[str, Any]:
        """Returns the settings that a run's folder keeps, to resume with: not those of one process."""
        temporary = ("out", "resume", "log", "sample", "coordinator", "num_processes", "process_id")
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in temporary}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # argparse's own version prints the usage, which fills a screen, and exits.
        raise UsageError(message)


def parse(argv: Sequence[str], recorded: Mapping[str, Any] | None = None) -> Settings:
    """Returns the settings of a command line, or those to continue a run with.

    Args:
        argv: the options.
        recorded: what the folder of the run keeps as its settings. Without it only `out` counts beside `--resume`.

    Raises:
        UsageError: an option is unknown, malformed, or does not fit the others or `recorded`, or that is damaged.
        SystemExit: after `--help`.
    """
    settings = _parse(argv)
    if recorded is None:
        if not settings.resume:
            _check(settings)
        return settings
    flags = {name: f"{_flag(name)}={value}" for name, value in recorded.items() if value is not None}
    try:
        if _parse([*flags.values()]).recorded() != recorded:
            raise UsageError("an option is missing")
    except UsageError as error:
        damage = f"settings.json in {settings.out} is damaged or not of this program ({error})"
        raise UsageError(f"--resume: {damage}: restore it, or start anew in another folder") from None
    settings = _parse([*flags.values(), *argv])
    if settings.parallel != recorded["parallel"]:
        # Devices that were chosen for another way to use them say nothing.
        settings = _parse([*(flags[name] for name in flags if not name.endswith("devices")), *argv])
    # Not the path of the text, which may have moved: its content is compared. The learning rate of a run that cools
    # down depends on the number of steps.
    free = {*CHANGEABLE, "data"} - ({"steps"} if settings.cool_down else set())
    for name, value in settings.recorded().items():
        if name not in free and value != recorded[name]:
            started = f"the run in {settings.out} was started with {_flag(name)} {recorded[name]}"
            raise UsageError(f"--resume: {started}, not {value}")
    _check(settings)
    return settings


def _parse(argv: Sequence[str]) -> Settings:
    raw = argparse.RawDescriptionHelpFormatter
    parser = _Parser("train_moe", description=_DESCRIPTION, formatter_class=raw, allow_abbrev=False)
    for field in dataclasses.fields(Settings):
        parser.add_argument(_flag(field.name), **field.metadata)
    values = vars(parser.parse_args(argv))
    if values["data"] is not None:
        values["data"] = os.path.abspath(values["data"])
    if values["d_ff"] is None:
        # With a gate, two thirds of the usual features have as many parameters.
        values["d_ff"] = FP8_ALIGNMENT * max(1, round(4 / 3 * values["d_model"] / FP8_ALIGNMENT))
    if values["learning_rate"] is None:
        # The best rate of Adam falls as the width grows (https://arxiv.org/abs/2203.03466); 0.25 suits width 128.
        values["learning_rate"] = 0.25 / max(1, values["d_model"])
    return Settings(**values)


def _require(rules: Iterable[tuple[bool, str]]) -> None:
    """Raises a UsageError with the text of the first rule that does not hold."""
    for holds, text in rules:
        if not holds:
            raise UsageError(text)


def _check(s: Settings) -> None:
    """Raises a UsageError if settings are out of range or do not fit one another."""
    for name, value in dataclasses.asdict(s).items():
        least = 0 if name in ("seed", "cool_down", "sample", "process_id") else 1
        if type(value) is int and not least <= value < 2**31:
            raise UsageError(f"{_flag(name)} must be at least {least} and less than 2^31, got {value}")
        if type(value) is float and not 0 < value < math.inf:
            raise UsageError(f"{_flag(name)} must be a positive number, got {value}")
    fp8_sizes = s.recipe == "bf16" or s.d_model % FP8_ALIGNMENT == s.d_ff % FP8_ALIGNMENT == 0
    rules = [
        (s.out != "", "--out must name a folder"),
        (s.top_k <= s.experts, f"--top-k {s.top_k} is more than --experts {s.experts}"),
        (s.d_model % (2 * s.heads) == 0, f"--d-model {s.d_model} must be a multiple of 2 * --heads = {2 * s.heads}"),
        (s.cool_down <= s.steps, f"--cool-down {s.cool_down} is more than --steps {s.steps}"),
        (fp8_sizes, f"--recipe {s.recipe} needs multiples of {FP8_ALIGNMENT} as --d-model and --d-ff"),
        (s.parallel != "none" or s.devices in (None, 1), "--devices needs --parallel pmap or --parallel expert"),
        (s.parallel == "expert" or s.expert_devices is None, "--expert-devices needs --parallel expert"),
    ]
    _require(rules)


class Devices(NamedTuple):
    """Numbers of devices: of all, and of those that the experts are split over."""

    total: int
    expert: int


def count_devices(s: Settings, available: int, processes: int = 1) -> Devices:
    """Returns the numbers of devices that settings ask for, of those that are available to all processes together.

    Raises:
        UsageError: there are too few, or something cannot be split evenly over them.
    """
    total = s.devices or (1 if s.parallel == "none" else available)
    expert = s.expert_devices or (total if s.parallel == "expert" else 1)
    both = f"--devices * --microbatches, here {total} * {s.microbatches}"
    all_devices = f"--devices {total} must be all {available} of the {processes} processes"
    rules = [
        (processes == 1 or s.parallel != "pmap", "--parallel pmap is for one process; --parallel expert takes several"),
        (total <= available, f"--devices {total} is more than the {available} that JAX sees"),
        (processes == 1 or total == available, all_devices),
        (total % expert == 0, f"--devices {total} must be a multiple of --expert-devices {expert}"),
        (s.experts % expert == 0, f"--experts {s.experts} must be a multiple of --expert-devices, here {expert}"),
        (s.batch % (total * s.microbatches) == 0, f"--batch {s.batch} must be a multiple of {both}"),
    ]
    _require(rules)
    return Devices(total, expert)
