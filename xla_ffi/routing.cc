#include <algorithm>
#include <cstdint>
#include <limits>

#include "csrc/routing/routing.h"
#include "xla_ffi/decode.h"
#include "xla_ffi/handlers.h"

namespace jax_grouped {
namespace {

// The static part of a choice of experts, apart from the shapes and types of its arrays.
struct RouteAttributes {
  int64_t batch;
  Score score;
  bool normalize_weights;
  int64_t expert_groups;
  int64_t top_groups;
  GroupScore group_score;
  bool has_bias;
  bool has_choice;
};
struct GroupPairsAttributes {
  int64_t batch;
};

// Pairs of one batch element, and twice as many indices, are counted in int32.
constexpr int64_t kMostPairs = int64_t{1} << 30;

// Returns the tokens of one batch element. Fails unless one launch can hold the elements and their pairs.
int64_t TakeElementTokens(Call& call, int64_t batch, int64_t tokens, int64_t choices) {
  // A launch counts blocks along its second axis with 16 bits.
  call.CheckRange("batch", batch, 1, std::numeric_limits<uint16_t>::max());
  if (!call.ok()) return 1;
  call.Check(tokens % batch == 0, "batch must divide the number of tokens");
  call.CheckRange("the number of pairs of a batch element", tokens / batch * choices, 1, kMostPairs);
  return std::max<int64_t>(tokens / batch, 1);
}

ffi::Error Route(Call& call, const RouteAttributes& attributes) {
  const Array logits = call.Operand("logits");
  const Array experts = call.Result("experts");
  const Array weights = call.Result("weights");
  const Array probabilities = call.Result("probabilities");
  const Array block_counts = call.Result("block_counts");
  const Array block_sums = call.Result("block_sums");
  const cudaDataType_t type = call.TakeFloatType(logits);
  const int64_t num_experts = logits.Axis(1);
  const int64_t choices = experts.Axis(1);
  call.CheckRank(logits, 2);
  call.CheckRange("score", static_cast<int64_t>(attributes.score), 0, static_cast<int64_t>(Score::kSqrtSoftplus));
  call.CheckRange("group_score", static_cast<int64_t>(attributes.group_score), 0,
                  static_cast<int64_t>(GroupScore::kMax));
  call.CheckRange("the number of experts", num_experts, 1, kMostExperts);
  call.CheckRange("expert_groups", attributes.expert_groups, 1, kMostExpertGroups);
  call.CheckRange("top_groups", attributes.top_groups, 1, attributes.expert_groups);
  const int64_t tokens = TakeElementTokens(call, attributes.batch, logits.Axis(0), choices);
  if (!call.ok()) return call.Error();
  call.Check(num_experts % attributes.expert_groups == 0, "expert_groups must divide the number of experts");
  call.CheckRange("the number of choices", choices, 1,
                  std::min<int64_t>(num_experts / attributes.expert_groups * attributes.top_groups, kMostChoices));
  const int64_t block_entries = attributes.batch * RoutingBlocks(tokens) * num_experts;
  call.CheckArray(experts, ffi::S32, {logits.Axis(0), choices});
  call.CheckArray(weights, ffi::F32, logits.Axis(0) * choices);
  call.CheckArray(probabilities, ffi::F32, logits.Axis(0) * num_experts);
  call.CheckArray(block_counts, ffi::S32, block_entries);
  call.CheckArray(block_sums, ffi::F32, block_entries);
  const Array bias = attributes.has_bias ? call.Operand("the bias") : Array{};
  const Array choice = attributes.has_choice ? call.Operand("the choice") : Array{};
  if (attributes.has_bias) call.CheckArray(bias, ffi::F32, attributes.batch * num_experts);
  if (attributes.has_choice) call.CheckArray(choice, ffi::S32, {logits.Axis(0), choices});
  call.CheckAligned({logits, probabilities, bias});
  if (!call.Finish()) return call.Error();
  const RouteBuffers buffers{
      logits.Data(),         bias.Data<float>(),          choice.Data<int32_t>(),       experts.Data<int32_t>(),
      weights.Data<float>(), probabilities.Data<float>(), block_counts.Data<int32_t>(), block_sums.Data<float>()};
  const RouteProblem problem{tokens,
                             static_cast<int>(num_experts),
                             static_cast<int>(choices),
                             static_cast<int>(attributes.batch),
                             attributes.score,
                             attributes.normalize_weights,
                             static_cast<int>(attributes.expert_groups),
                             static_cast<int>(attributes.top_groups),
                             attributes.group_score};
  return call.ToError(LaunchRoute(call.stream, buffers, type, problem));
}

ffi::Error GroupPairs(Call& call, const GroupPairsAttributes& attributes) {
  const int64_t batch = attributes.batch;
  const Array experts = call.Operand("experts");
  const Array order = call.Result("order");
  const Array inverse = call.Result("inverse");
  const Array group_sizes = call.Result("group_sizes");
  const Array dropped = call.Result("dropped");
  const Array expert_load = call.Result("expert_load");
  const Array last = call.Result("the last result");
  const int64_t choices = experts.Axis(1);
  call.CheckArray(experts, ffi::S32, {experts.Axis(0), choices});
  const int64_t tokens = TakeElementTokens(call, batch, experts.Axis(0), choices);
  if (!call.ok()) return call.Error();
  const int64_t num_experts = group_sizes.Elements() / batch;
  const int64_t rows = order.Elements() / batch;
  call.CheckRange("the number of experts", num_experts, 1, kMostExperts);
  call.CheckRange("the number of rows", rows, 0, tokens * choices);
  call.CheckArray(order, ffi::S32, batch * rows);
  call.CheckArray(inverse, ffi::S32, batch * tokens * choices);
  call.CheckArray(group_sizes, ffi::S32, batch * num_experts);
  call.CheckArray(dropped, ffi::S32, batch);
  call.CheckArray(expert_load, ffi::S32, batch * num_experts);
  GroupPairsBuffers buffers{};
  const int64_t block_entries = batch * RoutingBlocks(tokens) * num_experts;
  const bool counts = call.OperandsLeft() == 0;
  const Array block_counts = counts ? last : call.Operand("block_counts");
  call.CheckArray(block_counts, ffi::S32, block_entries);
  if (!counts) {
    const Array block_sums = call.Operand("block_sums");
    call.CheckArray(block_sums, ffi::F32, block_entries);
    call.CheckArray(last, ffi::F32, batch * num_experts);
    buffers.block_sums = block_sums.Data<float>();
    buffers.sums = last.Data<float>();
  }
  if (!call.Finish()) return call.Error();
  buffers.experts = experts.Data<int32_t>();
  buffers.block_counts = block_counts.Data<int32_t>();
  buffers.order = order.Data<int32_t>();
  buffers.inverse = inverse.Data<int32_t>();
  buffers.group_sizes = group_sizes.Data<int32_t>();
  buffers.dropped = dropped.Data<int32_t>();
  buffers.expert_load = expert_load.Data<int32_t>();
  const PairsProblem problem{tokens, choices, rows, static_cast<int>(num_experts), static_cast<int>(batch)};
  if (counts) {
    const Status counted = LaunchCountPairs(call.stream, buffers.experts, problem, last.Data<int32_t>());
    if (!counted.ok()) return call.ToError(counted);
  }
  return call.ToError(LaunchGroupPairs(call.stream, buffers, problem));
}

}  // namespace
}  // namespace jax_grouped

XLA_FFI_REGISTER_ENUM_ATTR_DECODING(::jax_grouped::Score);
XLA_FFI_REGISTER_ENUM_ATTR_DECODING(::jax_grouped::GroupScore);
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jax_grouped::RouteAttributes, StructMember<int64_t>("batch"),
                                      StructMember<::jax_grouped::Score>("score"),
                                      StructMember<bool>("normalize_weights"), StructMember<int64_t>("expert_groups"),
                                      StructMember<int64_t>("top_groups"),
                                      StructMember<::jax_grouped::GroupScore>("group_score"),
                                      StructMember<bool>("has_bias"), StructMember<bool>("has_choice"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jax_grouped::GroupPairsAttributes, StructMember<int64_t>("batch"));

namespace jax_grouped {

JAX_GROUPED_DEFINE_EXECUTE(RouteExecute, "jax_grouped_route", Route, RouteAttributes);
JAX_GROUPED_DEFINE_EXECUTE(GroupPairsExecute, "jax_grouped_group_pairs", GroupPairs, GroupPairsAttributes);

}  // namespace jax_grouped
