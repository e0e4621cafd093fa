// The choice of each token's experts, from the router's logits.

#ifndef JAX_GROUPED_CSRC_ROUTING_ROUTE_H_
#define JAX_GROUPED_CSRC_ROUTING_ROUTE_H_

#include <cuda_runtime_api.h>
#include <library_types.h>

#include <cstdint>

#include "csrc/common/status.h"
#include "csrc/routing/blocks.h"

namespace jax_grouped {

// Function from the logits to the scores.
enum class Score : int32_t { kSoftmax, kSigmoid };

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
};

// Device memory. The arrays of a batch lie one after another; `blocks` is RoutingBlocks(tokens).
struct RouteBuffers {
  const void* logits;     // [tokens, num_experts], bfloat16, float16 or float32
  const float* bias;      // [num_experts], added to the scores for the choice only; or null
  int32_t* experts;       // [tokens, choices], best first; of equal ones, the lower index first
  float* weights;         // [tokens, choices]: the scores, divided by their sum with normalize_weights
  float* probabilities;   // [tokens, num_experts]: the softmax, or the sigmoids divided by their sum
  int32_t* block_counts;  // [blocks, num_experts]: the block's choices of each expert
  float* block_sums;      // [blocks, num_experts]: the block's probabilities, added up over its tokens
};

// Computes scores in float32 and chooses experts by score plus bias. Without a bias it compares logits in place of
// their sigmoids, which float32 may round to 0 or 1. A NaN counts as the lowest number. Infinities count as the largest
// finite numbers. A token uses the groups with the highest sums of their two highest scores, plus bias. Weights and
// probabilities are right also where sigmoids are too small for float32. A sum that is 0 divides nothing. No results
// depend on the order in which warps run.
Status LaunchRoute(cudaStream_t stream, const RouteBuffers& buffers, cudaDataType_t type, const RouteProblem& problem);

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_ROUTING_ROUTE_H_
