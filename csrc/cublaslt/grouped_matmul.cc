#include "csrc/cublaslt/grouped_matmul.h"

#include <cublasLt.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <tuple>

#include "csrc/cublaslt/library.h"
#include "csrc/kernels/matmul_setup.h"

namespace jax_grouped {
namespace {

struct Plan {
  cublasLtMatmulAlgo_t algorithm;
  size_t workspace_bytes;
};

struct Key {
  int device;
  MatmulProblem problem;

  bool operator<(const Key& other) const { return Tuple() < other.Tuple(); }

 private:
  std::tuple<int, Product, int, int, int64_t, int64_t, int64_t, int64_t> Tuple() const {
    return {device,         problem.product,     problem.operand_type, problem.result_type,
            problem.tokens, problem.in_features, problem.out_features, problem.num_groups};
  }
};

// Handles and algorithms of all devices. Handles live as long as the process: the driver may be gone before a
// destructor runs.
class Plans {
 public:
  static Plans& Get() {
    static Plans* plans = new Plans();
    return *plans;
  }

  bool Find(const Key& key, Plan* plan, cublasLtHandle_t* handle) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = plans_.find(key);
    if (found == plans_.end()) return false;
    *plan = found->second;
    *handle = handles_.at(key.device);
    return true;
  }

  // Calls choose(handle, &plan) unless there is a plan for the key already.
  template <typename Choose>
  Status Ensure(const CublasLt& library, const Key& key, Choose choose) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (plans_.count(key) > 0) return Status::Ok();
    cublasLtHandle_t& handle = handles_[key.device];
    if (handle == nullptr) JAX_GROUPED_RETURN_IF_FAILED(library.Check(library.Create(&handle), "cublasLtCreate"));
    Plan plan{};
    JAX_GROUPED_RETURN_IF_FAILED(choose(handle, &plan));
    plans_.emplace(key, plan);
    return Status::Ok();
  }

  std::map<Key, Plan> Copy() {
    std::lock_guard<std::mutex> lock(mutex_);
    return plans_;
  }

 private:
  std::mutex mutex_;
  std::map<int, cublasLtHandle_t> handles_;
  std::map<Key, Plan> plans_;
};

int32_t ElementBytes(cudaDataType_t type) { return type == CUDA_R_32F ? 4 : 2; }

// How cuBLASLt sees a problem. Its matrices are column-major, so each of ours is its transpose there, and the product
// of row-major matrices is computed as d^T = b^T a^T.
struct ColumnMajor {
  Operand a;
  Operand b;
  Operand d;
  cublasOperation_t transpose_a;
  cublasOperation_t transpose_b;
};

ColumnMajor ToColumnMajor(const MatmulProblem& problem, const MatmulBuffers& buffers) {
  const auto in = static_cast<int32_t>(problem.in_features);
  const auto out = static_cast<int32_t>(problem.out_features);
  const int32_t operand_bytes = ElementBytes(problem.operand_type);
  const int32_t result_bytes = ElementBytes(problem.result_type);
  void* first = const_cast<void*>(buffers.a);
  void* second = const_cast<void*>(buffers.b);
  switch (problem.product) {
    case Product::kFprop:
      return {{second, operand_bytes, out, in},
              {first, operand_bytes, in, 0},
              {buffers.d, result_bytes, out, 0},
              CUBLAS_OP_N,
              CUBLAS_OP_N};
    case Product::kDgrad:
      return {{second, operand_bytes, out, in},
              {first, operand_bytes, out, 0},
              {buffers.d, result_bytes, in, 0},
              CUBLAS_OP_T,
              CUBLAS_OP_N};
    case Product::kWgrad:
      break;
  }
  return {{second, operand_bytes, out, 0},
          {first, operand_bytes, in, 0},
          {buffers.d, result_bytes, out, in},
          CUBLAS_OP_N,
          CUBLAS_OP_T};
}

// The descriptors of one call. They hold addresses of the call's scratch memory, so they are made anew each time.
struct Descriptors {
  cublasLtMatmulDescOpaque_t matmul;
  cublasLtMatrixLayoutOpaque_t a;
  cublasLtMatrixLayoutOpaque_t b;
  cublasLtMatrixLayoutOpaque_t d;
};

template <typename Value>
Status SetAttribute(const CublasLt& library, cublasLtMatmulDesc_t matmul, cublasLtMatmulDescAttributes_t attribute,
                    Value value) {
  return library.Check(library.MatmulDescSetAttribute(matmul, attribute, &value, sizeof(value)),
                       "cublasLtMatmulDescSetAttribute");
}

template <typename Value>
Status SetPreference(const CublasLt& library, cublasLtMatmulPreference_t preference,
                     cublasLtMatmulPreferenceAttributes_t attribute, Value value) {
  return library.Check(library.MatmulPreferenceSetAttribute(preference, attribute, &value, sizeof(value)),
                       "cublasLtMatmulPreferenceSetAttribute");
}

