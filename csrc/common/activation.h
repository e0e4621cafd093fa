// Activations of experts. A gated one multiplies the activation of its first half, the gate, by the second half, the
// factors.

#ifndef JAX_GROUPED_CSRC_COMMON_ACTIVATION_H_
#define JAX_GROUPED_CSRC_COMMON_ACTIVATION_H_

#include <cstdint>

#include "csrc/common/host_device.h"

namespace jax_grouped {

// kClampedSiluMul is that of gpt-oss: the gate is at most kClampLimit and multiplied by kClampedSlope in the sigmoid;
// factors are clamped to +-kClampLimit, plus 1.
enum class Activation : int32_t {
  kNone,
  kSilu,
  kGelu,
  kRelu,
  kReluSquared,
  kSiluMul,
  kGeluMul,
  kClampedSiluMul,
};
constexpr Activation kLastActivation = Activation::kClampedSiluMul;

JAX_GROUPED_HOST_DEVICE constexpr bool IsGated(Activation activation) { return activation >= Activation::kSiluMul; }

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_COMMON_ACTIVATION_H_
