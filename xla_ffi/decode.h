// Decoding that all handlers share: conversion of buffers to csrc's types, and errors that name the op, the argument
// and both values.

#ifndef JAX_GROUPED_XLA_FFI_DECODE_H_
#define JAX_GROUPED_XLA_FFI_DECODE_H_

#include <cuda_runtime_api.h>
#include <library_types.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <limits>
#include <optional>
#include <string>

#include "csrc/common/status.h"
#include "csrc/groups/layout.h"
#include "xla/ffi/api/ffi.h"

#define JAX_GROUPED_RETURN_IF_ERROR(expression)                                \
  do {                                                                         \
    if (::xla::ffi::Error error = (expression); error.failure()) return error; \
  } while (false)

// Declares `variable` with the value of an expression, or returns the expression's error.
#define JAX_GROUPED_ASSIGN_OR_RETURN(variable, expression) \
  auto variable = (expression);                            \
  if (!variable.has_value()) return variable.error()

// Ends a function that begins with `ffi::Error F(...) try {`. Converts exceptions such as std::bad_alloc to errors,
// because no exception may cross the C interface.
#define JAX_GROUPED_CATCH(op)                                                      \
  catch (const std::exception& exception) {                                        \
    return ::xla::ffi::Error::Internal(std::string(op) + ": " + exception.what()); \
  }                                                                                \
  catch (...) {                                                                    \
    return ::xla::ffi::Error::Internal(std::string(op) + ": unknown exception");   \
  }

namespace jax_grouped {

namespace ffi = ::xla::ffi;

using S32Buffer = ffi::Buffer<ffi::S32>;
using F32Buffer = ffi::Buffer<ffi::F32>;
using AnyResult = ffi::Result<ffi::AnyBuffer>;

inline ffi::Error ToError(const char* op, const Status& status) {
  if (status.ok()) return ffi::Error::Success();
  return ffi::Error::Internal(std::string(op) + ": " + status.message());
}

inline ffi::Error Invalid(const char* op, const std::string& what) {
  return ffi::Error::InvalidArgument(std::string(op) + ": " + what);
}

// Fails unless `got` is `expected`, the value that the op requires of `what`.
inline ffi::Error CheckEqual(const char* op, const std::string& what, int64_t got, int64_t expected) {
  if (got == expected) return ffi::Error::Success();
  return Invalid(op, what + " must be " + std::to_string(expected) + ", got " + std::to_string(got) + ".");
}

// Fails unless scratch memory that the caller has sized is large enough.
inline ffi::Error CheckAtLeast(const char* op, const std::string& what, int64_t got, int64_t least) {
  if (got >= least) return ffi::Error::Success();
  return Invalid(op, what + " must be at least " + std::to_string(least) + ", got " + std::to_string(got) + ".");
}

// Fails unless the value is from `least` to `most`.
inline ffi::Error CheckRange(const char* op, const std::string& what, int64_t got, int64_t least, int64_t most) {
  if (got >= least && got <= most) return ffi::Error::Success();
  return Invalid(op, what + " must be from " + std::to_string(least) + " to " + std::to_string(most) + ", got " +
                         std::to_string(got) + ".");
}

// Fails unless a batch of elements with `got` rows or groups each has a number of them that int32 holds.
inline ffi::Error CheckOfElement(const char* op, const std::string& what, int64_t got, int64_t batch) {
  return CheckRange(op, what, got, 0, std::numeric_limits<int32_t>::max() / std::max<int64_t>(batch, 1));
}

template <typename Buffer>
ffi::Error CheckRank(const char* op, const char* argument, const Buffer& buffer, int64_t rank) {
  return CheckEqual(op, std::string("the rank of ") + argument, static_cast<int64_t>(buffer.dimensions().size()), rank);
}

inline ffi::Error CheckAlignment(const char* op, const std::string& what, const void* address,
                                 int64_t bytes = kAlignmentBytes) {
  if (reinterpret_cast<uintptr_t>(address) % bytes == 0) return ffi::Error::Success();
  return Invalid(op, what + " must start on a " + std::to_string(bytes) + "-byte boundary.");
}

inline std::optional<cudaDataType_t> FloatType(ffi::DataType type) {
  switch (type) {
    case ffi::BF16:
      return CUDA_R_16BF;
    case ffi::F16:
      return CUDA_R_16F;
    case ffi::F32:
      return CUDA_R_32F;
    default:
      return std::nullopt;
  }
}

// Decodes the groups of a call from its two integer arguments and its static sizes. group_offset has an entry for every
// batch element. `num_groups` and `tokens` are those of all elements.
inline ffi::Error DecodeGroups(const char* op, const S32Buffer& sizes, const S32Buffer& offset, int64_t num_groups,
                               int64_t tokens, Groups* groups) {
  JAX_GROUPED_RETURN_IF_ERROR(CheckRank(op, "group_sizes", sizes, 1));
  const auto total = static_cast<int64_t>(sizes.element_count());
  const auto batch = static_cast<int64_t>(offset.element_count());
  if (num_groups <= 0 || tokens <= 0) return Invalid(op, "there must be groups and rows.");
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  if (total > kMost || num_groups > kMost || tokens > kMost) {
    return Invalid(op, "at most 2^31 - 1 groups and tokens are supported, got " + std::to_string(num_groups) +
                           " groups and " + std::to_string(tokens) + " tokens.");
  }
  // A launch counts blocks along its second axis with 16 bits.
  if (batch == 0 || batch > std::numeric_limits<uint16_t>::max() || total % batch != 0 || num_groups % batch != 0 ||
      tokens % batch != 0) {
    return Invalid(op,
                   "group_offset must have 1 to 65535 entries, a divisor of the number of group sizes, groups and "
                   "tokens, got " +
                       std::to_string(batch) + ".");
  }
  groups->sizes = sizes.typed_data();
  groups->offset = offset.typed_data();
  groups->total = static_cast<int32_t>(total / batch);
  groups->num_groups = static_cast<int32_t>(num_groups / batch);
  groups->capacity = tokens / batch;
  groups->batch = static_cast<int32_t>(batch);
  return ffi::Error::Success();
}

}  // namespace jax_grouped

#endif  // JAX_GROUPED_XLA_FFI_DECODE_H_
