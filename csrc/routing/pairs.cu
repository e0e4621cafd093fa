#include "csrc/routing/routing.h"

#include <cstdint>

#include "csrc/common/device.h"
#include "csrc/common/launch.cuh"
#include "csrc/common/warp.cuh"
#include "csrc/groups/table.cuh"

namespace jax_grouped {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;

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
static_assert(2 * kMostExperts <= kThreads);

// Numbers by expert, in shared memory.
struct ExpertCounts {
  int32_t all[kMostExperts];     // pairs of all blocks
  int32_t before[kMostExperts];  // pairs of the blocks before this one
  int32_t rows[kMostExperts];    // rows of all blocks
  int32_t start[kMostExperts];   // the first row
};

// Adds up the counts of the blocks. Several threads share an expert.
__device__ void AddBlockCounts(const int32_t* block_counts, int num_experts, ExpertCounts* counts) {
  const int threads = kThreads / num_experts;
  const int expert = static_cast<int>(threadIdx.x) % num_experts;
  const int first = static_cast<int>(threadIdx.x) / num_experts;
  const int blocks = static_cast<int>(gridDim.x);
  if (first >= min(threads, blocks)) return;
  int32_t before = 0;
  int32_t others = 0;
#pragma unroll 8
  for (int block = first; block < blocks; block += threads) {
    const int32_t count = block_counts[block * num_experts + expert];
    if (block < static_cast<int>(blockIdx.x)) {
      before += count;
    } else {
      others += count;
    }
  }
  atomicAdd(&counts->before[expert], before);
  atomicAdd(&counts->all[expert], before + others);
}

// Returns the greatest length at which all groups fit into the rows, or the largest integer if they fit uncut. One warp
// calls it.
__device__ int32_t LongestGroup(const int32_t* lengths, int num_experts, uint32_t rows) {
  constexpr int kLaneExperts = kMostExperts / 32;
  uint32_t own[kLaneExperts];
  uint32_t sum = 0;
#pragma unroll
  for (int i = 0; i < kLaneExperts; ++i) {
    const int expert = Lane() + 32 * i;
    own[i] = expert < num_experts ? lengths[expert] : 0;
    sum += own[i];
  }
  if (__reduce_add_sync(kFullWarp, sum) <= rows) return INT32_MAX;
  // Groups that are no longer than a length at which all fit stay whole. So the others can share the rest of the rows.
  // The length grows with every group that stays whole, so this ends after at most as many turns as there are groups.
  uint32_t longest = rows / num_experts;
  while (true) {
    uint32_t whole = 0;
    uint32_t cut = 0;
#pragma unroll
    for (int i = 0; i < kLaneExperts; ++i) {
      whole += own[i] <= longest ? own[i] : 0;
      cut += own[i] > longest;
    }
    whole = __reduce_add_sync(kFullWarp, whole);
    cut = __reduce_add_sync(kFullWarp, cut);
    const uint32_t longer = cut == 0 ? 0 : (rows - whole) / cut;
    if (longer <= longest) return static_cast<int32_t>(longest);
    longest = longer;
  }
}

// Visits a warp's pairs, 32 successive ones at a time, with the expert of each lane's pair; -1 for none.
template <typename Visit>
__device__ void ForEachPair(const int32_t* experts, const PairRange& pairs, int num_experts, const Visit& visit) {
#pragma unroll 1
  for (int64_t base = pairs.begin; base < pairs.end; base += 32) {
    const int64_t pair = base + Lane();
    const int32_t expert = pair < pairs.end ? experts[pair] : -1;
    visit(pair, static_cast<uint32_t>(expert) < static_cast<uint32_t>(num_experts) ? expert : -1);
  }
}

// Replaces the warps' counts of an expert by the rank of each warp's next pair, from that of the block's first pair.
__device__ void CountsToRanks(int32_t rank, int num_experts, int32_t* counts) {
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    const int32_t count = counts[warp * num_experts];
    counts[warp * num_experts] = rank;
    rank += count;
  }
}

// Returns the place of a pair among those that have a row, `rows` of `pairs` at equal distances; -1 for others.
__device__ int32_t RankOfRow(uint32_t rank, uint32_t pairs, uint32_t rows) {
  if (rank >= pairs) return -1;
  if (rows == pairs) return static_cast<int32_t>(rank);
  const uint64_t product = static_cast<uint64_t>(rank) * rows + pairs / 2;
  const uint64_t quotient = product / pairs;
  return product - quotient * pairs + rows >= pairs ? static_cast<int32_t>(quotient) : -1;
}

// Adds up the blocks' sums. Each warp of each block takes experts of its own.
__device__ void AddBlockSums(const float* block_sums, int num_experts, float* sums) {
  const int blocks = static_cast<int>(gridDim.x);
  for (int expert = Uniform(Warp()) * blocks + static_cast<int>(blockIdx.x); expert < num_experts;
       expert += kWarps * blocks) {
    float sum = 0.0f;
    for (int block = Lane(); block < blocks; block += 32) sum += block_sums[block * num_experts + expert];
    sum = WarpSum(sum);
    if (Lane() == 0) sums[expert] = sum;
  }
}

