// Activations of experts. A gated one multiplies the activation of its first half, the gate, by the second half, the
// factors.

#ifndef JAX_GROUPED_CSRC_COMMON_ACTIVATION_H_
#define JAX_GROUPED_CSRC_COMMON_ACTIVATION_H_

#include <cstdint>

#include "csrc/common/host_device.h"

namespace jax_grouped {

enum class ActivationKind : int32_t {
  kNone,
  kSilu,
  kGelu,
  kRelu,
  kReluSquared,
  kSwiGlu,
  kGeGlu,
  kReGlu,
  kSwiGluWithNumbers,
};
constexpr ActivationKind kLastActivation = ActivationKind::kSwiGluWithNumbers;

JAX_GROUPED_HOST_DEVICE constexpr bool IsGated(ActivationKind kind) { return kind >= ActivationKind::kSwiGlu; }

// The numbers are those of kSwiGluWithNumbers: the gate is at most `gate_limit`, and multiplied by `alpha` in the
// sigmoid; its activation is at most `limit`, to which it belongs anyway if the gate does; factors are clamped to
// +-`limit`, plus `offset`.
struct Activation {
  ActivationKind kind;
  float limit;
  float gate_limit;
  float alpha;
  float offset;
};

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_COMMON_ACTIVATION_H_
