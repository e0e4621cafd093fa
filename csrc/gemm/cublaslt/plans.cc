#include "csrc/gemm/cublaslt/plans.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "csrc/common/device.h"
#include "csrc/gemm/cublaslt/launch.h"

namespace jax_grouped {
namespace {

template <typename Value>
Status SetPreference(const CublasLt& library, cublasLtMatmulPreference_t preference,
                     cublasLtMatmulPreferenceAttributes_t attribute, Value value) {
  return library.Check(library.MatmulPreferenceSetAttribute(preference, attribute, &value, sizeof(value)),
                       "cublasLtMatmulPreferenceSetAttribute");
}

// Tells the heuristic the average of a size that it cannot see. cuBLASLt 13.10 takes 64 bits and refuses the 32 bits
// that its header names; another release may follow its header. Without the hint, the choice is merely less informed.
void SetAverage(const CublasLt& library, cublasLtMatmulPreference_t preference,
                cublasLtMatmulPreferenceAttributes_t attribute, int64_t value) {
  if (SetPreference(library, preference, attribute, value).ok()) return;
  (void)SetPreference(library, preference, attribute, static_cast<uint32_t>(value));
}

void SetAverages(const CublasLt& library, const GemmProblem& problem, cublasLtMatmulPreference_t preference) {
  const int64_t tokens = std::max<int64_t>(1, problem.expected_tokens / problem.num_groups);
  int64_t rows = problem.out_features;
  int64_t columns = tokens;
  int64_t reduction = problem.in_features;
  if (problem.product == Product::kDgrad) std::swap(rows, reduction);
  if (problem.product == Product::kWgrad) std::swap(columns, reduction);
  SetAverage(library, preference, CUBLASLT_MATMUL_PREF_GROUPED_DESC_D_AVERAGE_ROWS, rows);
  SetAverage(library, preference, CUBLASLT_MATMUL_PREF_GROUPED_DESC_D_AVERAGE_COLS, columns);
  SetAverage(library, preference, CUBLASLT_MATMUL_PREF_GROUPED_AVERAGE_REDUCTION_DIM, reduction);
}

Status InitPreference(const CublasLt& library, const GemmProblem& problem,
                      cublasLtMatmulPreferenceOpaque_t* preference) {
  JAX_GROUPED_RETURN_IF_FAILED(
      library.Check(library.MatmulPreferenceInit(preference, sizeof(*preference)), "cublasLtMatmulPreferenceInit"));
  JAX_GROUPED_RETURN_IF_FAILED(
      SetPreference(library, preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t{kWorkspaceBytes}));
  // Other reduction schemes would add partial sums in the result's type.
  JAX_GROUPED_RETURN_IF_FAILED(SetPreference(library, preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                                             uint32_t{CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE}));
  for (const auto attribute :
       {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
    JAX_GROUPED_RETURN_IF_FAILED(SetPreference(library, preference, attribute, kAlignmentBytes));
  }
  SetAverages(library, problem, preference);
  return Status::Ok();
}

// Finds the heuristic's first algorithm.
Status ChooseAlgorithm(const CublasLt& library, cublasLtHandle_t handle, const GemmProblem& problem,
                       Algorithm* algorithm) {
  // cuBLASLt requires addresses in the descriptors but reads nothing there.
  const GemmScratch nowhere(reinterpret_cast<void*>(uintptr_t{4096}), 1, problem.num_groups);
  Descriptors descriptors;
  JAX_GROUPED_RETURN_IF_FAILED(InitDescriptors(library, problem, ToColumnMajor(problem, {}), nowhere, &descriptors));
  cublasLtMatmulPreferenceOpaque_t preference;
  JAX_GROUPED_RETURN_IF_FAILED(InitPreference(library, problem, &preference));
  cublasLtMatmulHeuristicResult_t result{};
  int found = 0;
  JAX_GROUPED_RETURN_IF_FAILED(
      library.Check(library.MatmulAlgoGetHeuristic(handle, &descriptors.matmul, &descriptors.a, &descriptors.b,
                                                   &descriptors.d, &descriptors.d, &preference, 1, &result, &found),
                    "cublasLtMatmulAlgoGetHeuristic"));
  if (found == 0 || result.state != CUBLAS_STATUS_SUCCESS) {
    return Status::Failed("cuBLASLt has no algorithm for this grouped matmul on this GPU.");
  }
  *algorithm = {result.algo, result.workspaceSize};
  return Status::Ok();
}

// Returns a configuration attribute as text. `Value` is the attribute's type in cublasLt.h.
template <typename Value>
std::string ConfigAttribute(const CublasLt& library, const Algorithm& algorithm,
                            cublasLtMatmulAlgoConfigAttributes_t attribute) {
  Value value{};
  size_t written = 0;
  const bool known = library.MatmulAlgoConfigGetAttribute(&algorithm.choice, attribute, &value, sizeof(value),
                                                          &written) == CUBLAS_STATUS_SUCCESS;
  return known ? std::to_string(value) : "unknown";
}

}  // namespace

Plans& Plans::Get() {
  static Plans* plans = new Plans();
  return *plans;
}

bool Plans::Find(const Key& key, Plan* plan) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = plans_.find(key);
  if (found == plans_.end()) return false;
  *plan = found->second;
  return true;
}

Status Plans::Ensure(const CublasLt& library, const Key& key) {
  std::lock_guard<std::mutex> adding(adding_);
  Plan plan;
  if (Find(key, &plan)) return Status::Ok();
  const auto& [device, problem] = key;
  DeviceProperties properties;
  JAX_GROUPED_RETURN_IF_FAILED(GetDeviceProperties(device, &properties));
  JAX_GROUPED_RETURN_IF_FAILED(CheckCapability(problem, properties.major, properties.minor));
  cublasLtHandle_t& handle = handles_[device];
  if (handle == nullptr) JAX_GROUPED_RETURN_IF_FAILED(library.Check(library.Create(&handle), "cublasLtCreate"));
  plan.handle = handle;
  JAX_GROUPED_RETURN_IF_FAILED(ChooseAlgorithm(library, handle, problem, &plan.algorithm));
  std::lock_guard<std::mutex> lock(mutex_);
  plans_.emplace(key, plan);
  return Status::Ok();
}

void Plans::AddOwnKernel(const Key& key) {
  std::lock_guard<std::mutex> lock(mutex_);
  plans_.emplace(key, Plan{});
}

std::map<Plans::Key, Plan> Plans::Copy() {
  std::lock_guard<std::mutex> lock(mutex_);
  return plans_;
}

std::string Describe(const CublasLt& library, const Algorithm& algorithm) {
  return "algorithm " + ConfigAttribute<int32_t>(library, algorithm, CUBLASLT_ALGO_CONFIG_ID) + ", tile " +
         ConfigAttribute<uint32_t>(library, algorithm, CUBLASLT_ALGO_CONFIG_TILE_ID) + ", stages " +
         ConfigAttribute<uint32_t>(library, algorithm, CUBLASLT_ALGO_CONFIG_STAGES_ID) + ", cluster shape " +
         ConfigAttribute<uint16_t>(library, algorithm, CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID) + ", workspace " +
         std::to_string(algorithm.workspace_bytes) + " bytes";
}

}  // namespace jax_grouped
