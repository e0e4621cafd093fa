#include "csrc/gemm/cublaslt/products.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "csrc/common/device.h"

namespace jax_grouped {
namespace {

template <typename Value>
Status SetAttribute(const CublasLt& library, cublasLtMatmulDesc_t matmul, cublasLtMatmulDescAttributes_t attribute,
                    Value value) {
  return library.Check(library.MatmulDescSetAttribute(matmul, attribute, &value, sizeof(value)),
                       "cublasLtMatmulDescSetAttribute");
}

Status InitLayout(const CublasLt& library, const GemmScratch& scratch, int matrix, cudaDataType_t type,
                  int64_t num_groups, cublasLtMatrixLayoutOpaque_t* layout) {
  return library.Check(
      library.GroupedMatrixLayoutInit(layout, sizeof(*layout), type, static_cast<int>(num_groups), scratch.Rows(matrix),
                                      scratch.Columns(matrix), scratch.LeadingDimensions(matrix)),
      "cublasLtGroupedMatrixLayoutInit");
}

// By ScalingMode.
constexpr cublasLtMatmulMatrixScale_t kScaleModes[] = {
    CUBLASLT_MATMUL_MATRIX_SCALE_PER_BATCH_SCALAR_32F, CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F,
    CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F, CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0};

// Sets the scaling modes of the operands, and the device addresses of the arrays that point to each group's scales.
Status SetScales(const CublasLt& library, const GemmProblem& problem, const GemmScratch& scratch,
                 cublasLtMatmulDesc_t matmul) {
  const auto a_mode = static_cast<int32_t>(kScaleModes[static_cast<int>(problem.b_mode)]);
  const auto b_mode = static_cast<int32_t>(kScaleModes[static_cast<int>(problem.a_mode)]);
  JAX_GROUPED_RETURN_IF_FAILED(SetAttribute(library, matmul, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, a_mode));
  JAX_GROUPED_RETURN_IF_FAILED(SetAttribute(library, matmul, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, b_mode));
  JAX_GROUPED_RETURN_IF_FAILED(
      SetAttribute(library, matmul, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, scratch.ScalePointers(0)));
  JAX_GROUPED_RETURN_IF_FAILED(
      SetAttribute(library, matmul, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, scratch.ScalePointers(1)));
  // Every product accumulates in float32 throughout.
  constexpr int8_t kFastAccumulation = 0;
  return SetAttribute(library, matmul, CUBLASLT_MATMUL_DESC_FAST_ACCUM, kFastAccumulation);
}

int32_t ElementBytes(cudaDataType_t type) {
  return type == CUDA_R_32F ? 4 : type == CUDA_R_8F_E4M3 || type == CUDA_R_8F_E5M2 ? 1 : 2;
}

// Returns the setup of a problem: its matrices as cuBLASLt sees them. cuBLASLt's matrices are column-major, so each of
// ours appears transposed. The product of row-major matrices is computed as d^T = b^T a^T: cuBLASLt's A is our b, and
// its B is our a.
GemmSetup MakeSetup(const GemmProblem& problem, const Groups& groups, const GemmBuffers& buffers) {
  const auto in = static_cast<int32_t>(problem.in_features);
  const auto out = static_cast<int32_t>(problem.out_features);
  const bool is_dgrad = problem.product == Product::kDgrad;
  const bool is_wgrad = problem.product == Product::kWgrad;
  const int32_t bytes = ElementBytes(problem.a_type);
  GemmSetup setup{};
  Operand& a = setup.matrices[0] = {const_cast<void*>(buffers.b), bytes, out, is_wgrad ? 0 : in};
  Operand& b = setup.matrices[1] = {const_cast<void*>(buffers.a), bytes, is_dgrad ? out : in, 0};
  setup.matrices[2] = {buffers.d, ElementBytes(problem.result_type), is_dgrad ? in : out, is_wgrad ? in : 0};
  setup.elements_per_weight = problem.elements_per_weight;
  setup.beta = problem.accumulate ? 1.0f : 0.0f;
  setup.zero_other_rows = buffers.zero_other_rows && !is_wgrad && !problem.accumulate;
  setup.scaled = problem.scaled;
  if (!problem.scaled) return setup;
  // Scaled operands are contiguous along the contraction axis.
  if (!is_dgrad) std::swap(a.rows, a.columns);
  if (is_wgrad) std::swap(b.rows, b.columns);
  const QuantizedLayout tokens = LayoutOfA(problem, groups);
  setup.element_row_blocks = tokens.ElementRowBlocks();
  setup.scales[0] = {buffers.b_scale, problem.b_mode, out, buffers.weight_scales};
  setup.scales[1] = {buffers.a_scale, problem.a_mode, static_cast<int32_t>(tokens.features), 0};
  return setup;
}

}  // namespace

Status InitDescriptors(const CublasLt& library, const GemmProblem& problem, const GemmScratch& scratch,
                       Descriptors* descriptors) {
  cublasLtMatmulDesc_t matmul = &descriptors->matmul;
  // For scaled operands there is only one combination of transposes.
  const bool transposes_a = problem.scaled || problem.product == Product::kDgrad;
  const bool transposes_b = !problem.scaled && problem.product == Product::kWgrad;
  JAX_GROUPED_RETURN_IF_FAILED(library.Check(
      library.MatmulDescInit(matmul, sizeof(*matmul), CUBLAS_COMPUTE_32F, CUDA_R_32F), "cublasLtMatmulDescInit"));
  // Alpha and beta lie in device memory: scalars in host memory gave wrong grouped results on Hopper in several
  // releases. One pair serves all groups.
  const auto pointer_mode = static_cast<int32_t>(CUBLASLT_POINTER_MODE_DEVICE);
  constexpr int64_t kSameForAll = 0;
  JAX_GROUPED_RETURN_IF_FAILED(SetAttribute(library, matmul, CUBLASLT_MATMUL_DESC_POINTER_MODE, pointer_mode));
  JAX_GROUPED_RETURN_IF_FAILED(SetAttribute(library, matmul, CUBLASLT_MATMUL_DESC_ALPHA_BATCH_STRIDE, kSameForAll));
  JAX_GROUPED_RETURN_IF_FAILED(SetAttribute(library, matmul, CUBLASLT_MATMUL_DESC_BETA_BATCH_STRIDE, kSameForAll));
  JAX_GROUPED_RETURN_IF_FAILED(SetAttribute(library, matmul, CUBLASLT_MATMUL_DESC_TRANSA,
                                            static_cast<int32_t>(transposes_a ? CUBLAS_OP_T : CUBLAS_OP_N)));
  JAX_GROUPED_RETURN_IF_FAILED(SetAttribute(library, matmul, CUBLASLT_MATMUL_DESC_TRANSB,
                                            static_cast<int32_t>(transposes_b ? CUBLAS_OP_T : CUBLAS_OP_N)));
  if (problem.scaled) JAX_GROUPED_RETURN_IF_FAILED(SetScales(library, problem, scratch, matmul));
  const int64_t groups = problem.num_groups;
  JAX_GROUPED_RETURN_IF_FAILED(InitLayout(library, scratch, 0, problem.b_type, groups, &descriptors->a));
  JAX_GROUPED_RETURN_IF_FAILED(InitLayout(library, scratch, 1, problem.a_type, groups, &descriptors->b));
  return InitLayout(library, scratch, 2, problem.result_type, groups, &descriptors->d);
}

Status LaunchCublasLt(const CublasLt& library, cublasLtHandle_t handle, const Algorithm& algorithm, cudaStream_t stream,
                      const GemmProblem& problem, const Groups& groups, const GemmBuffers& buffers) {
  const GemmScratch scratch(buffers.scratch, groups.batch, groups.num_groups);
  GemmSetup setup = MakeSetup(problem, groups, buffers);
  // Each call starts from a zeroed workspace. XLA lends the workspace's memory to other buffers between calls, and
  // cuBLASLt releases up to 13.7 are known to trust what an earlier matmul left there. On an H200 the zeros cost
  // nothing: the algorithms use 0.2 MB at most.
  //
  // tests/gpu/test_replays.py overwrites the memory between the replays of captured steps. With cuBLASLt 13.10 it found
  // no difference in 5000 replays of four layers, with one or two executables at a time. With two executables it found
  // none without the zeros either: the older releases are the only reason for them.
  setup.workspace = {buffers.workspace, static_cast<int64_t>(algorithm.workspace_bytes)};
  JAX_GROUPED_RETURN_IF_FAILED(LaunchGemmSetup(stream, groups, setup, scratch));
  Descriptors descriptors;
  JAX_GROUPED_RETURN_IF_FAILED(InitDescriptors(library, problem, scratch, &descriptors));
  // C is D itself. With beta = 1 the product is added in place; with beta = 0 C is not read.
  return library.Check(library.Matmul(handle, &descriptors.matmul, scratch.Alpha(), scratch.Pointers(0), &descriptors.a,
                                      scratch.Pointers(1), &descriptors.b, scratch.Beta(), scratch.Pointers(2),
                                      &descriptors.d, scratch.Pointers(2), &descriptors.d, &algorithm.choice,
                                      buffers.workspace, algorithm.workspace_bytes, stream),
                       "cublasLtMatmul");
}

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
  JAX_GROUPED_RETURN_IF_FAILED(InitDescriptors(library, problem, nowhere, &descriptors));
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
