#include "csrc/routing/route.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>

#include "csrc/common/launch.cuh"
#include "csrc/common/warp.cuh"

namespace jax_grouped {
namespace {

// A warp routes a token. Each lane holds kValues successive experts, the first lane the first ones. So of equal
// numbers, the first one of the lowest lane has the lowest index.
template <int kValues>
constexpr int kMostOfLanes = 32 * kValues;

// More values need more registers and more shared memory.
template <int kValues>
constexpr int kWarps = kValues < 16 ? 32 : 16;

__device__ float ToFloat(float x) { return x; }
__device__ float ToFloat(__half x) { return __half2float(x); }
__device__ float ToFloat(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T, int kValues>
struct alignas(std::min<size_t>(16, sizeof(T) * kValues)) Vector {
  T element[kValues];
};

__device__ int FirstExpert(int values) { return Lane() * values; }

// Loads a lane's numbers of a row of `size`, and `filler` for those past its end. Rows of whole vectors are aligned.
template <typename T, int kValues>
__device__ void LoadRow(const T* row, int size, float filler, float (&values)[kValues]) {
  const int first = FirstExpert(kValues);
  if (size % kValues == 0) {
    Vector<T, kValues> vector;
    if (first < size) vector = *reinterpret_cast<const Vector<T, kValues>*>(row + first);
#pragma unroll
    for (int i = 0; i < kValues; ++i) values[i] = first < size ? ToFloat(vector.element[i]) : filler;
  } else {
#pragma unroll
    for (int i = 0; i < kValues; ++i) values[i] = first + i < size ? ToFloat(row[first + i]) : filler;
  }
}

template <int kValues>
__device__ void StoreRow(const float (&values)[kValues], int size, float* row) {
  const int first = FirstExpert(kValues);
  if (size % kValues == 0) {
    Vector<float, kValues> vector;
#pragma unroll
    for (int i = 0; i < kValues; ++i) vector.element[i] = values[i];
    if (first < size) *reinterpret_cast<Vector<float, kValues>*>(row + first) = vector;
  } else {
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      if (first + i < size) row[first + i] = values[i];
    }
  }
}

template <int kValues>
__device__ float SumOf(const float (&values)[kValues]) {
  float sum = 0.0f;
#pragma unroll
  for (const float value : values) sum += value;
  return WarpSum(sum);
}

// Maps numbers to integers in the same order. None of them is kNoKey.
constexpr uint32_t kNoKey = 0;
__device__ uint32_t ToKey(float number) {
  const uint32_t bits = __float_as_uint(number);
  return bits ^ (static_cast<int32_t>(bits) < 0 ? 0xffffffff : 0x80000000);
}
__device__ float FromKey(uint32_t key) {
  return __uint_as_float(key ^ (static_cast<int32_t>(key) < 0 ? 0x80000000 : 0xffffffff));
}

// Replaces logits by their softmax. Values past the last expert must be -inf.
template <int kValues>
__device__ void Softmax(float (&values)[kValues]) {
  float largest = values[0];
#pragma unroll
  for (int i = 1; i < kValues; ++i) largest = fmaxf(largest, values[i]);
  largest = FromKey(__reduce_max_sync(kFullWarp, ToKey(largest)));
#pragma unroll
  for (float& value : values) value = expf(value - largest);
  const float inverse = 1.0f / SumOf(values);
#pragma unroll
  for (float& value : values) value *= inverse;
}

template <int kValues>
__device__ void Sigmoid(float (&values)[kValues]) {
#pragma unroll
  for (float& value : values) value = 1.0f / (1.0f + expf(-value));
}

// Removes the keys of experts outside of the token's best groups. `numbers` is the warp's shared memory.
template <int kValues>
__device__ void KeepBestGroups(const RouteProblem& problem, float* numbers, uint32_t (&keys)[kValues]) {
  const int first = FirstExpert(kValues);
  const int size = problem.num_experts / problem.expert_groups;
#pragma unroll
  for (int i = 0; i < kValues; ++i) numbers[first + i] = FromKey(keys[i]);
  __syncwarp();
  // A group has 2^bits lanes, which share its experts. There are two groups or more, or none would be left out.
  const int bits = __clz(problem.expert_groups - 1) - 27;
  const int group = Lane() >> bits;
  float best = -INFINITY;
  float second = -INFINITY;
  if (group < problem.expert_groups) {
    for (int i = Lane() & ((1 << bits) - 1); i < size; i += 1 << bits) {
      const float number = numbers[group * size + i];
      second = fmaxf(second, fminf(best, number));
      best = fmaxf(best, number);
    }
  }
  __syncwarp();
  for (int lanes = (1 << bits) / 2; lanes > 0; lanes /= 2) {
    const float other = __shfl_xor_sync(kFullWarp, best, lanes);
    second = fmaxf(fmaxf(second, __shfl_xor_sync(kFullWarp, second, lanes)), fminf(best, other));
    best = fmaxf(best, other);
  }
  if (size == 1) second = 0.0f;
  // Halves, whose sum does not overflow.
  uint32_t key = group < problem.expert_groups ? ToKey(best * 0.5f + second * 0.5f) : kNoKey;
  uint32_t kept = 0;
  for (int i = 0; i < problem.top_groups; ++i) {
    const uint32_t largest = __reduce_max_sync(kFullWarp, key);
    const int winner = (__ffs(__ballot_sync(kFullWarp, key == largest)) - 1) >> bits;
    if (group == winner) key = kNoKey;
#pragma unroll
    for (int j = 0; j < kValues; ++j) {
      if (static_cast<uint32_t>(first + j - winner * size) < static_cast<uint32_t>(size)) kept |= 1u << j;
    }
  }
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    if ((kept >> i & 1) == 0) keys[i] = kNoKey;
  }
}

// The largest key of a lane and, of equal ones, the first one's place.
struct Best {
  uint32_t key;
  int place;

