"""A step of a whole model: published sizes, eight layers, forward, backward and Adam; ours, and PyTorch's."""

import argparse
import dataclasses
import importlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import tabulate

from benchmarks import plot
from benchmarks.rows import Record
from benchmarks.runner import WORDS, first_line, profile, seconds_of_parts
from jax_grouped.examples.settings import UsageError
from jax_grouped.kernels.extension import cuda_devices

#: Dense bfloat16 operations per second of an H100 or H200, as NVIDIA gives them; MFU is relative to it, FP8's too.
PEAK = 989.4e12
_WARM_UP, _BLOCKS, _STEPS = 2, 5, 2
#: What speeds are relative to: weights are converted once a step there, as in the models of PyTorch.
_AGAINST = "bf16 cached"
#: Parts of a step, by words in the names of their kernels.
_PARTS = {"attention": ("sdpa", "fmha", "flash"), **WORDS}


class Model(NamedTuple):
    """Sizes of a model.

    Attributes:
        features: of a token.
        heads, kv_heads: attention heads of queries, and of keys and values.
        head_features: of a head.
        experts, top_k: number of experts, and of those that a token uses.
        hidden: features inside an expert.
        vocabulary: tokens that there are.
        layers: blocks of attention and experts.
        sequence: tokens of a sequence.
        sequences: in a microbatch.
        microbatches: in a step.
    """

    features: int
    heads: int
    kv_heads: int
    head_features: int
    experts: int
    top_k: int
    hidden: int
    vocabulary: int
    layers: int = 8
    sequence: int = 4096
    sequences: int = 4
    microbatches: int = 4

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.sequence * self.sequences * self.microbatches

    @property
    def attention_features(self) -> int:
        """Features of all heads of queries."""
        return self.heads * self.head_features

    @property
    def qkv_features(self) -> int:
        """Features of all heads of queries, keys and values."""
        return (self.heads + 2 * self.kv_heads) * self.head_features

    @property
    def operations(self) -> int:
        """Multiplications and additions per token of a step that the model needs: nothing computed twice."""
        experts = self.top_k * 3 * self.features * self.hidden + self.features * self.experts
        projections = self.features * (self.qkv_features + self.attention_features)
        scores = self.sequence * self.attention_features  # Two products with half of the positions.
        return 6 * (self.layers * (experts + projections + scores) + self.features * self.vocabulary)


