#include "csrc/cublaslt/trial_operands.h"

#include <algorithm>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include "csrc/cublaslt/descriptors.h"

namespace jax_grouped {
namespace {

// As XLA aligns its buffers.
constexpr int64_t kBufferAlignment = 256;

// Words of 32 bits, some of whose bits are random.
struct Pattern {
  uint32_t random;
  uint32_t fixed;
};

constexpr Pattern kFloat32Ones{0, 0x3F800000};
constexpr Pattern kE8M0Ones{0, 0x7F7F7F7F};

// Random are the sign, the mantissa and the exponent's last bit; the others make the exponent that of 1/2 or 1.
Pattern ElementPattern(cudaDataType_t type) {
  switch (type) {
    case CUDA_R_8F_E4M3:
      return {0x8F8F8F8F, 0x30303030};
    case CUDA_R_8F_E5M2:
      return {0x87878787, 0x38383838};
    case CUDA_R_16BF:
      return {0x80FF80FF, 0x3F003F00};
    default:
      return {0x87FF87FF, 0x38003800};
  }
}

// Random numbers take time to make and to copy, so arrays repeat the first 4 MiB.
Status Fill(void* array, int64_t bytes, const Pattern& pattern, cudaStream_t stream) {
  constexpr int64_t kMostRandomBytes = 4 << 20;
  std::mt19937 random;
  std::vector<uint32_t> words(CeilDiv(std::min(bytes, kMostRandomBytes), 4));
  for (uint32_t& word : words) word = (random() & pattern.random) | pattern.fixed;
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

// Sizes that differ by one row at most, then the offset 0.
Status FillSizes(int32_t* sizes, const MatmulProblem& problem, cudaStream_t stream) {
  std::vector<int32_t> values(problem.num_groups + 1, static_cast<int32_t>(problem.tokens / problem.num_groups));
  for (int64_t group = 0; group < problem.tokens % problem.num_groups; ++group) ++values[group];
  values.back() = 0;
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

// Bytes of every array.
Sizes CountBytes(const MatmulProblem& problem, const Groups& groups) {
  const int64_t x = problem.tokens * problem.in_features;
  const int64_t kernels = problem.num_groups * problem.in_features * problem.out_features;
  const int64_t y = problem.tokens * problem.out_features;
  Sizes sizes{};
  sizes.a = problem.product == Product::kDgrad ? y : x;
  sizes.b = problem.product == Product::kWgrad ? y : kernels;
  sizes.d = problem.product == Product::kFprop ? y : problem.product == Product::kDgrad ? x : kernels;
  sizes.scratch = static_cast<int64_t>(MatmulScratch::Bytes(problem.num_groups));
  if (problem.scaled) {
    const QuantizedLayout a = LayoutOfA(problem, groups);
    const QuantizedLayout b = LayoutOfB(problem, groups, problem.num_groups);
    const int64_t scale_bytes = problem.a_mode == ScalingMode::kMx ? 1 : sizeof(float);
    sizes.a = a.DataElements();
    sizes.b = b.DataElements();
    sizes.a_scale = a.ScaleElements() * scale_bytes;
    sizes.b_scale = b.ScaleElements() * scale_bytes;
    sizes.scratch = static_cast<int64_t>(ScaledMatmulScratch::Bytes(1, problem.num_groups));
  }
  sizes.a *= ElementBytes(problem.a_type);
  sizes.b *= ElementBytes(problem.b_type);
  sizes.d *= ElementBytes(problem.result_type);
  sizes.group_sizes = (problem.num_groups + 1) * static_cast<int64_t>(sizeof(int32_t));
  return sizes;
}

}  // namespace

Status TrialOperands::Create(const MatmulProblem& problem, cudaStream_t stream, bool* allocated) {
  const auto num_groups = static_cast<int32_t>(problem.num_groups);
  groups_ = {nullptr, nullptr, num_groups, num_groups, problem.tokens, 1};
  const Sizes sizes = CountBytes(problem, groups_);
  int64_t total = 0;
  for (const int64_t bytes : {sizes.a, sizes.b, sizes.a_scale, sizes.b_scale, sizes.d, sizes.group_sizes, sizes.scratch,
                              static_cast<int64_t>(kWorkspaceBytes)}) {
    total += RoundUp(bytes, kBufferAlignment);
  }
  void* memory = nullptr;
  const cudaError_t error = cudaMalloc(&memory, total);
  *allocated = error == cudaSuccess;
  if (error == cudaErrorMemoryAllocation) {
    (void)cudaGetLastError();  // This failure is no one else's.
    return Status::Ok();
  }
  JAX_GROUPED_RETURN_IF_FAILED(Status::FromCuda(error, "cudaMalloc"));
  memory_.reset(static_cast<char*>(memory));

  char* next = memory_.get();
  const auto take = [&](int64_t bytes) { return std::exchange(next, next + RoundUp(bytes, kBufferAlignment)); };
  char* const a = take(sizes.a);
  char* const b = take(sizes.b);
  char* const a_scale = take(sizes.a_scale);
  char* const b_scale = take(sizes.b_scale);
  auto* const group_sizes = reinterpret_cast<int32_t*>(take(sizes.group_sizes));
  groups_.sizes = group_sizes;
  groups_.offset = group_sizes + num_groups;
  buffers_ = {a, b, a_scale, b_scale, 0, take(sizes.d), take(sizes.scratch), take(kWorkspaceBytes)};
  JAX_GROUPED_RETURN_IF_FAILED(FillSizes(group_sizes, problem, stream));
  JAX_GROUPED_RETURN_IF_FAILED(Fill(a, sizes.a, ElementPattern(problem.a_type), stream));
  JAX_GROUPED_RETURN_IF_FAILED(Fill(b, sizes.b, ElementPattern(problem.b_type), stream));
  if (!problem.scaled) return Status::Ok();
  const QuantizedLayout b_layout = LayoutOfB(problem, groups_, num_groups);
  if (problem.product != Product::kWgrad) buffers_.kernel_scales = b_layout.ScaleElements() / num_groups;
  const Pattern& ones = problem.a_mode == ScalingMode::kMx ? kE8M0Ones : kFloat32Ones;
  JAX_GROUPED_RETURN_IF_FAILED(Fill(a_scale, sizes.a_scale, ones, stream));
  return Fill(b_scale, sizes.b_scale, ones, stream);
}

}  // namespace jax_grouped
