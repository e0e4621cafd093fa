#include "csrc/routing/routing.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <type_traits>

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
  return bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000);
}
__device__ float FromKey(uint32_t key) {
  return __uint_as_float(key ^ (static_cast<uint32_t>(~static_cast<int32_t>(key) >> 31) | 0x80000000));
}

// Returns a sum to divide by: NaN in place of infinity, so that all shares of it are NaN.
__device__ float ToDivisor(float sum) { return isinf(sum) ? NAN : sum; }

// Returns the largest number of the warp. NaN are no numbers; -inf if there are no others.
template <int kValues>
__device__ float LargestOf(const float (&values)[kValues]) {
  float largest = -INFINITY;
#pragma unroll
  for (const float value : values) largest = fmaxf(largest, value);
  return FromKey(__reduce_max_sync(kFullWarp, ToKey(largest)));
}

// Replaces logits by their softmax. Values past the last expert must be -inf.
template <int kValues>
__device__ void Softmax(float (&values)[kValues]) {
  const float largest = LargestOf(values);
#pragma unroll
  for (float& value : values) value = expf(value - largest);
  const float inverse = 1.0f / SumOf(values);
#pragma unroll
  for (float& value : values) value *= inverse;
}

// The scores of one token, other than softmax, divided by the score's size at the token's largest logit: exp(shift) for
// sigmoids and exp(shift / 2) for sqrtsoftplus, where shift is min(largest, 0). The largest quotient is at least 1/2,
// so shares of the quotients' sum are right for logits whose scores are too small for float32. The formulas are those
// of jax_grouped/kernels/routing.py.
template <Score kScore>
class RelativeScore {
 public:
  __device__ explicit RelativeScore(float largest)
      : shift_(largest == -INFINITY ? 0.0f : fminf(largest, 0.0f)),
        divisor_(expf(kScore == Score::kSigmoid ? shift_ : shift_ / 2)) {}

  __device__ float Divisor() const { return divisor_; }
  // Returns a quotient. 0 for -inf; NaN for NaN.
  __device__ float operator()(float logit) const {
    if constexpr (kScore == Score::kSigmoid) {
      const bool is_positive = logit > 0.0f;  // Then the divisor is 1.
      const float power = expf(is_positive ? -logit : logit - shift_);
      return (is_positive ? 1.0f : power) / (1.0f + power * divisor_);
    } else {
      constexpr float kExponential = -17.0f;  // Below this logit, softplus is the exponential in float32.
      if (logit < kExponential) return expf((logit - shift_) / 2);
      return sqrtf(fmaxf(logit, 0.0f) + log1pf(expf(-fabsf(logit)))) / divisor_;
    }
  }

 private:
  float shift_;
  float divisor_;
};

// Returns 0 for subnormal numbers, as the xla backend has it on CPUs.
__device__ float WithoutSubnormals(float number) { return fabsf(number) < FLT_MIN ? 0.0f : number; }

// Returns the number by which the choice compares logits in place of their scores: it makes the same order, also of
// sigmoids that float32 rounds to 0 or 1. -inf is above NaN, which will become -FLT_MAX.
__device__ float ToCompared(float logit) {
  constexpr float kAboveLowest = -0x1.fffffcp127f;
  return WithoutSubnormals(logit < kAboveLowest ? kAboveLowest : logit);
}

// Returns the number within [-most, most]. NaN counts as the lowest.
__device__ float Limited(float number, float most) { return fminf(fmaxf(number, -most), most); }

// Removes the keys of experts outside of the token's best groups. `numbers` is the warp's shared memory.
template <int kValues>
__device__ void KeepBestGroups(const RouteProblem& problem, const float (&scores)[kValues], float* numbers,
                               uint32_t (&keys)[kValues]) {
  const int first = FirstExpert(kValues);
  const int size = problem.num_experts / problem.expert_groups;
#pragma unroll
  for (int i = 0; i < kValues; ++i) numbers[first + i] = Limited(scores[i], FLT_MAX / 2);
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
  if (size == 1 || problem.group_score == GroupScore::kMax) second = 0.0f;
  uint32_t key = group < problem.expert_groups ? ToKey(best + second) : kNoKey;
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

// A lane's keys, the largest first, with the places that they had. Of equal keys, the first stays first.
template <int kValues>
class SortedKeys {
 public:
  // Sorts as many of the largest keys as there are choices.
  __device__ SortedKeys(uint32_t choices, const uint32_t (&keys)[kValues]) {
    uint32_t places[kValues];
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      keys_[i] = keys[i];
      places[i] = i;
    }
    // Moves the largest of the keys that are left to the front. Only neighbours change places.
#pragma unroll
    for (int front = 0; front + 1 < kValues; ++front) {
      if (front >= choices) break;
#pragma unroll
      for (int i = kValues - 1; i > front; --i) {
        const bool swapped = keys_[i] > keys_[i - 1];
        const uint32_t larger = max(keys_[i], keys_[i - 1]);
        const uint32_t place = swapped ? places[i] : places[i - 1];
        keys_[i] = min(keys_[i], keys_[i - 1]);
        keys_[i - 1] = larger;
        places[i] = swapped ? places[i - 1] : places[i];
        places[i - 1] = place;
      }
    }
#pragma unroll
    for (int i = kValues - 1; i >= 0; --i) places_ = places_ << kPlaceBits | places[i];
  }

  __device__ uint32_t Largest() const { return keys_[0]; }
  __device__ uint32_t PlaceOfLargest() const { return places_ & (kValues - 1); }
  __device__ void RemoveLargest() {
#pragma unroll
    for (int i = 0; i + 1 < kValues; ++i) keys_[i] = keys_[i + 1];
    keys_[kValues - 1] = kNoKey;
    places_ >>= kPlaceBits;
  }

 private:
  static constexpr int kPlaceBits = 4;
  static_assert(kValues <= 1 << kPlaceBits);

  uint32_t keys_[kValues];
  std::conditional_t<(kValues * kPlaceBits > 32), uint64_t, uint32_t> places_ = 0;
};

