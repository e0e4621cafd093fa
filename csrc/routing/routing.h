// Routing of tokens: the choice of experts from the router's logits, counts of pairs of a token and a choice by expert
// for each block of tokens, and the rows of the pairs, sorted by expert.

#ifndef JAX_GROUPED_CSRC_ROUTING_ROUTING_H_
#define JAX_GROUPED_CSRC_ROUTING_ROUTING_H_

#include <cuda_runtime_api.h>
#include <library_types.h>

#include <cstdint>

#include "csrc/common/status.h"
#include "csrc/routing/blocks.h"

namespace jax_grouped {

// Sizes of one batch element.
struct PairsProblem {
  int64_t tokens;
  int64_t choices;  // of a token
  int64_t rows;     // at most the number of pairs
  int num_experts;  // at most kMostExperts
  int batch;
};

// Counts the choices `experts` [batch, tokens, choices] of each expert in each block of tokens: `block_counts` is
// [batch, RoutingBlocks(tokens), num_experts]. Choices outside of [0, num_experts) are not counted.
Status LaunchCountPairs(cudaStream_t stream, const int32_t* experts, const PairsProblem& problem,
                        int32_t* block_counts);

// Device memory. The arrays of a batch lie one after another; `blocks` is RoutingBlocks(tokens), and `pairs` the number
// of pairs.
struct GroupPairsBuffers {
  const int32_t* experts;       // [tokens, choices], any values
  const int32_t* block_counts;  // [blocks, num_experts]: the block's choices of each expert
  const float* block_sums;      // [blocks, num_experts]; or null
  int32_t* order;               // [rows]: the pair of each row, and `pairs` in the tail
  int32_t* inverse;             // [tokens, choices]: the row of each pair, and `rows` for one without a row
  int32_t* group_sizes;         // [num_experts]: rows of each expert
  int32_t* dropped;             // [1]: the number of pairs without a row
  int32_t* expert_load;         // [num_experts]: pairs of each expert, with those that have no row
  float* sums;                  // [num_experts]: the block_sums of all blocks, added up in a fixed order; or null
};

// Gives the pairs rows in the order of their experts, and of the pairs within an expert. Pairs of experts outside of
// [0, num_experts) get none. If the others are more than the rows, the longest groups are cut to one length, the
// greatest at which all groups fit, and lose pairs at equal distances. Counts that are not those of `experts` give
// wrong rows, but no access outside of the arrays.
Status LaunchGroupPairs(cudaStream_t stream, const GroupPairsBuffers& buffers, const PairsProblem& problem);

// Function from the logits to the scores.
enum class Score : int32_t { kSoftmax, kSigmoid, kSqrtSoftplus };

// Number by which groups of experts are chosen: the sum of a group's two highest scores, or its highest.
enum class GroupScore : int32_t { kTop2Sum, kMax };

// The sizes are those of one batch element.
struct RouteProblem {
  int64_t tokens;
  int num_experts;  // at most kMostExperts
  int choices;      // of a token; at most kMostChoices, and at most the experts of top_groups groups
  int batch;
  Score score;
  bool normalize_weights;
  int expert_groups;  // groups of successive experts, a divisor of num_experts; at most kMostExpertGroups
  int top_groups;     // groups that a token may use
  GroupScore group_score;
};

// Device memory. The arrays of a batch lie one after another; `blocks` is RoutingBlocks(tokens).
struct RouteBuffers {
  const void* logits;     // [tokens, num_experts], bfloat16, float16 or float32
  const float* bias;      // [num_experts], added to the scores for the choice only; or null
  const int32_t* choice;  // [tokens, choices], the experts, any values; or null
  int32_t* experts;       // [tokens, choices], best first; of equal ones, the lower index first
  float* weights;         // [tokens, choices]: the scores, divided by their sum with normalize_weights
  float* probabilities;   // [tokens, num_experts]: the softmax, or the scores divided by their sum
  int32_t* block_counts;  // [blocks, num_experts]: the block's choices of each expert
  float* block_sums;      // [blocks, num_experts]: the block's probabilities, added up over its tokens
};

// Computes scores in float32 and chooses experts by score plus bias, or takes the given choice, in which an expert
// outside of [0, num_experts) gets weight 0 and is not counted. Without a bias it compares logits in place of scores
// other than softmax, as float32 may round sigmoids to 0 or 1. A NaN counts as the lowest number. Infinities count as
// the largest finite numbers. A token uses the groups with the highest group scores, of scores plus bias. Weights and
// probabilities are right also where scores are too small for float32. A sum that is 0 divides nothing. No results
// depend on the order in which warps run.
Status LaunchRoute(cudaStream_t stream, const RouteBuffers& buffers, cudaDataType_t type, const RouteProblem& problem);

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_ROUTING_ROUTING_H_
