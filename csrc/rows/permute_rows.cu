#include "csrc/rows/permute_rows.h"

#include <cstdint>

#include "csrc/common/launch.cuh"
#include "csrc/common/warp.cuh"
#include "csrc/groups/layout.h"

namespace jax_grouped {
namespace {

constexpr int kWarps = 8;
// Loads of a thread that are all issued before the first store.
constexpr int kLoads = 4;

// Copies one token per warp.
__device__ void CopyToken(const uint4* token, int vectors, const int32_t* rows_of_token, int choices, int64_t num_rows,
                          uint4* rows) {
  for (int first = Lane(); first < vectors; first += 32 * kLoads) {
    uint4 loaded[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int vector = first + 32 * i;
      loaded[i] = vector < vectors ? __ldg(token + vector) : uint4{};
    }
    for (int choice = 0; choice < choices; ++choice) {
      const int64_t row = rows_of_token[choice];
      if (row < 0 || row >= num_rows) continue;
      uint4* to = rows + row * vectors;
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int vector = first + 32 * i;
        if (vector < vectors) to[vector] = loaded[i];
      }
    }
  }
}

// The first blocks copy one token per warp. The others, if there are any, zero the rows that have no pair, one per
// warp.
__global__ void __launch_bounds__(32 * kWarps)
    PermuteRows(const uint4* __restrict__ x, const int32_t* __restrict__ order, const int32_t* __restrict__ inverse,
                uint4* __restrict__ rows, int64_t tokens, int choices, int64_t num_rows, int vectors) {
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * kWarps + Warp();
  const int64_t first_of_tail = CeilDiv(tokens, kWarps) * kWarps;
  if (const int64_t row = warp - first_of_tail; row >= 0) {
    if (row >= num_rows || (order[row] >= 0 && order[row] < tokens * choices)) return;
    for (int vector = Lane(); vector < vectors; vector += 32) rows[row * vectors + vector] = uint4{};
  } else if (warp < tokens) {
    CopyToken(x + warp * vectors, vectors, inverse + warp * choices, choices, num_rows, rows);
  }
}

}  // namespace

Status LaunchPermuteRows(cudaStream_t stream, const PermuteRowsBuffers& buffers, int64_t tokens, int choices,
                         int64_t rows, int64_t token_bytes, bool zero_tail) {
  const int64_t blocks = CeilDiv(tokens, kWarps) + (zero_tail ? CeilDiv(rows, kWarps) : 0);
  return Launch("Launching the copies of tokens", stream, {dim3(static_cast<unsigned>(blocks)), 32 * kWarps},
                PermuteRows, static_cast<const uint4*>(buffers.x), buffers.order, buffers.inverse,
                static_cast<uint4*>(buffers.rows), tokens, choices, rows,
                static_cast<int>(token_bytes / kPermuteVectorBytes));
}

}  // namespace jax_grouped
