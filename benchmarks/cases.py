"""Cases to measure: their operations, the random arrays that these read, what they count, and the suites of them."""

import dataclasses
import functools
import itertools
import math
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from benchmarks import memory
from benchmarks.shapes import SHAPES, Shape, group_ends, group_sizes
from jax_grouped import ScalingMode
from jax_grouped.fp8.layout import QuantizedLayout

DTYPE = jnp.dtype(jnp.bfloat16)  # Of tokens and of their gradients.
_BYTES_IN_ROTATION = 256e6  # Several times an H200's L2 of 60 MB: no input is still there when its turn comes again.
_MOST_SETS = 64

Arrays = tuple[jax.Array, ...]
Structs = tuple[jax.ShapeDtypeStruct, ...]


@dataclasses.dataclass(frozen=True)
class Case:
    """One measurement: an operation on arrays of one shape, computed by one variant, both by name."""

    operation: str
    shape: Shape
    variant: str
    skew: str = "equal"
    kernel_dtype: str = "bfloat16"  # Type of the layer's kernel and of its gradient.
    seed: int = 0  # Origin of the group sizes and of the arrays.

    def __str__(self) -> str:
        return ", ".join((self.shape.name, self.operation, self.kernel_dtype, self.skew, self.variant))

    @functools.cached_property
    def sizes(self) -> npt.NDArray[np.int32]:
        return group_sizes(self.shape, self.skew, self.seed)

    @property
    def valid_rows(self) -> int:
        """Number of rows that belong to a group."""
        return int(group_ends(self.sizes, self.shape.tokens)[-1])

    def require_all_rows(self) -> None:
        if self.valid_rows != self.shape.tokens:
            raise ValueError("needs every row to belong to a group")


