"""The command line of `train_moe`: its flags, and the settings that they make."""

import argparse
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jax_grouped.core.groups import FP8_ALIGNMENT
from jax_grouped.examples.settings import CHANGEABLE, LAYERS, PARALLEL, RECIPES, Settings, UsageError, check

_DESCRIPTION = """\
Train a byte-level transformer whose feed-forward layers are mixtures of experts, each a MoEMlp of jax_grouped.

On a CPU the default sizes train for about a minute. The run's folder receives loss.csv, loss.png, settings.json and
checkpoints/. A new run never overwrites an earlier one: what it finds there moves to earlier-1, earlier-2, ... first.
Ctrl-C or SIGTERM ends a run after its current step, with a checkpoint; --resume continues it.
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # argparse's own version prints the usage, which fills a screen, and exits.
        raise UsageError(message)


def _positive_int(text: str) -> int:
    value = int(text) if text.isascii() and text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {text!r}")
    return value


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"must be an integer of at least 0, got {text!r}")
    return int(text)


def _path(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("must not be empty")
    return text


def _seed(text: str) -> int:
    value = int(text) if text.isascii() and text.isdigit() else -1
    if not 0 <= value < 2**31:
        raise argparse.ArgumentTypeError(f"must be an integer from 0 to 2147483647, got {text!r}")
    return value


def _positive_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a positive number, got {text!r}")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python3 -m jax_grouped.examples.train_moe",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )

    def positive(flag: str, default: int, text: str) -> None:
        parser.add_argument(flag, type=_positive_int, default=default, metavar="N", help=f"{text} (default: {default})")

    parser.add_argument(
        "--data",
        type=_path,
        metavar="PATH",
        help="a file, or a folder whose text files are read, hidden ones excepted "
        "(default: the Python sources of the running interpreter's standard library)",
    )
    parser.add_argument(
        "--out", type=_path, metavar="DIR", default="runs/train_moe", help="the run's folder (default: %(default)s)"
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue the run in DIR from its latest checkpoint, with its settings; only "
        f"{', '.join(_flag(name) for name in CHANGEABLE)} may differ",
    )
    positive("--steps", 250, "optimizer steps, counted from the start of the run")
    positive("--eval-every", 50, "steps between evaluations of the held-out loss")
    positive("--save-every", 100, "steps between checkpoints; the last step is always saved")
    parser.add_argument(
        "--layer",
        choices=LAYERS,
        default="linen",
        help="which of Flax's APIs the model is written in: moe_lm.py or moe_lm_nnx.py (default: %(default)s)",
    )
    parser.add_argument(
        "--recipe",
        choices=RECIPES,
        default="bf16",
        help="number formats. bf16: matmuls and activations in bfloat16; parameters, Adam, router and loss in float32. "
        "The others compute the experts' matmuls in FP8, scaled per block of 128, per expert with the current or the "
        "delayed largest value, or per block of 32 (default: %(default)s)",
    )
    parser.add_argument(
        "--parallel",
        choices=PARALLEL,
        default="none",
        help="none: one device. pmap: every device has the whole model and a part of the batch. expert: every device "
        "has a part of the experts and of the batch, and tokens travel to their experts and back. The curves are the "
        "same but for rounding (default: %(default)s)",
    )

    def devices(flag: str, text: str) -> None:
        parser.add_argument(flag, type=_positive_int, metavar="N", help=text)

    devices("--devices", "of --parallel pmap and expert (default: all that there are)")
    devices(
        "--expert-devices",
        "over how many of --devices the experts are split; such groups share the batch (default: --devices)",
    )
    parser.add_argument(
        "--scaling",
        action="store_true",
        help="after training, measure weak scaling: the speed of the same steps, without evaluation and files, on "
        "--devices and on one device with its part of --batch and all experts; the efficiency is the first divided by "
        "--devices times the second",
    )
    parser.add_argument(
        "--seed", type=_seed, default=0, metavar="N", help="of the parameters and the data order (default: %(default)s)"
    )
    positive("--batch", 16, "sequences per step, on all devices together")
    positive(
        "--microbatches",
        1,
        "parts of the batch, taken one after another; their gradients add up, and they share quantized kernels",
    )
    positive("--sequence", 128, "bytes per sequence")
    parser.add_argument(
        "--learning-rate", type=_positive_float, metavar="X", help="after the warm-up (default: 0.25 / d_model)"
    )
    parser.add_argument(
        "--cool-down",
        type=_count,
        metavar="N",
        default=0,
        help="last steps, over which the learning rate falls to zero; such a run cannot be extended (default: 0)",
    )
    positive("--d-model", 128, "features per token")
    positive("--layers", 2, "transformer blocks")
    positive("--heads", 4, "attention heads per block")
    positive("--experts", 8, "experts per block")
    positive("--top-k", 2, "experts that each token uses")
    parser.add_argument(
        "--d-ff",
        type=_positive_int,
        metavar="N",
        help="features inside an expert (default: the multiple of 16 nearest to 4/3 * d_model)",
    )
    return parser


def parse(argv: Sequence[str] | None) -> Settings:
    """Settings from the command line, or from the process's if `argv` is None.

    With `--resume` only `out` counts: it says where the settings are recorded that `parse_resumed` needs.

    Raises:
        UsageError: a flag is unknown, malformed, or does not fit the others.
        SystemExit: after `--help`.
    """
    settings = _settings(argv, {})
    if not settings.resume:
        check(settings)
    return settings


def parse_resumed(argv: Sequence[str] | None, recorded: Mapping[str, Any]) -> Settings:
    """Settings to continue a run with: those that it `recorded`, but for the changeable flags that are given.

    Raises:
        UsageError: another flag is given with another value, what is recorded are not settings, or as in `parse`.
    """
    _check_recorded(recorded, _settings(argv, {}).out)
    defaults = dict(recorded)
    if _settings(argv, defaults).parallel != recorded["parallel"]:
        # Devices that were chosen for another way to use them say nothing.
        defaults |= {"devices": None, "expert_devices": None}
    settings = _settings(argv, defaults)
    changeable = {*CHANGEABLE, "data"}
    if settings.cool_down:
        # The learning rate depends on the number of steps.
        changeable.remove("steps")
    for name, value in settings.recorded().items():
        # Not the path, for the text may have moved; its content is compared when it is read.
        if name not in changeable and value != recorded[name]:
            raise UsageError(
                f"--resume: the run in {settings.out} was started with {_flag(name)} {recorded[name]}, not {value}"
            )
    check(settings)
    return settings


def _check_recorded(recorded: Mapping[str, Any], out: str) -> None:
    """Raises unless these are all settings, each with a value that its flag could have given it."""
    try:
        made = _settings(
            [f"{_flag(name)}={value}" for name, value in recorded.items() if value is not None], {}
        ).recorded()
        if differing := [name for name in made if recorded.get(name, "nothing") != made[name]]:
            raise UsageError(f"it says {recorded.get(differing[0], 'nothing')} for {differing[0]}")
    except UsageError as error:
        raise UsageError(
            f"--resume: settings.json in {out} is damaged or not of this program ({error}): "
            "restore it, or start anew without --resume"
        ) from None


def _settings(argv: Sequence[str] | None, defaults: Mapping[str, Any]) -> Settings:
    parser = _parser()
    parser.set_defaults(**defaults)
    flags = vars(parser.parse_args(argv))
    if flags["data"] is not None:
        flags["data"] = os.path.abspath(flags["data"])
    if flags["d_ff"] is None:
        # With a gate, two thirds of the usual features have as many parameters.
        flags["d_ff"] = FP8_ALIGNMENT * max(1, round(4 / 3 * flags["d_model"] / FP8_ALIGNMENT))
    if flags["learning_rate"] is None:
        # The best rate of Adam falls as the width grows (https://arxiv.org/abs/2203.03466); 0.25 suits width 128.
        flags["learning_rate"] = 0.25 / flags["d_model"]
    return Settings(**flags)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
