#include "csrc/gemm/cublaslt/algorithms.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "csrc/gemm/cublaslt/descriptors.h"

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

// Initialises descriptors for queries about a problem. cuBLASLt requires addresses in them but reads nothing there.
Status InitDescriptorsOfNothing(const CublasLt& library, const GemmProblem& problem, Descriptors* descriptors) {
  const GemmScratch nowhere(reinterpret_cast<void*>(uintptr_t{4096}), 1, problem.num_groups);
  return InitDescriptors(library, problem, ToColumnMajor(problem, {}), nowhere, descriptors);
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

Status ProposeAlgorithms(const CublasLt& library, cublasLtHandle_t handle, const GemmProblem& problem, int most,
                         std::vector<Algorithm>* algorithms) {
  Descriptors descriptors;
  JAX_GROUPED_RETURN_IF_FAILED(InitDescriptorsOfNothing(library, problem, &descriptors));
  cublasLtMatmulPreferenceOpaque_t preference;
  JAX_GROUPED_RETURN_IF_FAILED(InitPreference(library, problem, &preference));
  std::vector<cublasLtMatmulHeuristicResult_t> results(most);
  int found = 0;
  JAX_GROUPED_RETURN_IF_FAILED(library.Check(
      library.MatmulAlgoGetHeuristic(handle, &descriptors.matmul, &descriptors.a, &descriptors.b, &descriptors.d,
                                     &descriptors.d, &preference, most, results.data(), &found),
      "cublasLtMatmulAlgoGetHeuristic"));
  algorithms->clear();
  for (int i = 0; i < found; ++i) {
    if (results[i].state == CUBLAS_STATUS_SUCCESS) algorithms->push_back({results[i].algo, results[i].workspaceSize});
  }
  if (!algorithms->empty()) return Status::Ok();
  return Status::Failed("cuBLASLt has no algorithm for this grouped matmul on this GPU.");
}

bool CanRun(const CublasLt& library, cublasLtHandle_t handle, const GemmProblem& problem, const Algorithm& algorithm) {
  Descriptors descriptors;
  if (!InitDescriptorsOfNothing(library, problem, &descriptors).ok()) return false;
  cublasLtMatmulHeuristicResult_t result{};
  return library.MatmulAlgoCheck(handle, &descriptors.matmul, &descriptors.a, &descriptors.b, &descriptors.d,
                                 &descriptors.d, &algorithm.choice, &result) == CUBLAS_STATUS_SUCCESS &&
         result.state == CUBLAS_STATUS_SUCCESS && result.workspaceSize <= algorithm.workspace_bytes &&
         algorithm.workspace_bytes <= kWorkspaceBytes;
}

std::string Describe(const CublasLt& library, const Algorithm& algorithm) {
  return "algorithm " + ConfigAttribute<int32_t>(library, algorithm, CUBLASLT_ALGO_CONFIG_ID) + ", tile " +
         ConfigAttribute<uint32_t>(library, algorithm, CUBLASLT_ALGO_CONFIG_TILE_ID) + ", stages " +
         ConfigAttribute<uint32_t>(library, algorithm, CUBLASLT_ALGO_CONFIG_STAGES_ID) + ", cluster shape " +
         ConfigAttribute<uint16_t>(library, algorithm, CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID) + ", workspace " +
         std::to_string(algorithm.workspace_bytes) + " bytes";
}

}  // namespace jax_grouped