@dataclasses.dataclass(frozen=True)
class Products:
    """Grouped products of tokens `x [T, K]`, a kernel `[E, K, N]` and the result's gradient `dy [T, N]`."""

    number: float  # Products of `K` by `N` in one call.
    mlp: bool = False  # There is a second kernel, `[E, N / 2, K]`, and `dy` is `[T, K]`.
    router: bool = False  # There is a kernel of the router, `[K, E]`; otherwise a layer gets a row for each choice.
    kernel_dtype: str | None = None  # Type of the kernels, if the operation fixes it.
    family: Literal["product", "moe"] = "product"  # `moe`: a layer of experts.
    unit = "TFLOP/s"

    def arrays(self, case: Case) -> Structs:
        E, K, N, rows = case.shape.num_groups, case.shape.K, case.shape.N, case.shape.tokens
        if self.family == "moe" and not self.router:
            rows *= case.shape.top_k
        kernels: list[tuple[int, ...]] = [(K, E)] if self.router else []
        kernels += [(E, K, N), (E, N // 2, K)] if self.mlp else [(E, K, N)]
        x, dy = (jax.ShapeDtypeStruct((rows, features), DTYPE) for features in (K, K if self.mlp else N))
        return x, *(jax.ShapeDtypeStruct(kernel, jnp.dtype(case.kernel_dtype)) for kernel in kernels), dy

    def count(self, case: Case) -> int:
        rows = case.shape.tokens * case.shape.top_k if self.family == "moe" else case.valid_rows
        return round(self.number * 2 * rows * case.shape.K * case.shape.N)


class Quantization:
    """A quantization of tokens `[T, K]`, as the words of its name say."""

    family = "quantization"
    unit = "GB/s"
    kernel_dtype = ""

    def __init__(self, name: str):
        words = name.split()
        self.mode: Any = next((mode for mode in ScalingMode if mode.value in words), None)  # None copies the tokens.
        self.orientations = ("rowwise", "columnwise") if "both" in words else (words[-1],)  # Made, or read.
        self.given_scale = "delayed" in words
        self.inverse = "dequantize" in words
        self.dbias = "dbias" in words  # The rows of each group are summed as well.
        # Applied first: reads `[T, 2 K]` and gives `[T, K]`. `backward`, the gradient of its input is quantized:
        # reads `[T, K]` and `[T, 2 K]`, and gives `[T, 2 K]`.
        self.activation: Literal["swiglu"] | None = "swiglu" if "swiglu" in words else None
        self.backward = "backward" in words
        self.kernels = "kernels" in words  # The tokens are a stack of kernels, one per group.

    def arrays(self, case: Case) -> Structs:
        K = case.shape.K
        widths = [K] if self.activation is None else [K, 2 * K] if self.backward else [2 * K]
        return tuple(jax.ShapeDtypeStruct((case.shape.tokens, width), DTYPE) for width in widths)

    def count(self, case: Case) -> int:
        """Counts the bytes that are read or written at least once, but none of what has one number a group."""
        width = 2 * case.shape.K if self.backward else case.shape.K
        whole = case.shape.tokens * width * DTYPE.itemsize
        if self.mode is None:
            return 2 * whole
        # The bytes of a group do not depend on the other groups.
        quantized = 0
        for orientation, rows in itertools.product(self.orientations, case.sizes.tolist()):
            layout = QuantizedLayout(self.mode, orientation == "columnwise", rows, width, 1, rows)
            scale_bytes = 1 if self.mode == ScalingMode.MX else 4
            quantized += math.prod(layout.data_shape) + scale_bytes * math.prod(layout.scale_shape)
        if self.inverse:
            return quantized + whole
        # The scale of a whole group must be found first.
        passes = 2 if self.mode == ScalingMode.TENSOR and not self.given_scale else 1
        read = passes * case.valid_rows * sum(array.shape[1] for array in self.arrays(case)) * DTYPE.itemsize
        return read + quantized + (case.shape.num_groups * width * 4 if self.dbias else 0)


@dataclasses.dataclass(frozen=True)
class Step:
    """A training step of `benchmarks.memory`, which is compiled only; counts the bytes that XLA plans for."""

    kernel_dtype: str
    family = "memory"
    unit = "GiB"

    def arrays(self, _: Case) -> Structs:
        return ()

    def count(self, case: Case) -> int:
        return memory.planned_bytes(case.shape, case.operation, case.variant)


#: Single products; `backward`, dgrad and wgrad; and whole steps of layers. `wgrad f32` gives the float32 gradient of a
#: float32 kernel. An `accumulating` step adds its kernel's gradient to that of earlier ones. An `mlp` has a gated
#: projection of `K` by `N`, SwiGLU, and a projection of half of `N` back to `K`.
PRODUCTS = {
    **dict.fromkeys(("fprop", "dgrad", "wgrad"), Products(1)),
    "wgrad f32": Products(1, kernel_dtype="float32"),
    "backward": Products(2),
    **dict.fromkeys(("dense", "accumulating"), Products(3)),
    "mlp": Products(4.5, mlp=True),
}

#: Whole layers: the forward pass, both passes, and both passes of the experts alone.
LAYERS = {
    "moe forward": Products(1.5, mlp=True, router=True, kernel_dtype="bfloat16", family="moe"),
    "moe": Products(4.5, mlp=True, router=True, kernel_dtype="bfloat16", family="moe"),
    "moe experts": Products(4.5, mlp=True, kernel_dtype="bfloat16", family="moe"),
}

_NAMES = (
    "copy, block_1d rowwise, block_1d columnwise, block_1d both, delayed tensor rowwise, delayed tensor both, "
    "current tensor rowwise, current tensor both, mx both, block_2d kernels both, dbias block_1d both, "
    "swiglu block_1d both, swiglu backward block_1d both, dequantize block_1d rowwise, "
    "dequantize block_1d columnwise"
)
QUANTIZATIONS = {name: Quantization(name) for name in _NAMES.split(", ")}

OPERATIONS: dict[str, Products | Quantization | Step] = {
    **PRODUCTS,
    **LAYERS,
    **QUANTIZATIONS,
    **{name: Step(kernel_dtype) for name, (_, kernel_dtype) in memory.OPERATIONS.items()},
}


#: Cases are all combinations of the names on these axes.
AXES = ("shapes", "operations", "kernels", "skews", "variants")
_DEFAULTS = {"kernels": ("bfloat16",), "skews": ("equal", "lognormal")}
Grid = Mapping[str, Sequence[str]]


@dataclasses.dataclass(frozen=True)
class Suite:
    """Cases that are measured together, how they are timed, and how they are compared."""

    grids: Sequence[Grid]
    clock: str = "device"  # A name in `benchmarks.runner.CLOCKS`, or `none` to count only.
    seconds: float = 1.0  # Budget of one measurement.
    calls: int | None = None  # Calls per block; by default the number that fits in the budget.
    verify: bool = False  # Compare every result with that of `jax_grouped` first.
    against: str = "jax_grouped"  # Variant that speeds are relative to.
    first: Sequence[Grid] = ()  # Cases that come first, whatever is chosen.
    device: str | None = None  # Device that is compiled for, if not the one that JAX finds.

    def cases(self, seed: int = 0, chosen: Grid | None = None) -> list[Case]:
        """Returns the cases, each once; chosen names take the place of those that the grids have on an axis."""
        cases: dict[Case, None] = {}
        for grid in [*self.first, *({**grid, **(chosen or {})} for grid in self.grids)]:
            for shape, operation, kernel, skew, variant in itertools.product(*(grid[axis] for axis in AXES)):
                fixed = OPERATIONS[operation].kernel_dtype
                cases[Case(operation, SHAPES[shape], variant, skew, kernel if fixed is None else fixed, seed)] = None
        return list(cases)


def _read_suites() -> dict[str, Suite]:
    suites, tables = {}, tomllib.loads(Path(__file__).with_name("suites.toml").read_text())
    for name, own in tables.items():
        table = tables[name] = {**_DEFAULTS, **tables.get(own.get("like", ""), {}), **own}
        axes = {axis: table[axis] for axis in AXES if axis in table}
        options = {key: value for key, value in table.items() if key not in ("like", *AXES)}
        options["grids"] = [{**axes, **grid} for grid in table.get("grids", [{}])]
        options["first"] = [{**_DEFAULTS, **grid} for grid in table.get("first", [])]
        suites[name] = Suite(**options)
    return suites


SUITES = _read_suites()
PAGE = [name for name in SUITES if name != "products"]  # Those of README.md.


def quantization_arguments(case: Case, sets: list[Arrays]) -> list[tuple[jax.Array | None, ...]]:
    """Returns the group sizes, the scales if they are given, and the arrays of each set."""
    scale = None
    if QUANTIZATIONS[case.operation].given_scale:
        # Scales that bring a normal distribution into the range of FP8.
        scale = jax.random.uniform(jax.random.key(case.seed), (case.shape.num_groups,), minval=64, maxval=128)
    return [(jnp.asarray(case.sizes), scale, *arrays) for arrays in sets]


_normal = jax.jit(jax.random.normal, static_argnums=(1, 2))


def part_read(case: Case) -> float:
    """Returns the part of a layer's kernels that a call reads, at most: few tokens do not choose all experts."""
    shape = case.shape
    return min(1.0, shape.tokens * shape.top_k / shape.num_groups) if case.operation in LAYERS else 1.0


def draw(arrays: Structs, seed: int, part: float = 1.0) -> list[Arrays]:
    """Draws normally distributed arrays, a part of which each call reads, in as many sets as keep them out of L2."""
    # Zeros would draw less power, and the chip would run at a higher clock than it does in training.
    sizes = [array.size * array.dtype.itemsize for array in arrays]
    # A product leaves out one of several arrays, perhaps the largest.
    read = part * (sum(sizes) - max(sizes) if len(sizes) > 1 else sum(sizes))
    count = min(_MOST_SETS, math.ceil(_BYTES_IN_ROTATION / read))
    keys = jax.random.split(jax.random.key(seed), (count, len(arrays)))
    return [tuple(_normal(key, like.shape, like.dtype) for key, like in zip(row, arrays, strict=True)) for row in keys]


def as_trained(arrays: Arrays) -> Arrays:
    """Returns a whole layer's arrays, kernels and router as small as trained ones, so that SwiGLU does not overflow."""
    x, *kernels, dy = arrays
    return x, *(kernel * kernel.shape[-2] ** -0.5 for kernel in kernels), dy


def relative_difference(got: Sequence[jax.Array], expected: Sequence[jax.Array], case: Case) -> float:
    """Returns the largest relative Frobenius norm of the differences between two variants' results."""
    differences = []
    for result, reference in zip(got, expected, strict=False):
        # The contents of rows outside every group are not defined for all peers.
        rows = slice(case.valid_rows if result.shape[0] == case.shape.tokens else None)
        reference = reference[rows].astype(jnp.float32).ravel()
        difference = result[rows].astype(jnp.float32).ravel() - reference
        differences.append(float(jnp.linalg.norm(difference) / jnp.linalg.norm(reference)))
    return max(differences)
