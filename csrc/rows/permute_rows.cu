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

// Zeros those of a warp's 32 rows that have no pair.
__device__ void ZeroTail(const int32_t* order, int64_t first_row, int64_t num_rows, int64_t pairs, int vectors,
                         uint4* rows) {
  const int64_t own = first_row + Lane();
  uint32_t tail = __ballot_sync(kFullWarp, own < num_rows && (order[own] < 0 || order[own] >= pairs));
  for (; tail != 0; tail &= tail - 1) {
    uint4* to = rows + (first_row + __ffs(tail) - 1) * vectors;
    for (int vector = Lane(); vector < vectors; vector += 32) to[vector] = uint4{};
  }
}

// The first blocks copy tokens, and the others zero the tail.
__global__ void __launch_bounds__(32 * kWarps)
    PermuteRows(const uint4* __restrict__ x, const int32_t* __restrict__ order, const int32_t* __restrict__ inverse,
                uint4* __restrict__ rows, int64_t tokens, int choices, int64_t num_rows, int vectors) {
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * kWarps + Warp();
  const int64_t first_of_tail = CeilDiv(tokens, kWarps) * kWarps;
  if (warp >= first_of_tail) {
    ZeroTail(order, (warp - first_of_tail) * 32, num_rows, tokens * choices, vectors, rows);
  } else if (warp < tokens) {
    CopyToken(x + warp * vectors, vectors, inverse + warp * choices, choices, num_rows, rows);
  }
}

}  // namespace

Status LaunchPermuteRows(cudaStream_t stream, const PermuteRowsBuffers& buffers, int64_t tokens, int choices,
                         int64_t rows, int64_t token_bytes) {
  const int64_t blocks = CeilDiv(tokens, kWarps) + CeilDiv(rows, 32 * kWarps);
  return Launch("Launching the copies of tokens", stream, {dim3(static_cast<unsigned>(blocks)), 32 * kWarps},
                PermuteRows, static_cast<const uint4*>(buffers.x), buffers.order, buffers.inverse,
                static_cast<uint4*>(buffers.rows), tokens, choices, rows,
                static_cast<int>(token_bytes / kPermuteVectorBytes));
}

}  // namespace jax_grouped
