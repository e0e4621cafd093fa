#include "csrc/matmul/grouped_matmul.h"

#include <cstdint>
#include <string>
#include <vector>

#include "csrc/common/device.h"
#include "csrc/cublaslt/autotune.h"
#include "csrc/cublaslt/launch.h"
#include "csrc/cublaslt/library.h"
#include "csrc/cublaslt/plans.h"
#include "csrc/hopper/token_product.h"
#include "csrc/hopper/wgrad.h"

namespace jax_grouped {
namespace {

// From so many tokens per group on, our kernel accumulates faster. The L2 cache does the additions, at 0.3e12 numbers
// per second, so that fewer tokens take as long as these.
constexpr int64_t kTokensToAccumulate = 768;

// Up to this depth our kernel of fprop and dgrad is faster if its tiles are full: 1.3 times as fast at 1024, 1.1 times
// at 2048, as fast at 4096. With tiles that are not full, it is if all are computed at once.
constexpr int64_t kMostDepth = 3072;

// What products of tokens sum over, and the features of their results.
int64_t Depth(const MatmulProblem& problem) {
  return problem.product == Product::kFprop ? problem.in_features : problem.out_features;
}
int64_t ResultFeatures(const MatmulProblem& problem) {
  return problem.product == Product::kFprop ? problem.out_features : problem.in_features;
}

const char* Name(Origin origin) {
  switch (origin) {
    case Origin::kOwnKernel:
      return "kernel of jax_grouped";
    case Origin::kHeuristic:
      return "heuristic";
    case Origin::kNotTimed:
      return "heuristic (could not be timed)";
    case Origin::kTuned:
      break;
  }
  return "tuned";
}

std::string Describe(const Plan& plan) {
  const CublasLt* library = nullptr;
  if (plan.origin == Origin::kOwnKernel || !GetCublasLt(&library).ok()) return Name(plan.origin);
  return Describe(*library, plan.algorithm) + ", " + Name(plan.origin);
}

hopper::Fp8Operand OperandA(const MatmulProblem& problem, const MatmulBuffers& buffers) {
  return {buffers.a, static_cast<const float*>(buffers.a_scale), problem.a_type};
}

hopper::Fp8Operand OperandB(const MatmulProblem& problem, const MatmulBuffers& buffers) {
  return {buffers.b, static_cast<const float*>(buffers.b_scale), problem.b_type};
}

Status EnqueueHopperWgrad(int device, cudaStream_t stream, const MatmulProblem& problem, const Groups& groups,
                          const MatmulBuffers& buffers) {
  const hopper::Wgrad wgrad{OperandA(problem, buffers),
                            OperandB(problem, buffers),
                            problem.a_mode,
                            buffers.d,
                            problem.result_type,
                            problem.accumulate,
                            problem.in_features,
                            problem.out_features,
                            LayoutOfA(problem, groups).ElementUnits()};
  return hopper::LaunchWgrad(stream, device, wgrad, groups, buffers.workspace);
}

Status EnqueueHopperTokens(int device, cudaStream_t stream, const MatmulProblem& problem, const Groups& groups,
                           const MatmulBuffers& buffers) {
  const hopper::TokenProduct product{OperandA(problem, buffers),
                                     OperandB(problem, buffers),
                                     problem.a_mode,
                                     buffers.kernel_scales,
                                     buffers.d,
                                     problem.result_type,
                                     Depth(problem),
                                     ResultFeatures(problem),
                                     NumKernels(problem),
                                     problem.elements_per_kernel,
                                     LayoutOfA(problem, groups).ElementUnits()};
  return hopper::LaunchTokenProduct(stream, device, product, groups, buffers.workspace);
}

bool IsHopperWgrad(const MatmulProblem& problem) {
  if (problem.accumulate) {
    // The L2 cache would round sums to 16 bits before it adds them.
    if (problem.result_type != CUDA_R_32F) return false;
    if (problem.tokens < kTokensToAccumulate * problem.num_groups) return false;
  }
  return hopper::WgradScratchBytes(problem.num_groups, 1) <= static_cast<int64_t>(kWorkspaceBytes);
}

bool IsHopperTokens(const MatmulProblem& problem, int processors) {
  if (problem.accumulate || Depth(problem) > kMostDepth) return false;
  const int64_t features = ResultFeatures(problem);
  const int64_t tiles =
      MostUnits(problem.tokens, problem.num_groups, hopper::kTileTokens) * CeilDiv(features, hopper::kTileFeatures);
  if (problem.tokens < hopper::kTileTokens * problem.num_groups && tiles > processors) return false;
  // The copy engine counts rows by 32 bits.
  if (NumKernels(problem) * features > INT32_MAX) return false;
  return hopper::TokenProductScratchBytes(problem.num_groups, 1) <= static_cast<int64_t>(kWorkspaceBytes);
}

// Whether a kernel of ours computes the product on such a GPU. On Hopper these are FP8 weight gradients, but not all
// that are added to what is there, and products of FP8 tokens over not too many features.
bool IsHopperProduct(const MatmulProblem& problem, const DeviceProperties& device) {
  if (device.major != 9 || !problem.scaled) return false;
  if (problem.a_mode != ScalingMode::kTensor && problem.a_mode != ScalingMode::kBlock1D) return false;
  return problem.product == Product::kWgrad ? IsHopperWgrad(problem) : IsHopperTokens(problem, device.processors);
}

}  // namespace

Status PrepareGroupedMatmul(int device, const MatmulProblem& problem, bool autotune) {
  DeviceProperties properties;
  JAX_GROUPED_RETURN_IF_FAILED(GetDeviceProperties(device, &properties));
  const Plans::Key key{device, problem};
  if (IsHopperProduct(problem, properties)) {
    Plans::Get().AddOwnKernel(key);
    return Status::Ok();
  }
  const CublasLt* library = nullptr;
  JAX_GROUPED_RETURN_IF_FAILED(GetCublasLt(&library));
  JAX_GROUPED_RETURN_IF_FAILED(Plans::Get().Ensure(*library, key));
  return autotune ? Tune(*library, key) : Status::Ok();
}

Status EnqueueGroupedMatmul(int device, cudaStream_t stream, const MatmulProblem& problem, const Groups& groups,
                            const MatmulBuffers& buffers) {
  Plan plan;
  if (!Plans::Get().Find({device, problem}, &plan)) {
    return Status::Failed("A grouped matmul ran on a device on which it had not been initialized.");
  }
  if (plan.origin == Origin::kOwnKernel) {
    return problem.product == Product::kWgrad ? EnqueueHopperWgrad(device, stream, problem, groups, buffers)
                                              : EnqueueHopperTokens(device, stream, problem, groups, buffers);
  }
  const CublasLt* library = nullptr;
  JAX_GROUPED_RETURN_IF_FAILED(GetCublasLt(&library));
  return LaunchGroupedMatmul(*library, plan.handle, plan.algorithm, stream, problem, groups, buffers);
}

std::vector<std::string> DescribePlans() {
  std::vector<std::string> lines;
  for (const auto& [key, plan] : Plans::Get().Copy()) {
    const auto& [device, problem] = key;
    lines.push_back("device " + std::to_string(device) + ": " + Describe(problem) + ": " + Describe(plan));
  }
  return lines;
}

}  // namespace jax_grouped
