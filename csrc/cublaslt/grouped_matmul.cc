#include "csrc/cublaslt/grouped_matmul.h"

#include "csrc/cublaslt/autotune.h"
#include "csrc/cublaslt/launch.h"
#include "csrc/cublaslt/library.h"
#include "csrc/cublaslt/plans.h"

namespace jax_grouped {
namespace {

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

}  // namespace

Status PrepareGroupedMatmul(int device, const MatmulProblem& problem, bool autotune) {
  const CublasLt* library = nullptr;
  JAX_GROUPED_RETURN_IF_FAILED(GetCublasLt(&library));
  const Plans::Key key{device, problem};
  JAX_GROUPED_RETURN_IF_FAILED(Plans::Get().Ensure(*library, key));
  return autotune ? Tune(*library, key) : Status::Ok();
}

Status EnqueueGroupedMatmul(int device, cudaStream_t stream, const MatmulProblem& problem, const Groups& groups,
                            const MatmulBuffers& buffers) {
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
  const CublasLt* library = nullptr;
  if (!GetCublasLt(&library).ok()) return lines;
  for (const auto& [key, plan] : Plans::Get().Copy()) {
    lines.push_back("device " + std::to_string(key.first) + ": " + Describe(key.second) + ": " +
                    Describe(*library, plan.algorithm) + ", " + Name(plan.origin));
  }
  return lines;
}

}  // namespace jax_grouped
