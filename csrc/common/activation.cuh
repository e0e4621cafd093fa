// The arithmetic of activations and of their gradients, in float32. That of the xla backend is in
// jax_grouped/kernels/activations.py.

#ifndef JAX_GROUPED_CSRC_COMMON_ACTIVATION_CUH_
#define JAX_GROUPED_CSRC_COMMON_ACTIVATION_CUH_

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

// The arithmetic of one kind of activation.
template <ActivationKind kActivation>
struct ActivationFunctions {
  static constexpr ActivationKind kKind = kActivation;
  static constexpr bool kGated = IsGated(kKind);
  static constexpr bool kHasNumbers = kKind == ActivationKind::kSwiGluWithNumbers;
  static constexpr bool kIsGelu = kKind == ActivationKind::kGelu || kKind == ActivationKind::kGeGlu;
  static constexpr bool kIsSquared = kKind == ActivationKind::kReluSquared;
  static constexpr bool kIsRelu = kIsSquared || kKind == ActivationKind::kRelu || kKind == ActivationKind::kReGlu;

  Activation numbers;

  // Returns the activation of x; that of the gate, if it is gated.
  __device__ float Activate(float x) const {
    if constexpr (kIsGelu) return x * Sigmoid(GeluInner(x));
    if constexpr (kIsRelu) {
      const float relu = MaxOrNan(x, 0.0f);
      return kIsSquared ? relu * relu : relu;
    }
    if constexpr (kHasNumbers) {
      const float gate = MinOrNan(x, numbers.gate_limit);
      return MinOrNan(gate * Sigmoid(numbers.alpha * gate), numbers.limit);
    }
    return x * Sigmoid(x);
  }

  // Returns the gradient of an activation's input `x` from the gradient of its result.
  __device__ float InputGradient(float x, float gradient) const {
    if constexpr (kIsGelu) {
      const float sigmoid = Sigmoid(GeluInner(x));
      return gradient * (sigmoid + x * (sigmoid * (1.0f - sigmoid)) * GeluInnerGradient(x));
    }
    if constexpr (kIsRelu) {
      const float slope = kIsSquared ? 2.0f * x : 1.0f;
      return x >= __uint_as_float(kTinyBits) ? gradient * slope : 0.0f;  // Subnormal numbers count as zero.
    }
    if constexpr (kHasNumbers) {
      const float inner = numbers.alpha * x;
      const float sigmoid = Sigmoid(inner);
      if (x > numbers.gate_limit || x * sigmoid > numbers.limit) return 0.0f;
      return gradient * (sigmoid * (1.0f + inner * (1.0f - sigmoid)));
    }
    const float sigmoid = Sigmoid(x);
    return gradient * (sigmoid * (1.0f + x * (1.0f - sigmoid)));
  }

  // Returns what a gate's activation is multiplied by.
  __device__ float Factor(float factor) const {
    if constexpr (!kHasNumbers) return factor;
    return MaxOrNan(MinOrNan(factor, numbers.limit), -numbers.limit) + numbers.offset;
  }

  // Returns the gradient of a factor from that of Factor's result.
  __device__ float FactorGradient(float factor, float gradient) const {
    if constexpr (!kHasNumbers) return gradient;
    return fabsf(factor) > numbers.limit ? 0.0f : gradient;
  }
};

// Calls visit(functions) with the functions of an activation: with kGated, of one of the gated ones.
template <bool kGated, typename Visit>
__device__ __forceinline__ auto WithActivation(const Activation& activation, const Visit& visit) {
#define JAX_GROUPED_VISIT(name) \
  if (activation.kind == ActivationKind::name) return visit(ActivationFunctions<ActivationKind::name>{activation})
  if constexpr (kGated) {
    JAX_GROUPED_VISIT(kGeGlu);
    JAX_GROUPED_VISIT(kReGlu);
    JAX_GROUPED_VISIT(kSwiGluWithNumbers);
    return visit(ActivationFunctions<ActivationKind::kSwiGlu>{activation});
  } else {
    JAX_GROUPED_VISIT(kGelu);
    JAX_GROUPED_VISIT(kRelu);
    JAX_GROUPED_VISIT(kReluSquared);
    return visit(ActivationFunctions<ActivationKind::kSilu>{activation});
  }
#undef JAX_GROUPED_VISIT
}

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_COMMON_ACTIVATION_CUH_
