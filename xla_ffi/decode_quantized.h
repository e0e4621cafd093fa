// Decoding that the handlers of quantized arrays share.

#ifndef JAX_GROUPED_XLA_FFI_DECODE_QUANTIZED_H_
#define JAX_GROUPED_XLA_FFI_DECODE_QUANTIZED_H_

#include <cstdint>
#include <limits>
#include <optional>
#include <string>

#include "xla_ffi/decode.h"

XLA_FFI_REGISTER_ENUM_ATTR_DECODING(::jax_grouped::ScalingMode);

namespace jax_grouped {

inline ffi::Error CheckMode(const char* op, ScalingMode mode) {
  const auto value = static_cast<int32_t>(mode);
  if (value >= 0 && value <= static_cast<int32_t>(ScalingMode::kMx)) return ffi::Error::Success();
  return Invalid(op, "there is no scaling mode " + std::to_string(value) + ".");
}

inline std::optional<cudaDataType_t> Fp8Type(ffi::DataType type) {
  switch (type) {
    case ffi::F8E4M3FN:
      return CUDA_R_8F_E4M3;
    case ffi::F8E5M2:
      return CUDA_R_8F_E5M2;
    default:
      return std::nullopt;
  }
}

inline int64_t Elements(const ffi::AnyBuffer& buffer) { return static_cast<int64_t>(buffer.element_count()); }

inline ffi::Error CheckFeatures(const char* op, int64_t features) {
  if (features > 0 && features % kFp8Alignment == 0 && features <= std::numeric_limits<int32_t>::max()) {
    return ffi::Error::Success();
  }
  return Invalid(op, "quantized features must be a positive multiple of " + std::to_string(kFp8Alignment) +
                         " below 2^31, got " + std::to_string(features) + ".");
}

// Checks one orientation's buffers against the layout of its data and scales.
inline ffi::Error CheckScaled(const char* op, const QuantizedLayout& layout, const ffi::AnyBuffer& data,
                              const ffi::AnyBuffer& scale) {
  const std::string name = layout.columnwise ? "columnwise" : "rowwise";
  const ffi::DataType scale_type = layout.mode == ScalingMode::kMx ? ffi::F8E8M0FNU : ffi::F32;
  if (scale.element_type() != scale_type) {
    return Invalid(op, "the " + name + " scales must be " + (scale_type == ffi::F32 ? "float32." : "float8_e8m0fnu."));
  }
  JAX_GROUPED_RETURN_IF_ERROR(
      CheckEqual(op, "the number of " + name + " elements", Elements(data), layout.DataElements()));
  JAX_GROUPED_RETURN_IF_ERROR(
      CheckEqual(op, "the number of " + name + " scales", Elements(scale), layout.ScaleElements()));
  JAX_GROUPED_RETURN_IF_ERROR(CheckAlignment(op, "the " + name + " data", data.untyped_data()));
  return CheckAlignment(op, "the " + name + " scales", scale.untyped_data());
}

// The rows of an FP8 input `x` and their inverse scales: those of kBlock1D for a stack of equal groups.
inline ffi::Error DecodeScaledInput(const char* op, const ffi::AnyBuffer& x, const ffi::AnyBuffer& x_scale,
                                    const float** scale, int64_t* group_rows) {
  JAX_GROUPED_RETURN_IF_ERROR(CheckRank(op, "x_scale", x_scale, 3));
  QuantizedLayout layout{};
  layout.mode = ScalingMode::kBlock1D;
  layout.batch = 1;
  layout.tokens = x.dimensions()[0];
  layout.features = x.dimensions()[1];
  layout.num_groups = static_cast<int32_t>(x_scale.dimensions()[0]);
  if (layout.num_groups <= 0 || layout.tokens % layout.num_groups != 0) {
    return Invalid(op, "the groups of x_scale must divide the rows of x, got " + std::to_string(layout.num_groups) +
                           " groups and " + std::to_string(layout.tokens) + " rows.");
  }
  layout.stack_rows = layout.tokens / layout.num_groups;
  JAX_GROUPED_RETURN_IF_ERROR(CheckScaled(op, layout, x, x_scale));
  *scale = static_cast<const float*>(x_scale.untyped_data());
  *group_rows = layout.stack_rows;
  return ffi::Error::Success();
}

}  // namespace jax_grouped

#endif  // JAX_GROUPED_XLA_FFI_DECODE_QUANTIZED_H_
