"""Suites as data: the cases of each, how they are timed, and how they are compared and drawn."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from benchmarks import cublaslt_rates, memory, shapes
from benchmarks.cases import OPERATIONS, Case
from benchmarks.peers import FP8, RECIPES
from benchmarks.shapes import Shape

#: Shapes of steps by what differs among them.
SWEEPS = {
    "tokens": [Shape(f"{2**i} tokens", 32, 32 * 2**i, 7168, 4096) for i in range(4, 14)],
    "experts": [Shape(f"{2**i} experts", 2**i, 32768, 2048, 1536) for i in range(10)],
    "skew": [shapes.SHAPES["dsv3 up"]],
}

#: Shapes to quantize: tokens of layers, among them qwen3's over more and more groups, to see what their number costs; a
#: stack of kernels; tokens so few that launching shows; and 940 MB to copy, to find the rate that memory sustains.
_TOKENS = (
    *(Shape(f"dsv3 {groups}", groups, 32768, 7168) for groups in (32, 128)),
    *(Shape(f"qwen3 {groups}", groups, 65536, 2048) for groups in (1, 8, 32, 128, 512, 1024, 4096)),
    Shape("dsv3 kernels", 32, 32 * 7168, 4096),
    Shape("small", 8, 1024, 2048),
    Shape("copy", 1, 65536, 7168),
)

SHAPES = shapes.SHAPES | {shape.name: shape for shape in (*itertools.chain(*SWEEPS.values()), *_TOKENS)}


class Grid(NamedTuple):
    """All combinations of these names."""

    shapes: Sequence[str]
    operations: Sequence[str]
    variants: Sequence[str]
    skews: Sequence[str] = ("equal", "lognormal")
    kernels: Sequence[str] = ("bfloat16",)

    def cases(self, seed: int) -> Iterator[Case]:
        axes = self.shapes, self.operations, self.kernels, self.skews, self.variants
        for shape, operation, kernel, skew, variant in itertools.product(*axes):
            fixed = OPERATIONS[operation].kernel_dtype
            yield Case(operation, SHAPES[shape], variant, skew, kernel if fixed is None else fixed, seed)


@dataclasses.dataclass(frozen=True)
class Suite:
    """Cases that are measured together."""

    grids: Sequence[Grid]
    clock: str = "device"  # A name in `benchmarks.runner.CLOCKS`, or `none` to count only.
    seconds: float = 1.0  # Budget of one measurement.
    calls: int | None = None  # Calls per block; by default the number that fits in the budget.
    verify: bool = False  # Compare every result with that of `jax_grouped` first.
    against: str = "jax_grouped"  # Variant that speeds are relative to.
    plot: str = "rates"  # `rates`, `speeds`, `shares` or `scaling`, as `benchmarks.plot` draws them.
    first: Sequence[Grid] = ()  # Cases that come first, whatever is chosen.
    device: str | None = None  # Device that is compiled for, if not the one that JAX finds.

    def cases(self, seed: int = 0, chosen: Mapping[str, Sequence[str]] | None = None) -> list[Case]:
        """Returns the cases, each once; chosen names take the place of those that the grids have on an axis."""
        grids = [*self.first, *(grid._replace(**(chosen or {})) for grid in self.grids)]
        return list(dict.fromkeys(case for grid in grids for case in grid.cases(seed)))


_BOTH = ("equal", "lognormal")
_TORCH, _TE, _LAX = "torch._grouped_mm", "transformer_engine.jax", "jax.lax.ragged_dot"
# A step with `jax.lax.ragged_dot` takes many times as long as those of the others: it is measured on request only.
_STEP = Grid(cublaslt_rates.SHAPES, ("dense",), (*RECIPES, _TORCH, _TE), kernels=("bfloat16", "float32"))


def _products(operations: str, *variants: str, **axes: Sequence[str]) -> list[Grid]:
    return [Grid(cublaslt_rates.SHAPES, operations.split(", "), ("jax_grouped", *variants))._replace(**axes)]


def _step(clock: str = "device", **axes: Sequence[str]) -> Suite:
    return Suite([_STEP._replace(**axes)], clock, against="bf16", plot="speeds")


def _quantizations(tokens: str, operations: str, *skews: str) -> Grid:
    return Grid(tokens.split(", "), operations.split(", "), ("jax_grouped", "jax.numpy", _TE), skews)


def _sweep(sweep: str, *skews: str) -> Grid:
    variants = ("bf16", "block", "block cached", "delayed cached", _TORCH)
    return Grid([shape.name for shape in SWEEPS[sweep]], ("dense",), variants, skews)


SUITES: dict[str, Suite] = {
    "products": Suite(_products("fprop, wgrad, wgrad f32, backward", _TORCH, _TE, _LAX), "host"),
    "bf16_ragged_dot": Suite(
        _products("fprop, backward", _TORCH, _LAX, shapes=("dsv3 up",)), "host", seconds=2.0, verify=True
    ),
    "bf16_sustained": Suite(_products("fprop, backward", _TORCH), "host", seconds=0.7),
    "bf16_device_clock": Suite(_products("fprop, dgrad, wgrad, wgrad f32"), seconds=2.0, calls=5),
    "fp8_products": Suite(_products("fprop, dgrad, wgrad", _TORCH, *FP8, skews=("equal",)), seconds=0.5),
    "quantize": Suite(
        [
            _quantizations(
                "dsv3 32, dsv3 128, qwen3 32, qwen3 128",
                "block_1d rowwise, block_1d columnwise, block_1d both, delayed tensor rowwise, delayed tensor both, "
                "current tensor rowwise, current tensor both, mx both",
                *_BOTH,
            ),
            _quantizations("dsv3 32, qwen3 128", "dbias block_1d both", *_BOTH),
            _quantizations("qwen3 128", "silu_mul block_1d both, silu_mul backward block_1d both", *_BOTH),
            _quantizations(
                "dsv3 32, qwen3 128", "dequantize block_1d rowwise, dequantize block_1d columnwise", "equal"
            ),
            _quantizations("dsv3 kernels", "block_2d kernels both", "equal"),
            _quantizations(
                "qwen3 1, qwen3 8, qwen3 32, qwen3 128, qwen3 512, qwen3 1024, qwen3 4096",
                "block_1d rowwise, block_1d both",
                *_BOTH,
            ),
            _quantizations(
                "small", "block_1d rowwise, block_1d both, delayed tensor both, current tensor both", "equal"
            ),
        ],
        clock="call",
        seconds=0.2,
        plot="shares",
        first=[Grid(("copy",), ("copy",), ("jax.numpy.copy",), ("equal",))],
    ),
    "step": _step(),
    "step_accumulating": _step(operations=("accumulating",), kernels=("float32",), skews=("equal",)),
    "step_mlp": _step(operations=("mlp",), shapes=("dsv3 up", "qwen3")),
    "step_launch": _step(
        "graph", operations=("dense", "mlp"), shapes=("launch",), kernels=("bfloat16",), skews=("equal",)
    ),
    "scaling": Suite(
        [
            _sweep("tokens", "equal"),
            _sweep("experts", "equal"),
            _sweep("skew", "equal", "lognormal", "zipf", "alternate_empty", "one_hot"),
        ],
        seconds=0.5,
        against="bf16",
        plot="scaling",
    ),
    "memory": Suite(
        [Grid(("dsv3 up",), [*memory.OPERATIONS], [*memory.VARIANTS], ("equal",))],
        clock="none",
        device="NVIDIA H200",
    ),
}

#: Suites of README.md.
PAGE = [name for name in SUITES if name != "products"]
