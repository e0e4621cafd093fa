// Which thread this is of a block of one dimension, and numbers that the lanes of a warp give each other.

#ifndef JAX_GROUPED_CSRC_COMMON_WARP_CUH_
#define JAX_GROUPED_CSRC_COMMON_WARP_CUH_

#include <cstdint>

namespace jax_grouped {

constexpr uint32_t kFullWarp = 0xffffffff;

__device__ inline int Lane() { return threadIdx.x % 32; }
__device__ inline int Warp() { return threadIdx.x / 32; }

// The number of one lane. For a whole warp.
template <typename T>
__device__ inline T FromLane(int lane, T value) {
  return __shfl_sync(kFullWarp, value, lane);
}

// The same number from every lane, and known to the compiler as such: behind a branch on any other, lanes may have
// parted for all that it knows, and it writes what they give each other there a second time for such lanes. For a whole
// warp.
__device__ inline int32_t Uniform(int32_t value) { return FromLane(0, value); }

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_COMMON_WARP_CUH_
