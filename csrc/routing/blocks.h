// The partition of tokens into blocks, for which routing has counts of its own, and what its kernels take.
//
// Every block that groups pairs reads the counts of all blocks. So their number has a bound, and that block reads at
// most kMostRoutingBlocks * kMostExperts counts, 256 KB, however many tokens there are.

#ifndef JAX_GROUPED_CSRC_ROUTING_BLOCKS_H_
#define JAX_GROUPED_CSRC_ROUTING_BLOCKS_H_

#include <cstdint>

#include "csrc/groups/layout.h"

namespace jax_grouped {

constexpr int kMostExperts = 512;
constexpr int kMostChoices = 32;       // of a token
constexpr int kMostExpertGroups = 32;  // of which a token may use some

// Most blocks of successive tokens, and fewest tokens in one. Hopper has up to 132 processors.
constexpr int64_t kMostRoutingBlocks = 128;
constexpr int64_t kLeastRoutingTokens = 32;

// Returns the number of tokens in each block but the last.
JAX_GROUPED_HOST_DEVICE constexpr int64_t TokensOfRoutingBlock(int64_t tokens) {
  const int64_t most = CeilDiv(tokens, kMostRoutingBlocks);
  return most < kLeastRoutingTokens ? kLeastRoutingTokens : most;
}

JAX_GROUPED_HOST_DEVICE constexpr int64_t RoutingBlocks(int64_t tokens) {
  return CeilDiv(tokens, TokensOfRoutingBlock(tokens));
}

// Pairs of a token and a choice, `token * choices + choice`, of one batch element or of a block of tokens.
struct PairRange {
  int64_t begin;
  int64_t end;
};

// Returns the pairs of a block's tokens.
JAX_GROUPED_HOST_DEVICE constexpr PairRange PairsOfRoutingBlock(int64_t block, int64_t tokens, int64_t choices) {
  const int64_t first = block * TokensOfRoutingBlock(tokens);
  const int64_t last = first + TokensOfRoutingBlock(tokens);
  return {first * choices, (last < tokens ? last : tokens) * choices};
}

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_ROUTING_BLOCKS_H_
