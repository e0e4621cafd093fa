#include "csrc/gemm/cublaslt/trial_operands.h"

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <random>
#include <utility>
#include <vector>

#include "csrc/gemm/cublaslt/descriptors.h"

namespace jax_grouped {
namespace {

// The alignment of XLA's buffers.
constexpr int64_t kBufferAlignment = 256;

// A 32-bit word of which some bits are random.
struct Pattern {
  uint32_t random;
  uint32_t fixed;
};

constexpr Pattern kFloat32Ones{0, 0x3F800000};
constexpr Pattern kE8M0Ones{0, 0x7F7F7F7F};

// Returns the pattern of a type's elements. The sign, the mantissa and the last bit of the exponent are random. The
// other bits make the exponent that of 1/2 or 1.
Pattern ElementPattern(cudaDataType_t type) {
  switch (type) {
    case CUDA_R_8F_E4M3:
      return {0x8F8F8F8F, 0x30303030};
    case CUDA_R_8F_E5M2:
      return {0x87878787, 0x38383838};
    case CUDA_R_16BF:
      return {0x80FF80FF, 0x3F003F00};
    case CUDA_R_32F:
      return {0x80FFFFFF, 0x3F000000};
    default:
      return {0x87FF87FF, 0x38003800};
  }
}

// Fills an array with a repetition of 4 MiB of random numbers. More would take time to generate and to copy.
Status Fill(void* array, int64_t bytes, const Pattern& pattern, std::mt19937* random, cudaStream_t stream) {
  if (bytes == 0) return Status::Ok();
  constexpr int64_t kMostRandomBytes = 4 << 20;
  std::vector<uint32_t> words(CeilDiv(std::min(bytes, kMostRandomBytes), 4));
  for (uint32_t& word : words) word = ((*random)() & pattern.random) | pattern.fixed;
  char* base = static_cast<char*>(array);
  int64_t filled = std::min(bytes, kMostRandomBytes);
  JAX_GROUPED_RETURN_IF_FAILED(
      Status::FromCuda(cudaMemcpyAsync(base, words.data(), filled, cudaMemcpyHostToDevice, stream), "cudaMemcpyAsync"));
  for (; filled < bytes; filled *= 2) {
    const int64_t more = std::min(filled, bytes - filled);
    JAX_GROUPED_RETURN_IF_FAILED(Status::FromCuda(
        cudaMemcpyAsync(base + filled, base, more, cudaMemcpyDeviceToDevice, stream), "cudaMemcpyAsync"));
  }
  return Status::FromCuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
}

// Writes sizes that differ by at most one row, then offsets of 0.
Status FillSizes(int32_t* sizes, const Groups& groups, cudaStream_t stream) {
  std::vector<int32_t> values(groups.AllGroups(), static_cast<int32_t>(groups.capacity / groups.num_groups));
  for (int32_t i = 0; i < groups.AllGroups(); ++i) {
    if (i % groups.num_groups < groups.capacity % groups.num_groups) ++values[i];
  }
  values.resize(groups.AllGroups() + groups.batch, 0);
  JAX_GROUPED_RETURN_IF_FAILED(Status::FromCuda(
      cudaMemcpyAsync(sizes, values.data(), values.size() * sizeof(int32_t), cudaMemcpyHostToDevice, stream),
      "cudaMemcpyAsync"));
  return Status::FromCuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
}

struct Sizes {
  int64_t a;
  int64_t b;
  int64_t a_scale;
  int64_t b_scale;
  int64_t d;
  int64_t group_sizes;
  int64_t scratch;
};

// Counts the bytes of every array.
Sizes CountBytes(const GemmProblem& problem, const Groups& groups) {
  const int64_t x = problem.tokens * problem.in_features;
  const int64_t weights = NumWeights(problem) * problem.in_features * problem.out_features;
  const int64_t y = problem.tokens * problem.out_features;
  Sizes sizes{};
  sizes.a = problem.product == Product::kDgrad ? y : x;
  sizes.b = problem.product == Product::kWgrad ? y : weights;
  sizes.d = problem.product == Product::kFprop ? y : problem.product == Product::kDgrad ? x : weights;
  sizes.scratch = static_cast<int64_t>(GemmScratch::Bytes(groups.batch, groups.num_groups));
  if (problem.scaled) {
    const QuantizedLayout a = LayoutOfA(problem, groups);
    const QuantizedLayout b = LayoutOfB(problem, groups);
    const int64_t scale_bytes = problem.a_mode == ScalingMode::kMx ? 1 : sizeof(float);
    sizes.a = a.DataElements();
    sizes.b = b.DataElements();
    sizes.a_scale = a.ScaleElements() * scale_bytes;
    sizes.b_scale = b.ScaleElements() * scale_bytes;
  }
  sizes.a *= ElementBytes(problem.a_type);
  sizes.b *= ElementBytes(problem.b_type);
  sizes.d *= ElementBytes(problem.result_type);
  sizes.group_sizes = (groups.AllGroups() + groups.batch) * static_cast<int64_t>(sizeof(int32_t));
  return sizes;
}

// Counts the copies of `bytes` bytes that together are twice as large as the current device's L2 cache, at most 8.
Status CountCopies(int64_t bytes, int* copies) {
  constexpr int64_t kMostCopies = 8;
  int device = 0;
  JAX_GROUPED_RETURN_IF_FAILED(Status::FromCuda(cudaGetDevice(&device), "cudaGetDevice"));
  int l2_bytes = 0;
  JAX_GROUPED_RETURN_IF_FAILED(
      Status::FromCuda(cudaDeviceGetAttribute(&l2_bytes, cudaDevAttrL2CacheSize, device), "cudaDeviceGetAttribute"));
  *copies = static_cast<int>(std::clamp<int64_t>(CeilDiv(2 * int64_t{l2_bytes}, bytes), 1, kMostCopies));
  return Status::Ok();
}

}  // namespace

Status TrialOperands::Create(const GemmProblem& problem, cudaStream_t stream) {
  // All elements of this batch share weights. It has as many groups and tokens as the batch of the problem.
  const int32_t batch = problem.elements_per_weight;
  const auto num_groups = static_cast<int32_t>(problem.num_groups / batch);
  groups_ = {nullptr, nullptr, num_groups, num_groups, problem.tokens / batch, batch};
  const Sizes sizes = CountBytes(problem, groups_);
  const auto sum = [](std::initializer_list<int64_t> arrays) {
    int64_t total = 0;
    for (const int64_t bytes : arrays) total += RoundUp(bytes, kBufferAlignment);
    return total;
  };
  const int64_t call_bytes = sum({sizes.a, sizes.b, sizes.a_scale, sizes.b_scale, sizes.d});
  int copies = 0;
  JAX_GROUPED_RETURN_IF_FAILED(CountCopies(call_bytes, &copies));
  const int64_t total = copies * call_bytes + sum({sizes.group_sizes, sizes.scratch, kWorkspaceBytes});
  void* memory = nullptr;
  JAX_GROUPED_RETURN_IF_FAILED(Status::FromCuda(cudaMalloc(&memory, total), "cudaMalloc"));
  memory_.reset(static_cast<char*>(memory));

  char* next = memory_.get();
  const auto take = [&](int64_t bytes) { return std::exchange(next, next + RoundUp(bytes, kBufferAlignment)); };
  auto* const group_sizes = reinterpret_cast<int32_t*>(take(sizes.group_sizes));
  groups_.sizes = group_sizes;
  groups_.offset = group_sizes + groups_.AllGroups();
  JAX_GROUPED_RETURN_IF_FAILED(FillSizes(group_sizes, groups_, stream));
  char* const scratch = take(sizes.scratch);
  char* const workspace = take(kWorkspaceBytes);
  const bool scaled_weights = problem.scaled && problem.product != Product::kWgrad;
  const int64_t weight_scales = scaled_weights ? LayoutOfB(problem, groups_).ScaleElements() / NumWeights(problem) : 0;
  const Pattern& ones = problem.a_mode == ScalingMode::kMx ? kE8M0Ones : kFloat32Ones;
  std::mt19937 random;  // Shared by all arrays: equal numbers in both operands would make the products squares.
  for (int copy = 0; copy < copies; ++copy) {
    char* const a = take(sizes.a);
    char* const b = take(sizes.b);
    char* const a_scale = take(sizes.a_scale);
    char* const b_scale = take(sizes.b_scale);
    char* const d = take(sizes.d);
    buffers_.push_back({a, b, a_scale, b_scale, weight_scales, nullptr, d, true, scratch, workspace});
    JAX_GROUPED_RETURN_IF_FAILED(Fill(a, sizes.a, ElementPattern(problem.a_type), &random, stream));
    JAX_GROUPED_RETURN_IF_FAILED(Fill(b, sizes.b, ElementPattern(problem.b_type), &random, stream));
    JAX_GROUPED_RETURN_IF_FAILED(Fill(a_scale, sizes.a_scale, ones, &random, stream));
    JAX_GROUPED_RETURN_IF_FAILED(Fill(b_scale, sizes.b_scale, ones, &random, stream));
    if (problem.accumulate) {
      JAX_GROUPED_RETURN_IF_FAILED(Fill(d, sizes.d, ElementPattern(problem.result_type), &random, stream));
    }
  }
  return Status::Ok();
}

}  // namespace jax_grouped
