"""Activations that `grouped_quantize` applies before it quantizes, and their gradients, against NumPy in float64."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped as jg
from benchmarks import shapes
from jax_grouped import ScalingMode
from jax_grouped.kernels.activations import Activation, SwiGLU, is_gated
from tests import oracle, quantize_oracle
from tests.activations import GPT_OSS
from tests.ops.quantize_cases import (
    ACTIVATIONS,
    AWKWARD_SIZES,
    MODES,
    SHAPE,
    Expected,
    assert_quantized,
    awkward_values,
    edges_of_clamping,
    some,
    tokens,
)

pytestmark = pytest.mark.slow

DIRECTIONS = pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
#: Activations without exponentials, whose results are the same to the bit on every backend.
EXACT = ("relu", "relu_squared")
INEXACT = [activation for activation in ACTIVATIONS if activation not in EXACT]


@DIRECTIONS
@pytest.mark.parametrize("activation", EXACT)
def test_relu_and_its_square_are_exact(backend: str, activation: Activation, backward: bool) -> None:
    rng = np.random.default_rng(1)
    dy = rng.standard_normal((SHAPE.tokens, SHAPE.K), np.float32)
    dy[rng.random(dy.shape) < 0.02] = np.inf
    # Without the rowwise copy, others of the kernel's steps find the largest values.
    forms = some(backend, itertools.product(MODES, [True, False]), 4 * EXACT.index(activation) + 2 * backward)
    for (mode, rowwise), (name, x) in itertools.product(forms, awkward_values().items()):
        if backward:
            exact = quantize_oracle.activation_grad(activation, dy, x)
        else:
            exact = quantize_oracle.activation(activation, x)
        with np.errstate(over="ignore"):
            values = exact.astype(np.float32)
        options = dict(rowwise=rowwise, columnwise=True, activation=activation)
        got = jg.grouped_quantize(**arguments(backward, dy, x), group_sizes=AWKWARD_SIZES, mode=mode, **options)
        expected = quantize_oracle.quantize(values, AWKWARD_SIZES, mode)
        assert_quantized(f"{mode}, {name}, rowwise {rowwise},", got, expected)


def arguments(backward: bool, dy: np.ndarray, x: np.ndarray) -> dict[str, jax.Array]:
    return dict(x=jnp.asarray(dy), activation_input=jnp.asarray(x)) if backward else dict(x=jnp.asarray(x))


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


#: Modes, types and features; the first tile of a gate's gradient of 80 features has features of both halves.
FORMS = (
    *((mode, "float32", 144) for mode in (ScalingMode.TENSOR, ScalingMode.BLOCK_1D, ScalingMode.MX)),
    *((ScalingMode.BLOCK_2D, dtype, 80) for dtype in ("bfloat16", "float16")),
)


@DIRECTIONS
def test_activations_are_quantized_and_summed(backend: str, backward: bool) -> None:
    sizes = shapes.group_sizes(SHAPE, "tail")
    dtype = "float8_e5m2" if backward else "float8_e4m3fn"
    forms = itertools.product(ACTIVATIONS, FORMS)
    for activation, (mode, input_type, features) in some(backend, forms, 1, count=6):
        label, pow2_scales = f"{activation}, {mode}, {input_type},", mode == ScalingMode.BLOCK_1D
        # Some numbers are clamped where that belongs to the activation.
        limit = activation.limit if isinstance(activation, SwiGLU) else None
        shape, width = dataclasses.replace(SHAPE, K=features), 1 + is_gated(activation)
        wide = dataclasses.replace(shape, K=width * features)
        x = tokens(wide, sizes, input_type, magnitude=4 * (limit or 1))
        dy = tokens(shape, sizes, input_type, magnitude=4.0, seed=1)
        # Every activation maps zero to zero, and its gradient too.
        grouped = [np.where(np.arange(len(x))[:, None] < sizes.sum(), array, 0 * array[0, 0]) for array in (dy, x)]
        expected = Expected.backward(activation, *grouped) if backward else Expected.forward(activation, grouped[1])

        got = jg.grouped_quantize(
            **arguments(backward, dy, x),
            group_sizes=jnp.asarray(sizes),
            mode=mode,
            dtype=dtype,
            columnwise=True,
            pow2_scales=pow2_scales,
            dbias=True,
            activation=activation,
        )

        for copy in (got.rowwise, got.columnwise):
            assert_close(label, copy, expected, sizes, dtype, pow2_scales)
        for group, rows in oracle.local_groups(sizes, len(sizes), len(x)):
            largest, error = np.abs(expected.values[rows]).max(), expected.error[rows].max()
            assert abs(float(got.amax[group]) - largest) <= error, label
        rounding = 2.0**-24 * sizes.max() * np.abs(expected.values)
        bound = oracle.bias_grad(rounding + expected.error, sizes, len(sizes))
        assert np.all(np.abs(got.dbias - oracle.bias_grad(expected.values, sizes, len(sizes))) <= bound), label


def test_what_is_not_finite_stays_visible_through_an_activation(backend: str) -> None:
    for activation in some(backend, INEXACT, 0, count=3):
        x = np.full((4, 32 if is_gated(activation) else 16), 1e30, np.float32)
        x[0], x[1, 3], x[2, 5] = 1, np.nan, np.inf
        with np.errstate(over="ignore"):
            # A product of gate and up that is finite in float64 only counts as infinite.
            expected = ~np.isfinite(quantize_oracle.activation(activation, x).astype(np.float32))
        got = jg.grouped_quantize(jnp.asarray(x), jnp.array([4]), ScalingMode.TENSOR, activation=activation)
        codes = np.asarray(got.rowwise.data).view(np.uint8)
        np.testing.assert_array_equal(codes == quantize_oracle.NAN, expected, str(activation))


@DIRECTIONS
def test_what_is_clamped_has_no_gradient_and_the_limit_has_one(backend: str, backward: bool) -> None:
    for dtype in some(backend, ["bfloat16", "float32"], backward):
        x = edges_of_clamping(dtype)
        dy = np.ones((x.shape[0], x.shape[1] // 2), x.dtype)
        if backward:
            expected = quantize_oracle.activation_grad(GPT_OSS, dy, x)
        else:
            expected = quantize_oracle.activation(GPT_OSS, x)

        options = dict(mode=ScalingMode.BLOCK_1D, columnwise=True, activation=GPT_OSS)
        got = jg.grouped_quantize(**arguments(backward, dy, x), group_sizes=jnp.array([len(x)]), **options)

        for copy in (got.rowwise, got.columnwise):
            numbers = np.asarray(jg.grouped_dequantize(copy))
            np.testing.assert_array_equal(np.isnan(numbers), np.isnan(expected))
            assert not numbers[expected == 0].any()
            np.testing.assert_allclose(numbers, expected, rtol=0.07, atol=1e-3)


def test_activations_of_a_stack_and_of_no_tokens(backend: str) -> None:
    x = np.random.default_rng(0).standard_normal((3, 20, 32), np.float32)
    got = jg.grouped_quantize(jnp.asarray(x), None, ScalingMode.MX, columnwise=True, activation="swiglu")
    expected = Expected.forward("swiglu", x.reshape(60, 32)).values.reshape(3, 20, 16)
    for copy in (got.rowwise, got.columnwise):
        assert copy.shape == (3, 20, 16)
        np.testing.assert_allclose(jg.grouped_dequantize(copy), expected, rtol=0.07, atol=1e-3)
    none = dict(group_sizes=jnp.zeros(3, jnp.int32), mode=ScalingMode.TENSOR, activation="swiglu")
    for given in (dict(x=jnp.ones((0, 64))), dict(x=jnp.ones((0, 32)), activation_input=jnp.ones((0, 64)))):
        got = jg.grouped_quantize(**given, **none)
        assert got.rowwise.shape[0] == 0
        assert not np.any(got.amax)
