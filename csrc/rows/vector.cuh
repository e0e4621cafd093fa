// Vectors of 16-bit numbers, which a thread loads and stores at once.

#ifndef JAX_GROUPED_CSRC_ROWS_VECTOR_CUH_
#define JAX_GROUPED_CSRC_ROWS_VECTOR_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "csrc/rows/rows.h"

namespace jax_grouped {

__device__ inline float2 ToFloats(__nv_bfloat162 pair) { return __bfloat1622float2(pair); }
__device__ inline float2 ToFloats(__half2 pair) { return __half22float2(pair); }
__device__ inline void Round(float2 values, __nv_bfloat162* pair) { *pair = __float22bfloat162_rn(values); }
__device__ inline void Round(float2 values, __half2* pair) { *pair = __float22half2_rn(values); }

template <typename Pair>
struct alignas(16) Vector {
  Pair pairs[kRowVector / 2];

  __device__ static Vector Load(const Pair* from) {
    const uint4 bits = __ldg(reinterpret_cast<const uint4*>(from));
    return reinterpret_cast<const Vector&>(bits);
  }
  __device__ void Store(Pair* to) const { *reinterpret_cast<uint4*>(to) = reinterpret_cast<const uint4&>(*this); }
};

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_ROWS_VECTOR_CUH_
