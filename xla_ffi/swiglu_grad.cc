#include "csrc/swiglu/swiglu_grad.h"

#include <cstdint>
#include <limits>

#include "xla/ffi/api/ffi.h"
#include "xla_ffi/decode.h"
#include "xla_ffi/handlers.h"

namespace jax_grouped {
namespace {

constexpr char kOp[] = "jax_grouped_swiglu_grad";

using F32 = ffi::Buffer<ffi::F32>;

// Checks a [rows, features] array of the type of gate_up.
ffi::Error CheckArray(const char* name, const ffi::AnyBuffer& array, ffi::DataType type, int64_t rows,
                      int64_t features) {
  if (array.element_type() != type) return Invalid(kOp, std::string(name) + " must have the type of gate_up.");
  JAX_GROUPED_RETURN_IF_ERROR(CheckRank(kOp, name, array, 2));
  JAX_GROUPED_RETURN_IF_ERROR(CheckEqual(kOp, std::string(name) + "'s shape[0]", array.dimensions()[0], rows));
  JAX_GROUPED_RETURN_IF_ERROR(CheckEqual(kOp, std::string(name) + "'s shape[1]", array.dimensions()[1], features));
  return CheckAlignment(kOp, name, array.untyped_data());
}

ffi::Error Execute(cudaStream_t stream, ffi::AnyBuffer gate_up, ffi::AnyBuffer da, F32 row_weights, AnyResult dgate_up,
                   AnyResult weighted, ffi::Result<F32> inner_products) try {
  const auto type = FloatType(gate_up.element_type());
  if (!type || *type == CUDA_R_32F) return Invalid(kOp, "gate_up must be bfloat16 or float16.");
  JAX_GROUPED_RETURN_IF_ERROR(CheckRank(kOp, "da", da, 2));
  const int64_t rows = da.dimensions()[0];
  const int64_t features = da.dimensions()[1];
  if (features % kSwigluVector != 0 || features > std::numeric_limits<int32_t>::max()) {
    return Invalid(kOp, "da's shape[1] must be a multiple of " + std::to_string(kSwigluVector) + " below 2^31.");
  }
  JAX_GROUPED_RETURN_IF_ERROR(CheckArray("gate_up", gate_up, gate_up.element_type(), rows, 2 * features));
  JAX_GROUPED_RETURN_IF_ERROR(CheckArray("da", da, gate_up.element_type(), rows, features));
  JAX_GROUPED_RETURN_IF_ERROR(CheckArray("dgate_up", *dgate_up, gate_up.element_type(), rows, 2 * features));
  JAX_GROUPED_RETURN_IF_ERROR(CheckArray("weighted", *weighted, gate_up.element_type(), rows, features));
  JAX_GROUPED_RETURN_IF_ERROR(
      CheckEqual(kOp, "the size of row_weights", static_cast<int64_t>(row_weights.element_count()), rows));
  JAX_GROUPED_RETURN_IF_ERROR(
      CheckEqual(kOp, "the size of inner_products", static_cast<int64_t>(inner_products->element_count()), rows));
  SwigluGradBuffers buffers{};
  buffers.gate_up = gate_up.untyped_data();
  buffers.da = da.untyped_data();
  buffers.row_weights = row_weights.typed_data();
  buffers.dgate_up = dgate_up->untyped_data();
  buffers.weighted = weighted->untyped_data();
  buffers.inner_products = inner_products->typed_data();
  return ToError(kOp, LaunchSwigluGrad(stream, buffers, *type, rows, features));
}
JAX_GROUPED_CATCH(kOp)

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(SwigluGradExecute, Execute,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<F32>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<F32>(),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jax_grouped
