"""What is measured: quantizations of tokens of one shape, with one set of group sizes."""

import dataclasses
import functools
import itertools
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import numpy.typing as npt

import jax_grouped as jg
from benchmarks.cases import DTYPE, normal, sets_in_rotation
from benchmarks.shapes import group_sizes

_MOST_SETS = 64


@dataclasses.dataclass(frozen=True)
class Tokens:
    """The static sizes of what is quantized: `[T, C]` in `G` groups."""

    name: str
    num_groups: int
    tokens: int
    features: int

    @property
    def dims(self) -> str:
        """The sizes in short, for tables."""
        return f"G{self.num_groups} T{self.tokens} C{self.features}"


#: Groups over which the qwen3 tokens are spread, to see what their number costs.
GROUP_COUNTS = (1, 8, 32, 128, 512, 1024, 4096)

#: The tokens of layers in `benchmarks.shapes`, a stack of kernels, and tokens so few that launching shows.
SHAPES: dict[str, Tokens] = {
    shape.name: shape
    for shape in (
        *(Tokens(f"dsv3 {groups}", groups, 32768, 7168) for groups in (32, 128)),
        *(Tokens(f"qwen3 {groups}", groups, 65536, 2048) for groups in GROUP_COUNTS),
        Tokens("dsv3 kernels", 32, 32 * 7168, 4096),
        Tokens("small", 8, 1024, 2048),
    )
}

#: What is copied to find the rate that the device's memory sustains: 940 MB.
COPY = Tokens("copy", 1, 65536, 7168)


@dataclasses.dataclass(frozen=True)
class Quantization:
    """One kind of quantization.

    Attributes:
        mode: which elements share a scale.
        rowwise, columnwise: the orientations that are made, or of which one is read.
        given_scale: whether the scales are given, as in delayed scaling.
        dbias: whether the rows of each group are summed as well.
        activation: what is applied to the tokens first; `silu_mul` reads `[T, 2 C]` and gives `[T, C]`.
        backward: quantize the gradient of the activation's input instead: reads `[T, C]` and `[T, 2 C]`, gives
            `[T, 2 C]`.
        kernels: quantize a stack of kernels, one per group, with `jax_grouped.quantize_kernel`.
        inverse: dequantize.
    """

    mode: jg.ScalingMode
    rowwise: bool = False
    columnwise: bool = False
    given_scale: bool = False
    dbias: bool = False
    activation: Literal["silu_mul"] | None = None
    backward: bool = False
    kernels: bool = False
    inverse: bool = False

    @property
    def orientation(self) -> str:
        """`rowwise`, `columnwise` or `both`."""
        return "both" if self.rowwise and self.columnwise else "rowwise" if self.rowwise else "columnwise"

    def input_features(self, features: int) -> tuple[int, ...]:
        """Features of the arrays that are read, `x` first."""
        if self.activation is None:
            return (features,)
        return (features, 2 * features) if self.backward else (2 * features,)

    def quantized_features(self, features: int) -> int:
        """Features of the quantized array."""
        return 2 * features if self.backward else features


def _in_each(prefix: str, orientations: str, **options: Any) -> dict[str, Quantization]:
    """A quantization in each of several orientations, by name."""
    return {
        f"{prefix} {name}": Quantization(
            rowwise=name in ("rowwise", "both"), columnwise=name in ("columnwise", "both"), **options
        )
        for name in orientations.split()
    }


_MODE = jg.ScalingMode

#: The quantizations by name.
CASES: dict[str, Quantization] = {
    **_in_each("block_1d", "rowwise columnwise both", mode=_MODE.BLOCK_1D),
    **_in_each("delayed tensor", "rowwise both", mode=_MODE.TENSOR, given_scale=True),
    **_in_each("current tensor", "rowwise both", mode=_MODE.TENSOR),
    **_in_each("mx", "both", mode=_MODE.MX),
    **_in_each("block_2d kernels", "both", mode=_MODE.BLOCK_2D, kernels=True),
    **_in_each("dbias block_1d", "both", mode=_MODE.BLOCK_1D, dbias=True),
    **_in_each("silu_mul block_1d", "both", mode=_MODE.BLOCK_1D, activation="silu_mul"),
    **_in_each("silu_mul backward block_1d", "both", mode=_MODE.BLOCK_1D, activation="silu_mul", backward=True),
    **_in_each("dequantize block_1d", "rowwise columnwise", mode=_MODE.BLOCK_1D, inverse=True),
}