// Returns the experts with the largest keys, the best one to the first lane. Of equal keys, the lowest expert is
// better.
template <int kValues>
__device__ uint32_t ChooseExperts(uint32_t choices, const uint32_t (&keys)[kValues]) {
  SortedKeys<kValues> sorted(choices, keys);
  uint32_t result = 0;
#pragma unroll 1
  for (uint32_t choice = 0; choice < choices; ++choice) {
    const uint32_t own = FirstExpert(kValues) + sorted.PlaceOfLargest();
    const bool is_best = sorted.Largest() == __reduce_max_sync(kFullWarp, sorted.Largest());
    const uint32_t chosen = __reduce_min_sync(kFullWarp, is_best ? own : UINT32_MAX);
    if (Lane() == choice) result = chosen;
    if (own == chosen) sorted.RemoveLargest();
  }
  return result;
}

// blockIdx.x is the block of tokens, and blockIdx.y the batch element.
template <typename T, int kValues, Score kScore>
__global__ void __launch_bounds__(32 * kWarps<kValues>, 1)
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
  // Numbers past the last expert become the lowest, and come after all of their equals.
  float bias[kValues];
  if (buffers.bias != nullptr) {
    LoadRow(buffers.bias + element * num_experts, num_experts, -INFINITY, bias);
  } else {
#pragma unroll
    for (int i = 0; i < kValues; ++i) bias[i] = first + i < num_experts ? 0.0f : -INFINITY;
  }
  float sums[kValues]{};
  constexpr bool kSoftmax = kScore == Score::kSoftmax;
  const bool compares_logits = !kSoftmax && buffers.bias == nullptr;

  const int own_warp = Uniform(Warp());
  const int64_t begin = blockIdx.x * TokensOfRoutingBlock(problem.tokens);
  const int64_t end = min(begin + TokensOfRoutingBlock(problem.tokens), problem.tokens);
#pragma unroll 1
  for (int64_t token = before_element + begin + own_warp; token < before_element + end; token += kWarps<kValues>) {
    // Logits, or their softmax. The weights follow from them.
    float values[kValues];
    LoadRow(static_cast<const T*>(buffers.logits) + token * num_experts, num_experts, -INFINITY, values);
    float scores[kValues];
    float probabilities[kValues];
    if constexpr (kSoftmax) {
      Softmax(values);
#pragma unroll
      for (int i = 0; i < kValues; ++i) scores[i] = probabilities[i] = values[i];
    } else {
      const RelativeScore<kScore> score(LargestOf(values));
#pragma unroll
      for (int i = 0; i < kValues; ++i) scores[i] = score(values[i]);
      const float sum = ToDivisor(SumOf(scores));
      const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        probabilities[i] = scores[i] * inverse;
        // Without a bias, scores are for the sums of groups, which the divisor does not change the order of.
        scores[i] = WithoutSubnormals(buffers.bias == nullptr ? scores[i] : scores[i] * score.Divisor());
      }
    }
    StoreRow(probabilities, num_experts, buffers.probabilities + token * num_experts);
#pragma unroll
    for (int i = 0; i < kValues; ++i) sums[i] += probabilities[i];

    uint32_t keys[kValues];
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      scores[i] += bias[i];
      keys[i] = ToKey(Limited(compares_logits ? ToCompared(values[i]) + bias[i] : scores[i], FLT_MAX));
    }
    if (problem.top_groups < problem.expert_groups) KeepBestGroups(problem, scores, numbers, keys);
#pragma unroll
    for (int i = 0; i < kValues; ++i) numbers[first + i] = values[i];
    uint32_t expert = ChooseExperts(problem.choices, keys);
    // A branch around the choice would take registers from it.
    const int64_t own = token * problem.choices + Lane();
    if (Lane() < problem.choices && buffers.choice != nullptr) expert = static_cast<uint32_t>(buffers.choice[own]);
    const bool exists = Lane() < problem.choices && expert < num_experts;
    __syncwarp();
    float weight = exists ? numbers[expert] : kSoftmax ? 0.0f : -INFINITY;
    __syncwarp();
    if constexpr (!kSoftmax) {
      const float logit[] = {weight};
      const RelativeScore<kScore> score(problem.normalize_weights ? LargestOf(logit) : 0.0f);
      weight = WithoutSubnormals(score(weight));
    }
    if (problem.normalize_weights) {
      const float sum = ToDivisor(WarpSum(weight));
      if (sum != 0.0f) weight /= sum;
    }
    if (Lane() < problem.choices) {
      buffers.experts[own] = static_cast<int32_t>(expert);
      buffers.weights[own] = weight;
    }
    if (exists) atomicAdd(&counts[expert], 1);
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
  const auto kernel = problem.score == Score::kSoftmax   ? Route<T, kValues, Score::kSoftmax>
                      : problem.score == Score::kSigmoid ? Route<T, kValues, Score::kSigmoid>
                                                         : Route<T, kValues, Score::kSqrtSoftplus>;
  return jax_grouped::Launch("Launching the choice of experts", stream, {blocks, 32 * kWarps<kValues>}, kernel, problem,
                             buffers);
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
  return WithFloatType(type, [&](auto number) { return Launch<decltype(number)>(stream, buffers, problem); });
}

}  // namespace jax_grouped
