#include "csrc/rows/rows.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "csrc/common/launch.cuh"
#include "csrc/common/warp.cuh"
#include "csrc/groups/layout.h"
#include "csrc/rows/vector.cuh"

namespace jax_grouped {
namespace {

constexpr int kWarps = 8;
// Blocks of a processor, so that its loads in flight cover the latency of memory.
constexpr int kBlocks = 4;
// Vectors of a thread. A warp sums this many features of one token.
constexpr int kVectors = 2;
constexpr int kFeaturesPerWarp = 32 * kVectors * kRowVector;

// One part of a token's features per warp. Neighboring warps have parts of the same token.
template <typename Pair, bool kWeighted>
__global__ void __launch_bounds__(32 * kWarps, kBlocks)
    SumRows(const Pair* __restrict__ rows, const int32_t* __restrict__ inverse, const float* __restrict__ weights,
            Pair* __restrict__ sums, int64_t tokens, int choices, int64_t num_rows, int pairs, int parts) {
  constexpr int kPairs = kRowVector / 2;
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * kWarps + Warp();
  const int64_t token = warp / parts;
  if (token >= tokens) return;
  const int first = static_cast<int>(warp % parts) * (kFeaturesPerWarp / 2) + Lane() * kPairs;
  float2 totals[kVectors][kPairs] = {};
  for (int chunk = 0; chunk < choices; chunk += 32) {
    // A choice per lane.
    const int choice = chunk + Lane();
    int32_t row = -1;
    float weight = 1.0f;
    if (choice < choices) {
      row = inverse[token * choices + choice];
      if constexpr (kWeighted) weight = weights[token * choices + choice];
    }
    uint32_t present = __ballot_sync(kFullWarp, row >= 0 && row < num_rows);
    const int count = __popc(present);
#pragma unroll 4
    for (int i = 0; i < count; ++i) {
      const int lane = __ffs(static_cast<int>(present)) - 1;
      present &= present - 1;
      const Pair* from = rows + static_cast<int64_t>(FromLane(lane, row)) * pairs;
      const float factor = kWeighted ? FromLane(lane, weight) : 1.0f;
      Vector<Pair> loaded[kVectors];
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const int pair = first + v * 32 * kPairs;
        loaded[v] = pair < pairs ? Vector<Pair>::Load(from + pair) : Vector<Pair>{};
      }
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
#pragma unroll
        for (int j = 0; j < kPairs; ++j) {
          const float2 values = ToFloats(loaded[v].pairs[j]);
          totals[v][j].x += kWeighted ? values.x * factor : values.x;
          totals[v][j].y += kWeighted ? values.y * factor : values.y;
        }
      }
    }
  }
  Pair* to = sums + token * pairs;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int pair = first + v * 32 * kPairs;
    if (pair >= pairs) continue;
    Vector<Pair> rounded;
#pragma unroll
    for (int j = 0; j < kPairs; ++j) Round(totals[v][j], &rounded.pairs[j]);
    rounded.Store(to + pair);
  }
}

template <typename Pair>
Status LaunchOfType(cudaStream_t stream, const SumRowsBuffers& buffers, int64_t tokens, int choices, int64_t rows,
                    int64_t features) {
  const int64_t parts = CeilDiv(features, kFeaturesPerWarp);
  const dim3 blocks(static_cast<unsigned>(CeilDiv(tokens * parts, kWarps)));
  return Launch("Launching the sums of rows", stream, {blocks, 32 * kWarps},
                buffers.weights == nullptr ? SumRows<Pair, false> : SumRows<Pair, true>,
                static_cast<const Pair*>(buffers.rows), buffers.inverse, buffers.weights,
                static_cast<Pair*>(buffers.sums), tokens, choices, rows, static_cast<int>(features / 2),
                static_cast<int>(parts));
}

}  // namespace

Status LaunchSumRows(cudaStream_t stream, const SumRowsBuffers& buffers, cudaDataType_t type, int64_t tokens,
                     int choices, int64_t rows, int64_t features) {
  switch (type) {
    case CUDA_R_16BF:
      return LaunchOfType<__nv_bfloat162>(stream, buffers, tokens, choices, rows, features);
    case CUDA_R_16F:
      return LaunchOfType<__half2>(stream, buffers, tokens, choices, rows, features);
    default:
      return Status::Failed("The kernel for sums of rows takes bfloat16 or float16.");
  }
}

}  // namespace jax_grouped
