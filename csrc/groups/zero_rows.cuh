// Zeroing of memory with all blocks of a grid except the first in each row of blocks, which has other work.

#ifndef JAX_GROUPED_CSRC_GROUPS_ZERO_ROWS_CUH_
#define JAX_GROUPED_CSRC_GROUPS_ZERO_ROWS_CUH_

#include <algorithm>
#include <cstdint>

#include "csrc/groups/layout.cuh"

namespace jax_grouped {

// Zeros bytes [begin, end), in words of 16 bytes, with all blocks except the first.
template <int kThreads>
__device__ void ZeroBytes(void* base, int64_t begin, int64_t end) {
  uint4* words = static_cast<uint4*>(base);
  const int64_t stride = static_cast<int64_t>(gridDim.x - 1) * kThreads;
  for (int64_t i = begin / 16 + (blockIdx.x - 1) * kThreads + threadIdx.x; i < RoundUp(end, 16) / 16; i += stride) {
    words[i] = make_uint4(0, 0, 0, 0);
  }
}

// Zeros the rows of a batch element outside its local groups. `groups` are the element's.
template <int kThreads>
__device__ void ZeroOtherRows(const Groups& groups, int32_t element, void* base, int64_t row_bytes) {
  const RowRange local = LocalRows<kThreads>(groups);
  const int64_t first_row = element * groups.capacity;
  ZeroBytes<kThreads>(base, first_row * row_bytes, (first_row + local.begin) * row_bytes);
  ZeroBytes<kThreads>(base, (first_row + local.end) * row_bytes, (first_row + groups.capacity) * row_bytes);
}

// Returns the number of blocks for zeroing up to `bytes` bytes. There are enough to write at memory speed, and few
// enough to cost nothing if nothing must be zeroed.
inline int ZeroingBlocks(int64_t bytes) {
  constexpr int64_t kBytesPerBlock = 16 * 1024;
  constexpr int64_t kMostBlocks = 264;
  return static_cast<int>(std::clamp<int64_t>(bytes / kBytesPerBlock, 1, kMostBlocks));
}

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_GROUPS_ZERO_ROWS_CUH_
