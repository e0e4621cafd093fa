#include "csrc/rows/swiglu_grad.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "csrc/common/launch.cuh"
#include "csrc/common/sigmoid.cuh"
#include "csrc/common/warp.cuh"
#include "csrc/groups/layout.h"

namespace jax_grouped {
namespace {

// One warp per row.
constexpr int kRowsPerBlock = 8;

__device__ float2 ToFloats(__nv_bfloat162 pair) { return __bfloat1622float2(pair); }
__device__ float2 ToFloats(__half2 pair) { return __half22float2(pair); }
__device__ void Round(float2 values, __nv_bfloat162* pair) { *pair = __float22bfloat162_rn(values); }
__device__ void Round(float2 values, __half2* pair) { *pair = __float22half2_rn(values); }

template <typename Pair>
struct alignas(16) Vector {
  Pair pairs[kSwigluVector / 2];

  __device__ static Vector Load(const Pair* from) {
    const uint4 bits = __ldg(reinterpret_cast<const uint4*>(from));
    return reinterpret_cast<const Vector&>(bits);
  }
  __device__ void Store(Pair* to) const { *reinterpret_cast<uint4*>(to) = reinterpret_cast<const uint4&>(*this); }
};

// One feature of a row in the results.
struct Feature {
  float dgate;
  float dup;
  float weighted;
};

// Adds the feature's part of the inner product.
__device__ Feature ComputeFeature(float gate, float up, float da, float weight, float* product) {
  const float sigmoid = Sigmoid(gate);
  const float silu = gate * sigmoid;
  const float a = silu * up;
  const float gradient = weight * da;
  *product += a * da;
  return {gradient * up * (sigmoid * (1.0f + gate * (1.0f - sigmoid))), gradient * silu, weight * a};
}

template <typename Pair>
__global__ void __launch_bounds__(32 * kRowsPerBlock)
    SwigluGrad(const Pair* __restrict__ gate_up, const Pair* __restrict__ all_da, const float* __restrict__ row_weights,
               Pair* __restrict__ dgate_up, Pair* __restrict__ all_weighted, float* __restrict__ inner_products,
               int64_t rows, int pairs) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRowsPerBlock + Warp();
  if (row >= rows) return;
  const Pair* gates = gate_up + row * 2 * pairs;
  Pair* dgates = dgate_up + row * 2 * pairs;
  const Pair* das = all_da + row * pairs;
  Pair* weighteds = all_weighted + row * pairs;
  const float weight = row_weights[row];
  constexpr int kPairs = kSwigluVector / 2;
  float product = 0.0f;
#pragma unroll 2
  for (int i = Lane() * kPairs; i < pairs; i += 32 * kPairs) {
    const auto gate = Vector<Pair>::Load(gates + i);
    const auto up = Vector<Pair>::Load(gates + pairs + i);
    const auto da = Vector<Pair>::Load(das + i);
    Vector<Pair> dgate;
    Vector<Pair> dup;
    Vector<Pair> weighted;
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const float2 g = ToFloats(gate.pairs[j]);
      const float2 u = ToFloats(up.pairs[j]);
      const float2 d = ToFloats(da.pairs[j]);
      const Feature first = ComputeFeature(g.x, u.x, d.x, weight, &product);
      const Feature second = ComputeFeature(g.y, u.y, d.y, weight, &product);
      Round({first.dgate, second.dgate}, &dgate.pairs[j]);
      Round({first.dup, second.dup}, &dup.pairs[j]);
      Round({first.weighted, second.weighted}, &weighted.pairs[j]);
    }
    dgate.Store(dgates + i);
    dup.Store(dgates + pairs + i);
    weighted.Store(weighteds + i);
  }
  product = WarpSum(product);
  if (Lane() == 0) inner_products[row] = product;
}

template <typename Pair>
Status Launch(cudaStream_t stream, const SwigluGradBuffers& buffers, int64_t rows, int64_t features) {
  const dim3 blocks(static_cast<unsigned>(CeilDiv(rows, kRowsPerBlock)));
  return jax_grouped::Launch("Launching the gradient of SwiGLU", stream, {blocks, 32 * kRowsPerBlock}, SwigluGrad<Pair>,
                             static_cast<const Pair*>(buffers.gate_up), static_cast<const Pair*>(buffers.da),
                             buffers.row_weights, static_cast<Pair*>(buffers.dgate_up),
                             static_cast<Pair*>(buffers.weighted), buffers.inner_products, rows,
                             static_cast<int>(features / 2));
}

}  // namespace

Status LaunchSwigluGrad(cudaStream_t stream, const SwigluGradBuffers& buffers, cudaDataType_t type, int64_t rows,
                        int64_t features) {
  switch (type) {
    case CUDA_R_16BF:
      return Launch<__nv_bfloat162>(stream, buffers, rows, features);
    case CUDA_R_16F:
      return Launch<__half2>(stream, buffers, rows, features);
    default:
      return Status::Failed("The kernel for the gradient of SwiGLU takes bfloat16 or float16.");
  }
}

}  // namespace jax_grouped
