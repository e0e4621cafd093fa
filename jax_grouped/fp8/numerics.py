"""FP8 numerics in plain JAX, the same to the bit on every platform.

XLA's float32 arithmetic differs between platforms. CPUs flush subnormal numbers to zero; GPUs don't. GPUs round
divisions wrongly, by up to 2 units (openxla/xla#37181). So this module flushes subnormals, and it divides in integers
except on CPUs.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jax_grouped.fp8.recipes import FP8_MAX

_TINY = float(jnp.finfo(jnp.float32).tiny)
_MANTISSA_BITS = 23
_BIAS = 127
#: Scales lie in [2^-126, 2^126], so that their inverses are normal numbers too.
_LARGEST_EXPONENT = 126
#: Bits of the NaN that replaces numbers that are not finite, in both types.
_NAN = 0x7F


def flush(x: jax.Array) -> jax.Array:
    """Replaces subnormal float32 numbers by zero of the same sign."""
    return jnp.where(jnp.abs(x) < _TINY, x * 0, x)


def magnitude(x: jax.Array) -> jax.Array:
    """Returns absolute values; 0 for numbers that are not finite."""
    return jnp.where(jnp.isfinite(x), jnp.abs(x), 0)


def _power_of_two(exponent: jax.Array) -> jax.Array:
    """Computes `2**exponent` for exponents of normal float32 numbers."""
    return jax.lax.bitcast_convert_type((exponent + _BIAS) << _MANTISSA_BITS, jnp.float32)


def clamp_scale(scale: jax.Array) -> jax.Array:
    """Clamps `scale` to [2^-126, 2^126]; NaN stays NaN."""
    limit = 2.0**_LARGEST_EXPONENT
    return jnp.where(jnp.isnan(scale), jnp.nan, jnp.clip(scale, 1 / limit, limit))


def _divide(numerator: int, numerator_exponent: int, x: jax.Array) -> jax.Array:
    """Computes `numerator * 2**numerator_exponent / x` for 1 or 7 and normal `x > 0`, clamped to [2^-126, 2^126]."""
    dividend = np.float32(numerator * 2.0**numerator_exponent)
    return jax.lax.platform_dependent(
        x,
        # CPUs round the division as IEEE 754 says, and it compiles to less code.
        cpu=lambda x: clamp_scale(dividend / x),
        default=lambda x: divide_integers(numerator, numerator_exponent, x),
    )


@functools.partial(jax.jit, static_argnums=(0, 1))
def divide_integers(numerator: int, numerator_exponent: int, x: jax.Array) -> jax.Array:
    """Computes `_divide` in integers, for platforms that do not round a floating-point division correctly."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    mantissa = (bits & ((1 << _MANTISSA_BITS) - 1)) | (1 << _MANTISSA_BITS)
    # Long division, 7 bits at a time: remainders stay below 2^31. The quotient has 27 or 28 bits. Its lowest bit also
    # stands for a nonzero remainder, so that the conversion to 24 bits rounds correctly.
    start = 23 - numerator.bit_length()
    quotient, remainder = jnp.zeros_like(bits), jnp.full_like(bits, numerator << start)
    for _ in range(4):
        remainder = remainder << 7
        quotient = (quotient << 7) | (remainder // mantissa)
        remainder = remainder % mantissa
    rounded = (quotient | (remainder != 0).astype(jnp.int32)).astype(jnp.float32)
    exponent = numerator_exponent - start - 28 + _MANTISSA_BITS + _BIAS - (bits >> _MANTISSA_BITS)
    # Multiply in two steps: the power alone may be too large. Clamp before anything can overflow.
    exponent = jnp.minimum(exponent, _LARGEST_EXPONENT)
    half = exponent // 2
    scaled = rounded * _power_of_two(half) * _power_of_two(exponent - half)
    return clamp_scale(scaled)


@jax.jit
def reciprocal(x: jax.Array) -> jax.Array:
    """Computes `1 / x` for normal numbers from 2^-126 to 2^126; NaN for NaN."""
    return jnp.where(jnp.isnan(x), jnp.nan, _divide(1, 0, x))


@functools.partial(jax.jit, static_argnums=(1, 2), static_argnames="pow2")
def scale_from_amax(amax: jax.Array, dtype: DTypeLike, epsilon: float, *, pow2: bool) -> jax.Array:
    """Computes `fp8_max / max(amax, epsilon)`, rounded down to a power of two if `pow2`; 1 for a block of zeros."""
    amax = flush(jnp.maximum(amax, jnp.float32(epsilon)))
    fp8_max = int(FP8_MAX[jnp.dtype(dtype)])
    exponent = fp8_max.bit_length() - 3
    assert fp8_max == 7 << exponent
    scale = jnp.where(amax == 0, 1, _divide(7, exponent, jnp.where(amax == 0, 1, amax)))
    if not pow2:
        return scale
    bits = jax.lax.bitcast_convert_type(scale, jnp.int32)
    return jax.lax.bitcast_convert_type(bits >> _MANTISSA_BITS << _MANTISSA_BITS, jnp.float32)


def mx_exponent(amax: jax.Array, dtype: DTypeLike, epsilon: float) -> jax.Array:
    """Computes the biased exponent, `uint8`, of `max(amax, epsilon) / fp8_max` rounded up; 0 for a block of zeros."""
    amax = flush(jnp.maximum(amax, jnp.float32(epsilon)))
    bits = jax.lax.bitcast_convert_type(amax, jnp.int32)
    # fp8_max of both types is 1.75 times a power of two, so only the mantissa's order relative to 1.75 matters.
    fp8_exponent = int(FP8_MAX[jnp.dtype(dtype)]).bit_length() - 1
    above = (bits & ((1 << _MANTISSA_BITS) - 1)) > (3 << (_MANTISSA_BITS - 2))
    exponent = jnp.maximum((bits >> _MANTISSA_BITS) - fp8_exponent + above.astype(jnp.int32), 1)
    return jnp.where(amax == 0, 0, exponent).astype(jnp.uint8)


def mx_scale(exponent: jax.Array) -> jax.Array:
    """Returns the scale, a normal float32, for its inverse's biased exponent. Exponent 0 counts as 2^-126."""
    return _power_of_two(_BIAS - jnp.maximum(exponent.astype(jnp.int32), 1))


def stored_scale(scale_inv: jax.Array) -> jax.Array:
    """Converts stored inverse scales to float32 numbers."""
    if scale_inv.dtype != jnp.float8_e8m0fnu:
        return scale_inv
    exponent = jax.lax.bitcast_convert_type(scale_inv, jnp.uint8).astype(jnp.int32)
    return _power_of_two(jnp.maximum(exponent, 1) - _BIAS)


@functools.partial(jax.jit, static_argnums=2)
def cast(x: jax.Array, scale: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Returns the bytes of `x * scale` in FP8, clipped to the type's range; NaN where either is not finite."""
    limit = FP8_MAX[jnp.dtype(dtype)]
    scaled = jnp.clip(x * scale, -limit, limit).astype(dtype)
    finite = jnp.isfinite(x) & jnp.isfinite(scale)
    return jnp.where(finite, jax.lax.bitcast_convert_type(scaled, jnp.uint8), jnp.uint8(_NAN))
