// The index of a thread in a one-dimensional block, and broadcasts and reductions within a warp.

#ifndef JAX_GROUPED_CSRC_COMMON_WARP_CUH_
#define JAX_GROUPED_CSRC_COMMON_WARP_CUH_

#include <cstdint>

namespace jax_grouped {

constexpr uint32_t kFullWarp = 0xffffffff;

__device__ inline int Lane() { return threadIdx.x % 32; }
__device__ inline int Warp() { return threadIdx.x / 32; }

// Returns the value of one lane. All lanes of the warp must call it.
template <typename T>
__device__ inline T FromLane(int lane, T value) {
  return __shfl_sync(kFullWarp, value, lane);
}

// Returns to all lanes the sum of their values, added up in a fixed order. All lanes of the warp must call it.
__device__ inline float WarpSum(float value) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) value += __shfl_xor_sync(kFullWarp, value, lanes);
  return value;
}

// Broadcasts lane 0's value, so that nvcc treats it as warp-uniform. nvcc assumes that the lanes diverge at a branch on
// any other value, and emits a second copy of the shuffles behind that branch for divergent lanes. All lanes of the
// warp must call it.
__device__ inline int32_t Uniform(int32_t value) { return FromLane(0, value); }

// Reduces values over kLanes successive lanes, a power of two, with a commutative `reduce`. A lane passes kSteps
// values, one for each of kSteps results. In each exchange it passes on half of the values that it has and keeps the
// others. Returns the first step whose result the lane gets; these results are the first of `values`. All lanes of the
// warp must call it.
template <int kLanes, typename T, int kSteps, typename Reduce>
__device__ int ReduceSteps(T (&values)[kSteps], const Reduce& reduce) {
  int first_step = 0;
  int count = kSteps;
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    if (count > 1) {
      count /= 2;
      const bool upper = Lane() & distance;
      first_step += upper ? count : 0;
#pragma unroll
      for (int i = 0; i < count; ++i) {
        const T sent = upper ? values[i] : values[i + count];
        const T kept = upper ? values[i + count] : values[i];
        values[i] = reduce(kept, __shfl_xor_sync(kFullWarp, sent, distance));
      }
    } else {
      values[0] = reduce(values[0], __shfl_xor_sync(kFullWarp, values[0], distance));
    }
  }
  return first_step;
}

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_COMMON_WARP_CUH_
