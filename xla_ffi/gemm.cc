#include "csrc/gemm/gemm.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>

#include "csrc/gemm/scratch.h"
#include "csrc/groups/layout.h"
#include "xla/ffi/api/ffi.h"
#include "xla_ffi/decode.h"
#include "xla_ffi/decode_quantized.h"
#include "xla_ffi/handlers.h"

namespace jax_grouped {
namespace {

// The static part of a call, apart from the shapes and types of its buffers.
struct GemmAttributes {
  Product product;
  bool scaled;         // the scales of a and b follow the other operands
  ScalingMode a_mode;  // for scaled operands
  ScalingMode b_mode;
  int64_t tokens;           // per batch element, for scaled operands
  int64_t expected_tokens;  // per batch element; 0 for all that there is room for
  int64_t weight_batch;     // batch elements that have weights of their own
  Gather gathered;          // the indices of rows follow the other operands
  bool accumulate;          // an accumulator is the last operand
  bool zero_other_rows;     // rows of no group of the result, except for wgrad, become zero
};

}  // namespace
}  // namespace jax_grouped

XLA_FFI_REGISTER_ENUM_ATTR_DECODING(::jax_grouped::Product);
XLA_FFI_REGISTER_ENUM_ATTR_DECODING(::jax_grouped::Gather);
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jax_grouped::GemmAttributes, StructMember<::jax_grouped::Product>("product"),
                                      StructMember<bool>("scaled"), StructMember<::jax_grouped::ScalingMode>("a_mode"),
                                      StructMember<::jax_grouped::ScalingMode>("b_mode"),
                                      StructMember<int64_t>("tokens"), StructMember<int64_t>("expected_tokens"),
                                      StructMember<int64_t>("weight_batch"),
                                      StructMember<::jax_grouped::Gather>("gathered"), StructMember<bool>("accumulate"),
                                      StructMember<bool>("zero_other_rows"));

namespace jax_grouped {
namespace {

constexpr char kOp[] = "jax_grouped_gemm";

// The buffers of a call, in the order of the custom call.
struct Call {
  ffi::AnyBuffer a;
  ffi::AnyBuffer b;
  S32Buffer group_sizes;
  S32Buffer group_offset;
  ffi::RemainingArgs more;  // the scales of a and b, row_indices and the accumulator, if the attributes say so
  ffi::AnyBuffer d;
  ffi::AnyBuffer scratch;
  ffi::AnyBuffer workspace;