Status InitLayout(const CublasLt& library, const MatmulScratch& scratch, int matrix, cudaDataType_t type,
                  int64_t num_groups, cublasLtMatrixLayoutOpaque_t* layout) {
  return library.Check(
      library.GroupedMatrixLayoutInit(layout, sizeof(*layout), type, static_cast<int>(num_groups), scratch.Rows(matrix),
                                      scratch.Columns(matrix), scratch.LeadingDimensions(matrix)),
      "cublasLtGroupedMatrixLayoutInit");
}

Status InitDescriptors(const CublasLt& library, const MatmulProblem& problem, const ColumnMajor& operands,
                       const MatmulScratch& scratch, Descriptors* descriptors) {
  cublasLtMatmulDesc_t matmul = &descriptors->matmul;
  JAX_GROUPED_RETURN_IF_FAILED(library.Check(
      library.MatmulDescInit(matmul, sizeof(*matmul), CUBLAS_COMPUTE_32F, CUDA_R_32F), "cublasLtMatmulDescInit"));
  // Scalars in host memory gave wrong grouped results on Hopper in several releases. One pair serves all groups.
  const auto pointer_mode = static_cast<int32_t>(CUBLASLT_POINTER_MODE_DEVICE);
  constexpr int64_t kSameForAll = 0;
  JAX_GROUPED_RETURN_IF_FAILED(SetAttribute(library, matmul, CUBLASLT_MATMUL_DESC_POINTER_MODE, pointer_mode));
  JAX_GROUPED_RETURN_IF_FAILED(SetAttribute(library, matmul, CUBLASLT_MATMUL_DESC_ALPHA_BATCH_STRIDE, kSameForAll));
  JAX_GROUPED_RETURN_IF_FAILED(SetAttribute(library, matmul, CUBLASLT_MATMUL_DESC_BETA_BATCH_STRIDE, kSameForAll));
  JAX_GROUPED_RETURN_IF_FAILED(
      SetAttribute(library, matmul, CUBLASLT_MATMUL_DESC_TRANSA, static_cast<int32_t>(operands.transpose_a)));
  JAX_GROUPED_RETURN_IF_FAILED(
      SetAttribute(library, matmul, CUBLASLT_MATMUL_DESC_TRANSB, static_cast<int32_t>(operands.transpose_b)));
  const int64_t groups = problem.num_groups;
  JAX_GROUPED_RETURN_IF_FAILED(InitLayout(library, scratch, 0, problem.operand_type, groups, &descriptors->a));
  JAX_GROUPED_RETURN_IF_FAILED(InitLayout(library, scratch, 1, problem.operand_type, groups, &descriptors->b));
  return InitLayout(library, scratch, 2, problem.result_type, groups, &descriptors->d);
}

// Tells the heuristic the average of a size that it can't see. 13.10 takes 64 bits and refuses the 32 that its header
// names; another release may do as the header says. Without the hint, the choice is merely less informed.
void SetAverage(const CublasLt& library, cublasLtMatmulPreference_t preference,
                cublasLtMatmulPreferenceAttributes_t attribute, int64_t value) {
  if (SetPreference(library, preference, attribute, value).ok()) return;
  (void)SetPreference(library, preference, attribute, static_cast<uint32_t>(value));
}

void SetAverages(const CublasLt& library, const MatmulProblem& problem, cublasLtMatmulPreference_t preference) {
  const int64_t tokens = std::max<int64_t>(1, problem.tokens / problem.num_groups);
  int64_t rows = problem.out_features;
  int64_t columns = tokens;
  int64_t reduction = problem.in_features;
  if (problem.product == Product::kDgrad) std::swap(rows, reduction);
  if (problem.product == Product::kWgrad) std::swap(columns, reduction);
  SetAverage(library, preference, CUBLASLT_MATMUL_PREF_GROUPED_DESC_D_AVERAGE_ROWS, rows);
  SetAverage(library, preference, CUBLASLT_MATMUL_PREF_GROUPED_DESC_D_AVERAGE_COLS, columns);
  SetAverage(library, preference, CUBLASLT_MATMUL_PREF_GROUPED_AVERAGE_REDUCTION_DIM, reduction);
}

