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

  auto Tuple() const {
    return std::make_tuple(device, problem.product, problem.a_type, problem.b_type, problem.result_type, problem.scaled,
                           problem.a_mode, problem.b_mode, problem.tokens, problem.in_features, problem.out_features,
                           problem.num_groups);
  }

  bool operator<(const Key& other) const { return Tuple() < other.Tuple(); }
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

int32_t ElementBytes(cudaDataType_t type) {
  switch (type) {
    case CUDA_R_32F:
      return 4;
    case CUDA_R_8F_E4M3:
    case CUDA_R_8F_E5M2:
      return 1;
    default:
      return 2;
  }
}

// How cuBLASLt sees a problem. Its matrices are column-major, so each of ours is its transpose there, and the product
// of row-major matrices is computed as d^T = b^T a^T.
struct ColumnMajor {
  Operand a;
  Operand b;
  Operand d;
  cublasOperation_t transpose_a;
  cublasOperation_t transpose_b;
};

// Scaled operands are contiguous along what is summed over, and so there is one combination of transposes.
ColumnMajor ScaledToColumnMajor(const MatmulProblem& problem, void* first, void* second, Operand d) {
  const auto in = static_cast<int32_t>(problem.in_features);
  const auto out = static_cast<int32_t>(problem.out_features);
  switch (problem.product) {
    case Product::kFprop:
      d.rows = out;
      return {{second, 1, in, out}, {first, 1, in, 0}, d, CUBLAS_OP_T, CUBLAS_OP_N};
    case Product::kDgrad:
      d.rows = in;
      return {{second, 1, out, in}, {first, 1, out, 0}, d, CUBLAS_OP_T, CUBLAS_OP_N};
    case Product::kWgrad:
      break;
  }
  d.rows = out;
  d.columns = in;
  return {{second, 1, 0, out}, {first, 1, 0, in}, d, CUBLAS_OP_T, CUBLAS_OP_N};
}