// blockIdx.x is the block of tokens, and blockIdx.y the batch element. Every block computes the rows of all experts,
// and then those of its own pairs. A warp has successive pairs.
__global__ void __launch_bounds__(kThreads)
    GroupPairs(const __grid_constant__ PairsProblem problem, const __grid_constant__ GroupPairsBuffers buffers) {
  extern __shared__ int32_t warp_counts[];  // [kWarps, num_experts]
  __shared__ ExpertCounts counts;
  __shared__ int32_t longest;
  const int num_experts = problem.num_experts;
  const int thread = static_cast<int>(threadIdx.x);
  const int own_warp = Uniform(Warp());
  const int64_t pairs = problem.tokens * problem.choices;
  const int64_t element = blockIdx.y;
  const int64_t first_count = element * gridDim.x * num_experts;
  const int32_t* experts = buffers.experts + element * pairs;
  int32_t* inverse = buffers.inverse + element * pairs;
  int32_t* order = buffers.order + element * problem.rows;
  const auto rows = static_cast<int32_t>(problem.rows);

  for (int i = thread; i < kWarps * num_experts; i += kThreads) warp_counts[i] = 0;
  if (thread < num_experts) counts.all[thread] = counts.before[thread] = 0;
  if (thread == 0) longest = INT32_MAX;
  __syncthreads();

  const PairRange block_pairs = PairsOfRoutingBlock(blockIdx.x, problem.tokens, problem.choices);
  const int64_t warp_pairs = RoundUp(CeilDiv(block_pairs.end - block_pairs.begin, kWarps), 32);
  PairRange own{block_pairs.begin + own_warp * warp_pairs, 0};
  own.end = min(own.begin + warp_pairs, block_pairs.end);
  int32_t* own_counts = warp_counts + own_warp * num_experts;
  AddBlockCounts(buffers.block_counts + first_count, num_experts, &counts);
  ForEachPair(experts, own, num_experts, [&](int64_t, int32_t expert) {
    if (expert >= 0) atomicAdd(&own_counts[expert], 1);
  });
  __syncthreads();
  if (problem.rows < pairs) {
    if (own_warp == 0) {
      const int32_t length = LongestGroup(counts.all, num_experts, static_cast<uint32_t>(rows));
      if (Lane() == 0) longest = length;
    }
    __syncthreads();
  }

  const int32_t size = thread < num_experts ? min(counts.all[thread], longest) : 0;
  const Sums<int32_t> used = WholeBlock<kThreads>::Scan(size, 0, [](int32_t a, int32_t b) { return a + b; });
  if (thread < num_experts) {
    counts.rows[thread] = size;
    counts.start[thread] = used.before;
    CountsToRanks(counts.before[thread], num_experts, warp_counts + thread);
  }
  __syncthreads();

  ForEachPair(experts, own, num_experts, [&](int64_t pair, int32_t expert) {
    const uint32_t alike = __match_any_sync(kFullWarp, expert);
    const int before = __popc(alike & ((1u << Lane()) - 1));
    const int32_t first = expert >= 0 ? own_counts[expert] : 0;
    __syncwarp();
    // The first of the lanes with this expert counts their pairs.
    if (expert >= 0 && before == 0) own_counts[expert] = first + __popc(alike);
    __syncwarp();
    const int32_t rank = expert >= 0 ? RankOfRow(first + before, counts.all[expert], counts.rows[expert]) : -1;
    const int32_t row = rank >= 0 ? counts.start[expert] + rank : rows;
    // Compares with all rows, because nobody has checked the counts.
    const bool has_row = static_cast<uint32_t>(row) < problem.rows;
    if (has_row) order[row] = static_cast<int32_t>(pair);
    if (pair < own.end) inverse[pair] = has_row ? row : rows;
  });
  const int64_t tail = max(used.all, 0);
  for (int64_t row = tail + static_cast<int64_t>(blockIdx.x) * kThreads + thread; row < rows;
       row += static_cast<int64_t>(gridDim.x) * kThreads) {
    order[row] = static_cast<int32_t>(pairs);
  }
  if (blockIdx.x == 0) {
    if (thread < num_experts) {
      buffers.group_sizes[element * num_experts + thread] = size;
      buffers.expert_load[element * num_experts + thread] = counts.all[thread];
    }
    if (thread == 0) buffers.dropped[element] = static_cast<int32_t>(pairs) - used.all;
  }
  if (buffers.sums != nullptr) {
    AddBlockSums(buffers.block_sums + first_count, num_experts, buffers.sums + element * num_experts);
  }
}

}  // namespace

Status LaunchCountPairs(cudaStream_t stream, const int32_t* experts, const PairsProblem& problem,
                        int32_t* block_counts) {
  const dim3 blocks(static_cast<unsigned>(RoutingBlocks(problem.tokens)), static_cast<unsigned>(problem.batch));
  return Launch("Launching the counts of pairs", stream, {blocks, kThreads}, CountPairs, experts, problem,
                block_counts);
}

Status LaunchGroupPairs(cudaStream_t stream, const GroupPairsBuffers& buffers, const PairsProblem& problem) {
  constexpr int kBytesPerExpert = kWarps * sizeof(int32_t);
  JAX_GROUPED_RETURN_IF_FAILED(
      AllowSharedMemory(reinterpret_cast<const void*>(&GroupPairs), kMostExperts * kBytesPerExpert));
  const dim3 blocks(static_cast<unsigned>(RoutingBlocks(problem.tokens)), static_cast<unsigned>(problem.batch));
  return Launch("Launching the order of pairs", stream, {blocks, kThreads, problem.num_experts * kBytesPerExpert},
                GroupPairs, problem, buffers);
}

}  // namespace jax_grouped
