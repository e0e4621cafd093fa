#include "csrc/matmul/grouped_matmul.h"

#include <mutex>
#include <set>

#include "csrc/common/device.h"
#include "csrc/cublaslt/autotune.h"
#include "csrc/cublaslt/launch.h"
#include "csrc/cublaslt/library.h"
#include "csrc/cublaslt/plans.h"
#include "csrc/hopper/wgrad.h"

namespace jax_grouped {
namespace {

// From so many tokens per group on, our kernel accumulates faster. The L2 cache does the additions, at 0.3e12 numbers
// per second, so that fewer tokens take as long as these.
constexpr int64_t kTokensToAccumulate = 768;

// The problems that our kernel was prepared for, as Plans has those of cuBLASLt.
class HopperWgrads {
 public:
  static HopperWgrads& Get() {
    static HopperWgrads* wgrads = new HopperWgrads();
    return *wgrads;
  }
  void Add(const Plans::Key& key) {
    std::lock_guard<std::mutex> lock(mutex_);
    keys_.insert(key);
  }
  std::set<Plans::Key> Copy() {
    std::lock_guard<std::mutex> lock(mutex_);
    return keys_;
  }

 private:
  std::mutex mutex_;
  std::set<Plans::Key> keys_;
};

std::string Line(const Plans::Key& key, const std::string& algorithm) {
  return "device " + std::to_string(key.first) + ": " + Describe(key.second) + ": " + algorithm;
}

const char* Name(Origin origin) {
  switch (origin) {
    case Origin::kHeuristic:
      return "heuristic";
    case Origin::kNotTimed:
      return "heuristic (could not be timed)";
    case Origin::kTuned:
      break;
  }
  return "tuned";
}

Status RunsHopperWgrad(int device, const MatmulProblem& problem, bool* result) {
  DeviceProperties properties;
  JAX_GROUPED_RETURN_IF_FAILED(GetDeviceProperties(device, &properties));
  *result = IsHopperWgrad(problem, properties.major);
  return Status::Ok();
}

Status EnqueueHopperWgrad(int device, cudaStream_t stream, const MatmulProblem& problem, const Groups& groups,
                          const MatmulBuffers& buffers) {
  const hopper::Wgrad wgrad{buffers.a,
                            static_cast<const float*>(buffers.a_scale),
                            problem.a_type,
                            buffers.b,
                            static_cast<const float*>(buffers.b_scale),
                            problem.b_type,
                            problem.a_mode,
                            buffers.d,
                            problem.result_type,
                            problem.accumulate,
                            problem.in_features,
                            problem.out_features,
                            LayoutOfA(problem, groups).ElementUnits()};
  return hopper::LaunchWgrad(stream, device, wgrad, groups, buffers.workspace);
}

}  // namespace

bool IsHopperWgrad(const MatmulProblem& problem, int major) {
  if (major != 9 || problem.product != Product::kWgrad || !problem.scaled) return false;
  if (problem.a_mode != ScalingMode::kTensor && problem.a_mode != ScalingMode::kBlock1D) return false;
  if (problem.accumulate) {
    // The L2 cache would round sums to 16 bits before it adds them.
    if (problem.result_type != CUDA_R_32F) return false;
    if (problem.tokens < kTokensToAccumulate * problem.num_groups) return false;
  }
  return hopper::WgradScratchBytes(problem.num_groups, 1) <= static_cast<int64_t>(kWorkspaceBytes);
}

Status PrepareGroupedMatmul(int device, const MatmulProblem& problem, bool autotune) {
  bool hopper_wgrad = false;
  JAX_GROUPED_RETURN_IF_FAILED(RunsHopperWgrad(device, problem, &hopper_wgrad));
  const Plans::Key key{device, problem};
  if (hopper_wgrad) {
    HopperWgrads::Get().Add(key);
    return Status::Ok();
  }
  const CublasLt* library = nullptr;
  JAX_GROUPED_RETURN_IF_FAILED(GetCublasLt(&library));
  JAX_GROUPED_RETURN_IF_FAILED(Plans::Get().Ensure(*library, key));
  return autotune ? Tune(*library, key) : Status::Ok();
}

Status EnqueueGroupedMatmul(int device, cudaStream_t stream, const MatmulProblem& problem, const Groups& groups,
                            const MatmulBuffers& buffers) {
  bool hopper_wgrad = false;
  JAX_GROUPED_RETURN_IF_FAILED(RunsHopperWgrad(device, problem, &hopper_wgrad));
  if (hopper_wgrad) return EnqueueHopperWgrad(device, stream, problem, groups, buffers);
  const CublasLt* library = nullptr;
  JAX_GROUPED_RETURN_IF_FAILED(GetCublasLt(&library));
  Plan plan;
  if (!Plans::Get().Find({device, problem}, &plan)) {
    return Status::Failed("A grouped matmul ran on a device on which it had not been initialized.");
  }
  return LaunchGroupedMatmul(*library, plan.handle, plan.algorithm, stream, problem, groups, buffers);
}

std::vector<std::string> DescribePlans() {
  std::vector<std::string> lines;
  for (const Plans::Key& key : HopperWgrads::Get().Copy()) lines.push_back(Line(key, "kernel of jax_grouped"));
  const CublasLt* library = nullptr;
  if (!GetCublasLt(&library).ok()) return lines;
  for (const auto& [key, plan] : Plans::Get().Copy()) {
    lines.push_back(Line(key, Describe(*library, plan.algorithm) + ", " + Name(plan.origin)));
  }
  return lines;
}

}  // namespace jax_grouped
