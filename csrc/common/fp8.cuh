// FP8 numerics, bit-identical to jax_grouped/fp8/numerics.py, and extrema that keep NaN. Subnormal float32 numbers
// count as zero.

#ifndef JAX_GROUPED_CSRC_COMMON_FP8_CUH_
#define JAX_GROUPED_CSRC_COMMON_FP8_CUH_

#include <cuda_fp8.h>

#include <cstdint>

#include "csrc/common/scale_rule.h"

namespace jax_grouped {

// The FP8 types, with the exponent of their largest value. Both largest values are 1.75 times a power of two.
struct E4m3 {
  static constexpr __nv_fp8_interpretation_t kType = __NV_E4M3;
  static constexpr int kMaxExponent = 8;
};
struct E5m2 {
  static constexpr __nv_fp8_interpretation_t kType = __NV_E5M2;
  static constexpr int kMaxExponent = 15;
};

constexpr uint32_t kInfinityBits = 0x7f800000;
constexpr uint32_t kTinyBits = 0x00800000;  // 2^-126
constexpr float kLargestScale = 0x1p126f;   // its inverse is a normal number too

struct Scale {
  float scale;
  float inverse;
};

__device__ inline float MultiplyFlushed(float a, float b) {
  float product;
  asm("mul.rn.ftz.f32 %0, %1, %2;" : "=f"(product) : "f"(a), "f"(b));
  return product;
}

// Returns the bits of a block's effective amax: at least `epsilon`, and zero if that is subnormal.
__device__ inline uint32_t EffectiveAmax(uint32_t amax_bits, float epsilon) {
  const uint32_t bits = max(amax_bits, __float_as_uint(epsilon));
  return bits < kTinyBits ? 0 : bits;
}

// Returns the biased exponent of fp8_max / x rounded down to a power of two, for the bits of a positive normal number
// x. fp8_max has the mantissa 1.75. The quotient of 1.75 and the mantissa of x is in (0.875, 1.75], and at least 1 if
// that mantissa is at most 1.75. Rounding the quotient correctly does not change its exponent.
template <typename Fp8>
__device__ inline int ScaleExponent(uint32_t bits) {
  const int exponent = static_cast<int>(bits >> 23);
  return 2 * 127 + Fp8::kMaxExponent - exponent - ((bits & 0x007fffff) > 0x00600000);
}

// Returns the correctly rounded quotient numerator / x, for a numerator of 1 or 1.75 and x from 1 to 2. Avoids the
// branches that general division has for large and small operands. The result was compared with general division for
// all 2^23 such x.
__device__ inline float DivideMantissa(float numerator, float x) {
  float estimate;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(estimate) : "f"(x));
  const float reciprocal = fmaf(fmaf(-x, estimate, 1.0f), estimate, estimate);
  const float quotient = numerator * reciprocal;
  return fmaf(fmaf(-x, quotient, numerator), reciprocal, quotient);
}

__device__ inline int Exponent(float x) { return static_cast<int>(__float_as_uint(x) >> 23); }
__device__ inline float Mantissa(float x) { return __uint_as_float((__float_as_uint(x) & 0x007fffff) | 0x3f800000); }
__device__ inline float AddToExponent(float x, int exponent) {
  return __uint_as_float(__float_as_uint(x) + (static_cast<uint32_t>(exponent) << 23));
}

// Returns 1 / x for x from 2^-126 to 2^126.
__device__ inline float Reciprocal(float x) {
  return AddToExponent(DivideMantissa(1.0f, Mantissa(x)), 127 - Exponent(x));
}

template <typename Fp8>
__device__ Scale ScaleFromAmax(uint32_t amax_bits, const ScaleRule& rule) {
  const uint32_t bits = EffectiveAmax(amax_bits, rule.amax_epsilon);
  if (bits == 0) return {1.0f, 1.0f};
  const int exponent = ScaleExponent<Fp8>(bits);
  if (exponent >= 127 + 126) return {kLargestScale, 1 / kLargestScale};
  if (rule.pow2) return {__int_as_float(exponent << 23), __int_as_float((254 - exponent) << 23)};
  const float amax = __uint_as_float(bits);
  const float scale = AddToExponent(DivideMantissa(1.75f, Mantissa(amax)), Fp8::kMaxExponent + 127 - Exponent(amax));
  return {scale, Reciprocal(scale)};
}

// Returns a given scale, clamped so that the scale and its inverse are normal numbers. NaN stays NaN.
__device__ inline Scale ClampScale(float scale) {
  if (isnan(scale)) return {__int_as_float(0x7fc00000), __int_as_float(0x7fc00000)};
  const float clamped = fminf(fmaxf(scale, 1 / kLargestScale), kLargestScale);
  return {clamped, Reciprocal(clamped)};
}

// Returns the biased exponent of an MX block's inverse scale, rounded up; 0 for a block of zeros.
template <typename Fp8>
__device__ uint32_t MxExponent(uint32_t amax_bits, const ScaleRule& rule) {
  const uint32_t bits = EffectiveAmax(amax_bits, rule.amax_epsilon);
  return bits == 0 ? 0 : max(2 * 127 - ScaleExponent<Fp8>(bits), 1);
}
__device__ inline float MxScale(uint32_t exponent) { return __uint_as_float((2 * 127 - max(exponent, 1u)) << 23); }
__device__ inline float MxScaleInverse(uint32_t exponent) { return __uint_as_float(max(exponent, 1u) << 23); }

// Returns x, or NaN if x is not finite: conversion to FP8 would clip an infinity.
__device__ inline float HideInfinity(float x) {
  return (__float_as_uint(x) & 0x7fffffff) >= kInfinityBits ? __int_as_float(0x7fffffff) : x;
}

// Returns the bits of the absolute value, or 0 if it is not finite.
__device__ inline uint32_t FiniteBits(float x) {
  const uint32_t bits = __float_as_uint(x) & 0x7fffffff;
  return bits < kInfinityBits ? bits : 0;
}

// Converts two values times a scale to FP8, the first in the low byte. Clips; NaN becomes 0x7f.
template <typename Fp8>
__device__ inline uint32_t Quantize2(float low, float high, float scale) {
  const float2 scaled = {MultiplyFlushed(low, scale), MultiplyFlushed(high, scale)};
  return __nv_cvt_float2_to_fp8x2(scaled, __NV_SATFINITE, Fp8::kType);
}

// Return the minimum and the maximum, or NaN if an argument is NaN, which fminf and fmaxf drop.
__device__ inline float MinOrNan(float a, float b) {
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}
__device__ inline float MaxOrNan(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_COMMON_FP8_CUH_
