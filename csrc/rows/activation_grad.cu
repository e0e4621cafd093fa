#include "csrc/rows/activation_grad.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "csrc/common/activation.cuh"
#include "csrc/common/launch.cuh"
#include "csrc/common/warp.cuh"
#include "csrc/groups/layout.h"
#include "csrc/rows/vector.cuh"

namespace jax_grouped {
namespace {

// One warp per row.
constexpr int kRowsPerBlock = 8;

// One feature of a row in the results.
struct Feature {
  float dgate;  // the gradient of the input itself, if it has no gate
  float dfactor;
  float weighted;
};

// Adds the feature's part of the inner product.
template <typename Functions>
__device__ Feature ComputeFeature(const Functions& functions, float gate, float factor, float da, float weight,
                                  float* product) {
  const float activated = functions.Activate(gate);
  const float multiplier = functions.Factor(factor);
  const float a = activated * multiplier;
  const float gradient = weight * da;
  *product += a * da;
  return {functions.InputGradient(gate, gradient * multiplier), functions.FactorGradient(factor, gradient * activated),
          weight * a};
}

template <typename Pair, ActivationKind kKind>
__global__ void __launch_bounds__(32 * kRowsPerBlock)
    ActivationGrad(const Pair* __restrict__ all_input, const Pair* __restrict__ all_da,
                   const float* __restrict__ weights, const int32_t* __restrict__ order, Pair* __restrict__ all_dinput,
                   Pair* __restrict__ all_weighted, float* __restrict__ inner_products, int64_t num_weights,
                   int64_t rows, int pairs, Activation activation) {
  const ActivationFunctions<kKind> functions{activation};
  constexpr bool kGated = IsGated(kKind);
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRowsPerBlock + Warp();
  if (row >= rows) return;
  const int64_t weight_index = order == nullptr ? row : order[row];
  if (weight_index < 0 || weight_index >= num_weights) return;
  const int64_t input_pairs = kGated ? int64_t{2} * pairs : pairs;
  const Pair* input = all_input + row * input_pairs;
  Pair* dinput = all_dinput + row * input_pairs;
  const Pair* das = all_da + row * pairs;
  Pair* weighteds = all_weighted + row * pairs;
  const float weight = weights[weight_index];
  constexpr int kPairs = kRowVector / 2;
  float product = 0.0f;
#pragma unroll 2
  for (int i = Lane() * kPairs; i < pairs; i += 32 * kPairs) {
    const auto gate = Vector<Pair>::Load(input + i);
    const auto da = Vector<Pair>::Load(das + i);
    Vector<Pair> factor;
    if constexpr (kGated) factor = Vector<Pair>::Load(input + pairs + i);
    Vector<Pair> dgate;
    Vector<Pair> dfactor;
    Vector<Pair> weighted;
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const float2 g = ToFloats(gate.pairs[j]);
      const float2 f = kGated ? ToFloats(factor.pairs[j]) : make_float2(1.0f, 1.0f);
      const float2 d = ToFloats(da.pairs[j]);
      const Feature first = ComputeFeature(functions, g.x, f.x, d.x, weight, &product);
      const Feature second = ComputeFeature(functions, g.y, f.y, d.y, weight, &product);
      Round({first.dgate, second.dgate}, &dgate.pairs[j]);
      if constexpr (kGated) Round({first.dfactor, second.dfactor}, &dfactor.pairs[j]);
      Round({first.weighted, second.weighted}, &weighted.pairs[j]);
    }
    dgate.Store(dinput + i);
    if constexpr (kGated) dfactor.Store(dinput + pairs + i);
    weighted.Store(weighteds + i);
  }
  product = WarpSum(product);
  if (Lane() == 0) inner_products[row] = product;
}

template <typename Pair>
auto KernelOf(ActivationKind kind) {
  switch (kind) {
    case ActivationKind::kGelu:
      return ActivationGrad<Pair, ActivationKind::kGelu>;
    case ActivationKind::kRelu:
      return ActivationGrad<Pair, ActivationKind::kRelu>;
    case ActivationKind::kReluSquared:
      return ActivationGrad<Pair, ActivationKind::kReluSquared>;
    case ActivationKind::kSwiGlu:
      return ActivationGrad<Pair, ActivationKind::kSwiGlu>;
    case ActivationKind::kGeGlu:
      return ActivationGrad<Pair, ActivationKind::kGeGlu>;
    case ActivationKind::kReGlu:
      return ActivationGrad<Pair, ActivationKind::kReGlu>;
    case ActivationKind::kSwiGluWithNumbers:
      return ActivationGrad<Pair, ActivationKind::kSwiGluWithNumbers>;
    case ActivationKind::kNone:
    case ActivationKind::kSilu:
      break;
  }
  return ActivationGrad<Pair, ActivationKind::kSilu>;
}

template <typename Pair>
Status LaunchOfType(cudaStream_t stream, const ActivationGradBuffers& buffers, const Activation& activation,
                    int64_t num_weights, int64_t rows, int64_t features) {
  const dim3 blocks(static_cast<unsigned>(CeilDiv(rows, kRowsPerBlock)));
  return Launch("Launching the gradient of an activation", stream, {blocks, 32 * kRowsPerBlock},
                KernelOf<Pair>(activation.kind), static_cast<const Pair*>(buffers.input),
                static_cast<const Pair*>(buffers.da), buffers.weights, buffers.order,
                static_cast<Pair*>(buffers.dinput), static_cast<Pair*>(buffers.weighted), buffers.inner_products,
                num_weights, rows, static_cast<int>(features / 2), activation);
}

}  // namespace

Status LaunchActivationGrad(cudaStream_t stream, const ActivationGradBuffers& buffers, const Activation& activation,
                            cudaDataType_t type, int64_t num_weights, int64_t rows, int64_t features) {
  switch (type) {
    case CUDA_R_16BF:
      return LaunchOfType<__nv_bfloat162>(stream, buffers, activation, num_weights, rows, features);
    case CUDA_R_16F:
      return LaunchOfType<__half2>(stream, buffers, activation, num_weights, rows, features);
    default:
      return Status::Failed("The kernel for the gradient of an activation takes bfloat16 or float16.");
  }
}

}  // namespace jax_grouped
