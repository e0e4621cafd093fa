// Rows of pairs of a token and a choice, sorted by expert.

#ifndef JAX_GROUPED_CSRC_ROUTING_GROUP_PAIRS_H_
#define JAX_GROUPED_CSRC_ROUTING_GROUP_PAIRS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "csrc/common/status.h"
#include "csrc/routing/count_pairs.h"

namespace jax_grouped {

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

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_ROUTING_GROUP_PAIRS_H_