Status ChooseAlgorithm(const CublasLt& library, cublasLtHandle_t handle, const MatmulProblem& problem, Plan* plan) {
  // The heuristic wants addresses in the layouts but reads nothing there.
  MatmulScratch nowhere(reinterpret_cast<void*>(uintptr_t{4096}), problem.num_groups);
  Descriptors descriptors;
  JAX_GROUPED_RETURN_IF_FAILED(InitDescriptors(library, problem, ToColumnMajor(problem, {}), nowhere, &descriptors));

  cublasLtMatmulPreferenceOpaque_t preference;
  JAX_GROUPED_RETURN_IF_FAILED(
      library.Check(library.MatmulPreferenceInit(&preference, sizeof(preference)), "cublasLtMatmulPreferenceInit"));
  JAX_GROUPED_RETURN_IF_FAILED(
      SetPreference(library, &preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t{kWorkspaceBytes}));
  for (const auto attribute :
       {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
    JAX_GROUPED_RETURN_IF_FAILED(SetPreference(library, &preference, attribute, kAlignmentBytes));
  }
  SetAverages(library, problem, &preference);

  cublasLtMatmulHeuristicResult_t result{};
  int found = 0;
  JAX_GROUPED_RETURN_IF_FAILED(
      library.Check(library.MatmulAlgoGetHeuristic(handle, &descriptors.matmul, &descriptors.a, &descriptors.b,
                                                   &descriptors.d, &descriptors.d, &preference, 1, &result, &found),
                    "cublasLtMatmulAlgoGetHeuristic"));
  if (found == 0) return Status::Failed("cuBLASLt has no algorithm for this grouped matmul on this GPU.");
  *plan = Plan{result.algo, result.workspaceSize};
  return Status::Ok();
}

const char* Name(Product product) {
  switch (product) {
    case Product::kFprop:
      return "fprop";
    case Product::kDgrad:
      return "dgrad";
    case Product::kWgrad:
      break;
  }
  return "wgrad";
}

const char* Name(cudaDataType_t type) { return type == CUDA_R_32F ? "f32" : type == CUDA_R_16BF ? "bf16" : "f16"; }

int32_t AlgorithmAttribute(const CublasLt& library, const Plan& plan, cublasLtMatmulAlgoConfigAttributes_t attribute) {
  int32_t value = -1;
  size_t written = 0;
  library.MatmulAlgoConfigGetAttribute(&plan.algorithm, attribute, &value, sizeof(value), &written);
  return value;
}

}  // namespace

Status PrepareGroupedMatmul(int device, const MatmulProblem& problem) {
  const CublasLt* library = nullptr;
  JAX_GROUPED_RETURN_IF_FAILED(GetCublasLt(&library));
  return Plans::Get().Ensure(*library, Key{device, problem}, [&](cublasLtHandle_t handle, Plan* plan) {
    return ChooseAlgorithm(*library, handle, problem, plan);
  });
}

Status EnqueueGroupedMatmul(int device, cudaStream_t stream, const MatmulProblem& problem, const Groups& groups,
                            int32_t elements_per_kernel, const MatmulBuffers& buffers, bool accumulate) {
  const CublasLt* library = nullptr;
  JAX_GROUPED_RETURN_IF_FAILED(GetCublasLt(&library));
  Plan plan;
  cublasLtHandle_t handle;
  if (!Plans::Get().Find(Key{device, problem}, &plan, &handle)) {
    return Status::Failed("A grouped matmul ran on a device on which it had not been initialized.");
  }

  const ColumnMajor operands = ToColumnMajor(problem, buffers);
  const MatmulScratch scratch(buffers.scratch, problem.num_groups);
  const bool zero_rest = problem.product != Product::kWgrad && !accumulate;
  // XLA lends the workspace's memory to other buffers between calls, and cuBLASLt releases up to 13.7 are known to
  // trust what an earlier matmul left there. So each call starts from zeros, which costs nothing: no algorithm seen on
  // an H200 uses more than 0.2 MB.
  const Region workspace{buffers.workspace, static_cast<int64_t>(plan.workspace_bytes)};
  JAX_GROUPED_RETURN_IF_FAILED(LaunchMatmulSetup(stream, groups, elements_per_kernel, operands.a, operands.b,
                                                 operands.d, accumulate ? 1.0f : 0.0f, zero_rest, workspace, scratch));
  Descriptors descriptors;
  JAX_GROUPED_RETURN_IF_FAILED(InitDescriptors(*library, problem, operands, scratch, &descriptors));
  // C is D itself: with beta = 1 the product is added in place, with beta = 0 it is not read.
  return library->Check(library->Matmul(handle, &descriptors.matmul, scratch.Alpha(), scratch.Pointers(0),
                                        &descriptors.a, scratch.Pointers(1), &descriptors.b, scratch.Beta(),
                                        scratch.Pointers(2), &descriptors.d, scratch.Pointers(2), &descriptors.d,
                                        &plan.algorithm, buffers.workspace, plan.workspace_bytes, stream),
                        "cublasLtMatmul");
}

std::vector<std::string> DescribePlans() {
  std::vector<std::string> lines;
  const CublasLt* library = nullptr;
  if (!GetCublasLt(&library).ok()) return lines;
  for (const auto& [key, plan] : Plans::Get().Copy()) {
    const MatmulProblem& problem = key.problem;
    lines.push_back(std::string("device ") + std::to_string(key.device) + ": " + Name(problem.product) + " " +
                    Name(problem.operand_type) + " -> " + Name(problem.result_type) + ", E " +
                    std::to_string(problem.num_groups) + " T " + std::to_string(problem.tokens) + " K " +
                    std::to_string(problem.in_features) + " N " + std::to_string(problem.out_features) +
                    ": algorithm " + std::to_string(AlgorithmAttribute(*library, plan, CUBLASLT_ALGO_CONFIG_ID)) +
                    ", tile " + std::to_string(AlgorithmAttribute(*library, plan, CUBLASLT_ALGO_CONFIG_TILE_ID)) +
                    ", workspace " + std::to_string(plan.workspace_bytes) + " bytes");
  }
  return lines;
}

}  // namespace jax_grouped
