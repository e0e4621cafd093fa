#include <cstdint>
#include <limits>
#include <string>

#include "csrc/rows/gather_rows.h"
#include "csrc/rows/swiglu_grad.h"
#include "xla/ffi/api/ffi.h"
#include "xla_ffi/decode.h"
#include "xla_ffi/handlers.h"

namespace jax_grouped {
namespace {

constexpr char kSwigluGrad[] = "jax_grouped_swiglu_grad";
constexpr char kGatherRows[] = "jax_grouped_gather_rows";

using F32 = ffi::Buffer<ffi::F32>;

// Checks a [rows, features] array of the type of gate_up.
ffi::Error CheckArray(const char* name, const ffi::AnyBuffer& array, ffi::DataType type, int64_t rows,
                      int64_t features) {
  if (array.element_type() != type) return Invalid(kSwigluGrad, std::string(name) + " must have the type of gate_up.");
  JAX_GROUPED_RETURN_IF_ERROR(CheckRank(kSwigluGrad, name, array, 2));
  JAX_GROUPED_RETURN_IF_ERROR(CheckEqual(kSwigluGrad, std::string(name) + "'s shape[0]", array.dimensions()[0], rows));
  JAX_GROUPED_RETURN_IF_ERROR(
      CheckEqual(kSwigluGrad, std::string(name) + "'s shape[1]", array.dimensions()[1], features));
  return CheckAlignment(kSwigluGrad, name, array.untyped_data());
}

ffi::Error SwigluGrad(cudaStream_t stream, ffi::AnyBuffer gate_up, ffi::AnyBuffer da, F32 row_weights,
                      AnyResult dgate_up, AnyResult weighted, ffi::Result<F32> inner_products) try {
  const auto type = FloatType(gate_up.element_type());
  if (!type || *type == CUDA_R_32F) return Invalid(kSwigluGrad, "gate_up must be bfloat16 or float16.");
  JAX_GROUPED_RETURN_IF_ERROR(CheckRank(kSwigluGrad, "da", da, 2));
  const int64_t rows = da.dimensions()[0];
  const int64_t features = da.dimensions()[1];
  if (features % kSwigluVector != 0 || features > std::numeric_limits<int32_t>::max()) {
    return Invalid(kSwigluGrad,
                   "da's shape[1] must be a multiple of " + std::to_string(kSwigluVector) + " below 2^31.");
  }
  JAX_GROUPED_RETURN_IF_ERROR(CheckArray("gate_up", gate_up, gate_up.element_type(), rows, 2 * features));
  JAX_GROUPED_RETURN_IF_ERROR(CheckArray("da", da, gate_up.element_type(), rows, features));
  JAX_GROUPED_RETURN_IF_ERROR(CheckArray("dgate_up", *dgate_up, gate_up.element_type(), rows, 2 * features));
  JAX_GROUPED_RETURN_IF_ERROR(CheckArray("weighted", *weighted, gate_up.element_type(), rows, features));
  JAX_GROUPED_RETURN_IF_ERROR(
      CheckEqual(kSwigluGrad, "the size of row_weights", static_cast<int64_t>(row_weights.element_count()), rows));
  JAX_GROUPED_RETURN_IF_ERROR(CheckEqual(kSwigluGrad, "the size of inner_products",
                                         static_cast<int64_t>(inner_products->element_count()), rows));
  SwigluGradBuffers buffers{};
  buffers.gate_up = gate_up.untyped_data();
  buffers.da = da.untyped_data();
  buffers.row_weights = row_weights.typed_data();
  buffers.dgate_up = dgate_up->untyped_data();
  buffers.weighted = weighted->untyped_data();
  buffers.inner_products = inner_products->typed_data();
  return ToError(kSwigluGrad, LaunchSwigluGrad(stream, buffers, *type, rows, features));
}
JAX_GROUPED_CATCH(kSwigluGrad)

ffi::Error GatherRows(cudaStream_t stream, ffi::AnyBuffer x, S32Buffer indices, AnyResult rows) try {
  JAX_GROUPED_RETURN_IF_ERROR(CheckRank(kGatherRows, "x", x, 2));
  JAX_GROUPED_RETURN_IF_ERROR(CheckRank(kGatherRows, "the result", *rows, 2));
  if (rows->element_type() != x.element_type()) return Invalid(kGatherRows, "the result must have the type of x.");
  const int64_t x_rows = x.dimensions()[0];
  const auto num_rows = static_cast<int64_t>(indices.element_count());
  JAX_GROUPED_RETURN_IF_ERROR(CheckEqual(kGatherRows, "the result's shape[0]", rows->dimensions()[0], num_rows));
  JAX_GROUPED_RETURN_IF_ERROR(
      CheckEqual(kGatherRows, "the result's shape[1]", rows->dimensions()[1], x.dimensions()[1]));
  if (x_rows == 0 || num_rows == 0) return Invalid(kGatherRows, "x and indices must have rows.");
  const int64_t row_bytes = static_cast<int64_t>(x.size_bytes()) / x_rows;
  if (row_bytes % kGatherVectorBytes != 0 || row_bytes > std::numeric_limits<int32_t>::max()) {
    return Invalid(kGatherRows, "the bytes of a row must be a multiple of " + std::to_string(kGatherVectorBytes) +
                                    " below 2^31, got " + std::to_string(row_bytes) + ".");
  }
  JAX_GROUPED_RETURN_IF_ERROR(CheckAlignment(kGatherRows, "x", x.untyped_data()));
  JAX_GROUPED_RETURN_IF_ERROR(CheckAlignment(kGatherRows, "the result", rows->untyped_data()));
  return ToError(kGatherRows, LaunchGatherRows(stream, x.untyped_data(), x_rows, row_bytes, indices.typed_data(),
                                               num_rows, rows->untyped_data()));
}
JAX_GROUPED_CATCH(kGatherRows)

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(SwigluGradExecute, SwigluGrad,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<F32>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<F32>(),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(GatherRowsExecute, GatherRows,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<S32Buffer>()
                                  .Ret<ffi::AnyBuffer>(),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jax_grouped
