// The pass of current scaling that finds the amax of each group.

#ifndef JAX_GROUPED_CSRC_QUANTIZE_AMAX_CUH_
#define JAX_GROUPED_CSRC_QUANTIZE_AMAX_CUH_

#include <cstdint>

#include "csrc/common/warp.cuh"
#include "csrc/quantize/pass.cuh"

namespace jax_grouped {

// Returns the bits of the largest finite absolute value of a chunk in a tile's columns. Whole warps must call it. The
// chunk is passed by value, so that it is not loaded from memory again for every row.
template <typename Source>
__device__ uint32_t FindChunkAmax(const Source& source, Chunk chunk, int64_t first_column) {
  constexpr int kCount = Source::kRowsAtOnce;
  const int lane = threadIdx.x % 32;
  const int64_t column = first_column + lane % 16 * 8;
  uint32_t amax = 0;
#pragma unroll 1
  for (int first = lane / 16; first < kFp8Alignment; first += 2 * kCount) {
    alignas(16) PairOf<typename Source::Element> rows[kCount][4] = {};
    source.LoadRows(chunk, first, column, rows);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      uint2 bits = PairwiseAmax(rows[i]);
      if (max(bits.x, bits.y) >= kInfinityBits) bits = PairwiseFiniteAmax(rows[i]);
      amax = max(amax, max(bits.x, bits.y));
    }
  }
  return __reduce_max_sync(kFullWarp, amax);
}

// Updates the amax of each of a work item's groups. All threads of the block must call it. Each warp takes one slot of
// a pass.
template <typename Source>
__device__ void FindAmax(const QuantizeArguments& args, const Source& source, const WorkItem& work,
                         const Window& window, uint32_t (&slot_amax)[kSlots]) {
  const int slot = threadIdx.x / 32;
#pragma unroll 1
  for (int pass = work.part; pass < window.num_passes; pass += Window::kParts) {
    const Chunk* chunks = window.chunks + window.pass_begins[pass];
    const int count = window.pass_begins[pass + 1] - window.pass_begins[pass];
    if (slot < count) {
      const uint32_t amax = FindChunkAmax(source, chunks[slot], work.first_column);
      if (threadIdx.x % 32 == 0) slot_amax[slot] = amax;
    }
    __syncthreads();
    RecordAmax(threadIdx.x, chunks, [&](int i) { return slot_amax[i]; }, count, args.amax);
    __syncthreads();
  }
}

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_QUANTIZE_AMAX_CUH_
