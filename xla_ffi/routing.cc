#include <cstdint>
#include <limits>
#include <string>

#include "csrc/routing/count_pairs.h"
#include "csrc/routing/group_pairs.h"
#include "csrc/routing/route.h"
#include "xla/ffi/api/ffi.h"
#include "xla_ffi/decode.h"
#include "xla_ffi/handlers.h"

namespace jax_grouped {
namespace {

// The static part of a choice of experts, apart from the shapes and types of its buffers.
struct RouteAttributes {
  int64_t batch;
  Score score;
  bool normalize_weights;
  int64_t expert_groups;
  int64_t top_groups;
};

}  // namespace
}  // namespace jax_grouped

XLA_FFI_REGISTER_ENUM_ATTR_DECODING(::jax_grouped::Score);
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jax_grouped::RouteAttributes, StructMember<int64_t>("batch"),
                                      StructMember<::jax_grouped::Score>("score"),
                                      StructMember<bool>("normalize_weights"), StructMember<int64_t>("expert_groups"),
                                      StructMember<int64_t>("top_groups"));

namespace jax_grouped {
namespace {

constexpr char kRoute[] = "jax_grouped_route";
constexpr char kGroupPairs[] = "jax_grouped_group_pairs";

// Pairs of one batch element, and twice as many indices, are counted in int32.
constexpr int64_t kMostPairs = int64_t{1} << 30;

template <typename Buffer>
ffi::Error CheckSize(const char* op, const char* argument, const Buffer& buffer, int64_t size) {
  return CheckEqual(op, std::string("the size of ") + argument, static_cast<int64_t>(buffer.element_count()), size);
}

ffi::Error CheckArray(const char* op, const char* argument, const ffi::AnyBuffer& array, ffi::DataType type,
                      int64_t size) {
  if (array.element_type() != type) {
    return Invalid(op, std::string(argument) + " must be " + (type == ffi::F32 ? "float32." : "int32."));
  }
  return CheckSize(op, argument, array, size);
}

// Fails unless the tokens are those of `batch` elements that one launch can hold.
ffi::Error CheckBatch(const char* op, int64_t batch, int64_t tokens) {
  // A launch counts blocks along its second axis with 16 bits.
  if (batch >= 1 && batch <= std::numeric_limits<uint16_t>::max() && tokens > 0 && tokens % batch == 0) {
    return ffi::Error::Success();
  }
  return Invalid(op, "batch must be from 1 to 65535 and divide the number of tokens, which must not be 0, got " +
                         std::to_string(batch) + " of " + std::to_string(tokens) + " tokens.");
}

ffi::Error CheckPairs(const char* op, int64_t pairs) {
  return CheckRange(op, "the number of pairs of a batch element", pairs, 1, kMostPairs);
}

ffi::Error CheckExpertGroups(const RouteAttributes& attributes, int64_t num_experts, int64_t choices) {
  JAX_GROUPED_RETURN_IF_ERROR(CheckRange(kRoute, "expert_groups", attributes.expert_groups, 1, kMostExpertGroups));
  if (num_experts % attributes.expert_groups != 0) {
    return Invalid(kRoute, "expert_groups must divide the number of experts, got " +
                               std::to_string(attributes.expert_groups) + " of " + std::to_string(num_experts) + ".");
  }
  JAX_GROUPED_RETURN_IF_ERROR(CheckRange(kRoute, "top_groups", attributes.top_groups, 1, attributes.expert_groups));
  const int64_t usable = num_experts / attributes.expert_groups * attributes.top_groups;
  return CheckRange(kRoute, "experts's shape[1]", choices, 1, usable < kMostChoices ? usable : kMostChoices);
}

ffi::Error Route(cudaStream_t stream, ffi::AnyBuffer logits, ffi::RemainingArgs bias, ffi::Result<S32Buffer> experts,
                 ffi::Result<F32Buffer> weights, ffi::Result<F32Buffer> probabilities,
                 ffi::Result<S32Buffer> block_counts, ffi::Result<F32Buffer> block_sums,
                 RouteAttributes attributes) try {
  const auto type = FloatType(logits.element_type());
  if (!type) return Invalid(kRoute, "logits must be bfloat16, float16 or float32.");
  JAX_GROUPED_RETURN_IF_ERROR(CheckRank(kRoute, "logits", logits, 2));
  JAX_GROUPED_RETURN_IF_ERROR(CheckRank(kRoute, "experts", *experts, 2));
  const int64_t all_tokens = logits.dimensions()[0];
  const int64_t num_experts = logits.dimensions()[1];
  const int64_t choices = experts->dimensions()[1];
  const auto score = static_cast<int32_t>(attributes.score);
  if (score < 0 || score > static_cast<int32_t>(Score::kSigmoid)) {
    return Invalid(kRoute, "score must be 0 (softmax) or 1 (sigmoid), got " + std::to_string(score) + ".");
  }
  JAX_GROUPED_RETURN_IF_ERROR(CheckBatch(kRoute, attributes.batch, all_tokens));
  JAX_GROUPED_RETURN_IF_ERROR(CheckRange(kRoute, "logits's shape[1]", num_experts, 1, kMostExperts));
  JAX_GROUPED_RETURN_IF_ERROR(CheckExpertGroups(attributes, num_experts, choices));
  const int64_t tokens = all_tokens / attributes.batch;
  JAX_GROUPED_RETURN_IF_ERROR(CheckPairs(kRoute, tokens * choices));
  const int64_t of_blocks = attributes.batch * RoutingBlocks(tokens) * num_experts;
  JAX_GROUPED_RETURN_IF_ERROR(CheckSize(kRoute, "experts", *experts, all_tokens * choices));
  JAX_GROUPED_RETURN_IF_ERROR(CheckSize(kRoute, "weights", *weights, all_tokens * choices));
  JAX_GROUPED_RETURN_IF_ERROR(CheckSize(kRoute, "probabilities", *probabilities, all_tokens * num_experts));
  JAX_GROUPED_RETURN_IF_ERROR(CheckSize(kRoute, "block_counts", *block_counts, of_blocks));
  JAX_GROUPED_RETURN_IF_ERROR(CheckSize(kRoute, "block_sums", *block_sums, of_blocks));
  JAX_GROUPED_RETURN_IF_ERROR(CheckAlignment(kRoute, "logits", logits.untyped_data()));
  JAX_GROUPED_RETURN_IF_ERROR(CheckAlignment(kRoute, "probabilities", probabilities->untyped_data()));
  RouteBuffers buffers{};
  if (bias.size() > 1) {
    return Invalid(
        kRoute, "there must be at most one operand after logits, the bias, got " + std::to_string(bias.size()) + ".");
  }
  if (bias.size() == 1) {
    JAX_GROUPED_ASSIGN_OR_RETURN(given, bias.get<ffi::AnyBuffer>(0));
    JAX_GROUPED_RETURN_IF_ERROR(CheckArray(kRoute, "the bias", *given, ffi::F32, attributes.batch * num_experts));
    JAX_GROUPED_RETURN_IF_ERROR(CheckAlignment(kRoute, "the bias", given->untyped_data()));
    buffers.bias = static_cast<const float*>(given->untyped_data());
  }
  buffers.logits = logits.untyped_data();
  buffers.experts = experts->typed_data();
  buffers.weights = weights->typed_data();
  buffers.probabilities = probabilities->typed_data();
  buffers.block_counts = block_counts->typed_data();
  buffers.block_sums = block_sums->typed_data();
  RouteProblem problem{};
  problem.tokens = tokens;
  problem.num_experts = static_cast<int>(num_experts);
  problem.choices = static_cast<int>(choices);
  problem.batch = static_cast<int>(attributes.batch);
  problem.score = attributes.score;
  problem.normalize_weights = attributes.normalize_weights;
  problem.expert_groups = static_cast<int>(attributes.expert_groups);
  problem.top_groups = static_cast<int>(attributes.top_groups);
  return ToError(kRoute, LaunchRoute(stream, buffers, *type, problem));
}
JAX_GROUPED_CATCH(kRoute)

ffi::Error GroupPairs(cudaStream_t stream, S32Buffer experts, ffi::RemainingArgs of_blocks,
                      ffi::Result<S32Buffer> order, ffi::Result<S32Buffer> inverse, ffi::Result<S32Buffer> group_sizes,
                      ffi::Result<S32Buffer> dropped, ffi::Result<S32Buffer> expert_load, AnyResult last,
                      int64_t batch) try {
  JAX_GROUPED_RETURN_IF_ERROR(CheckRank(kGroupPairs, "experts", experts, 2));
  const int64_t all_tokens = experts.dimensions()[0];
  const int64_t choices = experts.dimensions()[1];
  JAX_GROUPED_RETURN_IF_ERROR(CheckBatch(kGroupPairs, batch, all_tokens));
  const int64_t tokens = all_tokens / batch;
  JAX_GROUPED_RETURN_IF_ERROR(CheckPairs(kGroupPairs, tokens * choices));
  const auto num_experts = static_cast<int64_t>(group_sizes->element_count()) / batch;
  const auto rows = static_cast<int64_t>(order->element_count()) / batch;
  JAX_GROUPED_RETURN_IF_ERROR(CheckRange(kGroupPairs, "the number of experts", num_experts, 1, kMostExperts));
  JAX_GROUPED_RETURN_IF_ERROR(CheckRange(kGroupPairs, "the number of rows", rows, 0, tokens * choices));
  JAX_GROUPED_RETURN_IF_ERROR(CheckSize(kGroupPairs, "order", *order, batch * rows));
  JAX_GROUPED_RETURN_IF_ERROR(CheckSize(kGroupPairs, "inverse", *inverse, all_tokens * choices));
  JAX_GROUPED_RETURN_IF_ERROR(CheckSize(kGroupPairs, "group_sizes", *group_sizes, batch * num_experts));
  JAX_GROUPED_RETURN_IF_ERROR(CheckSize(kGroupPairs, "dropped", *dropped, batch));
  JAX_GROUPED_RETURN_IF_ERROR(CheckSize(kGroupPairs, "expert_load", *expert_load, batch * num_experts));
  GroupPairsBuffers buffers{};
  buffers.experts = experts.typed_data();
  buffers.order = order->typed_data();
  buffers.inverse = inverse->typed_data();
  buffers.group_sizes = group_sizes->typed_data();
  buffers.dropped = dropped->typed_data();
  buffers.expert_load = expert_load->typed_data();
  PairsProblem problem{};
  problem.tokens = tokens;
  problem.choices = choices;
  problem.rows = rows;
  problem.num_experts = static_cast<int>(num_experts);
  problem.batch = static_cast<int>(batch);
  const int64_t of_all_blocks = batch * RoutingBlocks(tokens) * num_experts;
  if (of_blocks.size() == 0) {
    JAX_GROUPED_RETURN_IF_ERROR(CheckArray(kGroupPairs, "block_counts", *last, ffi::S32, of_all_blocks));
    auto* counts = static_cast<int32_t*>(last->untyped_data());
    JAX_GROUPED_RETURN_IF_ERROR(ToError(kGroupPairs, LaunchCountPairs(stream, buffers.experts, problem, counts)));
    buffers.block_counts = counts;
  } else {
    if (of_blocks.size() != 2) {
      return Invalid(kGroupPairs, "block_counts and block_sums must be given together, got " +
                                      std::to_string(of_blocks.size()) + " of the two.");
    }
    JAX_GROUPED_ASSIGN_OR_RETURN(counts, of_blocks.get<ffi::AnyBuffer>(0));
    JAX_GROUPED_ASSIGN_OR_RETURN(block_sums, of_blocks.get<ffi::AnyBuffer>(1));
    JAX_GROUPED_RETURN_IF_ERROR(CheckArray(kGroupPairs, "block_counts", *counts, ffi::S32, of_all_blocks));
    JAX_GROUPED_RETURN_IF_ERROR(CheckArray(kGroupPairs, "block_sums", *block_sums, ffi::F32, of_all_blocks));
    JAX_GROUPED_RETURN_IF_ERROR(CheckArray(kGroupPairs, "sums", *last, ffi::F32, batch * num_experts));
    buffers.block_counts = static_cast<const int32_t*>(counts->untyped_data());
    buffers.block_sums = static_cast<const float*>(block_sums->untyped_data());
    buffers.sums = static_cast<float*>(last->untyped_data());
  }
  return ToError(kGroupPairs, LaunchGroupPairs(stream, buffers, problem));
}
JAX_GROUPED_CATCH(kGroupPairs)

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(RouteExecute, Route,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<S32Buffer>()
                                  .Ret<F32Buffer>()
                                  .Ret<F32Buffer>()
                                  .Ret<S32Buffer>()
                                  .Ret<F32Buffer>()
                                  .Attrs<RouteAttributes>(),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(GroupPairsExecute, GroupPairs,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<S32Buffer>()
                                  .RemainingArgs()
                                  .Ret<S32Buffer>()
                                  .Ret<S32Buffer>()
                                  .Ret<S32Buffer>()
                                  .Ret<S32Buffer>()
                                  .Ret<S32Buffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("batch"),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jax_grouped
