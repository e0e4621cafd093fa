#include <cstdint>
#include <limits>
#include <string>

#include "csrc/rows/activation_grad.h"
#include "csrc/rows/permute_rows.h"
#include "csrc/rows/sum_rows.h"
#include "csrc/rows/vector.h"
#include "xla/ffi/api/ffi.h"
#include "xla_ffi/decode.h"
#include "xla_ffi/decode_activation.h"
#include "xla_ffi/handlers.h"

namespace jax_grouped {
namespace {

constexpr char kActivationGrad[] = "jax_grouped_activation_grad";
constexpr char kPermuteRows[] = "jax_grouped_permute_rows";
constexpr char kSumRows[] = "jax_grouped_sum_rows";

constexpr int64_t kLimit = std::numeric_limits<int32_t>::max();

// Fails unless rows of this size are whole vectors, at least one.
ffi::Error CheckFeatures(const char* op, const std::string& array, int64_t features) {
  if (features > 0 && features % kRowVector == 0 && features <= kLimit) return ffi::Error::Success();
  return Invalid(op, array + "'s shape[1] must be a positive multiple of " + std::to_string(kRowVector) +
                         " below 2^31, got " + std::to_string(features) + ".");
}

// Fails unless there are tokens, choices and rows, no more than int32 counts. A launch has blocks for each of them.
ffi::Error CheckPairs(const char* op, int64_t tokens, int64_t choices, int64_t rows) {
  JAX_GROUPED_RETURN_IF_ERROR(CheckRange(op, "the number of tokens", tokens, 1, kLimit));
  JAX_GROUPED_RETURN_IF_ERROR(CheckRange(op, "the number of choices", choices, 1, kLimit / tokens));
  return CheckRange(op, "the number of rows", rows, 1, kLimit);
}

// Checks a [rows, features] array of the type of the input.
ffi::Error CheckArray(const char* name, const ffi::AnyBuffer& array, ffi::DataType type, int64_t rows,
                      int64_t features) {
  if (array.element_type() != type)
    return Invalid(kActivationGrad, std::string(name) + " must have the type of the input.");
  JAX_GROUPED_RETURN_IF_ERROR(CheckRank(kActivationGrad, name, array, 2));
  JAX_GROUPED_RETURN_IF_ERROR(
      CheckEqual(kActivationGrad, std::string(name) + "'s shape[0]", array.dimensions()[0], rows));
  JAX_GROUPED_RETURN_IF_ERROR(
      CheckEqual(kActivationGrad, std::string(name) + "'s shape[1]", array.dimensions()[1], features));
  return CheckAlignment(kActivationGrad, name, array.untyped_data());
}

ffi::Error ActivationGrad(cudaStream_t stream, ffi::AnyBuffer input, ffi::AnyBuffer da, F32Buffer weights,
                          ffi::RemainingArgs order, AnyResult dinput, AnyResult weighted,
                          ffi::Result<F32Buffer> inner_products, ActivationKind kind, float limit, float alpha,
                          float offset) try {
  JAX_GROUPED_RETURN_IF_ERROR(CheckActivation(kActivationGrad, kind));
  if (kind == ActivationKind::kNone) return Invalid(kActivationGrad, "there must be an activation.");
  const auto type = FloatType(input.element_type());
  if (!type || *type == CUDA_R_32F) return Invalid(kActivationGrad, "the input must be bfloat16 or float16.");
  JAX_GROUPED_RETURN_IF_ERROR(CheckRank(kActivationGrad, "da", da, 2));
  const int64_t rows = da.dimensions()[0];
  const int64_t features = da.dimensions()[1];
  JAX_GROUPED_RETURN_IF_ERROR(CheckRange(kActivationGrad, "da's shape[0]", rows, 1, kLimit));
  JAX_GROUPED_RETURN_IF_ERROR(CheckFeatures(kActivationGrad, "da", features));
  const int64_t in_features = IsGated(kind) ? 2 * features : features;
  JAX_GROUPED_RETURN_IF_ERROR(CheckArray("the input", input, input.element_type(), rows, in_features));
  JAX_GROUPED_RETURN_IF_ERROR(CheckArray("da", da, input.element_type(), rows, features));
  JAX_GROUPED_RETURN_IF_ERROR(CheckArray("dinput", *dinput, input.element_type(), rows, in_features));
  JAX_GROUPED_RETURN_IF_ERROR(CheckArray("weighted", *weighted, input.element_type(), rows, features));
  const auto num_weights = static_cast<int64_t>(weights.element_count());
  JAX_GROUPED_RETURN_IF_ERROR(CheckEqual(kActivationGrad, "the size of inner_products",
                                         static_cast<int64_t>(inner_products->element_count()), rows));
  ActivationGradBuffers buffers{};
  buffers.input = input.untyped_data();
  buffers.da = da.untyped_data();
  buffers.weights = weights.typed_data();
  buffers.dinput = dinput->untyped_data();
  buffers.weighted = weighted->untyped_data();
  buffers.inner_products = inner_products->typed_data();
  if (order.size() > 1) {
    return Invalid(kActivationGrad,
                   "there must be at most one order, got " + std::to_string(order.size()) + " of them.");
  }
  if (order.size() == 1) {
    JAX_GROUPED_ASSIGN_OR_RETURN(of_rows, order.get<ffi::AnyBuffer>(0));
    if (of_rows->element_type() != ffi::S32) return Invalid(kActivationGrad, "order must be int32.");
    JAX_GROUPED_RETURN_IF_ERROR(
        CheckEqual(kActivationGrad, "the size of order", static_cast<int64_t>(of_rows->element_count()), rows));
    buffers.order = static_cast<const int32_t*>(of_rows->untyped_data());
  } else {
    JAX_GROUPED_RETURN_IF_ERROR(CheckEqual(kActivationGrad, "the size of weights", num_weights, rows));
  }
  return ToError(kActivationGrad, LaunchActivationGrad(stream, buffers, {kind, limit, alpha, offset}, *type,
                                                       num_weights, rows, features));
}
JAX_GROUPED_CATCH(kActivationGrad)

ffi::Error PermuteRows(cudaStream_t stream, ffi::AnyBuffer x, S32Buffer order, S32Buffer inverse, AnyResult rows,
                       bool zero_tail) try {
  JAX_GROUPED_RETURN_IF_ERROR(CheckRank(kPermuteRows, "x", x, 2));
  JAX_GROUPED_RETURN_IF_ERROR(CheckRank(kPermuteRows, "inverse", inverse, 2));
  JAX_GROUPED_RETURN_IF_ERROR(CheckRank(kPermuteRows, "the result", *rows, 2));
  if (rows->element_type() != x.element_type()) return Invalid(kPermuteRows, "the result must have the type of x.");
  const int64_t tokens = x.dimensions()[0];
  const int64_t choices = inverse.dimensions()[1];
  const auto num_rows = static_cast<int64_t>(order.element_count());
  JAX_GROUPED_RETURN_IF_ERROR(CheckEqual(kPermuteRows, "inverse's shape[0]", inverse.dimensions()[0], tokens));
  JAX_GROUPED_RETURN_IF_ERROR(CheckEqual(kPermuteRows, "the result's shape[0]", rows->dimensions()[0], num_rows));
  JAX_GROUPED_RETURN_IF_ERROR(
      CheckEqual(kPermuteRows, "the result's shape[1]", rows->dimensions()[1], x.dimensions()[1]));
  JAX_GROUPED_RETURN_IF_ERROR(CheckPairs(kPermuteRows, tokens, choices, num_rows));
  const int64_t token_bytes = static_cast<int64_t>(x.size_bytes()) / tokens;
  if (token_bytes == 0 || token_bytes % kPermuteVectorBytes != 0 || token_bytes > kLimit) {
    return Invalid(kPermuteRows, "the bytes of a token must be a positive multiple of " +
                                     std::to_string(kPermuteVectorBytes) + " below 2^31, got " +
                                     std::to_string(token_bytes) + ".");
  }
  JAX_GROUPED_RETURN_IF_ERROR(CheckAlignment(kPermuteRows, "x", x.untyped_data()));
  JAX_GROUPED_RETURN_IF_ERROR(CheckAlignment(kPermuteRows, "the result", rows->untyped_data()));
  PermuteRowsBuffers buffers{};
  buffers.x = x.untyped_data();
  buffers.order = order.typed_data();
  buffers.inverse = inverse.typed_data();
  buffers.rows = rows->untyped_data();
  return ToError(kPermuteRows, LaunchPermuteRows(stream, buffers, tokens, static_cast<int>(choices), num_rows,
                                                 token_bytes, zero_tail));
}
JAX_GROUPED_CATCH(kPermuteRows)

ffi::Error SumRows(cudaStream_t stream, ffi::AnyBuffer rows, S32Buffer inverse, ffi::RemainingArgs weights,
                   AnyResult sums) try {
  JAX_GROUPED_RETURN_IF_ERROR(CheckRank(kSumRows, "rows", rows, 2));
  JAX_GROUPED_RETURN_IF_ERROR(CheckRank(kSumRows, "inverse", inverse, 2));
  JAX_GROUPED_RETURN_IF_ERROR(CheckRank(kSumRows, "the result", *sums, 2));
  const auto type = FloatType(rows.element_type());
  if (!type || *type == CUDA_R_32F) return Invalid(kSumRows, "rows must be bfloat16 or float16.");
  if (sums->element_type() != rows.element_type()) return Invalid(kSumRows, "the result must have the type of rows.");
  const int64_t num_rows = rows.dimensions()[0];
  const int64_t features = rows.dimensions()[1];
  const int64_t tokens = inverse.dimensions()[0];
  const int64_t choices = inverse.dimensions()[1];
  JAX_GROUPED_RETURN_IF_ERROR(CheckEqual(kSumRows, "the result's shape[0]", sums->dimensions()[0], tokens));
  JAX_GROUPED_RETURN_IF_ERROR(CheckEqual(kSumRows, "the result's shape[1]", sums->dimensions()[1], features));
  JAX_GROUPED_RETURN_IF_ERROR(CheckPairs(kSumRows, tokens, choices, num_rows));
  JAX_GROUPED_RETURN_IF_ERROR(CheckFeatures(kSumRows, "rows", features));
  JAX_GROUPED_RETURN_IF_ERROR(CheckAlignment(kSumRows, "rows", rows.untyped_data()));
  JAX_GROUPED_RETURN_IF_ERROR(CheckAlignment(kSumRows, "the result", sums->untyped_data()));
  SumRowsBuffers buffers{};
  buffers.rows = rows.untyped_data();
  buffers.inverse = inverse.typed_data();
  buffers.sums = sums->untyped_data();
  if (weights.size() > 1) {
    return Invalid(kSumRows, "there must be at most one array of weights, got " + std::to_string(weights.size()) + ".");
  }
  if (weights.size() == 1) {
    JAX_GROUPED_ASSIGN_OR_RETURN(of_choices, weights.get<ffi::AnyBuffer>(0));
    if (of_choices->element_type() != ffi::F32) return Invalid(kSumRows, "weights must be float32.");
    JAX_GROUPED_RETURN_IF_ERROR(CheckEqual(kSumRows, "the size of weights",
                                           static_cast<int64_t>(of_choices->element_count()), tokens * choices));
    buffers.weights = static_cast<const float*>(of_choices->untyped_data());
  }
  return ToError(kSumRows,
                 LaunchSumRows(stream, buffers, *type, tokens, static_cast<int>(choices), num_rows, features));
}
JAX_GROUPED_CATCH(kSumRows)

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(ActivationGradExecute, ActivationGrad,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<F32Buffer>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<F32Buffer>()
                                  .Attr<ActivationKind>("activation")
                                  .Attr<float>("limit")
                                  .Attr<float>("alpha")
                                  .Attr<float>("offset"),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(PermuteRowsExecute, PermuteRows,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<S32Buffer>()
                                  .Arg<S32Buffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<bool>("zero_tail"),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(SumRowsExecute, SumRows,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<S32Buffer>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>(),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jax_grouped
