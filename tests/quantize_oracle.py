"""Definition of quantization, group by group and block by block, in NumPy; and of activations, in float64.

Quantization is the same to the bit on every backend, so it is computed in float32 here too.
"""

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jax_grouped import ScalingMode, SwiGLU
from jax_grouped.kernels.activations import Activation
from tests import oracle

FP8 = {"float8_e4m3fn": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2}
FP8_MAX = {"float8_e4m3fn": np.float32(448), "float8_e5m2": np.float32(57344)}
#: The distance from 1 to the next number, and the smallest number above 0.
FP8_EPS = {"float8_e4m3fn": 2.0**-3, "float8_e5m2": 2.0**-2}
FP8_TINY = {"float8_e4m3fn": 2.0**-9, "float8_e5m2": 2.0**-16}
#: Byte of numbers that are not finite, in both types.
NAN = 0x7F

#: Rows and features that share a scale in the rowwise copy; in the columnwise one, features and rows.
BLOCKS = {ScalingMode.BLOCK_1D: (1, 128), ScalingMode.BLOCK_2D: (128, 128), ScalingMode.MX: (1, 32)}
SCALE_MIN, SCALE_MAX = np.float32(2.0**-126), np.float32(2.0**126)


class Copy(NamedTuple):
    """One orientation of a quantized array, whole, or the regions of all groups with which a flat array starts."""

    data: np.ndarray  # The bytes of the FP8 numbers.
    scale_inv: np.ndarray  # float32, or the bytes of E8M0 numbers.
    inverse: np.ndarray  # The float32 inverse scale of every element, in the order of `x`; 0 in the rows of no group.
    dequantized: np.ndarray  # float32, `data * scale_inv` in the order of `x`; 0 in the rows of no group.
    data_is_whole: bool = True
    scales_are_whole: bool = True


class Quantized(NamedTuple):
    """Both orientations, and the largest finite absolute value of each group."""

    rowwise: Copy
    columnwise: Copy
    amax: np.ndarray


class _Group(NamedTuple):
    """A quantized group: bytes, the stored inverse scale of each block, and the inverse scale of each element."""

    codes: np.ndarray
    scale_inv: np.ndarray
    inverse: np.ndarray


