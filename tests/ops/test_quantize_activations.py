"""Activations that `grouped_quantize` applies before it quantizes, and their gradients, against NumPy in float64."""

import dataclasses
import itertools
from typing import get_args

import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped as jg
from benchmarks import shapes
from jax_grouped import ScalingMode
from jax_grouped.backends.spec import Activation
from tests import oracle, quantize_oracle
from tests.ops.quantize_cases import AWKWARD_SIZES, MODES, SHAPE, assert_quantized, awkward_values, some, tokens

pytestmark = pytest.mark.slow

DIRECTIONS = pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
INEXACT = ("silu_mul", "silu", "gelu")


@DIRECTIONS
def test_relu_is_exact(backend: str, backward: bool) -> None:
    rng = np.random.default_rng(1)
    dy = rng.standard_normal((SHAPE.tokens, SHAPE.K), np.float32)
    dy[rng.random(dy.shape) < 0.02] = np.inf
    for mode, (name, x) in itertools.product(some(backend, MODES, 1 + backward), awkward_values().items()):
        if backward:
            values = quantize_oracle.activation_grad("relu", dy, x).astype(np.float32)
            arguments = dict(x=jnp.asarray(dy), activation_input=jnp.asarray(x))
        else:
            values = quantize_oracle.activation("relu", x).astype(np.float32)
            arguments = dict(x=jnp.asarray(x))
        got = jg.grouped_quantize(
            **arguments, group_sizes=jnp.asarray(AWKWARD_SIZES), mode=mode, columnwise=True, activation="relu"
        )
        assert_quantized(f"{mode}, {name},", got, quantize_oracle.quantize(values, AWKWARD_SIZES, mode))


@dataclasses.dataclass(frozen=True)
class Expected:
    """Numbers to be quantized, in float64, and the error that float32 may have.

    Sums that cancel, as in the lower end of GELU, keep no relative accuracy but that of what they add up.
    """

    values: np.ndarray
    error: np.ndarray

    @classmethod
    def forward(cls, activation: str, x: np.ndarray) -> "Expected":
        values, size = quantize_oracle.activation(activation, x), np.abs(x.astype(np.float64))
        if activation == "silu_mul":
            gate, up = np.split(size, 2, axis=1)
            size = gate * up
        return cls(values, 1e-5 * np.abs(values) + 2e-6 * size)

    @classmethod
    def backward(cls, activation: str, dy: np.ndarray, x: np.ndarray) -> "Expected":
        values = quantize_oracle.activation_grad(activation, dy, x)
        dy, size = np.abs(dy.astype(np.float64)), np.abs(x.astype(np.float64))
        if activation == "silu_mul":
            gate, up = np.split(size, 2, axis=1)
            size = np.concatenate([dy * up * (1 + gate), dy * gate], axis=1)
        else:
            size = dy * (1 + size**3)
        return cls(values, 1e-5 * np.abs(values) + 2e-6 * size)


def assert_close(
    label: str, got: jg.ScaledArray, expected: Expected, sizes: np.ndarray, dtype: str, pow2_scales: bool = False
) -> None:
    """Checks that scales are those of values within the error, and that numbers are the nearest ones for their scale.

    Where scales are powers of two, a small error of the largest value may change the scale by a factor of two.
    """

    def copy(sign: int) -> quantize_oracle.Copy:
        magnitude = np.maximum(np.abs(expected.values) + sign * expected.error, 0).astype(np.float32)
        quantized = quantize_oracle.quantize(magnitude, sizes, got.layout.mode, dtype=dtype, pow2_scales=pow2_scales)
        return quantized.columnwise if got.layout.columnwise else quantized.rowwise

    low, high = copy(-1), copy(1)
    used = low.scale_inv.size
    scale_inv = np.asarray(got.scale_inv).view(low.scale_inv.dtype).ravel()[:used]
    between = (low.scale_inv.ravel() <= scale_inv) & (scale_inv <= high.scale_inv.ravel())
    assert between.all(), f"{label} scale_inv ({used}) differs first at {np.argmin(between)}"

    numbers = np.asarray(jg.grouped_dequantize(got), np.float64)
    relative, smallest = quantize_oracle.FP8_EPS[dtype], quantize_oracle.FP8_TINY[dtype]
    step = np.maximum(relative * np.abs(expected.values), smallest * high.inverse)
    valid = np.arange(len(numbers)) < sizes.sum()
    off = valid[:, None] & ~(np.abs(numbers - expected.values) <= 0.501 * step + expected.error)
    assert not off.any(), f"{label} {numbers.shape} differs first at {np.argwhere(off)[0]}"
    assert not numbers[~valid].any(), f"{label}: rows of no group are not zero"


