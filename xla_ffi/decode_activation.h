// Decoding that the handlers with activations share.

#ifndef JAX_GROUPED_XLA_FFI_DECODE_ACTIVATION_H_
#define JAX_GROUPED_XLA_FFI_DECODE_ACTIVATION_H_

#include <cstdint>
#include <string>

#include "csrc/common/activation.h"
#include "xla_ffi/decode.h"

XLA_FFI_REGISTER_ENUM_ATTR_DECODING(::jax_grouped::ActivationKind);

namespace jax_grouped {

inline ffi::Error CheckActivation(const char* op, ActivationKind kind) {
  const auto value = static_cast<int32_t>(kind);
  if (value >= 0 && value <= static_cast<int32_t>(kLastActivation)) return ffi::Error::Success();
  return Invalid(op, "there is no activation " + std::to_string(value) + ".");
}

}  // namespace jax_grouped

#endif  // JAX_GROUPED_XLA_FFI_DECODE_ACTIVATION_H_
