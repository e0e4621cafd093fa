#include "csrc/rows/rows.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>

#include "csrc/common/activation.cuh"
#include "csrc/common/device.h"
#include "csrc/common/launch.cuh"
#include "csrc/common/warp.cuh"
#include "csrc/groups/layout.h"

namespace jax_grouped {
namespace {

constexpr int kWarps = 8;

__device__ float2 ToFloats(__nv_bfloat162 pair) { return __bfloat1622float2(pair); }
__device__ float2 ToFloats(__half2 pair) { return __half22float2(pair); }
__device__ void Round(float2 values, __nv_bfloat162* pair) { *pair = __float22bfloat162_rn(values); }
__device__ void Round(float2 values, __half2* pair) { *pair = __float22half2_rn(values); }

template <typename Pair>
struct alignas(16) Vector {
  Pair pairs[kRowVector / 2];

  __device__ static Vector Load(const Pair* from) {
    const uint4 bits = __ldg(reinterpret_cast<const uint4*>(from));
    return reinterpret_cast<const Vector&>(bits);
  }
  __device__ void Store(Pair* to) const { *reinterpret_cast<uint4*>(to) = reinterpret_cast<const uint4&>(*this); }
};

// Vectors of a thread, which it loads before it stores the first. A warp copies this many bytes of one token.
constexpr int kLoads = 4;
constexpr int kVectorsPerWarp = 32 * kLoads;

// One part of a token per warp, and then, if there are more warps, zeros for one part of a row that has no pair.
// Neighboring warps have parts of the same token. Blocks are short: a collective that is to run meanwhile starts when
// blocks end.
__global__ void __launch_bounds__(32 * kWarps)
    PermuteRows(const uint4* __restrict__ x, const int32_t* __restrict__ order, const int32_t* __restrict__ inverse,
                uint4* __restrict__ rows, int64_t tokens, int choices, int64_t num_rows, int vectors, int parts) {
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * kWarps + Warp();
  const int64_t token = warp / parts;
  const int first = static_cast<int>(warp % parts) * kVectorsPerWarp + Lane();
  uint4 loaded[kLoads] = {};
  const auto store = [&](int64_t row) {
    uint4* to = rows + row * vectors;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int vector = first + 32 * i;
      if (vector < vectors) to[vector] = loaded[i];
    }
  };
  if (const int64_t row = token - tokens; row >= 0) {
    if (row < num_rows && (order[row] < 0 || order[row] >= tokens * choices)) store(row);
    return;
  }
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int vector = first + 32 * i;
    if (vector < vectors) loaded[i] = __ldg(x + token * vectors + vector);
  }
  for (int choice = 0; choice < choices; ++choice) {
    const int64_t row = inverse[token * choices + choice];
    if (row >= 0 && row < num_rows) store(row);
  }
}

// Blocks of a processor, so that its loads in flight cover the latency of memory.
constexpr int kSumBlocks = 4;
// Vectors of a thread. A warp sums this many features of one token.
constexpr int kSumVectors = 2;
constexpr int kFeaturesPerWarp = 32 * kSumVectors * kRowVector;

template <typename Pair>
struct Summands {
  const Pair* rows;
  const int32_t* inverse;
  const float* weights;  // null for 1
  int64_t num_rows;
  int choices;
  int pairs;  // of a row
};

