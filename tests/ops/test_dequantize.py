"""`grouped_dequantize`, bit for bit against NumPy, from arrays that NumPy quantized."""

import itertools

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jax_grouped as jg
from benchmarks import shapes
from jax_grouped import ScalingMode
from jax_grouped.fp8.layout import QuantizedLayout
from tests import quantize_oracle
from tests.ops.quantize_cases import (
    AWKWARD_SIZES,
    FP8_TYPES,
    INPUT_TYPES,
    MODES,
    SHAPE,
    awkward_values,
    each_mode,
    some,
    tokens,
)
from tests.quantize_oracle import assert_same_bits

pytestmark = pytest.mark.slow


def scaled_array(
    copy: quantize_oracle.Copy, layout: QuantizedLayout, sizes: np.ndarray | None, dtype: str
) -> jg.ScaledArray:
    """Wraps NumPy's result in a ScaledArray, with NaN in all unspecified bytes: nothing may read them."""

    def filled(shape: tuple[int, ...], numbers: np.ndarray, nan: float) -> np.ndarray:
        array = np.full(shape, nan, numbers.dtype)
        array.reshape(-1)[: numbers.size] = numbers.ravel()
        return array

    data = filled(layout.data_shape, copy.data, quantize_oracle.NAN).view(quantize_oracle.FP8[dtype])
    if layout.mode == ScalingMode.MX:
        scale_inv = filled(layout.scale_shape, copy.scale_inv, 0xFF).view(ml_dtypes.float8_e8m0fnu)
    else:
        scale_inv = filled(layout.scale_shape, copy.scale_inv, np.nan)
    group_sizes = None if sizes is None else jnp.asarray(sizes)
    return jg.ScaledArray(jnp.asarray(data), jnp.asarray(scale_inv), group_sizes, layout)


@pytest.mark.parametrize("columnwise", [False, True], ids=["rowwise", "columnwise"])
@each_mode
def test_dequantize(backend: str, mode: ScalingMode, columnwise: bool) -> None:
    layout = QuantizedLayout(mode, columnwise, SHAPE.tokens, SHAPE.K, SHAPE.num_groups)
    cases = {name: (x, AWKWARD_SIZES) for name, x in awkward_values().items()}
    for skew in ("lognormal", "hostile", "empty_first", "all_empty"):
        sizes = shapes.group_sizes(SHAPE, skew)
        cases[skew] = tokens(SHAPE, sizes, "float32"), sizes
    types = list(itertools.product(FP8_TYPES, INPUT_TYPES))
    for dtype, out_dtype in some(backend, types, 2 * MODES.index(mode) + columnwise):
        for name, (x, sizes) in cases.items():
            quantized = quantize_oracle.quantize(x, sizes, mode, dtype=dtype)
            copy = quantized.columnwise if columnwise else quantized.rowwise
            got = jg.grouped_dequantize(scaled_array(copy, layout, sizes, dtype), out_dtype)
            with np.errstate(over="ignore", invalid="ignore"):
                expected = copy.dequantized.astype(INPUT_TYPES[out_dtype])
            assert_same_bits(f"{name}, {dtype} to {out_dtype},", got, expected)


@each_mode
def test_dequantize_a_stack(backend: str, mode: ScalingMode) -> None:
    x = np.random.default_rng(0).standard_normal((3, 50, 144), np.float32)
    quantized = quantize_oracle.quantize(x, None, mode)
    for columnwise in some(backend, [False, True], MODES.index(mode)):
        copy = quantized.columnwise if columnwise else quantized.rowwise
        layout = QuantizedLayout(mode, columnwise, 150, 144, 3, stack_rows=50)
        got = jg.grouped_dequantize(scaled_array(copy, layout, None, "float8_e4m3fn"))
        assert_same_bits(f"columnwise {columnwise}", got, copy.dequantized)


@pytest.mark.parametrize("columnwise", [False, True], ids=["rowwise", "columnwise"])
def test_dequantize_reads_swizzled_scales(backend: str, columnwise: bool) -> None:
    sizes = shapes.group_sizes(SHAPE, "tail")
    x = tokens(SHAPE, sizes)
    quantized = quantize_oracle.quantize(x, sizes, ScalingMode.MX, swizzled_scales=True)
    copy = quantized.columnwise if columnwise else quantized.rowwise
    layout = QuantizedLayout(ScalingMode.MX, columnwise, SHAPE.tokens, SHAPE.K, 5, swizzled_scales=True)
    got = jg.grouped_dequantize(scaled_array(copy, layout, sizes, "float8_e4m3fn"))
    assert_same_bits("swizzled", got, copy.dequantized)