def quantize(
    x: np.ndarray,
    group_sizes: np.ndarray | None,
    mode: ScalingMode,
    *,
    dtype: str = "float8_e4m3fn",
    pow2_scales: bool = False,
    amax_epsilon: float = 0.0,
    scale: np.ndarray | None = None,
) -> Quantized:
    """Quantizes tokens `[T, C]` with the rows per group, or a stack of equal groups `[E, K, C]` without."""
    sizes = np.full(x.shape[0], x.shape[1]) if group_sizes is None else group_sizes
    tokens = flush(x.reshape(-1, x.shape[-1]))
    groups = [tokens[rows] for _, rows in oracle.local_groups(sizes, len(sizes), tokens.shape[0])]

    def scales_of(amax: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the scales of blocks, their stored inverses, and the inverses as numbers."""
        a = flush(np.maximum(amax, np.float32(amax_epsilon)))
        if mode == ScalingMode.MX:
            return _mx_scales(a, FP8_MAX[dtype])
        if scale is not None:
            scales = np.full(a.shape, np.clip(scale[group], SCALE_MIN, SCALE_MAX))
        else:
            scales = _scales(a, FP8_MAX[dtype], pow2_scales)
        return scales, np.float32(1) / scales, np.float32(1) / scales

    def quantize_group(values: np.ndarray, group: int, columnwise: bool) -> _Group:
        rows, features = BLOCKS.get(mode, values.shape)
        if columnwise and mode in BLOCKS:
            rows, features = features, rows
        per_block, stored, inverse = scales_of(_block_amax(values, rows, features), group)
        codes = cast(values, _spread(per_block, rows, features, values.shape), dtype)
        return _Group(codes, stored, _spread(inverse, rows, features, values.shape))

    def copy(*, columnwise: bool) -> Copy:
        quantized = [quantize_group(values, group, columnwise) for group, values in enumerate(groups)]
        data = [_padded(group.codes.T, 1, 16) if columnwise else group.codes for group in quantized]
        scale_inv = [_scale_region(group.scale_inv, mode, columnwise) for group in quantized]
        inverse = _rows([group.inverse for group in quantized], tokens.shape).reshape(x.shape)
        numbers = _rows([group.codes for group in quantized], tokens.shape).view(FP8[dtype]).reshape(x.shape)
        dequantized = flush(numbers.astype(np.float32) * inverse)
        if group_sizes is None:
            return Copy(np.stack(data), np.stack(scale_inv), inverse, dequantized)
        return Copy(
            _flat(data) if columnwise else _rows(data, tokens.shape),
            _flat(scale_inv),
            inverse,
            dequantized,
            data_is_whole=not columnwise,
            scales_are_whole=mode == ScalingMode.TENSOR,
        )

    with np.errstate(over="ignore", invalid="ignore"):
        amax = np.array([_magnitude(values).max(initial=0) for values in groups])
        return Quantized(copy(columnwise=False), copy(columnwise=True), amax)


def flush(x: np.ndarray) -> np.ndarray:
    """Replaces subnormal float32 numbers by zero of the same sign."""
    with np.errstate(invalid="ignore"):
        x = x.astype(np.float32)
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)


def cast(values: np.ndarray, scale: np.ndarray, dtype: str) -> np.ndarray:
    """Returns the bytes of `values * scale`, clipped to what the type holds; NaN where either is not finite."""
    finite = np.isfinite(values) & np.isfinite(scale)
    scaled = np.where(finite, np.clip(values * scale, -FP8_MAX[dtype], FP8_MAX[dtype]), 0)
    return np.where(finite, scaled.astype(FP8[dtype]).view(np.uint8), np.uint8(NAN))


def _magnitude(values: np.ndarray) -> np.ndarray:
    """Returns absolute values; 0 for numbers that are not finite."""
    return np.where(np.isfinite(values), np.abs(values), 0)


def _scales(a: np.ndarray, fp8_max: np.float32, pow2: bool) -> np.ndarray:
    scale = np.where(a == 0, np.float32(1), np.clip(fp8_max / np.where(a == 0, 1, a), SCALE_MIN, SCALE_MAX))
    if pow2:
        # Clear all bits of the mantissa, which leaves a power of two.
        return (scale.view(np.uint32) & np.uint32(0xFF80_0000)).view(np.float32)
    return scale


def _mx_scales(a: np.ndarray, fp8_max: np.float32) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    mantissa, exponent = np.frexp(a)
    max_mantissa, max_exponent = np.frexp(fp8_max)
    # The smallest power of two that is not below a / fp8_max, compared without dividing.
    biased = np.maximum(exponent - max_exponent + (mantissa > max_mantissa) + 127, 1)
    inverse = np.ldexp(np.float32(1), biased - 127)
    return 1 / inverse, np.where(a == 0, 0, biased).astype(np.uint8), inverse


def _block_amax(values: np.ndarray, rows: int, features: int) -> np.ndarray:
    """Returns every block's largest finite absolute value. Last blocks may be partial. An empty group is one block."""
    if values.shape[0] == 0:
        return np.zeros((1 if rows == 0 else 0, -(-values.shape[1] // features)), np.float32)
    row_amax = np.maximum.reduceat(_magnitude(values), range(0, values.shape[0], rows), axis=0)
    return np.maximum.reduceat(row_amax, range(0, values.shape[1], features), axis=1)


def _spread(per_block: np.ndarray, rows: int, features: int, shape: tuple[int, ...]) -> np.ndarray:
    """Repeats one number per block to one per element."""
    return per_block.repeat(rows, axis=0).repeat(features, axis=1)[: shape[0], : shape[1]]


def _padded(array: np.ndarray, axis: int, multiple: int) -> np.ndarray:
    """Pads the end of an axis with zeros."""
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, -array.shape[axis] % multiple)
    return np.pad(array, widths)


def _scale_region(scale_inv: np.ndarray, mode: ScalingMode, columnwise: bool) -> np.ndarray:
    """Returns the region of one group's inverse scales, given one per block of rows and features."""
    match mode, columnwise:
        case ScalingMode.TENSOR, _:
            return scale_inv[0, 0]
        case ScalingMode.BLOCK_1D, False:
            return _padded(scale_inv.T, 1, 4)
        case ScalingMode.BLOCK_1D, True:
            return scale_inv
        case ScalingMode.BLOCK_2D, _:
            return _padded(scale_inv.T if columnwise else scale_inv, 1, 4)
        case ScalingMode.MX, _:
            return _swizzled(scale_inv.T if columnwise else scale_inv)
    raise ValueError(mode)


def _swizzled(scale_inv: np.ndarray) -> np.ndarray:
    """Swizzles into tiles of 128 outer by 4 inner blocks, row by row; (r, c) is byte r % 32 * 16 + r // 32 * 4 + c."""
    scale_inv = _padded(_padded(scale_inv, 0, 128), 1, 4)
    swizzled = np.empty(scale_inv.size, np.uint8)
    for r, c in np.ndindex(scale_inv.shape):
        tile = r // 128 * (scale_inv.shape[1] // 4) + c // 4
        swizzled[512 * tile + r % 32 * 16 + r % 128 // 32 * 4 + c % 4] = scale_inv[r, c]
    return swizzled


def _rows(groups: list[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    """Concatenates the rows of all groups from the first row on, with zeros in the rows of no group."""
    rows = np.zeros(shape, groups[0].dtype)
    rows[: sum(group.shape[0] for group in groups)] = np.concatenate(groups)
    return rows


def _flat(regions: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([region.ravel() for region in regions])


def bits(array: np.ndarray) -> np.ndarray:
    """Returns an array's bits as unsigned integers. All float32, bfloat16 and float16 NaN have one value."""
    array = np.asarray(array)
    if array.dtype.itemsize > 1 and not np.issubdtype(array.dtype, np.integer):
        # The hardware decides the bits of a computed NaN. The library itself makes the NaN of FP8.
        array = np.where(np.isnan(array), np.array(np.nan, array.dtype), array)
    return np.ascontiguousarray(array).view(f"uint{8 * array.dtype.itemsize}")


def assert_same_bits(name: str, got: np.ndarray, expected: np.ndarray, *, whole: bool = True) -> None:
    """Checks that an array, or if it is not `whole` its first elements, are the expected ones to the bit."""
    got = np.asarray(got)
    if not whole:
        assert got.ndim == 1, f"{name} has shape {got.shape}, expected a flat array"
        assert got.size >= expected.size, f"{name} has {got.size} elements, expected at least {expected.size}"
        got = got[: expected.size]
    assert got.shape == expected.shape, f"{name} has shape {got.shape}, expected {expected.shape}"
    assert got.dtype.itemsize == expected.dtype.itemsize, f"{name} has type {got.dtype}, expected {expected.dtype}"
    different = np.argwhere(bits(got) != bits(expected))
    if different.size:
        first = tuple(different[0].tolist())
        raise AssertionError(
            f"{name} {got.shape} differs in {len(different)} elements, first at {first}: got {got[first]} "
            f"({bits(got)[first]:#x}), expected {expected[first]} ({bits(expected)[first]:#x})"
        )


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def _tanh_of_gelu(x: np.ndarray) -> np.ndarray:
    return np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))


def _gelu_grad(x: np.ndarray) -> np.ndarray:
    tanh = _tanh_of_gelu(x)
    inner = np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * x**2)
    return 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh**2) * inner


def _silu_grad(x: np.ndarray) -> np.ndarray:
    return _sigmoid(x) * (1 + x * (1 - _sigmoid(x)))


#: Functions of one argument, and its gradient from that of the value. Gradients select where a derivative is 0: an
#: infinite gradient times 0 would be NaN.
_FUNCTIONS = {
    "silu": (lambda x: x * _sigmoid(x), lambda dy, x: dy * _silu_grad(x)),
    "gelu": (lambda x: 0.5 * x * (1 + _tanh_of_gelu(x)), lambda dy, x: dy * _gelu_grad(x)),
    "relu": (lambda x: np.where((x > 0) | np.isnan(x), x, 0), lambda dy, x: np.where(x > 0, dy, 0)),
    "relu_squared": (
        lambda x: np.where((x > 0) | np.isnan(x), x, 0) ** 2,
        # 2 x may overflow in float32, even if its product with a small gradient would not.
        lambda dy, x: np.where(x > 0, dy * (2 * x).astype(np.float32), 0),
    ),
}


def _gated(activation: Activation) -> Any:
    """Returns the functions of the gate and of the other half, which are multiplied."""
    if not isinstance(activation, SwiGLU):
        name = {"swiglu": "silu", "geglu": "gelu", "reglu": "relu"}.get(activation)
        return None if name is None else (_FUNCTIONS[name], (lambda x: x, lambda dy, _: dy))
    limit, alpha = np.inf if activation.limit is None else activation.limit, activation.alpha

    def gate(x: np.ndarray) -> np.ndarray:
        if activation.clamp_result:
            return np.minimum(x * _sigmoid(alpha * x), limit)
        return np.minimum(x, limit) * _sigmoid(alpha * np.minimum(x, limit))

    def gate_gradient(dy: np.ndarray, x: np.ndarray) -> np.ndarray:
        clamped = x * _sigmoid(alpha * x) if activation.clamp_result else x
        # x sigmoid(alpha x) is silu(alpha x) / alpha.
        return np.where(clamped > limit, 0, dy * _silu_grad(alpha * x))

    return (
        (gate, gate_gradient),
        (lambda x: np.clip(x, -limit, limit) + activation.offset, lambda dy, x: np.where(np.abs(x) > limit, 0, dy)),
    )


def activation(name: Activation, x: np.ndarray) -> np.ndarray:
    """Returns the activation in float64; a gated one takes the gate and the factors side by side."""
    with np.errstate(over="ignore", invalid="ignore"):
        x, gated = flush(x).astype(np.float64), _gated(name)
        if gated is None:
            return _FUNCTIONS[name][0](x)
        gate, factor = np.split(x, 2, axis=-1)
        return gated[0][0](gate) * gated[1][0](factor)


def activation_grad(name: Activation, dy: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Returns the gradient of the activation's input, in float64, from that of its result."""
    with np.errstate(over="ignore", invalid="ignore"):
        dy, x, gated = flush(dy).astype(np.float64), flush(x).astype(np.float64), _gated(name)
        if gated is None:
            return _FUNCTIONS[name][1](dy, x)
        gate, factor = np.split(x, 2, axis=-1)
        (value, gradient), (factor_value, factor_gradient) = gated
        halves = gradient(dy * factor_value(factor), gate), factor_gradient(dy * value(gate), factor)
        return np.concatenate(halves, axis=-1)