// Sums one part of a token's features, and writes it to the array that `find_sums` returns. Whole warps must call it.
template <bool kWeighted, typename Pair, typename FindSums>
__device__ void SumPart(const Summands<Pair>& summands, int64_t token, int part, const FindSums& find_sums) {
  constexpr int kPairs = kRowVector / 2;
  const Pair* __restrict__ rows = summands.rows;
  const int32_t* __restrict__ inverse = summands.inverse;
  const float* __restrict__ weights = summands.weights;
  const int64_t num_rows = summands.num_rows;
  const int choices = summands.choices;
  const int pairs = summands.pairs;
  const int first = part * (kFeaturesPerWarp / 2) + Lane() * kPairs;
  float2 totals[kSumVectors][kPairs] = {};
  for (int chunk = 0; chunk < choices; chunk += 32) {
    // A choice per lane.
    const int choice = chunk + Lane();
    int32_t row = -1;
    float weight = 1.0f;
    if (choice < choices) {
      row = inverse[token * choices + choice];
      if constexpr (kWeighted) weight = weights[token * choices + choice];
    }
    uint32_t present = __ballot_sync(kFullWarp, row >= 0 && row < num_rows);
    const int count = __popc(present);
#pragma unroll 4
    for (int i = 0; i < count; ++i) {
      const int lane = __ffs(static_cast<int>(present)) - 1;
      present &= present - 1;
      const Pair* from = rows + static_cast<int64_t>(FromLane(lane, row)) * pairs;
      const float factor = kWeighted ? FromLane(lane, weight) : 1.0f;
      Vector<Pair> loaded[kSumVectors];
#pragma unroll
      for (int v = 0; v < kSumVectors; ++v) {
        const int pair = first + v * 32 * kPairs;
        loaded[v] = pair < pairs ? Vector<Pair>::Load(from + pair) : Vector<Pair>{};
      }
#pragma unroll
      for (int v = 0; v < kSumVectors; ++v) {
#pragma unroll
        for (int j = 0; j < kPairs; ++j) {
          const float2 values = ToFloats(loaded[v].pairs[j]);
          totals[v][j].x += kWeighted ? values.x * factor : values.x;
          totals[v][j].y += kWeighted ? values.y * factor : values.y;
        }
      }
    }
  }
  Pair* to = find_sums();
#pragma unroll
  for (int v = 0; v < kSumVectors; ++v) {
    const int pair = first + v * 32 * kPairs;
    if (pair >= pairs) continue;
    Vector<Pair> rounded;
#pragma unroll
    for (int j = 0; j < kPairs; ++j) Round(totals[v][j], &rounded.pairs[j]);
    rounded.Store(to + pair);
  }
}

// One part of a token's features per warp. Neighboring warps have parts of the same token.
template <typename Pair, bool kWeighted>
__global__ void __launch_bounds__(32 * kWarps, kSumBlocks)
    SumRows(const __grid_constant__ Summands<Pair> summands, Pair* __restrict__ sums, int64_t tokens, int parts) {
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * kWarps + Warp();
  const int64_t token = warp / parts;
  if (token >= tokens) return;
  SumPart<kWeighted>(summands, token, static_cast<int>(warp % parts), [&] { return sums + token * summands.pairs; });
}

// Sums tokens of the devices in turn, so that no device gets the sums of all at once.
template <typename Pair, bool kWeighted>
__global__ void __launch_bounds__(32 * kWarps, kSumBlocks)
    PushSums(const __grid_constant__ Summands<Pair> summands, const __grid_constant__ PeerArrays sums,
             const uint32_t* __restrict__ wanted, int32_t rank, int32_t count, int64_t tokens, int parts) {
  const int64_t warps = static_cast<int64_t>(gridDim.x) * kWarps;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kWarps + Warp(); i < count * tokens * parts; i += warps) {
    const int64_t turn = i / parts;
    const auto device = static_cast<int32_t>((rank + 1 + turn) % count);
    const int64_t own = turn / count;
    const int64_t token = device * tokens + own;
    if ((wanted[token] >> rank & 1) == 0) continue;
    SumPart<kWeighted>(summands, token, static_cast<int>(i % parts),
                       [&] { return static_cast<Pair*>(sums.of[device]) + own * summands.pairs; });
  }
}

template <typename Pair>
Summands<Pair> SummandsOf(const SumRowsBuffers& buffers, int choices, int64_t rows, int64_t features) {
  return {static_cast<const Pair*>(buffers.rows), buffers.inverse, buffers.weights, rows, choices,
          static_cast<int>(features / 2)};
}

template <typename Pair>
Status LaunchSumRowsOf(cudaStream_t stream, const SumRowsBuffers& buffers, int64_t tokens, int choices, int64_t rows,
                       int64_t features) {
  const int64_t parts = CeilDiv(features, kFeaturesPerWarp);
  const dim3 blocks(static_cast<unsigned>(CeilDiv(tokens * parts, kWarps)));
  return Launch("Launching the sums of rows", stream, {blocks, 32 * kWarps},
                buffers.weights == nullptr ? SumRows<Pair, false> : SumRows<Pair, true>,
                SummandsOf<Pair>(buffers, choices, rows, features), static_cast<Pair*>(buffers.sums), tokens,
                static_cast<int>(parts));
}

