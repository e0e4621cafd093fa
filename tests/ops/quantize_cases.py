"""Code shared by the tests of quantization: inputs that hide nothing, and the comparison of every specified byte."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar, get_args

import jax
import ml_dtypes
import numpy as np
import pytest

import jax_grouped as jg
from benchmarks import shapes
from jax_grouped import ScalingMode
from jax_grouped.kernels.activations import Activation, ActivationName, SwiGLU, is_gated
from tests import activations, quantize_oracle
from tests.operands import random_operands
from tests.quantize_oracle import assert_same_bits

MODES = list(ScalingMode)
ACTIVATIONS: tuple[Activation, ...] = (*get_args(ActivationName), *activations.WITH_NUMBERS)
FP8_TYPES = ["float8_e4m3fn", "float8_e5m2"]
INPUT_TYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}

#: Two blocks of features, the second one short; 300 rows leave most blocks of rows short too.
SHAPE = shapes.Shape("unaligned", num_groups=5, tokens=300, K=144, N=1)

each_mode = pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
each_activation = pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)

T = TypeVar("T")


def some(backend: str, choices: Iterable[T], index: int, count: int = 1) -> Sequence[T]:
    """Returns all choices for CUDA kernels, where each may have its own code. For plain JAX, returns `count`, from the
    index on: every other one would cost a second of compilation, and shares its code with these."""
    choices = list(choices)
    if backend == "cuda":
        return choices
    return [choices[(index + i * len(choices) // count) % len(choices)] for i in range(count)]


def tokens(
    shape: shapes.Shape, sizes: np.ndarray, dtype: str = "bfloat16", *, magnitude: float = 1e3, seed: int = 0
) -> np.ndarray:
    """Returns `[T, K]` of magnitudes from 1e-3 to 1e3, `K` rounded up for FP8; poison in the rows of no group."""
    shape = dataclasses.replace(shape, K=-(-shape.K // 16) * 16, N=1)
    x = random_operands(shape, sizes, INPUT_TYPES[dtype], magnitude=magnitude, seed=seed).x
    poison(x[shapes.group_ends(sizes, shape.tokens)[-1] :])
    return x


def poison(tail: np.ndarray) -> None:
    """Fills rows with NaN, which shows in sums and products, and with the largest number, which shows in scales."""
    tail[:, ::2] = np.nan
    tail[:, 1::2] = ml_dtypes.finfo(tail.dtype).max


#: Group sizes for `awkward_values`.
AWKWARD_SIZES = np.full(SHAPE.num_groups, 30, np.int32)


def awkward_values() -> dict[str, np.ndarray]:
    """Returns float32 tokens of SHAPE with `AWKWARD_SIZES`; poison in the rows of no group."""
    rng = np.random.default_rng(0)
    rows = int(AWKWARD_SIZES[0])
    ordinary = rng.standard_normal((AWKWARD_SIZES.sum(), SHAPE.K), np.float32)
    signs = np.sign(ordinary)
    tiny, largest = np.finfo(np.float32).tiny, np.finfo(np.float32).max

    not_finite = ordinary.copy()
    bits = np.array([0x7FC00000, 0xFFFFFFFF, 0x7F800001, 0xFF812345, 0x7F800000, 0xFF800000], np.uint32)
    mask = rng.random(ordinary.shape) < 0.05
    not_finite[mask] = rng.choice(bits, mask.sum()).view(np.float32)
    # Two groups and one block without any number that could give a scale.
    not_finite[rows : 2 * rows] = np.nan
    not_finite[2 * rows : 3 * rows] = -np.inf
    not_finite[3 * rows, :128] = np.inf

    only_subnormal = rng.integers(0, 2**23, ordinary.shape, np.uint32).view(np.float32) * signs
    subnormal = np.where(rng.random(ordinary.shape) < 0.5, only_subnormal, ordinary)
    subnormal[rows : 2 * rows] = only_subnormal[rows : 2 * rows]

    values = {
        "not finite": not_finite,
        "subnormal": subnormal,
        "around the smallest normal number": tiny * rng.choice([0.5, 1 - 2.0**-23, 1, 1 + 2.0**-23, 2], signs.shape),
        "zeros of both signs": 0 * signs,
        # Rows whose scales run from where they are clamped down to the smallest.
        "every magnitude": np.clip(ordinary, -1, 1) * np.geomspace(tiny, largest, len(ordinary))[:, None],
        "largest": signs * largest,
        "where the clamp of scales begins": signs
        * 448
        * tiny
        * rng.choice([1 - 2.0**-23, 1, 1 + 2.0**-23], (1, SHAPE.K)),
        "halfway between numbers": np.rint(ordinary * 64) / 64,
    }
    tail = np.empty((SHAPE.tokens - len(ordinary), SHAPE.K), np.float32)
    poison(tail)
    with np.errstate(invalid="ignore"):
        return {name: np.concatenate([array, tail]).astype(np.float32) for name, array in values.items()}


def edges_of_clamping(dtype: str) -> np.ndarray:
    """Returns inputs of `GPT_OSS` at its limit, next to it, beyond it and not finite: `[16, 32]`, every gate
    with every factor."""
    limit = np.array(activations.GPT_OSS.limit, INPUT_TYPES[dtype])
    around = [np.nextafter(limit, 0 * limit), limit, np.nextafter(limit, 2 * limit)]
    magnitudes = np.array([0.5, 1, *around, 8, np.inf], limit.dtype)
    edges = np.concatenate([-magnitudes, magnitudes, np.array([0, np.nan], limit.dtype)])
    gates, factors = np.meshgrid(edges, edges)
    return np.concatenate([gates, factors], axis=1)


@dataclasses.dataclass(frozen=True)
class Expected:
    """Results of an activation or its gradient in float64, and the error that float32 may have.

    Sums that cancel, as in the lower end of GELU, keep no relative accuracy but that of what they add up.
    """

    values: np.ndarray
    error: np.ndarray

    @classmethod
    def forward(cls, activation: Activation, x: np.ndarray) -> "Expected":
        values, size = quantize_oracle.activation(activation, x), _size(activation, x)
        if is_gated(activation):
            gate, factor = np.split(size, 2, axis=1)
            size = gate * (1 + factor)
        return cls(values, 1e-5 * np.abs(values) + 2e-6 * size)

    @classmethod
    def backward(cls, activation: Activation, dy: np.ndarray, x: np.ndarray) -> "Expected":
        values = quantize_oracle.activation_grad(activation, dy, x)
        dy, size = np.abs(dy.astype(np.float64)), _size(activation, x)
        power = 3 if activation in ("gelu", "geglu") else 1
        if is_gated(activation):
            gate, factor = np.split(size, 2, axis=1)
            size = np.concatenate([dy * (1 + factor) * (1 + gate**power), dy * gate], axis=1)
        else:
            size = dy * (1 + size**power)
        return cls(values, 1e-5 * np.abs(values) + 2e-6 * size)


def _size(activation: Activation, x: np.ndarray) -> np.ndarray:
    """Returns the magnitudes of the numbers that an activation computes with."""
    size = np.abs(x.astype(np.float64))
    is_clamped = isinstance(activation, SwiGLU) and not activation.clamp_result
    return np.minimum(size, activation.limit or np.inf) if is_clamped else size


def assert_quantized(
    label: str, got: jg.GroupedQuantized | jg.KernelCache, expected: quantize_oracle.Quantized
) -> None:
    """Compares every specified byte of the existing copies: all but those past the last group's region."""
    assert_same_bits(f"{label} amax", got.amax, expected.amax)
    for name in ("rowwise", "columnwise"):
        copy, wanted = getattr(got, name), getattr(expected, name)
        if copy is not None:
            scale_type = ml_dtypes.float8_e8m0fnu if copy.layout.mode == ScalingMode.MX else np.float32
            assert copy.scale_inv.dtype == scale_type, f"{label} {name} scale_inv has type {copy.scale_inv.dtype}"
            scales, whole = as_bytes(copy.scale_inv), wanted.scales_are_whole
            assert_same_bits(f"{label} {name} data", as_bytes(copy.data), wanted.data, whole=wanted.data_is_whole)
            assert_same_bits(f"{label} {name} scale_inv", scales, wanted.scale_inv, whole=whole)


def as_bytes(array: jax.Array) -> np.ndarray:
    """Reinterprets 8-bit numbers as integers; returns other arrays unchanged."""
    numbers = np.asarray(array)
    return numbers.view(np.uint8) if numbers.dtype.itemsize == 1 else numbers


def assert_same_trees(got: Any, expected: Any) -> None:
    """Compares all bytes, and the static fields."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for (path, one), other in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(expected), strict=True):
        assert_same_bits(jax.tree_util.keystr(path), as_bytes(one), as_bytes(other))
