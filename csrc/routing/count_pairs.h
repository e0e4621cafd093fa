// Counts of pairs by expert, for each block of tokens.

#ifndef JAX_GROUPED_CSRC_ROUTING_COUNT_PAIRS_H_
#define JAX_GROUPED_CSRC_ROUTING_COUNT_PAIRS_H_

#include <cuda_runtime_api.h>

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

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_ROUTING_COUNT_PAIRS_H_