template <typename Pair>
Status LaunchPushSumsOf(cudaStream_t stream, const SumRowsBuffers& buffers, const Peers& peers, const uint32_t* wanted,
                        const PeerArrays& to, int64_t tokens, int choices, int64_t rows, int64_t features) {
  DeviceProperties properties;
  JAX_GROUPED_RETURN_IF_FAILED(GetDeviceProperties(&properties));
  const int64_t parts = CeilDiv(features, kFeaturesPerWarp);
  const int64_t blocks =
      std::min<int64_t>(CeilDiv(peers.count * tokens * parts, kWarps), int64_t{kSumBlocks} * properties.processors);
  JAX_GROUPED_RETURN_IF_FAILED(LaunchBarrier(stream, peers, Barrier::kBeforeWrites));
  JAX_GROUPED_RETURN_IF_FAILED(LaunchUrgent("Launching the transfer of sums", stream,
                                            {dim3(static_cast<unsigned>(blocks)), 32 * kWarps},
                                            buffers.weights == nullptr ? PushSums<Pair, false> : PushSums<Pair, true>,
                                            SummandsOf<Pair>(buffers, choices, rows, features), to, wanted, peers.rank,
                                            peers.count, tokens, static_cast<int>(parts)));
  return LaunchBarrier(stream, peers, Barrier::kAfterWrites);
}

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
__global__ void __launch_bounds__(32 * kWarps)
    ActivationGrad(const Pair* __restrict__ all_input, const Pair* __restrict__ all_da,
                   const float* __restrict__ weights, const int32_t* __restrict__ order, Pair* __restrict__ all_dinput,
                   Pair* __restrict__ all_weighted, float* __restrict__ inner_products, int64_t num_weights,
                   int64_t rows, int pairs, Activation activation) {
  const ActivationFunctions<kKind> functions{activation};
  constexpr bool kGated = IsGated(kKind);
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + Warp();
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
Status LaunchActivationGradOf(cudaStream_t stream, const ActivationGradBuffers& buffers, const Activation& activation,
                              int64_t num_weights, int64_t rows, int64_t features) {
  const dim3 blocks(static_cast<unsigned>(CeilDiv(rows, kWarps)));
  return Launch("Launching the gradient of an activation", stream, {blocks, 32 * kWarps},
                KernelOf<Pair>(activation.kind), static_cast<const Pair*>(buffers.input),
                static_cast<const Pair*>(buffers.da), buffers.weights, buffers.order,
                static_cast<Pair*>(buffers.dinput), static_cast<Pair*>(buffers.weighted), buffers.inner_products,
                num_weights, rows, static_cast<int>(features / 2), activation);
}

}  // namespace

Status LaunchPermuteRows(cudaStream_t stream, const PermuteRowsBuffers& buffers, int64_t tokens, int choices,
                         int64_t rows, int64_t token_bytes, bool zero_tail) {
  const int64_t vectors = token_bytes / kPermuteVectorBytes;
  const int64_t parts = CeilDiv(vectors, kVectorsPerWarp);
  const int64_t blocks = CeilDiv((tokens + (zero_tail ? rows : 0)) * parts, kWarps);
  return Launch("Launching the copies of tokens", stream, {dim3(static_cast<unsigned>(blocks)), 32 * kWarps},
                PermuteRows, static_cast<const uint4*>(buffers.x), buffers.order, buffers.inverse,
                static_cast<uint4*>(buffers.rows), tokens, choices, rows, static_cast<int>(vectors),
                static_cast<int>(parts));
}

Status LaunchSumRows(cudaStream_t stream, const SumRowsBuffers& buffers, cudaDataType_t type, int64_t tokens,
                     int choices, int64_t rows, int64_t features) {
  if (type == CUDA_R_16F) return LaunchSumRowsOf<__half2>(stream, buffers, tokens, choices, rows, features);
  return LaunchSumRowsOf<__nv_bfloat162>(stream, buffers, tokens, choices, rows, features);
}

Status LaunchPushSums(cudaStream_t stream, const SumRowsBuffers& buffers, const Peers& peers, const uint32_t* wanted,
                      const PeerArrays& to, cudaDataType_t type, int64_t tokens, int choices, int64_t rows,
                      int64_t features) {
  const auto launch = type == CUDA_R_16F ? LaunchPushSumsOf<__half2> : LaunchPushSumsOf<__nv_bfloat162>;
  return launch(stream, buffers, peers, wanted, to, tokens, choices, rows, features);
}

Status LaunchActivationGrad(cudaStream_t stream, const ActivationGradBuffers& buffers, const Activation& activation,
                            cudaDataType_t type, int64_t num_weights, int64_t rows, int64_t features) {
  if (type == CUDA_R_16F) {
    return LaunchActivationGradOf<__half2>(stream, buffers, activation, num_weights, rows, features);
  }
  return LaunchActivationGradOf<__nv_bfloat162>(stream, buffers, activation, num_weights, rows, features);
}

}  // namespace jax_grouped
