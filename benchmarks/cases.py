"""Cases to measure: their operations, the random arrays that these read, and what they count."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from benchmarks import memory
from benchmarks.shapes import Shape, group_ends, group_sizes
from jax_grouped import ScalingMode
from jax_grouped.fp8.layout import QuantizedLayout

#: Type of tokens and of their gradients.
DTYPE = jnp.dtype(jnp.bfloat16)

# Several times the 60 MB of L2 on an H200, so that no input is still there when its turn comes again.
_BYTES_IN_ROTATION = 256e6
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
        """Rows per group, `int32[E]`."""
        return group_sizes(self.shape, self.skew, self.seed)

    @property
    def valid_rows(self) -> int:
        """Number of rows that belong to a group."""
        return int(group_ends(self.sizes, self.shape.tokens)[-1])

    def require_all_rows(self) -> None:
        """Raises ValueError if rows belong to no group."""
        if self.valid_rows != self.shape.tokens:
            raise ValueError("needs every row to belong to a group")

    def tokens(self, features: int) -> jax.ShapeDtypeStruct:
        """Returns an array `[T, features]`."""
        return jax.ShapeDtypeStruct((self.shape.tokens, features), DTYPE)


@dataclasses.dataclass(frozen=True)
class Products:
    """Grouped products of tokens `x [T, K]`, a kernel `[E, K, N]` and the result's gradient `dy [T, N]`."""

    number: float  # Products of `K` by `N` in one call.
    mlp: bool = False  # There are two kernels, `[E, K, N]` and `[E, N / 2, K]`, and `dy` is `[T, K]`.
    kernel_dtype: str | None = None  # The kernel's type, if the operation fixes it.
    family = "product"
    unit = "TFLOP/s"

    def arrays(self, case: Case) -> Structs:
        """Returns `x`, the kernels and `dy`."""
        E, K, N = case.shape.num_groups, case.shape.K, case.shape.N
        shapes = [(E, K, N), (E, N // 2, K)] if self.mlp else [(E, K, N)]
        kernels = (jax.ShapeDtypeStruct(shape, jnp.dtype(case.kernel_dtype)) for shape in shapes)
        return case.tokens(K), *kernels, case.tokens(K if self.mlp else N)

    def count(self, case: Case) -> int:
        """Counts the multiplications and additions that the result needs."""
        return round(self.number * 2 * case.valid_rows * case.shape.K * case.shape.N)


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer of experts with its router: tokens `x [T, K]`, the kernels of router, gate and up, and down, and `dy`."""

    number: float  # Products of `K` by `N` and back, counted as those of one forward pass.
    rows: bool = False  # The experts alone, on rows in the order of experts that are not equally loaded.
    kernel_dtype = "bfloat16"
    family = "moe"
    unit = "TFLOP/s"

    def arrays(self, case: Case) -> Structs:
        """Returns `x`, the kernels, and the gradient of the result."""
        shape = case.shape
        E, K, N = shape.num_groups, shape.K, shape.N
        x = jax.ShapeDtypeStruct((shape.tokens * (shape.top_k if self.rows else 1), K), DTYPE)
        kernels = [(E, K, N), (E, N // 2, K)] if self.rows else [(K, E), (E, K, N), (E, N // 2, K)]
        return x, *(jax.ShapeDtypeStruct(kernel, DTYPE) for kernel in kernels), x

    def count(self, case: Case) -> int:
        """Counts the multiplications and additions of the experts' products."""
        shape = case.shape
        return round(self.number * 3 * shape.tokens * shape.top_k * shape.K * shape.N)


class Quantization:
    """A quantization of tokens `[T, K]`, as the words of its name say."""

    family = "quantization"
    unit = "GB/s"
    kernel_dtype = ""

    def __init__(self, name: str):
        words = name.split()
        # None copies the tokens.
        self.mode: Any = next((mode for mode in ScalingMode if mode.value in words), None)
        # The copies that are made, or the copy that is read.
        self.orientations = ("rowwise", "columnwise") if "both" in words else (words[-1],)
        self.given_scale = "delayed" in words
        self.inverse = "dequantize" in words
        # The rows of each group are summed as well.
        self.dbias = "dbias" in words
        # Applied first: reads `[T, 2 K]` and gives `[T, K]`. `backward`, the gradient of its input is quantized:
        # reads `[T, K]` and `[T, 2 K]`, and gives `[T, 2 K]`.
        self.activation: Literal["silu_mul"] | None = "silu_mul" if "silu_mul" in words else None
        self.backward = "backward" in words
        # A stack of kernels is quantized, one per group, with `jax_grouped.quantize_kernel`.
        self.kernels = "kernels" in words

    def arrays(self, case: Case) -> Structs:
        """Returns the tokens; `backward`, the gradient of the activation's result, and the activation's input."""
        x, wide = case.tokens(case.shape.K), case.tokens(2 * case.shape.K)
        return (x,) if self.activation is None else (x, wide) if self.backward else (wide,)

    def count(self, case: Case) -> int:
        """Counts the bytes that are read or written at least once, whoever does it.

        Read are the rows that belong to a group, twice where the scale of a whole group must be found first. Written is
        each orientation's data with the padding that its layout has (each group's rows up to a multiple of 16 where it
        is columnwise), its scales, and the bias gradient. Dequantization reads one orientation and writes every row.
        Group sizes, the largest value of each group and scales that are given are too small to count.
        """
        width = 2 * case.shape.K if self.backward else case.shape.K
        whole = case.shape.tokens * width * DTYPE.itemsize
        if self.mode is None:
            return 2 * whole
        # The bytes of a group do not depend on the other groups.
        groups = itertools.product(self.orientations, case.sizes.tolist())
        layouts = [QuantizedLayout(self.mode, of == "columnwise", rows, width, 1, rows) for of, rows in groups]
        scale_bytes = 1 if self.mode == ScalingMode.MX else 4
        quantized = sum(math.prod(of.data_shape) + scale_bytes * math.prod(of.scale_shape) for of in layouts)
        if self.inverse:
            return quantized + whole
        passes = 2 if self.mode == ScalingMode.TENSOR and not self.given_scale else 1
        read = passes * case.valid_rows * sum(of.shape[1] for of in self.arrays(case)) * DTYPE.itemsize
        return read + quantized + (case.shape.num_groups * width * 4 if self.dbias else 0)


@dataclasses.dataclass(frozen=True)
class Step:
    """A training step that is compiled only, one of `benchmarks.memory.OPERATIONS`."""

    kernel_dtype: str
    family = "memory"
    unit = "GiB"

    def arrays(self, _: Case) -> Structs:
        """Returns nothing."""
        return ()

    def count(self, case: Case) -> int:
        """Counts the bytes that XLA plans for."""
        return memory.planned_bytes(case.shape, case.operation, case.variant)


#: Single products; `backward`, dgrad and wgrad; and whole steps of layers. `wgrad f32` gives the float32 gradient of a
#: float32 kernel. An `accumulating` step adds its kernel's gradient to that of earlier ones. An `mlp` has a gated
#: projection of `K` by `N`, SwiGLU, and a projection of half of `N` back to `K`.
PRODUCTS = {
    "fprop": Products(1),
    "dgrad": Products(1),
    "wgrad": Products(1),
    "wgrad f32": Products(1, kernel_dtype="float32"),
    "backward": Products(2),
    "dense": Products(3),
    "accumulating": Products(3),
    "mlp": Products(4.5, mlp=True),
}

#: Whole layers: the forward pass, both passes, and both passes of the experts alone.
LAYERS = {"moe forward": Layer(1), "moe": Layer(3), "moe experts": Layer(3, rows=True)}

_NAMES = (
    "copy, block_1d rowwise, block_1d columnwise, block_1d both, delayed tensor rowwise, delayed tensor both, "
    "current tensor rowwise, current tensor both, mx both, block_2d kernels both, dbias block_1d both, "
    "silu_mul block_1d both, silu_mul backward block_1d both, dequantize block_1d rowwise, "
    "dequantize block_1d columnwise"
)
QUANTIZATIONS = {name: Quantization(name) for name in _NAMES.split(", ")}

OPERATIONS: dict[str, Products | Layer | Quantization | Step] = {
    **PRODUCTS,
    **LAYERS,
    **QUANTIZATIONS,
    **{name: Step(kernel_dtype) for name, (_, kernel_dtype) in memory.OPERATIONS.items()},
}


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
    """Draws normally distributed arrays, in as many sets as keep calls in rotation from finding any in the L2 cache.

    Zeros would draw less power, and the chip would run at a higher clock than it does in training. A call reads a part
    of them, all by default.
    """
    sizes = [of.size * of.dtype.itemsize for of in arrays]
    # A product leaves out one of several arrays, perhaps the largest.
    read = part * (sum(sizes) - max(sizes) if len(sizes) > 1 else sum(sizes))
    count = min(_MOST_SETS, math.ceil(_BYTES_IN_ROTATION / read))
    keys = jax.random.split(jax.random.key(seed), (count, len(arrays)))
    return [tuple(_normal(key, of.shape, of.dtype) for key, of in zip(row, arrays, strict=True)) for row in keys]


def as_trained(arrays: Arrays) -> Arrays:
    """Returns a whole layer's arrays, kernels and router as small as trained ones, so that SwiGLU does not overflow."""
    x, *kernels, dy = arrays
    return x, *(kernel * kernel.shape[-2] ** -0.5 for kernel in kernels), dy


def relative_difference(got: Sequence[jax.Array], expected: Sequence[jax.Array], case: Case) -> float:
    """Returns the largest relative Frobenius norm of the differences between two variants' results."""

    def difference(got: jax.Array, expected: jax.Array) -> float:
        # The contents of rows outside every group are not defined for all peers.
        rows = slice(case.valid_rows if got.shape[0] == case.shape.tokens else None)
        got, expected = got[rows].astype(jnp.float32), expected[rows].astype(jnp.float32)
        return float(jnp.linalg.norm((got - expected).ravel()) / jnp.linalg.norm(expected.ravel()))

    return max(map(difference, got, expected))
