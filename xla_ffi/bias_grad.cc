#include <cstdint>

#include "csrc/bias_grad/bias_grad.h"
#include "xla/ffi/api/ffi.h"
#include "xla_ffi/decode.h"
#include "xla_ffi/handlers.h"

namespace jax_grouped {
namespace {

constexpr char kOp[] = "jax_grouped_bias_grad";

ffi::Error Execute(cudaStream_t stream, ffi::AnyBuffer dy, S32Buffer group_sizes, S32Buffer group_offset,
                   ffi::Result<F32Buffer> dbias, ffi::Result<F32Buffer> partial_sums,
                   ffi::Result<S32Buffer> tables) try {
  JAX_GROUPED_RETURN_IF_ERROR(CheckRank(kOp, "dy", dy, 2));
  JAX_GROUPED_RETURN_IF_ERROR(CheckRank(kOp, "dbias", *dbias, 2));
  const auto type = FloatType(dy.element_type());
  if (!type) return Invalid(kOp, "dy must be bfloat16, float16 or float32.");
  const int64_t tokens = dy.dimensions()[0];
  const int64_t features = dy.dimensions()[1];
  const int64_t num_groups = dbias->dimensions()[0];
  JAX_GROUPED_RETURN_IF_ERROR(CheckEqual(kOp, "dbias's shape[1]", dbias->dimensions()[1], features));
  if (features == 0) return Invalid(kOp, "dy must have features.");
  Groups groups{};
  JAX_GROUPED_RETURN_IF_ERROR(DecodeGroups(kOp, group_sizes, group_offset, num_groups, tokens, &groups));
  JAX_GROUPED_RETURN_IF_ERROR(
      CheckAtLeast(kOp, "the size of partial_sums", static_cast<int64_t>(partial_sums->element_count()),
                   groups.batch * BiasGradTiles(groups.capacity, groups.num_groups) * features));
  JAX_GROUPED_RETURN_IF_ERROR(CheckAtLeast(kOp, "the size of tables", static_cast<int64_t>(tables->element_count()),
                                           GroupTable::Size(groups.num_groups) * groups.batch));
  JAX_GROUPED_RETURN_IF_ERROR(CheckAlignment(kOp, "dy", dy.untyped_data()));
  return ToError(kOp, LaunchBiasGrad(stream, groups, dy.untyped_data(), *type, features, partial_sums->typed_data(),
                                     tables->typed_data(), dbias->typed_data()));
}
JAX_GROUPED_CATCH(kOp)

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(BiasGradExecute, Execute,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<S32Buffer>()
                                  .Arg<S32Buffer>()
                                  .Ret<F32Buffer>()
                                  .Ret<F32Buffer>()
                                  .Ret<S32Buffer>(),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jax_grouped
