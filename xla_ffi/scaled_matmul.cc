#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "csrc/common/group_layout.h"
#include "csrc/matmul/grouped_matmul.h"
#include "xla/ffi/api/ffi.h"
#include "xla_ffi/decode_matmul.h"
#include "xla_ffi/decode_quantized.h"
#include "xla_ffi/handlers.h"

namespace jax_grouped {
namespace {

constexpr char kOp[] = "jax_grouped_scaled_matmul";

using S32 = ffi::Buffer<ffi::S32>;
using Result = ffi::Result<ffi::AnyBuffer>;

// The buffers and attributes of a call as XLA hands them over.
struct Call {
  ffi::AnyBuffer a;
  ffi::AnyBuffer a_scale;
  ffi::AnyBuffer b;
  ffi::AnyBuffer b_scale;
  S32 group_sizes;
  S32 group_offset;
  ffi::AnyBuffer d;
  ffi::AnyBuffer scratch;
  ffi::AnyBuffer workspace;
  std::string_view product;
  std::string_view a_mode;
  std::string_view b_mode;
  int64_t tokens;  // of a batch element
  int64_t kernel_batch;

  int64_t Batch() const { return static_cast<int64_t>(group_offset.element_count()); }
};

ffi::Error CheckTypes(const Call& call, MatmulProblem* problem) {
  const auto a_type = Fp8Type(call.a.element_type());
  const auto b_type = Fp8Type(call.b.element_type());
  if (!a_type || !b_type) return Invalid(kOp, "a and b must be float8_e4m3fn or float8_e5m2.");
  if (*a_type == CUDA_R_8F_E5M2 && *b_type == CUDA_R_8F_E5M2) {
    return Invalid(kOp, "a and b must not both be float8_e5m2.");
  }
  const auto result = FloatType(call.d.element_type());
  if (!result) return Invalid(kOp, "the result must be bfloat16, float16 or float32.");
  problem->a_type = *a_type;
  problem->b_type = *b_type;
  problem->result_type = *result;
  return ffi::Error::Success();
}

ffi::Error DecodeModes(const Call& call, MatmulProblem* problem) {
  const auto product = ToProduct(call.product);
  if (!product) return Invalid(kOp, "product must be fprop, dgrad or wgrad, got " + std::string(call.product) + ".");
  const auto a_mode = ToScalingMode(call.a_mode);
  const auto b_mode = ToScalingMode(call.b_mode);
  const ScalingMode b_block = *product == Product::kWgrad ? ScalingMode::kBlock1D : ScalingMode::kBlock2D;
  const bool same_for_all = a_mode == b_mode && (a_mode == ScalingMode::kTensor || a_mode == ScalingMode::kMx);
  if (!same_for_all && (a_mode != ScalingMode::kBlock1D || b_mode != b_block)) {
    return Invalid(kOp, "there is no " + std::string(call.product) + " with the scaling modes " +
                            std::string(call.a_mode) + " and " + std::string(call.b_mode) + ".");
  }
  problem->product = *product;
  problem->scaled = true;
  problem->a_mode = *a_mode;
  problem->b_mode = *b_mode;
  return ffi::Error::Success();
}

// Fills in the sizes, from the result and one operand.
ffi::Error DecodeSizes(const Call& call, MatmulProblem* problem) {
  const bool is_wgrad = problem->product == Product::kWgrad;
  JAX_GROUPED_RETURN_IF_ERROR(CheckRank(kOp, is_wgrad ? "the result" : "b", is_wgrad ? call.d : call.b, 3));
  if (!is_wgrad) {
    JAX_GROUPED_RETURN_IF_ERROR(CheckRank(kOp, "a", call.a, 2));
    JAX_GROUPED_RETURN_IF_ERROR(CheckRank(kOp, "the result", call.d, 2));
  }
  const auto kernels = (is_wgrad ? call.d : call.b).dimensions();
  JAX_GROUPED_RETURN_IF_ERROR(CheckKernelBatch(kOp, problem->product, call.Batch(), call.kernel_batch, kernels[0]));
  problem->num_groups = kernels[0] / call.kernel_batch * call.Batch();
  problem->elements_per_kernel = static_cast<int32_t>(call.Batch() / call.kernel_batch);
  problem->tokens = call.tokens * call.Batch();
  // Columnwise kernels are stored transposed.
  problem->in_features = problem->product == Product::kFprop ? kernels[2] : kernels[1];
  problem->out_features = problem->product == Product::kFprop ? kernels[1] : kernels[2];
  JAX_GROUPED_RETURN_IF_ERROR(CheckFeatures(kOp, problem->in_features));
  JAX_GROUPED_RETURN_IF_ERROR(CheckFeatures(kOp, problem->out_features));
  if (problem->num_groups == 0 || problem->tokens <= 0) return Invalid(kOp, "groups and tokens must not be 0.");
  if (is_wgrad) return ffi::Error::Success();
  JAX_GROUPED_RETURN_IF_ERROR(CheckEqual(kOp, "the result's shape[0]", call.d.dimensions()[0], problem->tokens));
  return CheckEqual(kOp, "the result's shape[1]", call.d.dimensions()[1],
                    problem->product == Product::kFprop ? problem->out_features : problem->in_features);
}

// Checks the operands against where their data and scales lie, and tells how many scales a kernel has.
ffi::Error CheckOperands(const Call& call, const MatmulProblem& problem, const Groups& groups, int64_t* kernel_scales) {
  JAX_GROUPED_RETURN_IF_ERROR(CheckScaled(kOp, LayoutOfA(problem, groups), call.a, call.a_scale));
  if (problem.product == Product::kWgrad) {
    return CheckScaled(kOp, LayoutOfB(problem, groups), call.b, call.b_scale);
  }
  const QuantizedLayout b = LayoutOfB(problem, groups);
  *kernel_scales = b.ScaleElements() / NumKernels(problem);
  return CheckScaled(kOp, b, call.b, call.b_scale);
}

ffi::Error Decode(const Call& call, MatmulProblem* problem, Groups* groups, int64_t* kernel_scales) {
  JAX_GROUPED_RETURN_IF_ERROR(DecodeModes(call, problem));
  JAX_GROUPED_RETURN_IF_ERROR(CheckTypes(call, problem));
  JAX_GROUPED_RETURN_IF_ERROR(DecodeSizes(call, problem));
  JAX_GROUPED_RETURN_IF_ERROR(
      DecodeGroups(kOp, call.group_sizes, call.group_offset, problem->num_groups, problem->tokens, groups));
  JAX_GROUPED_RETURN_IF_ERROR(CheckOperands(call, *problem, *groups, kernel_scales));
  JAX_GROUPED_RETURN_IF_ERROR(
      CheckEqual(kOp, "the bytes of scratch", static_cast<int64_t>(call.scratch.size_bytes()),
                 static_cast<int64_t>(ScaledMatmulScratch::Bytes(groups->batch, groups->num_groups))));
  return CheckEqual(kOp, "the bytes of workspace", static_cast<int64_t>(call.workspace.size_bytes()),
                    static_cast<int64_t>(kWorkspaceBytes));
}

ffi::Error Initialize(int32_t device, ffi::AnyBuffer a, ffi::AnyBuffer a_scale, ffi::AnyBuffer b,
                      ffi::AnyBuffer b_scale, S32 group_sizes, S32 group_offset, ffi::RemainingArgs rest, Result d,
                      Result scratch, Result workspace, std::string_view product, std::string_view a_mode,
                      std::string_view b_mode, int64_t tokens, int64_t kernel_batch, bool autotune) {
  const Call call{a,        a_scale,    b,       b_scale, group_sizes, group_offset, *d,
                  *scratch, *workspace, product, a_mode,  b_mode,      tokens,       kernel_batch};
  MatmulProblem problem{};
  Groups groups{};
  int64_t kernel_scales = 0;
  JAX_GROUPED_RETURN_IF_ERROR(Decode(call, &problem, &groups, &kernel_scales));
  problem.accumulate = rest.size() > 0;
  return ToError(kOp, PrepareGroupedMatmul(device, problem, autotune));
}

ffi::Error Execute(int32_t device, cudaStream_t stream, ffi::AnyBuffer a, ffi::AnyBuffer a_scale, ffi::AnyBuffer b,
                   ffi::AnyBuffer b_scale, S32 group_sizes, S32 group_offset, ffi::RemainingArgs rest, Result d,
                   Result scratch, Result workspace, std::string_view product, std::string_view a_mode,
                   std::string_view b_mode, int64_t tokens, int64_t kernel_batch, bool /*autotune*/) {
  const Call call{a,        a_scale,    b,       b_scale, group_sizes, group_offset, *d,
                  *scratch, *workspace, product, a_mode,  b_mode,      tokens,       kernel_batch};
  MatmulProblem problem{};
  Groups groups{};
  MatmulBuffers buffers{};
  JAX_GROUPED_RETURN_IF_ERROR(Decode(call, &problem, &groups, &buffers.kernel_scales));
  JAX_GROUPED_RETURN_IF_ERROR(CheckAlignment(kOp, "the result", d->untyped_data()));
  problem.accumulate = rest.size() > 0;
  JAX_GROUPED_RETURN_IF_ERROR(LoadAccumulator(kOp, stream, rest, *d));
  buffers.a = a.untyped_data();
  buffers.b = b.untyped_data();
  buffers.a_scale = a_scale.untyped_data();
  buffers.b_scale = b_scale.untyped_data();
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
      .template Arg<ffi::AnyBuffer>()
      .template Arg<ffi::AnyBuffer>()
      .template Arg<S32>()
      .template Arg<S32>()
      .RemainingArgs()
      .template Ret<ffi::AnyBuffer>()
      .template Ret<ffi::AnyBuffer>()
      .template Ret<ffi::AnyBuffer>()
      .template Attr<std::string_view>("product")
      .template Attr<std::string_view>("a_mode")
      .template Attr<std::string_view>("b_mode")
      .template Attr<int64_t>("tokens")
      .template Attr<int64_t>("kernel_batch")
      .template Attr<bool>("autotune");
}

}  // namespace

XLA_FFI_DEFINE_HANDLER(initialize, Initialize, BindCall(ffi::Ffi::BindInitialize().Ctx<ffi::DeviceOrdinal>()),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(execute, Execute,
                       BindCall(ffi::Ffi::Bind().Ctx<ffi::DeviceOrdinal>().Ctx<ffi::PlatformStream<cudaStream_t>>()),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_Error* ScaledMatmulInitialize(XLA_FFI_CallFrame* frame) { return CallHandler(initialize, frame); }
XLA_FFI_Error* ScaledMatmulExecute(XLA_FFI_CallFrame* frame) { return CallHandler(execute, frame); }

}  // namespace jax_grouped
