#include "csrc/rows/gather_rows.h"

#include <cstdint>

#include "csrc/common/launch.cuh"
#include "csrc/common/warp.cuh"
#include "csrc/groups/layout.h"

namespace jax_grouped {
namespace {

// One warp per row.
constexpr int kRowsPerBlock = 8;
// Loads of a thread that are all issued before the first store.
constexpr int kLoads = 4;

__global__ void __launch_bounds__(32 * kRowsPerBlock)
    GatherRows(const uint4* __restrict__ x, int64_t x_rows, int vectors, const int32_t* __restrict__ indices,
               int64_t num_rows, uint4* __restrict__ rows) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRowsPerBlock + Warp();
  if (row >= num_rows) return;
  const int64_t index = indices[row];
  const bool exists = 0 <= index && index < x_rows;
  const uint4* from = x + (exists ? index * vectors : 0);
  uint4* to = rows + row * vectors;
  for (int first = Lane(); first < vectors; first += 32 * kLoads) {
    uint4 loaded[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int vector = first + 32 * i;
      loaded[i] = exists && vector < vectors ? __ldg(from + vector) : uint4{};
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int vector = first + 32 * i;
      if (vector < vectors) to[vector] = loaded[i];
    }
  }
}

}  // namespace

Status LaunchGatherRows(cudaStream_t stream, const void* x, int64_t x_rows, int64_t row_bytes, const int32_t* indices,
                        int64_t num_rows, void* rows) {
  const dim3 blocks(static_cast<unsigned>(CeilDiv(num_rows, kRowsPerBlock)));
  return Launch("Launching the copy of rows", stream, {blocks, 32 * kRowsPerBlock}, GatherRows,
                static_cast<const uint4*>(x), x_rows, static_cast<int>(row_bytes / kGatherVectorBytes), indices,
                num_rows, static_cast<uint4*>(rows));
}

}  // namespace jax_grouped