  template <int kValues>
  __device__ static Best Of(const uint32_t (&keys)[kValues]) {
    Best best{keys[0], 0};
#pragma unroll
    for (int i = 1; i < kValues; ++i) {
      if (keys[i] > best.key) best = {keys[i], i};
    }
    return best;
  }
};

// Returns to each of the first lanes one of the experts with the largest keys, the best one to lane 0. Removes the
// keys.
template <int kValues>
__device__ int ChooseExperts(int choices, uint32_t (&keys)[kValues]) {
  int expert = 0;
  Best best = Best::Of(keys);
#pragma unroll 1
  for (int choice = 0; choice < choices; ++choice) {
    const uint32_t largest = __reduce_max_sync(kFullWarp, best.key);
    const int winner = __ffs(__ballot_sync(kFullWarp, best.key == largest)) - 1;
    const int chosen = FromLane(winner, FirstExpert(kValues) + best.place);
    if (Lane() == choice) expert = chosen;
    if (Lane() == winner) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        if (i == best.place) keys[i] = kNoKey;
      }
      best = Best::Of(keys);
    }
  }
  return expert;
}

// blockIdx.x is the block of tokens, and blockIdx.y the batch element.
template <typename T, int kValues>
__global__ void __launch_bounds__(32 * kWarps<kValues>)
    Route(const __grid_constant__ RouteProblem problem, const __grid_constant__ RouteBuffers buffers) {
  // A row for each warp, first for a token's numbers, then for the warp's sums.
  __shared__ alignas(16) float warp_numbers[kWarps<kValues>][kMostOfLanes<kValues>];
  __shared__ int32_t counts[kMostOfLanes<kValues>];
  for (int i = threadIdx.x; i < kMostOfLanes<kValues>; i += blockDim.x) counts[i] = 0;
  __syncthreads();

  const int first = FirstExpert(kValues);
  const int num_experts = problem.num_experts;
  const int64_t element = blockIdx.y;
  const int64_t before_element = element * problem.tokens;
  float* numbers = warp_numbers[Warp()];
  float bias[kValues]{};
  if (buffers.bias != nullptr) LoadRow(buffers.bias + element * num_experts, num_experts, 0.0f, bias);
  float sums[kValues]{};

  const int64_t begin = blockIdx.x * TokensOfRoutingBlock(problem.tokens);
  const int64_t end = min(begin + TokensOfRoutingBlock(problem.tokens), problem.tokens);
#pragma unroll 1
  for (int64_t token = before_element + begin + Warp(); token < before_element + end; token += kWarps<kValues>) {
    float scores[kValues];
    LoadRow(static_cast<const T*>(buffers.logits) + token * num_experts, num_experts, -INFINITY, scores);
    float total = 0.0f;
    if (problem.score == Score::kSoftmax) {
      Softmax(scores);
    } else {
      Sigmoid(scores);
      total = SumOf(scores);
    }
    float probabilities[kValues];
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      probabilities[i] = total > 0.0f ? scores[i] / total : scores[i];
      sums[i] += probabilities[i];
    }
    StoreRow(probabilities, num_experts, buffers.probabilities + token * num_experts);

    uint32_t keys[kValues];
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      // The maximum of NaN and a number is the number.
      const float number = fminf(fmaxf(scores[i] + bias[i], -FLT_MAX), FLT_MAX);
      keys[i] = first + i < num_experts ? ToKey(number) : kNoKey;
    }
    if (problem.top_groups < problem.expert_groups) KeepBestGroups(problem, numbers, keys);