ColumnMajor ToColumnMajor(const MatmulProblem& problem, const MatmulBuffers& buffers) {
  const auto in = static_cast<int32_t>(problem.in_features);
  const auto out = static_cast<int32_t>(problem.out_features);
  const int32_t operand_bytes = ElementBytes(problem.a_type);
  const int32_t result_bytes = ElementBytes(problem.result_type);
  void* first = const_cast<void*>(buffers.a);
  void* second = const_cast<void*>(buffers.b);
  if (problem.scaled) return ScaledToColumnMajor(problem, first, second, {buffers.d, result_bytes, 0, 0});
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

cublasLtMatmulMatrixScale_t ScaleMode(ScalingMode mode) {
  switch (mode) {
    case ScalingMode::kBlock1D:
      return CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F;
    case ScalingMode::kBlock2D:
      return CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F;
    default:
      return CUBLASLT_MATMUL_MATRIX_SCALE_PER_BATCH_SCALAR_32F;
  }
}

// Says how the operands are scaled, and where the device has the addresses of each group's scales.
Status SetScales(const CublasLt& library, const MatmulProblem& problem, const ScaledMatmulScratch& scratch,
                 cublasLtMatmulDesc_t matmul) {
  const auto a_mode = static_cast<int32_t>(ScaleMode(problem.b_mode));
  const auto b_mode = static_cast<int32_t>(ScaleMode(problem.a_mode));
  JAX_GROUPED_RETURN_IF_FAILED(SetAttribute(library, matmul, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, a_mode));
  JAX_GROUPED_RETURN_IF_FAILED(SetAttribute(library, matmul, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, b_mode));
  JAX_GROUPED_RETURN_IF_FAILED(
      SetAttribute(library, matmul, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, scratch.ScalePointers(0)));
  JAX_GROUPED_RETURN_IF_FAILED(
      SetAttribute(library, matmul, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, scratch.ScalePointers(1)));
  // Every product is accumulated in float32 throughout.
  constexpr int8_t kFastAccumulation = 0;
  return SetAttribute(library, matmul, CUBLASLT_MATMUL_DESC_FAST_ACCUM, kFastAccumulation);
}

Status InitDescriptors(const CublasLt& library, const MatmulProblem& problem, const ColumnMajor& operands,
                       const ScaledMatmulScratch& scaled_scratch, Descriptors* descriptors) {
  const MatmulScratch scratch = scaled_scratch.Matmul();
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
  if (problem.scaled) JAX_GROUPED_RETURN_IF_FAILED(SetScales(library, problem, scaled_scratch, matmul));
  const int64_t groups = problem.num_groups;
  JAX_GROUPED_RETURN_IF_FAILED(InitLayout(library, scratch, 0, problem.b_type, groups, &descriptors->a));
  JAX_GROUPED_RETURN_IF_FAILED(InitLayout(library, scratch, 1, problem.a_type, groups, &descriptors->b));
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
  const ScaledMatmulScratch nowhere(reinterpret_cast<void*>(uintptr_t{4096}), 1, problem.num_groups);
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

const char* Name(cudaDataType_t type) {
  switch (type) {
    case CUDA_R_32F:
      return "f32";
    case CUDA_R_16BF:
      return "bf16";
    case CUDA_R_8F_E4M3:
      return "e4m3";
    case CUDA_R_8F_E5M2:
      return "e5m2";
    default:
      return "f16";
  }
}

const char* Name(ScalingMode mode) {
  switch (mode) {
    case ScalingMode::kBlock1D:
      return "1x128";
    case ScalingMode::kBlock2D:
      return "128x128";
    default:
      return "tensor";
  }
}

std::string DescribeOperands(const MatmulProblem& problem) {
  if (!problem.scaled) return Name(problem.a_type);
  return std::string(Name(problem.a_type)) + " " + Name(problem.a_mode) + " x " + Name(problem.b_type) + " " +
         Name(problem.b_mode);
}

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
  // Of which matmuls without scales have the first part only.
  const ScaledMatmulScratch scaled_scratch(buffers.scratch, groups.batch, groups.num_groups);
  const MatmulScratch scratch = scaled_scratch.Matmul();
  const bool zero_rest = problem.product != Product::kWgrad && !accumulate;
  // XLA lends the workspace's memory to other buffers between calls, and cuBLASLt releases up to 13.7 are known to
  // trust what an earlier matmul left there. So each call starts from zeros, which costs nothing: no algorithm seen on
  // an H200 uses more than 0.2 MB.
  const Region workspace{buffers.workspace, static_cast<int64_t>(plan.workspace_bytes)};
  const float beta = accumulate ? 1.0f : 0.0f;
  if (problem.scaled) {
    const bool has_kernels = problem.product != Product::kWgrad;
    const OperandScales a_scales{buffers.b_scale, problem.b_mode, static_cast<int32_t>(problem.out_features),
                                 has_kernels ? buffers.kernel_scales : 0};
    const int64_t b_features = problem.product == Product::kDgrad ? problem.out_features : problem.in_features;
    const OperandScales b_scales{buffers.a_scale, problem.a_mode, static_cast<int32_t>(b_features), 0};
    const QuantizedLayout tokens{problem.a_mode, false, false, 1, groups.capacity, b_features, groups.num_groups, 0};
    JAX_GROUPED_RETURN_IF_FAILED(LaunchScaledMatmulSetup(stream, groups, tokens.ElementUnits(), elements_per_kernel,
                                                         operands.a, a_scales, operands.b, b_scales, operands.d, beta,
                                                         zero_rest, workspace, scaled_scratch));
  } else {
    JAX_GROUPED_RETURN_IF_FAILED(LaunchMatmulSetup(stream, groups, elements_per_kernel, operands.a, operands.b,
                                                   operands.d, beta, zero_rest, workspace, scratch));
  }
  Descriptors descriptors;
  JAX_GROUPED_RETURN_IF_FAILED(InitDescriptors(*library, problem, operands, scaled_scratch, &descriptors));
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
                    DescribeOperands(problem) + " -> " + Name(problem.result_type) + ", E " +
                    std::to_string(problem.num_groups) + " T " + std::to_string(problem.tokens) + " K " +
                    std::to_string(problem.in_features) + " N " + std::to_string(problem.out_features) +
                    ": algorithm " + std::to_string(AlgorithmAttribute(*library, plan, CUBLASLT_ALGO_CONFIG_ID)) +
                    ", tile " + std::to_string(AlgorithmAttribute(*library, plan, CUBLASLT_ALGO_CONFIG_TILE_ID)) +
                    ", workspace " + std::to_string(plan.workspace_bytes) + " bytes");
  }
  return lines;
}

}  // namespace jax_grouped
