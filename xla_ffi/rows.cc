#include <cstdint>
#include <limits>
#include <string>

#include "csrc/rows/activation_grad.h"
#include "csrc/rows/permute_rows.h"
#include "xla/ffi/api/ffi.h"
#include "xla_ffi/decode.h"
#include "xla_ffi/decode_activation.h"
#include "xla_ffi/handlers.h"

namespace jax_grouped {
namespace {

constexpr char kActivationGrad[] = "jax_grouped_activation_grad";
constexpr char kPermuteRows[] = "jax_grouped_permute_rows";

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

ffi::Error ActivationGrad(cudaStream_t stream, ffi::AnyBuffer input, ffi::AnyBuffer da, F32Buffer row_weights,
                          AnyResult dinput, AnyResult weighted, ffi::Result<F32Buffer> inner_products,
                          Activation activation) try {
  JAX_GROUPED_RETURN_IF_ERROR(CheckActivation(kActivationGrad, activation));
  if (activation == Activation::kNone) return Invalid(kActivationGrad, "there must be an activation.");
  const auto type = FloatType(input.element_type());
  if (!type || *type == CUDA_R_32F) return Invalid(kActivationGrad, "the input must be bfloat16 or float16.");
  JAX_GROUPED_RETURN_IF_ERROR(CheckRank(kActivationGrad, "da", da, 2));
  const int64_t rows = da.dimensions()[0];
  const int64_t features = da.dimensions()[1];
  if (rows == 0) return Invalid(kActivationGrad, "da must have rows.");
  if (features % kActivationVector != 0 || features > std::numeric_limits<int32_t>::max()) {
    return Invalid(kActivationGrad,
                   "da's shape[1] must be a multiple of " + std::to_string(kActivationVector) + " below 2^31.");
  }
  const int64_t in_features = IsGated(activation) ? 2 * features : features;
  JAX_GROUPED_RETURN_IF_ERROR(CheckArray("the input", input, input.element_type(), rows, in_features));
  JAX_GROUPED_RETURN_IF_ERROR(CheckArray("da", da, input.element_type(), rows, features));
  JAX_GROUPED_RETURN_IF_ERROR(CheckArray("dinput", *dinput, input.element_type(), rows, in_features));
  JAX_GROUPED_RETURN_IF_ERROR(CheckArray("weighted", *weighted, input.element_type(), rows, features));
  JAX_GROUPED_RETURN_IF_ERROR(
      CheckEqual(kActivationGrad, "the size of row_weights", static_cast<int64_t>(row_weights.element_count()), rows));
  JAX_GROUPED_RETURN_IF_ERROR(CheckEqual(kActivationGrad, "the size of inner_products",
                                         static_cast<int64_t>(inner_products->element_count()), rows));
  ActivationGradBuffers buffers{};
  buffers.input = input.untyped_data();
  buffers.da = da.untyped_data();
  buffers.row_weights = row_weights.typed_data();
  buffers.dinput = dinput->untyped_data();
  buffers.weighted = weighted->untyped_data();
  buffers.inner_products = inner_products->typed_data();
  return ToError(kActivationGrad, LaunchActivationGrad(stream, buffers, activation, *type, rows, features));
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
  constexpr int64_t kLimit = std::numeric_limits<int32_t>::max();
  JAX_GROUPED_RETURN_IF_ERROR(CheckEqual(kPermuteRows, "inverse's shape[0]", inverse.dimensions()[0], tokens));
  JAX_GROUPED_RETURN_IF_ERROR(CheckEqual(kPermuteRows, "the result's shape[0]", rows->dimensions()[0], num_rows));
  JAX_GROUPED_RETURN_IF_ERROR(
      CheckEqual(kPermuteRows, "the result's shape[1]", rows->dimensions()[1], x.dimensions()[1]));
  if (tokens == 0 || num_rows == 0) return Invalid(kPermuteRows, "x and the result must have rows.");
  if (tokens * choices > kLimit || num_rows > kLimit)
    return Invalid(kPermuteRows, "there must be fewer than 2^31 rows.");
  const int64_t token_bytes = static_cast<int64_t>(x.size_bytes()) / tokens;
  if (token_bytes % kPermuteVectorBytes != 0 || token_bytes > kLimit) {
    return Invalid(kPermuteRows, "the bytes of a token must be a multiple of " + std::to_string(kPermuteVectorBytes) +
                                     " below 2^31, got " + std::to_string(token_bytes) + ".");
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

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(ActivationGradExecute, ActivationGrad,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<F32Buffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<F32Buffer>()
                                  .Attr<Activation>("activation"),
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

}  // namespace jax_grouped