#: Eight layers of each, and of its vocabulary as large a part as these are of its layers: 8 of 16, 8 of 48.
MODELS = {
    "OLMoE-1B-7B": Model(2048, 16, 16, 128, experts=64, top_k=8, hidden=1024, vocabulary=50304 * 8 // 16),
    "Qwen3-30B-A3B": Model(2048, 32, 4, 128, experts=128, top_k=8, hidden=768, vocabulary=151936 * 8 // 48 // 64 * 64),
}


class Variant(NamedTuple):
    """A module of `benchmarks.peers`, and options of its function `training`."""

    module: str
    options: Mapping[str, Any] = {}


def _ours(recipe: str, **options: bool) -> Variant:
    return Variant("our_model", {"recipe": recipe, **options})


#: `cached` ones quantize the weights, or convert them to bfloat16, once a step, others in every microbatch; with
#: `projections`, attention's projections too are in FP8, or converted once.
VARIANTS = {
    "bf16": Variant("our_model"),
    "bf16 cached": _ours("bf16", cached=True),
    "bf16 cached, projections": _ours("bf16", cached=True, projections=True),
    "block": _ours("block"),
    "current": _ours("current"),
    "delayed": _ours("delayed"),
    "mxfp8": _ours("mxfp8"),
    "block cached": _ours("block", cached=True),
    "current cached": _ours("current", cached=True),
    "delayed cached": _ours("delayed", cached=True),
    "block cached, projections": _ours("block", cached=True, projections=True),
    "delayed cached, projections": _ours("delayed", cached=True, projections=True),
    "torch compiled": Variant("torch_model", {"experts": "torch"}),
    "SonicMoE": Variant("torch_model", {"experts": "SonicMoE"}),
}


class Training(NamedTuple):
    """A model that is being trained.

    Attributes:
        step: takes a step, and returns its loss; does not wait for the device.
        wait: waits for the device, and returns a loss as a number.
        peak_bytes: the most memory that was in use at once.
    """

    step: Callable[[], Any]
    wait: Callable[[Any], float]
    peak_bytes: Callable[[], int]

    def block(self, steps: int) -> float:
        """Takes steps one after another; returns the last one's loss, when all are done."""
        for _ in range(steps):
            loss = self.step()
        return self.wait(loss)


@dataclasses.dataclass
class Row:
    """A measurement of a model, or why there is none."""

    model: str
    variant: str
    milliseconds: list[float] = dataclasses.field(default_factory=list)  # Per step, of each block, in ascending order.
    tokens_per_second: float | None = None
    mfu: float | None = None  # Operations of the model per second, in parts of `PEAK`.
    peak_gib: float | None = None
    losses: list[float] = dataclasses.field(default_factory=list)  # Of the warm-up steps, and of each block's last.
    parts: dict[str, float] = dataclasses.field(default_factory=dict)  # Milliseconds of a step, by its kernels' work.
    note: str = ""


def training(name: str, variant: str) -> Training:
    """Makes a model of random weights."""
    module, options = VARIANTS[variant]
    return importlib.import_module(f"benchmarks.peers.{module}").training(MODELS[name], **options)


def row(name: str, variant: str) -> Row:
    """Measures a model in this process, by the host's clock over blocks of steps."""
    try:
        return _measured(name, variant)
    except Exception as error:  # Out of memory, a library that is missing.
        return Row(name, variant, note=first_line(error))


def _measured(name: str, variant: str) -> Row:
    model, run = MODELS[name], training(name, variant)
    losses = [run.block(1) for _ in range(_WARM_UP)]
    times = []
    for _ in range(_BLOCKS):
        start = time.perf_counter()
        losses.append(run.block(_STEPS))
        times.append(1e3 * (time.perf_counter() - start) / _STEPS)
    rate, peak = model.tokens / (1e-3 * statistics.median(times)), run.peak_bytes() / 2**30
    parts = {part: 1e3 * seconds for part, seconds in seconds_of_parts(profile(run, 1), _PARTS).items()}
    return Row(name, variant, sorted(times), rate, rate * model.operations / PEAK, peak, losses, parts)


def _rows(names: list[str], variants: list[str]) -> Iterator[Row]:
    """Yields the rows, each from a process of its own, as frameworks keep the memory that they have had."""
    for name in names:
        for variant in variants:
            command = [sys.executable, "-m", "benchmarks.model", name, variant]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                yield Row(**json.loads(done.stdout.splitlines()[-1]))
            else:
                last = done.stderr.strip().rpartition("\n")[2]
                yield Row(name, variant, note=f"ended with {done.returncode}: {last}"[:200])


def measure(arguments: argparse.Namespace) -> int:
    """Measures, prints and writes the rows."""
    if not cuda_devices():
        raise UsageError("needs a GPU, and JAX sees none")
    settings = {name: MODELS[name]._asdict() for name in arguments.models}
    record = Record.new("model", None, settings)
    found: list[Any] = []
    for measured in _rows(arguments.models, arguments.variants):
        found.append(measured)
        rate = measured.note or f"{measured.tokens_per_second:,.0f} tokens/s"
        print(f"{measured.model}, {measured.variant}: {rate}", flush=True)
        if arguments.json:
            dataclasses.replace(record, rows=found).write(arguments.json)
    if arguments.plot:
        title = f"{record.device}, JAX {record.versions['jax']}, {record.date[:10]}"
        plot.models(found, _AGAINST, title, arguments.plot)
    print(_table(found))
    return 0


def _table(found: list[Row]) -> str:
    base = {measured.model: measured.tokens_per_second for measured in found if measured.variant == _AGAINST}
    cells = []
    for of in found:
        if of.tokens_per_second and of.mfu:
            speed = of.tokens_per_second / rate if (rate := base.get(of.model)) else None
            figures = of.tokens_per_second, speed, 100 * of.mfu, of.peak_gib, of.losses[-1], *of.parts.values()
            cells.append([of.model, of.variant, *figures])
        else:
            cells.append([of.model, of.variant, of.note])
    parts = [f"{part} ms" for part in _PARTS]
    headers = ["model", "variant", "tokens/s", f"relative to {_AGAINST}", "MFU %", "peak GiB", "loss", *parts]
    return tabulate.tabulate(
        cells, headers, floatfmt=("", "", ",.0f", ".2f", ".1f", ".1f", ".3f", *[".0f"] * len(parts))
    )


if __name__ == "__main__":
    print(json.dumps(dataclasses.asdict(row(*sys.argv[1:]))))
