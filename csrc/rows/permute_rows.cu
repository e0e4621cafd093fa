#include "csrc/rows/rows.h"

#include <cstdint>

#include "csrc/common/launch.cuh"
#include "csrc/common/warp.cuh"
#include "csrc/groups/layout.h"

namespace jax_grouped {
namespace {

constexpr int kWarps = 8;
// Vectors of a thread, which it loads before it stores the first. A warp copies this many bytes of one token.
constexpr int kLoads = 4;
constexpr int kVectorsPerWarp = 32 * kLoads;

// One part of a token per warp, and then, if there are more warps, zeros for one part of a row that has no pair.
// Neighboring warps have parts of the same token. Blocks are short: a collective that is to run meanwhile starts when
// blocks end.
__global__ void __launch_bounds__(32 * kWarps)
    PermuteRows(const uint4* __restrict__ x, const int32_t* __restrict__ order, const int32_t* __restrict__ inverse,
                uint4* __restrict__ rows, int64_t tokens, int choices, int64_t num_rows, int vectors, int parts) {
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * kWarps + Warp();
  const int64_t token = warp / parts;
  const int first = static_cast<int>(warp % parts) * kVectorsPerWarp + Lane();
  uint4 loaded[kLoads] = {};
  const auto store = [&](int64_t row) {
    uint4* to = rows + row * vectors;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int vector = first + 32 * i;
      if (vector < vectors) to[vector] = loaded[i];
    }
  };
  if (const int64_t row = token - tokens; row >= 0) {
    if (row < num_rows && (order[row] < 0 || order[row] >= tokens * choices)) store(row);
    return;
  }
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int vector = first + 32 * i;
    if (vector < vectors) loaded[i] = __ldg(x + token * vectors + vector);
  }
  for (int choice = 0; choice < choices; ++choice) {
    const int64_t row = inverse[token * choices + choice];
    if (row >= 0 && row < num_rows) store(row);
  }
}

}  // namespace

Status LaunchPermuteRows(cudaStream_t stream, const PermuteRowsBuffers& buffers, int64_t tokens, int choices,
                         int64_t rows, int64_t token_bytes, bool zero_tail) {
  const int64_t vectors = token_bytes / kPermuteVectorBytes;
  const int64_t parts = CeilDiv(vectors, kVectorsPerWarp);
  const int64_t blocks = CeilDiv((tokens + (zero_tail ? rows : 0)) * parts, kWarps);
  return Launch("Launching the copies of tokens", stream, {dim3(static_cast<unsigned>(blocks)), 32 * kWarps},
                PermuteRows, static_cast<const uint4*>(buffers.x), buffers.order, buffers.inverse,
                static_cast<uint4*>(buffers.rows), tokens, choices, rows, static_cast<int>(vectors),
                static_cast<int>(parts));
}

}  // namespace jax_grouped