def without_tail(x: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Sets the rows of no group to zero, which every activation maps to zero."""
    return np.where(np.arange(len(x))[:, None] < sizes.sum(), x, np.zeros((), x.dtype))


def wide(activation: str) -> shapes.Shape:
    """Returns the shape of an activation's input whose result has SHAPE."""
    return dataclasses.replace(SHAPE, K=2 * SHAPE.K) if activation == "silu_mul" else SHAPE


@DIRECTIONS
@pytest.mark.parametrize("activation", INEXACT)
def test_activations_are_quantized_and_summed(backend: str, activation: str, backward: bool) -> None:
    sizes = shapes.group_sizes(SHAPE, "tail")
    x = tokens(wide(activation), sizes, "float32", magnitude=4.0)
    dy = tokens(SHAPE, sizes, "float32", magnitude=4.0, seed=1)
    dtype = "float8_e5m2" if backward else "float8_e4m3fn"
    if backward:
        expected = Expected.backward(activation, without_tail(dy, sizes), without_tail(x, sizes))
    else:
        expected = Expected.forward(activation, without_tail(x, sizes))
    modes = [ScalingMode.TENSOR, ScalingMode.BLOCK_1D, ScalingMode.MX]
    for mode in some(backend, modes, INEXACT.index(activation) + backward):
        pow2_scales = mode == ScalingMode.BLOCK_1D
        got = jg.grouped_quantize(
            jnp.asarray(dy if backward else x),
            jnp.asarray(sizes),
            mode,
            dtype=dtype,
            columnwise=True,
            pow2_scales=pow2_scales,
            dbias=True,
            activation=activation,
            activation_input=jnp.asarray(x) if backward else None,
        )
        for name, copy in (("rowwise", got.rowwise), ("columnwise", got.columnwise)):
            assert_close(f"{mode}, {name}", copy, expected, sizes, dtype, pow2_scales)
        for group, rows in oracle.local_groups(sizes, len(sizes), len(x)):
            largest, error = np.abs(expected.values[rows]).max(), expected.error[rows].max()
            assert abs(float(got.amax[group]) - largest) <= error
        rounding = 2.0**-24 * sizes.max() * np.abs(expected.values)
        bound = oracle.bias_grad(rounding + expected.error, sizes, len(sizes))
        assert np.all(np.abs(got.dbias - oracle.bias_grad(expected.values, sizes, len(sizes))) <= bound)


@pytest.mark.parametrize("activation", get_args(Activation))
def test_activations_of_16_bit_types_are_computed_in_float32(backend: str, activation: str) -> None:
    sizes = shapes.group_sizes(SHAPE, "lognormal")
    for dtype in some(backend, ["bfloat16", "float16"], len(activation)):
        x = tokens(wide(activation), sizes, dtype, magnitude=4.0)
        got = jg.grouped_quantize(jnp.asarray(x), jnp.asarray(sizes), ScalingMode.BLOCK_2D, activation=activation)
        expected = Expected.forward(activation, without_tail(x, sizes))
        assert_close(dtype, got.rowwise, expected, sizes, "float8_e4m3fn")


@pytest.mark.parametrize("activation", INEXACT)
def test_what_is_not_finite_stays_visible_through_an_activation(backend: str, activation: str) -> None:
    x = np.full((4, 32 if activation == "silu_mul" else 16), 1e30, np.float32)
    x[0], x[1, 3], x[2, 5] = 1, np.nan, np.inf
    with np.errstate(over="ignore"):
        # A product of gate and up that is finite in float64 only counts as infinite.
        expected = ~np.isfinite(quantize_oracle.activation(activation, x).astype(np.float32))
    got = jg.grouped_quantize(jnp.asarray(x), jnp.array([4]), ScalingMode.TENSOR, activation=activation)
    codes = np.asarray(got.rowwise.data).view(np.uint8)
    np.testing.assert_array_equal(codes == quantize_oracle.NAN, expected)


def test_the_activation_of_a_stack(backend: str) -> None:
    x = np.random.default_rng(0).standard_normal((3, 20, 32), np.float32)
    got = jg.grouped_quantize(jnp.asarray(x), None, ScalingMode.MX, columnwise=True, activation="silu_mul")
    expected = Expected.forward("silu_mul", x.reshape(60, 32)).values.reshape(3, 20, 16)
    for copy in (got.rowwise, got.columnwise):
        assert copy.shape == (3, 20, 16)
        np.testing.assert_allclose(jg.grouped_dequantize(copy), expected, rtol=0.07, atol=1e-3)


@pytest.mark.parametrize("activation", get_args(Activation))
def test_activations_of_no_tokens(backend: str, activation: str) -> None:
    wide_x = jnp.ones((0, 64 if activation == "silu_mul" else 32))
    for arguments in (dict(x=wide_x), dict(x=jnp.ones((0, 32)), activation_input=wide_x)):
        got = jg.grouped_quantize(
            **arguments, group_sizes=jnp.zeros(3, jnp.int32), mode=ScalingMode.TENSOR, activation=activation
        )
        assert got.rowwise.shape[0] == 0
        assert not np.any(got.amax)
