"""A step of a whole model: published sizes, eight layers, forward, backward and Adam; ours, and PyTorch's."""

import argparse
import dataclasses
import importlib
import json
import subprocess
import sys
import time
from statistics import median
from typing import NamedTuple

import tabulate

from benchmarks.rows import Record
from benchmarks.runner import WORDS, first_line, profile, sum_parts
from jax_grouped.examples.settings import UsageError
from jax_grouped.kernels.primitive import cuda_devices

#: Dense bfloat16 operations per second of an H100 or H200, as NVIDIA gives them; MFU is relative to it, FP8's too.
PEAK = 989.4e12
AGAINST = "bf16 cached"  # Speeds are relative to it: weights are converted once a step, as in PyTorch's models.
_PARTS = {"attention": ("sdpa", "fmha", "flash"), **WORDS}
_WARM_UP, _BLOCKS, _STEPS = 2, 5, 2


class Model(NamedTuple):
    """Sizes of a model."""

    features: int  # Of a token.
    heads: int  # Attention heads of queries.
    kv_heads: int  # Attention heads of keys and values.
    head_features: int
    experts: int
    top_k: int  # Experts that a token uses.
    hidden: int  # Features inside an expert.
    vocabulary: int
    layers: int = 8
    sequence: int = 4096  # Tokens of a sequence.
    sequences: int = 4  # In a microbatch.
    microbatches: int = 4  # In a step.

    @property
    def tokens(self) -> int:
        return self.sequence * self.sequences * self.microbatches

    @property
    def attention_features(self) -> int:
        return self.heads * self.head_features

    @property
    def qkv_features(self) -> int:
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

#: Names of this library's variants tell the recipe. `cached` ones quantize the weights, or convert them to bfloat16,
#: once a step, others in every microbatch; with `projections`, so are attention's projections.
_OURS = ["bf16", "bf16 cached", "bf16 cached, projections", "block", "current", "delayed", "mxfp8", "block cached"]
_OURS += ["current cached", "delayed cached", "block cached, projections", "delayed cached, projections"]
VARIANTS = {**dict.fromkeys(_OURS, "our_model"), "torch compiled": "torch_model", "SonicMoE": "torch_model"}


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


def measure_here(name: str, variant: str) -> Row:
    """Measures a model of random weights in this process, by the host's clock over blocks of steps."""
    model = MODELS[name]
    try:
        module = importlib.import_module(f"benchmarks.peers.{VARIANTS[variant]}")
        take_step, find_peak_bytes = module.training(model, variant)

        def take(steps: int) -> float:
            for _ in range(steps):
                loss = take_step()
            return float(loss)  # Waits for the device.

        losses = [take(1) for _ in range(_WARM_UP)]
        times = []
        for _ in range(_BLOCKS):
            start = time.perf_counter()
            losses.append(take(_STEPS))
            times.append(1e3 * (time.perf_counter() - start) / _STEPS)
        rate, peak = model.tokens / (1e-3 * median(times)), find_peak_bytes() / 2**30
        parts = {part: 1e3 * seconds for part, seconds in sum_parts(profile(take, 1), _PARTS).items()}
        return Row(name, variant, sorted(times), rate, rate * model.operations / PEAK, peak, losses, parts)
    except Exception as error:  # Out of memory, a library that is missing.
        return Row(name, variant, note=first_line(error))


def measure(arguments: argparse.Namespace) -> int:
    if not cuda_devices():
        raise UsageError("needs a GPU, and JAX sees none")
    record = Record.new("model", {name: MODELS[name]._asdict() for name in arguments.models})
    for name in arguments.models:
        for variant in arguments.variants:
            # In a process of its own, as frameworks keep the memory that they have had.
            command = [sys.executable, "-m", "benchmarks.model", name, variant]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                row = Row(**json.loads(done.stdout.splitlines()[-1]))
            else:
                last = done.stderr.strip().rpartition("\n")[2]
                row = Row(name, variant, note=f"ended with {done.returncode}: {last}"[:200])
            rate = row.note or f"{row.tokens_per_second:,.0f} tokens/s"
            record.add(row, f"{name}, {variant}: {rate}", arguments.json)
    bases = {row.model: row.tokens_per_second for row in record.rows if row.variant == AGAINST}
    headers = ["model", "variant", "tokens/s", f"relative to {AGAINST}", "MFU %", "peak GiB", "loss"]
    cells = []
    for row in record.rows:
        figures = [row.note]
        if not row.note:
            speed = row.tokens_per_second / base if (base := bases.get(row.model)) else None
            figures = [row.tokens_per_second, speed, 100 * row.mfu, row.peak_gib, row.losses[-1], *row.parts.values()]
        cells.append([row.model, row.variant, *figures])
    formats = ("", "", ",.0f", ".2f", ".1f", ".1f", ".3f", *[".0f"] * len(_PARTS))
    print(tabulate.tabulate(cells, [*headers, *(f"{part} ms" for part in _PARTS)], floatfmt=formats))
    return 0


if __name__ == "__main__":
    print(json.dumps(dataclasses.asdict(measure_here(*sys.argv[1:]))))