  int64_t Batch() const { return static_cast<int64_t>(group_offset.element_count()); }
};

ffi::Error CheckEnums(const GemmAttributes& attributes) {
  JAX_GROUPED_RETURN_IF_ERROR(CheckMode(kOp, attributes.a_mode));
  JAX_GROUPED_RETURN_IF_ERROR(CheckMode(kOp, attributes.b_mode));
  const auto product = static_cast<int32_t>(attributes.product);
  if (product >= 0 && product <= static_cast<int32_t>(Product::kWgrad)) return ffi::Error::Success();
  return Invalid(kOp, "product must be 0 (fprop), 1 (dgrad) or 2 (wgrad), got " + std::to_string(product) + ".");
}

// Fails unless the operand can be gathered.
ffi::Error CheckGathered(const GemmAttributes& attributes) {
  if (attributes.gathered == Gather::kNone) return ffi::Error::Success();
  const auto gathered = static_cast<int32_t>(attributes.gathered);
  const auto last = attributes.product == Product::kWgrad ? Gather::kB : Gather::kA;
  if (gathered < 0 || gathered > static_cast<int32_t>(last)) {
    return Invalid(kOp, "gathered must be 0 (none), 1 (a) or, for wgrad, 2 (b), got " + std::to_string(gathered) + ".");
  }
  if (!attributes.scaled && !attributes.accumulate) return ffi::Error::Success();
  return Invalid(kOp, "rows are gathered for 16-bit operands without an accumulator only.");
}

ffi::Error CheckModes(const GemmAttributes& attributes) {
  const auto [a, b] = std::pair(attributes.a_mode, attributes.b_mode);
  const ScalingMode b_block = attributes.product == Product::kWgrad ? ScalingMode::kBlock1D : ScalingMode::kBlock2D;
  if (a == b && (a == ScalingMode::kTensor || a == ScalingMode::kMx)) return ffi::Error::Success();
  if (a == ScalingMode::kBlock1D && b == b_block) return ffi::Error::Success();
  return Invalid(kOp, "this product has no scaling modes " + std::to_string(static_cast<int32_t>(a)) + " and " +
                          std::to_string(static_cast<int32_t>(b)) + ".");
}

ffi::Error DecodeScaledTypes(const Call& call, GemmProblem* problem) {
  const auto a = Fp8Type(call.a.element_type());
  const auto b = Fp8Type(call.b.element_type());
  if (!a || !b) return Invalid(kOp, "a and b must be float8_e4m3fn or float8_e5m2.");
  if (*a == CUDA_R_8F_E5M2 && *b == CUDA_R_8F_E5M2) return Invalid(kOp, "a and b must not both be float8_e5m2.");
  const auto result = FloatType(call.d.element_type());
  if (!result) return Invalid(kOp, "the result must be bfloat16, float16 or float32.");
  problem->a_type = *a;
  problem->b_type = *b;
  problem->result_type = *result;
  return ffi::Error::Success();
}

ffi::Error DecodeTypes(const Call& call, GemmProblem* problem) {
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

// Fails unless `weight_batch` batch elements can have weights of their own. Each of these weights serves the same
// number of successive elements.
ffi::Error CheckWeightBatch(const Call& call, const GemmAttributes& attributes, int64_t weights) {
  const int64_t batch = call.Batch();
  const int64_t own = attributes.weight_batch;
  if (own > 0 && batch % own == 0 && weights % own == 0 && (attributes.product != Product::kWgrad || own == batch)) {
    return ffi::Error::Success();
  }
  return Invalid(kOp,
                 "weight_batch must divide the batch size and the number of weights, and be the batch size for wgrad, "
                 "got " +
                     std::to_string(own) + " of " + std::to_string(batch) + " and " + std::to_string(weights) +
                     " weights.");
}

ffi::Error CheckAllFeatures(const GemmProblem& problem) {
  for (const int64_t features : {problem.in_features, problem.out_features}) {
    if (problem.scaled) {
      JAX_GROUPED_RETURN_IF_ERROR(CheckFeatures(kOp, features));
    } else if (features == 0 || features % kFeatureAlignment != 0 || features > std::numeric_limits<int32_t>::max()) {
      return Invalid(kOp, "feature sizes must be positive multiples of " + std::to_string(kFeatureAlignment) +
                              " below 2^31, got " + std::to_string(features) + ".");
    }
  }
  return ffi::Error::Success();
}

// Decodes the sizes from the weights (the result of wgrad) and the tokens. Fails unless the other shapes match.
ffi::Error DecodeSizes(const Call& call, const GemmAttributes& attributes, GemmProblem* problem) {
  const bool is_wgrad = problem->product == Product::kWgrad;
  const ffi::AnyBuffer& weights = is_wgrad ? call.d : call.b;
  const ffi::AnyBuffer& tokens = is_wgrad ? call.b : call.d;
  const std::string tokens_name = is_wgrad ? "b" : "the result";
  JAX_GROUPED_RETURN_IF_ERROR(CheckRank(kOp, is_wgrad ? "the result" : "b", weights, 3));
  // The shapes of columnwise tokens, as in a scaled wgrad, hold no sizes.
  const bool has_token_shapes = !(is_wgrad && problem->scaled);
  if (has_token_shapes) {
    JAX_GROUPED_RETURN_IF_ERROR(CheckRank(kOp, "a", call.a, 2));
    JAX_GROUPED_RETURN_IF_ERROR(CheckRank(kOp, tokens_name.c_str(), tokens, 2));
  }
  const auto shape = weights.dimensions();
  JAX_GROUPED_RETURN_IF_ERROR(CheckWeightBatch(call, attributes, shape[0]));
  const int64_t own_groups = shape[0] / attributes.weight_batch;
  JAX_GROUPED_RETURN_IF_ERROR(CheckOfElement(kOp, "the number of groups", own_groups, call.Batch()));
  problem->num_groups = own_groups * call.Batch();
  problem->elements_per_weight = static_cast<int32_t>(call.Batch() / attributes.weight_batch);
  const ffi::AnyBuffer& rows = problem->gathered == Gather::kA ? tokens : call.a;
  JAX_GROUPED_RETURN_IF_ERROR(CheckOfElement(kOp, "tokens", attributes.tokens, call.Batch()));
  problem->tokens = problem->scaled ? attributes.tokens * call.Batch() : rows.dimensions()[0];
  if (problem->gathered != Gather::kNone) {
    problem->gathered_from = (problem->gathered == Gather::kA ? call.a : call.b).dimensions()[0];
  }
  // Columnwise weights are stored transposed.
  const bool transposed = problem->scaled && problem->product == Product::kFprop;
  problem->in_features = shape[transposed ? 2 : 1];
  problem->out_features = shape[transposed ? 1 : 2];
  if (has_token_shapes) {
    const bool is_dgrad = problem->product == Product::kDgrad;
    JAX_GROUPED_RETURN_IF_ERROR(CheckEqual(kOp, "a's shape[1]", call.a.dimensions()[1],
                                           is_dgrad ? problem->out_features : problem->in_features));
    if (problem->gathered != Gather::kB) {
      JAX_GROUPED_RETURN_IF_ERROR(
          CheckEqual(kOp, tokens_name + "'s shape[0]", tokens.dimensions()[0], problem->tokens));
    }
    JAX_GROUPED_RETURN_IF_ERROR(CheckEqual(kOp, tokens_name + "'s shape[1]", tokens.dimensions()[1],
                                           is_dgrad ? problem->in_features : problem->out_features));
  }
  return CheckAllFeatures(*problem);
}

// Checks the accumulator, the last operand.
ffi::Error CheckAccumulator(const Call& call) {
  JAX_GROUPED_ASSIGN_OR_RETURN(accumulator, call.more.get<ffi::AnyBuffer>(call.more.size() - 1));
  if (accumulator->element_type() != call.d.element_type()) {
    return Invalid(kOp, "the accumulator must have the result's type.");
  }
  return CheckEqual(kOp, "the number of elements of the accumulator", Elements(*accumulator), Elements(call.d));
}

ffi::Error DecodeRowIndices(const Call& call, const GemmProblem& problem, GemmBuffers* buffers) {
  constexpr int64_t kMostRows = std::numeric_limits<int32_t>::max();
  if (problem.gathered_from == 0 || problem.gathered_from > kMostRows || problem.num_groups > kMostGatheredGroups) {
    return Invalid(kOp, "rows are gathered from 1 to 2^31 - 1 rows in at most " + std::to_string(kMostGatheredGroups) +
                            " groups, got " + std::to_string(problem.gathered_from) + " rows and " +
                            std::to_string(problem.num_groups) + " groups.");
  }
  JAX_GROUPED_ASSIGN_OR_RETURN(indices, call.more.get<ffi::AnyBuffer>(0));
  if (indices->element_type() != ffi::S32) return Invalid(kOp, "row_indices must be int32.");
  JAX_GROUPED_RETURN_IF_ERROR(CheckEqual(kOp, "the size of row_indices", Elements(*indices), problem.tokens));
  buffers->row_indices = static_cast<const int32_t*>(indices->untyped_data());
  return ffi::Error::Success();
}

// Decodes the operands that not every call has, and checks scales against their layout.
ffi::Error DecodeMore(const Call& call, const GemmAttributes& attributes, const Groups& groups,
                      const GemmProblem& problem, GemmBuffers* buffers) {
  const bool gathers = problem.gathered != Gather::kNone;
  JAX_GROUPED_RETURN_IF_ERROR(CheckEqual(
      kOp, gathers ? "the number of row_indices" : "the number of scales and accumulators",
      static_cast<int64_t>(call.more.size()), (problem.scaled ? 2 : 0) + (gathers || attributes.accumulate ? 1 : 0)));
  if (gathers) return DecodeRowIndices(call, problem, buffers);
  if (attributes.accumulate) JAX_GROUPED_RETURN_IF_ERROR(CheckAccumulator(call));
  if (!problem.scaled) return ffi::Error::Success();
  JAX_GROUPED_ASSIGN_OR_RETURN(a_scale, call.more.get<ffi::AnyBuffer>(0));
  JAX_GROUPED_ASSIGN_OR_RETURN(b_scale, call.more.get<ffi::AnyBuffer>(1));
  const QuantizedLayout b = LayoutOfB(problem, groups);
  JAX_GROUPED_RETURN_IF_ERROR(CheckScaled(kOp, LayoutOfA(problem, groups), call.a, *a_scale));
  JAX_GROUPED_RETURN_IF_ERROR(CheckScaled(kOp, b, call.b, *b_scale));
  buffers->a_scale = a_scale->untyped_data();
  buffers->b_scale = b_scale->untyped_data();
  if (problem.product != Product::kWgrad) buffers->weight_scales = b.ScaleElements() / NumWeights(problem);
  return ffi::Error::Success();
}

ffi::Error Decode(const Call& call, const GemmAttributes& attributes, GemmProblem* problem, Groups* groups,
                  GemmBuffers* buffers) {
  JAX_GROUPED_RETURN_IF_ERROR(CheckEnums(attributes));
  JAX_GROUPED_RETURN_IF_ERROR(CheckGathered(attributes));
  problem->product = attributes.product;
  problem->scaled = attributes.scaled;
  problem->accumulate = attributes.accumulate;
  problem->gathered = attributes.gathered;
  if (problem->scaled) {
    problem->a_mode = attributes.a_mode;
    problem->b_mode = attributes.b_mode;
    JAX_GROUPED_RETURN_IF_ERROR(CheckModes(attributes));
  }
  JAX_GROUPED_RETURN_IF_ERROR(problem->scaled ? DecodeScaledTypes(call, problem) : DecodeTypes(call, problem));
  JAX_GROUPED_RETURN_IF_ERROR(DecodeSizes(call, attributes, problem));
  JAX_GROUPED_RETURN_IF_ERROR(
      DecodeGroups(kOp, call.group_sizes, call.group_offset, problem->num_groups, problem->tokens, groups));
  JAX_GROUPED_RETURN_IF_ERROR(CheckOfElement(kOp, "expected_tokens", attributes.expected_tokens, 1));
  const int64_t expected = attributes.expected_tokens * groups->batch;
  problem->expected_tokens = expected == 0 ? problem->tokens : std::min(expected, problem->tokens);
  JAX_GROUPED_RETURN_IF_ERROR(DecodeMore(call, attributes, *groups, *problem, buffers));
  JAX_GROUPED_RETURN_IF_ERROR(
      CheckAtLeast(kOp, "the bytes of scratch", static_cast<int64_t>(call.scratch.size_bytes()),
                   static_cast<int64_t>(GemmScratch::Bytes(groups->batch, groups->num_groups))));
  JAX_GROUPED_RETURN_IF_ERROR(CheckAtLeast(kOp, "the bytes of workspace",
                                           static_cast<int64_t>(call.workspace.size_bytes()),
                                           static_cast<int64_t>(kWorkspaceBytes)));
  buffers->a = call.a.untyped_data();
  buffers->b = call.b.untyped_data();
  buffers->d = call.d.untyped_data();
  buffers->zero_other_rows = attributes.zero_other_rows;
  buffers->scratch = call.scratch.untyped_data();
  buffers->workspace = call.workspace.untyped_data();
  JAX_GROUPED_RETURN_IF_ERROR(CheckAlignment(kOp, "a", buffers->a));
  JAX_GROUPED_RETURN_IF_ERROR(CheckAlignment(kOp, "b", buffers->b));
  JAX_GROUPED_RETURN_IF_ERROR(CheckAlignment(kOp, "the result", buffers->d));
  JAX_GROUPED_RETURN_IF_ERROR(CheckAlignment(kOp, "scratch", buffers->scratch));
  return CheckAlignment(kOp, "workspace", buffers->workspace, kWorkspaceAlignmentBytes);
}

// Copies the accumulator to the result, unless they are the same buffer. They are, except where XLA makes the call
// write its result straight into a slice of a larger array, as it does with the results of a loop.
ffi::Error LoadAccumulator(cudaStream_t stream, const Call& call) {
  JAX_GROUPED_ASSIGN_OR_RETURN(accumulator, call.more.get<ffi::AnyBuffer>(call.more.size() - 1));
  if (accumulator->untyped_data() == call.d.untyped_data()) return ffi::Error::Success();
  return ToError(kOp, Status::FromCuda(cudaMemcpyAsync(call.d.untyped_data(), accumulator->untyped_data(),
                                                       call.d.size_bytes(), cudaMemcpyDeviceToDevice, stream),
                                       "Copying the accumulator"));
}

ffi::Error Initialize(int32_t device, ffi::AnyBuffer a, ffi::AnyBuffer b, S32Buffer group_sizes, S32Buffer group_offset,
                      ffi::RemainingArgs more, AnyResult d, AnyResult scratch, AnyResult workspace,
                      const GemmAttributes& attributes) try {
  const Call call{a, b, group_sizes, group_offset, more, *d, *scratch, *workspace};
  GemmProblem problem{};
  Groups groups{};
  GemmBuffers buffers{};
  JAX_GROUPED_RETURN_IF_ERROR(Decode(call, attributes, &problem, &groups, &buffers));
  return ToError(kOp, PrepareGemm(device, problem));
}
JAX_GROUPED_CATCH(kOp)

ffi::Error Execute(int32_t device, cudaStream_t stream, ffi::AnyBuffer a, ffi::AnyBuffer b, S32Buffer group_sizes,
                   S32Buffer group_offset, ffi::RemainingArgs more, AnyResult d, AnyResult scratch, AnyResult workspace,
                   const GemmAttributes& attributes) try {
  const Call call{a, b, group_sizes, group_offset, more, *d, *scratch, *workspace};
  GemmProblem problem{};
  Groups groups{};
  GemmBuffers buffers{};
  JAX_GROUPED_RETURN_IF_ERROR(Decode(call, attributes, &problem, &groups, &buffers));
  if (problem.accumulate) JAX_GROUPED_RETURN_IF_ERROR(LoadAccumulator(stream, call));
  return ToError(kOp, EnqueueGemm(device, stream, problem, groups, buffers));
}
JAX_GROUPED_CATCH(kOp)

// Binds the arguments that both stages take besides their contexts.
template <typename Binding>
auto BindCall(Binding binding) {
  return std::move(binding)
      .template Arg<ffi::AnyBuffer>()
      .template Arg<ffi::AnyBuffer>()
      .template Arg<S32Buffer>()
      .template Arg<S32Buffer>()
      .RemainingArgs()
      .template Ret<ffi::AnyBuffer>()
      .template Ret<ffi::AnyBuffer>()
      .template Ret<ffi::AnyBuffer>()
      .template Attrs<GemmAttributes>();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(GemmInitialize, Initialize,
                              BindCall(ffi::Ffi::BindInitialize().Ctx<ffi::DeviceOrdinal>()),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    GemmExecute, Execute, BindCall(ffi::Ffi::Bind().Ctx<ffi::DeviceOrdinal>().Ctx<ffi::PlatformStream<cudaStream_t>>()),
    {ffi::Traits::kCmdBufferCompatible});

}  // namespace jax_grouped
