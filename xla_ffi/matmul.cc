#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "csrc/common/group_layout.h"
#include "csrc/matmul/grouped_matmul.h"
#include "xla/ffi/api/ffi.h"
#include "xla_ffi/decode_matmul.h"
#include "xla_ffi/handlers.h"

namespace jax_grouped {
namespace {

constexpr char kOp[] = "jax_grouped_matmul";

using S32 = ffi::Buffer<ffi::S32>;
using Result = ffi::Result<ffi::AnyBuffer>;

// The buffers of a call as XLA hands them over, in the order of the custom call.
struct Call {
  ffi::AnyBuffer a;
  ffi::AnyBuffer b;
  S32 group_sizes;
  S32 group_offset;
  ffi::AnyBuffer d;
  ffi::AnyBuffer scratch;
  ffi::AnyBuffer workspace;
  int64_t kernel_batch;  // how many batch elements have kernels of their own

  int64_t Batch() const { return static_cast<int64_t>(group_offset.element_count()); }
};

ffi::Error CheckTypes(const Call& call, MatmulProblem* problem) {
  const auto operand = FloatType(call.a.element_type());
  if (!operand || *operand == CUDA_R_32F) return Invalid(kOp, "a must be bfloat16 or float16.");
  if (call.b.element_type() != call.a.element_type()) return Invalid(kOp, "a and b must have one type.");
  const auto result = FloatType(call.d.element_type());
  if (!result || (*result != *operand && *result != CUDA_R_32F)) {
    return Invalid(kOp, "the result must have the type of a and b, or be float32.");
  }
  problem->a_type = problem->b_type = *operand;
  problem->result_type = *result;
  return ffi::Error::Success();
}

// Fills in the features and checks that the other shapes follow from them.
ffi::Error CheckShapes(const Call& call, MatmulProblem* problem) {
  const bool is_wgrad = problem->product == Product::kWgrad;
  const ffi::AnyBuffer& kernel = is_wgrad ? call.d : call.b;
  JAX_GROUPED_RETURN_IF_ERROR(CheckRank(kOp, "a", call.a, 2));
  JAX_GROUPED_RETURN_IF_ERROR(CheckRank(kOp, is_wgrad ? "the result" : "b", kernel, 3));
  JAX_GROUPED_RETURN_IF_ERROR(CheckRank(kOp, is_wgrad ? "b" : "the result", is_wgrad ? call.b : call.d, 2));

  problem->tokens = call.a.dimensions()[0];
  JAX_GROUPED_RETURN_IF_ERROR(
      CheckKernelBatch(kOp, problem->product, call.Batch(), call.kernel_batch, kernel.dimensions()[0]));
  problem->num_groups = kernel.dimensions()[0] / call.kernel_batch * call.Batch();
  problem->elements_per_kernel = static_cast<int32_t>(call.Batch() / call.kernel_batch);
  problem->in_features = kernel.dimensions()[1];
  problem->out_features = kernel.dimensions()[2];
  const int64_t a_features = problem->product == Product::kDgrad ? problem->out_features : problem->in_features;
  const int64_t other_features = problem->product == Product::kDgrad ? problem->in_features : problem->out_features;
  const ffi::AnyBuffer& other = is_wgrad ? call.b : call.d;
  const std::string other_name = is_wgrad ? "b" : "the result";
  JAX_GROUPED_RETURN_IF_ERROR(CheckEqual(kOp, "a's shape[1]", call.a.dimensions()[1], a_features));
  JAX_GROUPED_RETURN_IF_ERROR(CheckEqual(kOp, other_name + "'s shape[0]", other.dimensions()[0], problem->tokens));
  JAX_GROUPED_RETURN_IF_ERROR(CheckEqual(kOp, other_name + "'s shape[1]", other.dimensions()[1], other_features));

  if (problem->num_groups == 0 || problem->tokens == 0) return Invalid(kOp, "groups and tokens must not be 0.");
  for (const int64_t features : {problem->in_features, problem->out_features}) {
    if (features == 0 || features % kFeatureAlignment != 0 || features > std::numeric_limits<int32_t>::max()) {
      return Invalid(kOp, "feature sizes must be positive multiples of " + std::to_string(kFeatureAlignment) +
                              " below 2^31, got " + std::to_string(features) + ".");
    }
  }
  return ffi::Error::Success();
}

ffi::Error Decode(const Call& call, std::string_view product, MatmulProblem* problem, Groups* groups) {
  const auto known = ToProduct(product);
  if (!known) return Invalid(kOp, "product must be fprop, dgrad or wgrad, got " + std::string(product) + ".");
  problem->product = *known;
  JAX_GROUPED_RETURN_IF_ERROR(CheckTypes(call, problem));
  JAX_GROUPED_RETURN_IF_ERROR(CheckShapes(call, problem));
  JAX_GROUPED_RETURN_IF_ERROR(
      DecodeGroups(kOp, call.group_sizes, call.group_offset, problem->num_groups, problem->tokens, groups));
  JAX_GROUPED_RETURN_IF_ERROR(CheckEqual(kOp, "the bytes of scratch", static_cast<int64_t>(call.scratch.size_bytes()),
                                         static_cast<int64_t>(MatmulScratch::Bytes(problem->num_groups))));
  return CheckEqual(kOp, "the bytes of workspace", static_cast<int64_t>(call.workspace.size_bytes()),
                    static_cast<int64_t>(kWorkspaceBytes));
}

ffi::Error Initialize(int32_t device, ffi::AnyBuffer a, ffi::AnyBuffer b, S32 group_sizes, S32 group_offset,
                      ffi::RemainingArgs rest, Result d, Result scratch, Result workspace, std::string_view product,
                      int64_t kernel_batch, bool autotune) {
  const Call call{a, b, group_sizes, group_offset, *d, *scratch, *workspace, kernel_batch};
  MatmulProblem problem{};
  Groups groups{};
  JAX_GROUPED_RETURN_IF_ERROR(Decode(call, product, &problem, &groups));
  problem.accumulate = rest.size() > 0;
  return ToError(kOp, PrepareGroupedMatmul(device, problem, autotune));
}

ffi::Error Execute(int32_t device, cudaStream_t stream, ffi::AnyBuffer a, ffi::AnyBuffer b, S32 group_sizes,
                   S32 group_offset, ffi::RemainingArgs rest, Result d, Result scratch, Result workspace,
                   std::string_view product, int64_t kernel_batch, bool /*autotune*/) {
  const Call call{a, b, group_sizes, group_offset, *d, *scratch, *workspace, kernel_batch};
  MatmulProblem problem{};
  Groups groups{};
  JAX_GROUPED_RETURN_IF_ERROR(Decode(call, product, &problem, &groups));
  JAX_GROUPED_RETURN_IF_ERROR(CheckAlignment(kOp, "a", a.untyped_data()));
  JAX_GROUPED_RETURN_IF_ERROR(CheckAlignment(kOp, "b", b.untyped_data()));
  JAX_GROUPED_RETURN_IF_ERROR(CheckAlignment(kOp, "the result", d->untyped_data()));
  problem.accumulate = rest.size() > 0;
  JAX_GROUPED_RETURN_IF_ERROR(LoadAccumulator(kOp, stream, rest, *d));
  MatmulBuffers buffers{};
  buffers.a = a.untyped_data();
  buffers.b = b.untyped_data();
  buffers.d = d->untyped_data();
  buffers.scratch = scratch->untyped_data();
  buffers.workspace = workspace->untyped_data();
  return ToError(kOp, EnqueueGroupedMatmul(device, stream, problem, groups, buffers));
}

// What both stages take besides their contexts.
template <typename Binding>
auto BindCall(Binding binding) {
  return std::move(binding)
      .template Arg<ffi::AnyBuffer>()
      .template Arg<ffi::AnyBuffer>()
      .template Arg<S32>()
      .template Arg<S32>()
      .RemainingArgs()
      .template Ret<ffi::AnyBuffer>()
      .template Ret<ffi::AnyBuffer>()
      .template Ret<ffi::AnyBuffer>()
      .template Attr<std::string_view>("product")
      .template Attr<int64_t>("kernel_batch")
      .template Attr<bool>("autotune");
}

}  // namespace

XLA_FFI_DEFINE_HANDLER(initialize, Initialize, BindCall(ffi::Ffi::BindInitialize().Ctx<ffi::DeviceOrdinal>()),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(execute, Execute,
                       BindCall(ffi::Ffi::Bind().Ctx<ffi::DeviceOrdinal>().Ctx<ffi::PlatformStream<cudaStream_t>>()),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_Error* MatmulInitialize(XLA_FFI_CallFrame* frame) { return CallHandler(initialize, frame); }
XLA_FFI_Error* MatmulExecute(XLA_FFI_CallFrame* frame) { return CallHandler(execute, frame); }

}  // namespace jax_grouped