_BOTH_SKEWS = ("equal", "lognormal")


class Combinations(NamedTuple):
    """All combinations of these shapes, skews and cases."""

    shapes: tuple[str, ...]
    skews: tuple[str, ...]
    cases: tuple[str, ...]


#: The rows of the full table.
TABLE = (
    Combinations(
        ("dsv3 32", "dsv3 128", "qwen3 32", "qwen3 128"),
        _BOTH_SKEWS,
        (
            "block_1d rowwise",
            "block_1d columnwise",
            "block_1d both",
            "delayed tensor rowwise",
            "delayed tensor both",
            "current tensor rowwise",
            "current tensor both",
            "mx both",
        ),
    ),
    Combinations(("dsv3 32", "qwen3 128"), _BOTH_SKEWS, ("dbias block_1d both",)),
    Combinations(("qwen3 128",), _BOTH_SKEWS, ("silu_mul block_1d both", "silu_mul backward block_1d both")),
    Combinations(
        ("dsv3 32", "qwen3 128"), ("equal",), ("dequantize block_1d rowwise", "dequantize block_1d columnwise")
    ),
    Combinations(("dsv3 kernels",), ("equal",), ("block_2d kernels both",)),
    Combinations(
        tuple(f"qwen3 {groups}" for groups in GROUP_COUNTS), _BOTH_SKEWS, ("block_1d rowwise", "block_1d both")
    ),
    Combinations(
        ("small",), ("equal",), ("block_1d rowwise", "block_1d both", "delayed tensor both", "current tensor both")
    ),
)

SKEWS = tuple(dict.fromkeys(skew for part in TABLE for skew in part.skews))


def combinations(shapes: list[str], skews: list[str], cases: list[str]) -> list[tuple[Tokens, str, str]]:
    """The shape, skew and case of those rows of the full table that have one of these names each."""
    rows = (row for part in TABLE for row in itertools.product(part.shapes, part.skews, part.cases))
    chosen = (row for row in rows if row[0] in shapes and row[1] in skews and row[2] in cases)
    return [(SHAPES[shape], skew, case) for shape, skew, case in dict.fromkeys(chosen)]


class Inputs(NamedTuple):
    """The arrays that a quantization reads.

    Attributes:
        x: the tokens; with `backward`, the gradient of the activation's result.
        scale: `float32[G]`, if the scales are given.
        activation_input: what the activation was applied to, with `backward`.
    """

    x: jax.Array
    scale: jax.Array | None
    activation_input: jax.Array | None


@dataclasses.dataclass(frozen=True)
class Case:
    """One quantization to measure.

    Attributes:
        shape: the static sizes.
        quantization: what to do.
        sizes: rows per group, `int32[G]`.
        inputs: sets of operands that calls take in turn.
    """

    shape: Tokens
    quantization: Quantization
    sizes: npt.NDArray[np.int32]
    inputs: tuple[Inputs, ...]


def make_case(shape: Tokens, skew: str, quantization: Quantization, seed: int) -> Case:
    """A case with normally distributed tokens, as many sets of them as it takes to keep them out of the L2 cache."""
    features = quantization.input_features(shape.features)
    count = sets_in_rotation(shape.tokens * sum(features), _MOST_SETS)
    scale = None
    if quantization.given_scale:
        # Of the size that brings a normal distribution into the range of FP8.
        scale = jax.random.uniform(jax.random.key(seed), (shape.num_groups,), minval=64, maxval=128)
    x = normal_sets(shape.tokens, features[0], seed, count)
    activation_inputs: tuple[jax.Array | None, ...] = (None,) * count
    if quantization.backward:
        activation_inputs = normal_sets(shape.tokens, features[1], seed + 1, count)
    inputs = (Inputs(array, scale, other) for array, other in zip(x, activation_inputs, strict=True))
    return Case(shape, quantization, group_sizes(shape, skew, seed), tuple(inputs))


# Rows of the table that follow each other mostly read the same tokens.
@functools.lru_cache(maxsize=4)
def normal_sets(tokens: int, features: int, seed: int, count: int) -> tuple[jax.Array, ...]:
    """Normally distributed arrays `[T, C]`."""
    keys = jax.random.split(jax.random.key(seed), count)
    return tuple(normal(key, (tokens, features), DTYPE) for key in keys)
