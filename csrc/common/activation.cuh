// The arithmetic of activations and of their gradients, in float32. That of the xla backend is in
// jax_grouped/kernels/activations.py.

#ifndef JAX_GROUPED_CSRC_COMMON_ACTIVATION_CUH_
#define JAX_GROUPED_CSRC_COMMON_ACTIVATION_CUH_

#include <type_traits>

#include "csrc/common/activation.h"
#include "csrc/common/fp8.cuh"

namespace jax_grouped {

// Returns the sigmoid, computed with the hardware's exponential and reciprocal. Their errors of 1e-6 are far below
// those of FP8 and of 16-bit numbers. Instructions bound the kernels with activations; this function takes 4.
__device__ inline float Sigmoid(float x) {
  constexpr float kMinusLog2E = -1.4426950408889634f;
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * kMinusLog2E));
  float sigmoid;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(sigmoid) : "f"(1.0f + power));
  return sigmoid;
}

// Twice the argument of the hyperbolic tangent in jax.nn.gelu's approximation, and its derivative. (1 + tanh(y)) / 2 is
// Sigmoid(2 y).
constexpr float kGeluInner = 2 * 0.7978845608028654f;  // 2 sqrt(2 / pi)
constexpr float kGeluCubic = 0.044715f;
__device__ inline float GeluInner(float x) { return kGeluInner * (x + kGeluCubic * x * x * x); }
__device__ inline float GeluInnerGradient(float x) { return kGeluInner * (1.0f + 3.0f * kGeluCubic * x * x); }

constexpr float kClampLimit = 7.0f;
constexpr float kClampedSlope = 1.702f;

JAX_GROUPED_HOST_DEVICE constexpr bool IsGelu(Activation activation) {
  return activation == Activation::kGelu || activation == Activation::kGeluMul;
}

// Returns the activation of x; that of the gate, if it is gated.
template <Activation kActivation>
__device__ float Activate(float x) {
  if constexpr (IsGelu(kActivation)) return x * Sigmoid(GeluInner(x));
  if constexpr (kActivation == Activation::kRelu || kActivation == Activation::kReluSquared) {
    const float relu = x > 0.0f || isnan(x) ? x : 0.0f;
    return kActivation == Activation::kRelu ? relu : relu * relu;
  }
  if constexpr (kActivation == Activation::kClampedSiluMul) {
    const float clamped = x > kClampLimit ? kClampLimit : x;
    return clamped * Sigmoid(kClampedSlope * clamped);
  }
  return x * Sigmoid(x);
}

// Returns the gradient of an activation's input `x` from the gradient of its result.
template <Activation kActivation>
__device__ float ActivationGradient(float x, float gradient) {
  if constexpr (IsGelu(kActivation)) {
    const float sigmoid = Sigmoid(GeluInner(x));
    return gradient * (sigmoid + x * (sigmoid * (1.0f - sigmoid)) * GeluInnerGradient(x));
  }
  if constexpr (kActivation == Activation::kRelu || kActivation == Activation::kReluSquared) {
    const float slope = kActivation == Activation::kRelu ? 1.0f : 2.0f * x;
    return x >= __uint_as_float(kTinyBits) ? gradient * slope : 0.0f;  // Subnormal numbers count as zero.
  }
  if constexpr (kActivation == Activation::kClampedSiluMul) {
    if (x > kClampLimit) return 0.0f;
    const float inner = kClampedSlope * x;
    const float sigmoid = Sigmoid(inner);
    return gradient * (sigmoid * (1.0f + inner * (1.0f - sigmoid)));
  }
  const float sigmoid = Sigmoid(x);
  return gradient * (sigmoid * (1.0f + x * (1.0f - sigmoid)));
}

// Returns what a gate's activation is multiplied by.
template <Activation kActivation>
__device__ float Factor(float factor) {
  if constexpr (kActivation != Activation::kClampedSiluMul) return factor;
  // Comparisons keep NaN.
  const float below = factor > kClampLimit ? kClampLimit : factor;
  return (below < -kClampLimit ? -kClampLimit : below) + 1.0f;
}

// Returns the gradient of a factor from that of Factor's result.
template <Activation kActivation>
__device__ float FactorGradient(float factor, float gradient) {
  if constexpr (kActivation != Activation::kClampedSiluMul) return gradient;
  return fabsf(factor) > kClampLimit ? 0.0f : gradient;
}

// Calls visit(constant) with an activation as a std::integral_constant: with kGated, one of the gated ones.
template <bool kGated, typename Visit>
__device__ __forceinline__ auto WithActivation(Activation activation, const Visit& visit) {
#define JAX_GROUPED_VISIT(name) \
  if (activation == Activation::name) return visit(std::integral_constant<Activation, Activation::name>())
  if constexpr (kGated) {
    JAX_GROUPED_VISIT(kGeluMul);
    JAX_GROUPED_VISIT(kClampedSiluMul);
    return visit(std::integral_constant<Activation, Activation::kSiluMul>());
  } else {
    JAX_GROUPED_VISIT(kGelu);
    JAX_GROUPED_VISIT(kRelu);
    JAX_GROUPED_VISIT(kReluSquared);
    return visit(std::integral_constant<Activation, Activation::kSilu>());
  }
#undef JAX_GROUPED_VISIT
}

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_COMMON_ACTIVATION_CUH_
