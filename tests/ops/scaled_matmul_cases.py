"""Code shared by the tests of products of quantized operands: a product's operands, and its result from NumPy."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jax_grouped as jg
from benchmarks import shapes
from jax_grouped import ScalingMode
from jax_grouped.core.groups import Groups
from jax_grouped.fp8.layout import QuantizedLayout
from jax_grouped.kernels.product import GemmSpec, Product, multiply
from tests import oracle, quantize_oracle
from tests.operands import random_operands

PRODUCTS: list[Product] = ["fprop", "dgrad", "wgrad"]
#: Modes of tokens and of kernels.
MODES = {
    "block": (ScalingMode.BLOCK_1D, ScalingMode.BLOCK_2D),
    "tensor": (ScalingMode.TENSOR, ScalingMode.TENSOR),
    "mx": (ScalingMode.MX, ScalingMode.MX),
}
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
E8M0_NAN = 0xFF
TYPE_PAIRS = [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)]

#: Two blocks of rows and of either kind of features, some of them short.
SHAPE = shapes.Shape("unaligned", num_groups=5, tokens=300, K=144, N=272)
RAGGED = np.array([1, 37, 0, 130, 2], np.int32)

each_product = pytest.mark.parametrize("product", PRODUCTS)
each_mode = pytest.mark.parametrize("mode", MODES)


@dataclasses.dataclass(frozen=True)
class Operand:
    """Quantized numbers as the product reads them, and their values."""

    data: np.ndarray
    scale_inv: np.ndarray
    layout: QuantizedLayout
    dequantized: np.ndarray


@dataclasses.dataclass(frozen=True)
class Case:
    """The operands of one product, with its groups and its result in float64."""

    a: Operand
    b: Operand
    sizes: np.ndarray
    offset: int
    product: Product
    expected: np.ndarray

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        offset = np.array([self.offset], np.int32)
        arrays = self.a.data, self.a.scale_inv, self.b.data, self.b.scale_inv, self.sizes, offset
        return tuple(jnp.asarray(array) for array in arrays)

    def multiply(
        self,
        a_data: jax.Array,
        a_scale: jax.Array,
        b_data: jax.Array,
        b_scale: jax.Array,
        sizes: jax.Array,
        offset: jax.Array,
        *accumulator: jax.Array,
        out_dtype: str = "float32",
    ) -> jax.Array:
        a = jg.ScaledArray(a_data, a_scale, None, self.a.layout)
        b = jg.ScaledArray(b_data, b_scale, None, self.b.layout)
        spec = GemmSpec(self.product, self.a.layout.num_groups, out_dtype)
        return multiply(a, b, Groups(sizes, offset), spec, *accumulator)

    def check(self, out_dtype: str = "float32") -> None:
        out = self.multiply(*self.arrays, out_dtype=out_dtype)
        assert out.dtype == out_dtype
        self.compare(np.asarray(out), oracle.fp8_tolerance(out_dtype))

    def check_accumulation(self) -> None:
        accumulator = jax.random.normal(jax.random.key(0), self.expected.shape)
        self.compare_accumulated(self.multiply(*self.arrays, accumulator), accumulator)

    def compare_accumulated(self, out: jax.Array, accumulator: jax.Array) -> None:
        self.compare(np.asarray(out, np.float64) - np.asarray(accumulator), 2 * oracle.fp8_tolerance())

    def compare(self, out: np.ndarray, tolerance: float) -> None:
        if self.product == "wgrad":
            oracle.assert_kernels_close(out, self.expected, tolerance)
        else:
            groups = self.a.layout.num_groups
            oracle.assert_groups_close(out, self.expected, self.sizes, groups, tolerance, self.offset)


def filled(array: np.ndarray, shape: tuple[int, ...], poison: int | float) -> np.ndarray:
    """Returns an array of this shape that starts with these elements."""
    flat = np.full(math.prod(shape), poison, array.dtype)
    flat[: array.size] = array.ravel()
    return flat.reshape(shape)


def as_scales(scale_inv: np.ndarray) -> np.ndarray:
    """Converts inverse scales to the type in arrays; the oracle gives E8M0 numbers as bytes."""
    return scale_inv.view(ml_dtypes.float8_e8m0fnu) if scale_inv.dtype == np.uint8 else scale_inv


def quantized_tokens(
    x: np.ndarray, sizes: np.ndarray, offset: int, num_groups: int, mode: ScalingMode, dtype: str, *, columnwise: bool
) -> Operand:
    """Returns the tokens of the groups from `offset` on, with NaN wherever nothing may be read."""
    local = dict(oracle.local_groups(sizes, num_groups, len(x), offset))
    starts = [rows.start for rows in local.values()]
    first = min(starts, default=0)
    lengths = [local[group].stop - local[group].start if group in local else 0 for group in range(num_groups)]
    mx = mode == ScalingMode.MX
    quantized = quantize_oracle.quantize(x[first:], np.array(lengths), mode, dtype=dtype, swizzled_scales=mx)
    copy = quantized.columnwise if columnwise else quantized.rowwise
    layout = QuantizedLayout(mode, columnwise, x.shape[0], x.shape[1], num_groups, swizzled_scales=mx)
    if columnwise:
        data = filled(copy.data, layout.data_shape, quantize_oracle.NAN)
    else:
        data = np.full(layout.data_shape, quantize_oracle.NAN, np.uint8)
        data[first : first + sum(lengths)] = copy.data[: sum(lengths)]
    dequantized = np.concatenate([np.zeros((first, x.shape[1]), np.float32), copy.dequantized])
    scale_inv = filled(copy.scale_inv, layout.scale_shape, E8M0_NAN if mx else np.nan)
    return Operand(data.view(quantize_oracle.FP8[dtype]), as_scales(scale_inv), layout, dequantized)


def quantized_kernels(kernel: np.ndarray, mode: ScalingMode, dtype: str, *, columnwise: bool) -> Operand:
    groups, rows, features = kernel.shape
    mx = mode == ScalingMode.MX
    quantized = quantize_oracle.quantize(kernel, None, mode, dtype=dtype, swizzled_scales=mx)
    copy = quantized.columnwise if columnwise else quantized.rowwise
    layout = QuantizedLayout(mode, columnwise, groups * rows, features, groups, stack_rows=rows, swizzled_scales=mx)
    scale_inv = as_scales(copy.scale_inv.reshape(layout.scale_shape))
    return Operand(copy.data.view(quantize_oracle.FP8[dtype]), scale_inv, layout, copy.dequantized)


def make_case(
    product: Product,
    mode: str,
    pair: tuple[str, str] = (E4M3, E4M3),
    shape: shapes.Shape = SHAPE,
    sizes: np.ndarray = RAGGED,
    *,
    offset: int = 0,
    magnitude: float = 1e2,
    seed: int = 0,
) -> Case:
    whole = dataclasses.replace(shape, num_groups=len(sizes))
    at = random_operands(whole, sizes, np.float32, magnitude=magnitude, seed=seed)
    kernel = at.kernel[: shape.num_groups]
    token_mode, kernel_mode = MODES[mode]

    def tokens(x: np.ndarray, dtype: str, *, columnwise: bool) -> Operand:
        return quantized_tokens(x, sizes, offset, shape.num_groups, token_mode, dtype, columnwise=columnwise)

    if product == "wgrad":
        a, b = tokens(at.x, pair[0], columnwise=True), tokens(at.dy, pair[1], columnwise=True)
        expected = oracle.wgrad(a.dequantized, b.dequantized, sizes, shape.num_groups, offset)
    else:
        forward = product == "fprop"
        a = tokens(at.x if forward else at.dy, pair[0], columnwise=False)
        b = quantized_kernels(kernel, kernel_mode, pair[1], columnwise=forward)
        multiply = oracle.fprop if forward else oracle.dgrad
        expected = multiply(a.dequantized, b.dequantized, sizes, offset)
    return Case(a, b, sizes, offset, product, expected)
