"""Measures all that README.md shows, but for what models learn: `python3 -m benchmarks.page --help`."""

import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import cli

_DESCRIPTION = """\
Runs the other programs of this folder one after another, each in a process of its own, with the options behind the
figures of benchmarks/README.md; writes the rows of each as JSON and as a plot."""

_EPILOG = "One that fails does not keep the others from running."

_STEP = ("benchmarks.step", "--clock", "device")

#: The programs with their options, by the name of the files that they write.
RUNS: dict[str, tuple[str, ...]] = {
    "bf16_ragged_dot": (
        *("benchmarks", "--shapes", "dsv3 up", "--ops", "fprop", "backward", "--seconds", "2", "--verify"),
        *("--peers", "jax_grouped", "torch._grouped_mm", "jax.lax.ragged_dot"),
    ),
    "bf16_sustained": (
        *("benchmarks", "--ops", "fprop", "backward", "--seconds", "0.7"),
        *("--peers", "jax_grouped", "torch._grouped_mm"),
    ),
    "bf16_device_clock": (
        *("benchmarks", "--ops", "fprop", "dgrad", "wgrad", "wgrad f32", "--seconds", "2", "--calls", "5"),
        *("--peers", "jax_grouped", "--clock", "device"),
    ),
    "fp8_products": (
        *("benchmarks", "--clock", "device", "--seconds", "0.5", "--skews", "equal"),
        *("--ops", "fprop", "dgrad", "wgrad"),
        *("--peers", "jax_grouped", "torch._grouped_mm"),
        *("jax_grouped fp8 block", "jax_grouped fp8 tensor", "torch._scaled_grouped_mm"),
    ),
    "quantize": ("benchmarks.quantize", "--clock", "device"),
    "step": _STEP,
    "step_accumulating": (*_STEP, "--layers", "accumulating", "--kernels", "float32", "--skews", "equal"),
    "step_mlp": (*_STEP, "--layers", "mlp", "--shapes", "dsv3 up", "qwen3"),
    "step_launch": (
        *("benchmarks.step", "--clock", "call", "--shapes", "launch", "--layers", "dense", "mlp"),
        *("--skews", "equal", "--kernels", "bfloat16"),
    ),
    "scaling": ("benchmarks.scaling", "--clock", "device"),
}


def command(name: str, results: Path, device: str) -> list[str]:
    """One of `RUNS`, with where its files go, as the arguments of Python."""
    program, *options = RUNS[name]
    file = results / f"{device}_{name}"
    return ["-m", program, *options, "--json", f"{file}.json", "--plot", f"{file}.png"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program with these arguments, or those of the command line, and returns its exit status."""
    parser = cli.new_parser("python3 -m benchmarks.page", _DESCRIPTION, _EPILOG)
    cli.add_choices(parser, "runs", list(RUNS), tuple(RUNS))
    parser.add_argument(
        "--results",
        type=Path,
        metavar="FOLDER",
        default=Path(__file__).with_name("results"),
        help="(default: benchmarks/results)",
    )
    parser.add_argument("--device", default="h200", help="what the names of all files begin with (default: h200)")
    arguments = parser.parse_args(argv)
    if not arguments.results.is_dir():
        parser.error(f"--results: there is no folder {arguments.results}")
    failed = []
    for name in arguments.runs:
        line = command(name, arguments.results, arguments.device)
        print(f"\n$ python3 {shlex.join(line)}", flush=True)
        if subprocess.run([sys.executable, *line], check=False).returncode != 0:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