#pragma unroll
    for (int i = 0; i < kValues; ++i) numbers[first + i] = scores[i];
    const int expert = ChooseExperts(problem.choices, keys);
    __syncwarp();
    float weight = Lane() < problem.choices ? numbers[expert] : 0.0f;
    __syncwarp();
    if (problem.normalize_weights) {
      const float sum = WarpSum(weight);
      if (sum > 0.0f) weight /= sum;
    }
    if (Lane() < problem.choices) {
      buffers.experts[token * problem.choices + Lane()] = expert;
      buffers.weights[token * problem.choices + Lane()] = weight;
      atomicAdd(&counts[expert], 1);
    }
  }

#pragma unroll
  for (int i = 0; i < kValues; ++i) numbers[first + i] = sums[i];
  __syncthreads();
  const int64_t row = (element * gridDim.x + blockIdx.x) * num_experts;
  for (int expert = threadIdx.x; expert < num_experts; expert += blockDim.x) {
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kWarps<kValues>; ++warp) sum += warp_numbers[warp][expert];
    buffers.block_counts[row + expert] = counts[expert];
    buffers.block_sums[row + expert] = sum;
  }
}

template <typename T, int kValues>
Status Launch(cudaStream_t stream, const RouteBuffers& buffers, const RouteProblem& problem) {
  const dim3 blocks(static_cast<unsigned>(RoutingBlocks(problem.tokens)), static_cast<unsigned>(problem.batch));
  return jax_grouped::Launch("Launching the choice of experts", stream, {blocks, 32 * kWarps<kValues>},
                             Route<T, kValues>, problem, buffers);
}

template <typename T>
Status Launch(cudaStream_t stream, const RouteBuffers& buffers, const RouteProblem& problem) {
  if (problem.num_experts <= kMostOfLanes<1>) return Launch<T, 1>(stream, buffers, problem);
  if (problem.num_experts <= kMostOfLanes<2>) return Launch<T, 2>(stream, buffers, problem);
  if (problem.num_experts <= kMostOfLanes<4>) return Launch<T, 4>(stream, buffers, problem);
  if (problem.num_experts <= kMostOfLanes<8>) return Launch<T, 8>(stream, buffers, problem);
  static_assert(kMostExperts == kMostOfLanes<16>);
  return Launch<T, 16>(stream, buffers, problem);
}

}  // namespace

Status LaunchRoute(cudaStream_t stream, const RouteBuffers& buffers, cudaDataType_t type, const RouteProblem& problem) {
  switch (type) {
    case CUDA_R_16BF:
      return Launch<__nv_bfloat16>(stream, buffers, problem);
    case CUDA_R_16F:
      return Launch<__half>(stream, buffers, problem);
    case CUDA_R_32F:
      return Launch<float>(stream, buffers, problem);
    default:
      return Status::Failed("The choice of experts takes bfloat16, float16 or float32.");
  }
}

}  // namespace jax_grouped
