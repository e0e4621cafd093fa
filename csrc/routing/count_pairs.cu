#include "csrc/routing/count_pairs.h"

#include <cstdint>

#include "csrc/common/launch.cuh"

namespace jax_grouped {
namespace {

constexpr int kThreads = 1024;

// blockIdx.x is the block of tokens, and blockIdx.y the batch element.
__global__ void __launch_bounds__(kThreads)
    CountPairs(const int32_t* __restrict__ experts, PairsProblem problem, int32_t* __restrict__ block_counts) {
  __shared__ int32_t counts[kMostExperts];
  for (int expert = threadIdx.x; expert < problem.num_experts; expert += kThreads) counts[expert] = 0;
  __syncthreads();
  const int64_t before_element = blockIdx.y * problem.tokens * problem.choices;
  const PairRange pairs = PairsOfRoutingBlock(blockIdx.x, problem.tokens, problem.choices);
#pragma unroll 4
  for (int64_t pair = pairs.begin + threadIdx.x; pair < pairs.end; pair += kThreads) {
    const int32_t expert = experts[before_element + pair];
    if (static_cast<uint32_t>(expert) < static_cast<uint32_t>(problem.num_experts)) atomicAdd(&counts[expert], 1);
  }
  __syncthreads();
  const int64_t row = (static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x) * problem.num_experts;
  for (int expert = threadIdx.x; expert < problem.num_experts; expert += kThreads) {
    block_counts[row + expert] = counts[expert];
  }
}

}  // namespace

Status LaunchCountPairs(cudaStream_t stream, const int32_t* experts, const PairsProblem& problem,
                        int32_t* block_counts) {
  const dim3 blocks(static_cast<unsigned>(RoutingBlocks(problem.tokens)), static_cast<unsigned>(problem.batch));
  return Launch("Launching the counts of pairs", stream, {blocks, kThreads}, CountPairs, experts, problem,
                block_counts);
}

}  // namespace jax_grouped
