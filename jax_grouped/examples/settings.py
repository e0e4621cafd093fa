"""What one run of `train_moe` does, the rules for it, and the clear lines for what breaks one."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from jax_grouped.core.groups import FP8_ALIGNMENT
from jax_grouped.fp8.recipes import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling, Recipe

#: How the experts' matmuls are computed in FP8, None for bfloat16.
RECIPES: Mapping[str, Recipe | None] = {
    "bf16": None,
    "block": Float8BlockScaling(),
    "current": Float8CurrentScaling(),
    "delayed": DelayedScaling(),
    "mxfp8": MXFP8BlockScaling(),
}

#: Flax's APIs in which the model is written.
LAYERS = ("linen", "nnx")

#: How a step is spread over devices.
PARALLEL = ("none", "pmap", "expert")

#: Flags that may change when a run is resumed; every other one shapes the loss curve.
CHANGEABLE = ("steps", "eval_every", "save_every", "parallel", "devices", "expert_devices")

#: Flags of one process, which a run's folder does not keep.
_NOT_RECORDED = ("out", "resume", "scaling")


class UsageError(Exception):
    """Something that the user can put right; its text is one line that says what."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What one run does; each field is the flag of the same name."""

    data: str | None
    out: str
    resume: bool
    steps: int
    eval_every: int
    save_every: int
    layer: str
    recipe: str
    parallel: str
    devices: int | None
    expert_devices: int | None
    scaling: bool
    seed: int
    batch: int
    microbatches: int
    sequence: int
    learning_rate: float
    cool_down: int
    d_model: int
    layers: int
    heads: int
    experts: int
    top_k: int
    d_ff: int

    def recorded(self) -> dict[str, Any]:
        """The settings that a run's folder keeps, to resume with."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in _NOT_RECORDED}


def check(settings: Settings) -> None:
    """Raises unless the settings fit one another.

    Raises:
        UsageError: two of them do not.
    """
    if settings.top_k > settings.experts:
        raise UsageError(f"--top-k {settings.top_k} is more than --experts {settings.experts}")
    if settings.d_model % (2 * settings.heads):
        raise UsageError(
            f"--d-model {settings.d_model} must be a multiple of 2 * --heads = {2 * settings.heads}: "
            "rotary attention needs heads of an even size"
        )
    if settings.cool_down > settings.steps:
        raise UsageError(f"--cool-down {settings.cool_down} is more than --steps {settings.steps}")
    if RECIPES[settings.recipe] is not None:
        for flag, features in (("--d-model", settings.d_model), ("--d-ff", settings.d_ff)):
            if features % FP8_ALIGNMENT:
                raise UsageError(
                    f"{flag} {features} must be a multiple of {FP8_ALIGNMENT}: "
                    f"the FP8 matmuls of --recipe {settings.recipe} need it"
                )
    if settings.parallel == "none" and settings.devices not in (None, 1):
        raise UsageError(f"--devices {settings.devices} needs --parallel pmap or --parallel expert")
    if settings.parallel != "expert" and settings.expert_devices is not None:
        raise UsageError(f"--expert-devices {settings.expert_devices} needs --parallel expert")
    if settings.parallel == "none" and settings.scaling:
        raise UsageError("--scaling compares several devices with one: it needs --parallel pmap or --parallel expert")


class Devices(NamedTuple):
    """The devices of a run.

    Attributes:
        total: how many.
        expert: over how many of them the experts are split.
    """

    total: int
    expert: int


def devices_of(settings: Settings, available: int) -> Devices:
    """The devices that settings which pass `check` ask for, of so many that there are.

    Raises:
        UsageError: there are too few, or something cannot be split evenly over them.
    """
    count = settings.devices or (1 if settings.parallel == "none" else available)
    expert = settings.expert_devices or (count if settings.parallel == "expert" else 1)
    if count > available:
        raise UsageError(f"--devices {count} is more than the {available} that JAX sees")
    if count % expert:
        raise UsageError(f"--devices {count} must be a multiple of --expert-devices {expert}")
    if settings.experts % expert:
        raise UsageError(f"--experts {settings.experts} must be a multiple of --expert-devices, here {expert}")
    if settings.batch % (count * settings.microbatches):
        raise UsageError(
            f"--batch {settings.batch} must be a multiple of --devices * --microbatches, here "
            f"{count} * {settings.microbatches}"
        )
    return Devices(count, expert)
