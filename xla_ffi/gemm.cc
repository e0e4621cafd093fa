#include "csrc/gemm/gemm.h"

#include <algorithm>
#include <cstdint>

#include "csrc/gemm/scratch.h"
#include "xla_ffi/decode.h"
#include "xla_ffi/handlers.h"

namespace jax_grouped {
namespace {

// The static part of a call, apart from the shapes and types of its arrays.
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
  bool batch_invariant;     // except for wgrad
  bool swiglu;              // results for the activation follow the result
  bool keeps_product;       // with swiglu
  bool pow2_scales;         // of the activation
  float amax_epsilon;
};

// A call's problem and memory.
struct Gemm {
  GemmProblem problem{};
  Groups groups{};
  GemmBuffers buffers{};
  Array d;
  Array accumulator;  // if the product is added to one
};

void DecodeTypes(Call& call, const Array& a, const Array& b, const Array& d, GemmProblem* problem) {
  problem->result_type = call.TakeFloatType(d);
  if (problem->scaled) {
    problem->a_type = call.TakeFp8Type(a);
    problem->b_type = call.TakeFp8Type(b);
    call.Check(problem->a_type == CUDA_R_8F_E4M3 || problem->b_type == CUDA_R_8F_E4M3,
               "a and b must not both be float8_e5m2");
    const bool same = problem->a_mode == problem->b_mode &&
                      (problem->a_mode == ScalingMode::kTensor || problem->a_mode == ScalingMode::kMx);
    const auto block = problem->product == Product::kWgrad ? ScalingMode::kBlock1D : ScalingMode::kBlock2D;
    call.Check(same || (problem->a_mode == ScalingMode::kBlock1D && problem->b_mode == block),
               "this product has no operands of these scaling modes");
    return;
  }
  problem->a_type = problem->b_type = call.Take16BitType(a);
  call.Check(a.Type() == b.Type(), "a and b must have one type");
  call.Check(d.Type() == a.Type() || problem->result_type == CUDA_R_32F,
             "the result must have the type of a and b, or be float32");
}

// Decodes the sizes from the weights (the result of wgrad) and the tokens, and checks the other shapes.
void DecodeSizes(Call& call, const GemmAttributes& attributes, int64_t batch, const Array& a, const Array& b,
                 const Array& d, GemmProblem* problem) {
  const bool is_wgrad = problem->product == Product::kWgrad;
  const Array& weights = is_wgrad ? d : b;
  const Array& tokens = is_wgrad ? b : d;
  const int64_t own = attributes.weight_batch;
  call.CheckRank(weights, 3);
  call.CheckRange("weight_batch", own, 1, std::max<int64_t>(batch, 1));
  call.CheckElementRange("tokens", attributes.tokens, batch);
  call.CheckElementRange("expected_tokens", attributes.expected_tokens, 1);
  if (!call.ok()) return;
  // Each of the weights serves the same number of successive elements.
  call.Check(batch % own == 0 && weights.Axis(0) % own == 0 && (!is_wgrad || own == batch),
             "weight_batch must divide the batch and the number of weights, and be the batch for wgrad");
  call.CheckElementRange("the number of groups", weights.Axis(0) / own, batch);
  problem->num_groups = weights.Axis(0) / own * batch;
  problem->elements_per_weight = static_cast<int32_t>(batch / own);
  const Array& rows = problem->gathered == Gather::kA ? tokens : a;
  problem->tokens = problem->scaled ? attributes.tokens * batch : rows.Axis(0);
  const int64_t expected = attributes.expected_tokens * batch;
  problem->expected_tokens = expected == 0 ? problem->tokens : std::min(expected, problem->tokens);
  // Columnwise weights are stored transposed.
  const bool transposed = problem->scaled && problem->product == Product::kFprop;
  problem->in_features = weights.Axis(transposed ? 2 : 1);
  problem->out_features = weights.Axis(transposed ? 1 : 2);
  for (const int64_t features : {problem->in_features, problem->out_features}) {
    call.CheckFeatures(features, problem->scaled ? kFp8Alignment : kFeatureAlignment);
  }
  if (problem->gathered != Gather::kNone) {
    problem->gathered_from = (problem->gathered == Gather::kA ? a : b).Axis(0);
    call.CheckRange("the number of rows to gather from", problem->gathered_from, 1, kMostInt32);
  }
  if (problem->gathered != Gather::kNone || problem->swiglu) {
    // The kernels keep maps of the groups in the workspace.
    call.CheckRange("the number of groups", problem->num_groups, 1, kMostGatheredGroups);
  }
  // The shapes of columnwise tokens, as in a scaled wgrad, hold no sizes.
  if (is_wgrad && problem->scaled) return;
  const bool is_dgrad = problem->product == Product::kDgrad;
  call.CheckArray(a, a.Type(), {a.Axis(0), is_dgrad ? problem->out_features : problem->in_features});
  call.CheckArray(tokens, tokens.Type(),
                  {problem->gathered == Gather::kB ? tokens.Axis(0) : problem->tokens,
                   is_dgrad ? problem->in_features : problem->out_features});
}

Gemm Decode(Call& call, const GemmAttributes& attributes) {
  const Array a = call.Operand("a");
  const Array b = call.Operand("b");
  const Array sizes = call.Operand("group_sizes");
  const Array offset = call.Operand("group_offset");
  Gemm gemm;
  GemmProblem& problem = gemm.problem;
  GemmBuffers& buffers = gemm.buffers;
  gemm.d = call.Result("the result");
  const Array data = attributes.swiglu ? call.Result("the activation's data") : Array();
  const Array scale = attributes.swiglu && attributes.scaled ? call.Result("the activation's scales") : Array();
  const Array scratch = call.Result("scratch");
  const Array workspace = call.Result("workspace");
  problem.product = attributes.product;
  problem.scaled = attributes.scaled;
  problem.accumulate = attributes.accumulate;
  problem.gathered = attributes.gathered;
  problem.swiglu = attributes.swiglu;
  problem.batch_invariant = attributes.batch_invariant && attributes.product != Product::kWgrad;
  problem.a_mode = problem.scaled ? attributes.a_mode : ScalingMode{};
  problem.b_mode = problem.scaled ? attributes.b_mode : ScalingMode{};
  const bool is_wgrad = problem.product == Product::kWgrad;
  const bool gathers = problem.gathered != Gather::kNone;
  call.CheckRange("product", static_cast<int64_t>(problem.product), 0, static_cast<int64_t>(Product::kWgrad));
  call.CheckRange("gathered", static_cast<int64_t>(problem.gathered), 0,
                  static_cast<int64_t>(is_wgrad ? Gather::kB : Gather::kA));
  call.Check(!gathers || !problem.accumulate, "rows are gathered without an accumulator only");
  call.Check(!gathers || !problem.scaled || (!is_wgrad && problem.a_mode == ScalingMode::kBlock1D),
             "of scaled operands, rows are gathered for a, in blocks of 1x128, only");
  DecodeTypes(call, a, b, gemm.d, &problem);
  DecodeSizes(call, attributes, offset.Elements(), a, b, gemm.d, &problem);
  const Groups& groups = gemm.groups = call.TakeGroups(sizes, offset, problem.num_groups, problem.tokens);
  if (!call.ok()) return gemm;
  if (problem.scaled) {
    const Array a_scale = call.Operand("a_scale");
    const Array b_scale = call.Operand("b_scale");
    const QuantizedLayout b_layout = LayoutOfB(problem, groups);
    QuantizedLayout a_layout = LayoutOfA(problem, groups);
    if (gathers) {  // It is quantized as a single group.
      a_layout.batch = a_layout.num_groups = 1;
      a_layout.tokens = problem.gathered_from;
    }
    if (gathers || problem.swiglu) {
      // The copy engine (TMA) counts rows of all weights with 32 bits.
      call.CheckRange("the features of all weights", NumWeights(problem) * ResultFeatures(problem), 1, kMostInt32);
    }
    call.CheckQuantized(a_layout, a, a_scale);
    call.CheckQuantized(b_layout, b, b_scale);
    buffers.a_scale = a_scale.Data();
    buffers.b_scale = b_scale.Data();
    if (!is_wgrad) buffers.weight_scales = b_layout.ScaleElements() / NumWeights(problem);
  }
  if (problem.swiglu) {
    const bool in_blocks = problem.scaled && problem.a_mode == ScalingMode::kBlock1D;
    call.Check(problem.product == Product::kFprop && (in_blocks || gathers),
               "swiglu is for fprop of gathered tokens or of block-scaled operands");
    call.Check(problem.result_type != CUDA_R_32F, "the result must have 16 bits with swiglu");
    call.Check(problem.out_features % (2 * kBlock) == 0, "half of the features must be a multiple of 128 with swiglu");
    if (in_blocks) {
      call.Check(problem.a_type == CUDA_R_8F_E4M3 && problem.b_type == CUDA_R_8F_E4M3,
                 "a and b must be float8_e4m3fn with swiglu");
      call.Check(data.Type() == ffi::F8E4M3FN, "the activation's data must be float8_e4m3fn");
      QuantizedLayout layout = LayoutOfA(problem, groups);
      layout.features = problem.out_features / 2;
      call.CheckQuantized(layout, data, scale);
      buffers.swiglu.scale = scale.Data<float>();
    } else {
      call.CheckArray(data, gemm.d.Type(), {problem.tokens, problem.out_features / 2});
      call.CheckAligned({data});
    }
    buffers.swiglu.data = data.Data<uint8_t>();
    buffers.swiglu.scale_rule = {attributes.pow2_scales, attributes.amax_epsilon};
    buffers.swiglu.keeps_product = attributes.keeps_product;
  }
  if (gathers) {
    const Array indices = call.Operand("row_indices");
    call.CheckArray(indices, ffi::S32, problem.tokens);
    buffers.row_indices = indices.Data<int32_t>();
  }
  if (problem.accumulate) {
    gemm.accumulator = call.Operand("the accumulator");
    call.CheckArray(gemm.accumulator, gemm.d.Type(), gemm.d.Elements());
  }
  call.CheckRoom(scratch, ffi::U8, static_cast<int64_t>(GemmScratch::Bytes(groups.batch, groups.num_groups)));
  call.CheckRoom(workspace, ffi::U8, static_cast<int64_t>(kWorkspaceBytes));
  call.CheckAligned({a, b, gemm.d, scratch});
  call.CheckAligned({workspace}, kWorkspaceAlignmentBytes);
  buffers.a = a.Data();
  buffers.b = b.Data();
  buffers.d = gemm.d.Data();
  buffers.zero_other_rows = attributes.zero_other_rows;
  buffers.scratch = scratch.Data();
  buffers.workspace = workspace.Data();
  return gemm;
}

ffi::Error Initialize(Call& call, const GemmAttributes& attributes) {
  const Gemm gemm = Decode(call, attributes);
  return call.Finish() ? call.ToError(PrepareGemm(call.device, gemm.problem)) : call.Error();
}

ffi::Error Execute(Call& call, const GemmAttributes& attributes) {
  const Gemm gemm = Decode(call, attributes);
  if (!call.Finish()) return call.Error();
  if (gemm.problem.accumulate) {
    const ffi::Error copied = call.Copy(gemm.accumulator, gemm.d);
    if (copied.failure()) return copied;
  }
  return call.ToError(EnqueueGemm(call.device, call.stream, gemm.problem, gemm.groups, gemm.buffers));
}

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
                                      StructMember<bool>("zero_other_rows"), StructMember<bool>("batch_invariant"),
                                      StructMember<bool>("swiglu"), StructMember<bool>("keeps_product"),
                                      StructMember<bool>("pow2_scales"), StructMember<float>("amax_epsilon"));

namespace jax_grouped {

constexpr char kOp[] = "jax_grouped_gemm";

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    GemmInitialize,
    [](int32_t device, ffi::RemainingArgs operands, ffi::RemainingRets results, const GemmAttributes& attributes) {
      return RunHandler(Initialize, kOp, nullptr, device, operands, results, attributes);
    },
    ffi::Ffi::BindInitialize().Ctx<ffi::DeviceOrdinal>().RemainingArgs().RemainingRets().Attrs<GemmAttributes>(),
    {ffi::Traits::kCmdBufferCompatible});
JAX_GROUPED_DEFINE_EXECUTE(GemmExecute, kOp, Execute, GemmAttributes);

}  // namespace jax_grouped
