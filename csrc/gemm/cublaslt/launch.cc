#include "csrc/gemm/cublaslt/launch.h"

namespace jax_grouped {
namespace {

// Returns the matrices of a scaled problem. Scaled operands are contiguous along the contraction axis, so there is only
// one combination of transposes.
ColumnMajor ScaledToColumnMajor(const GemmProblem& problem, void* first, void* second, Operand d) {
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

cublasLtMatmulMatrixScale_t ScaleMode(ScalingMode mode) {
  switch (mode) {
    case ScalingMode::kBlock1D:
      return CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F;
    case ScalingMode::kBlock2D:
      return CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F;
    case ScalingMode::kMx:
      return CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0;
    case ScalingMode::kTensor:
      break;
  }
  return CUBLASLT_MATMUL_MATRIX_SCALE_PER_BATCH_SCALAR_32F;
}

// Sets the scaling modes of the operands, and the device addresses of the arrays that point to each group's scales.
Status SetScales(const CublasLt& library, const GemmProblem& problem, const GemmScratch& scratch,
                 cublasLtMatmulDesc_t matmul) {
  const auto a_mode = static_cast<int32_t>(ScaleMode(problem.b_mode));
  const auto b_mode = static_cast<int32_t>(ScaleMode(problem.a_mode));
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

}  // namespace

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

ColumnMajor ToColumnMajor(const GemmProblem& problem, const GemmBuffers& buffers) {
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

Status InitDescriptors(const CublasLt& library, const GemmProblem& problem, const ColumnMajor& operands,
                       const GemmScratch& scratch, Descriptors* descriptors) {
  cublasLtMatmulDesc_t matmul = &descriptors->matmul;
  JAX_GROUPED_RETURN_IF_FAILED(library.Check(
      library.MatmulDescInit(matmul, sizeof(*matmul), CUBLAS_COMPUTE_32F, CUDA_R_32F), "cublasLtMatmulDescInit"));
  // Alpha and beta lie in device memory: scalars in host memory gave wrong grouped results on Hopper in several
  // releases. One pair serves all groups.
  const auto pointer_mode = static_cast<int32_t>(CUBLASLT_POINTER_MODE_DEVICE);
  constexpr int64_t kSameForAll = 0;
  JAX_GROUPED_RETURN_IF_FAILED(SetAttribute(library, matmul, CUBLASLT_MATMUL_DESC_POINTER_MODE, pointer_mode));
  JAX_GROUPED_RETURN_IF_FAILED(SetAttribute(library, matmul, CUBLASLT_MATMUL_DESC_ALPHA_BATCH_STRIDE, kSameForAll));
  JAX_GROUPED_RETURN_IF_FAILED(SetAttribute(library, matmul, CUBLASLT_MATMUL_DESC_BETA_BATCH_STRIDE, kSameForAll));
  JAX_GROUPED_RETURN_IF_FAILED(
      SetAttribute(library, matmul, CUBLASLT_MATMUL_DESC_TRANSA, static_cast<int32_t>(operands.transpose_a)));
  JAX_GROUPED_RETURN_IF_FAILED(
      SetAttribute(library, matmul, CUBLASLT_MATMUL_DESC_TRANSB, static_cast<int32_t>(operands.transpose_b)));
  if (problem.scaled) JAX_GROUPED_RETURN_IF_FAILED(SetScales(library, problem, scratch, matmul));
  const int64_t groups = problem.num_groups;
  JAX_GROUPED_RETURN_IF_FAILED(InitLayout(library, scratch, 0, problem.b_type, groups, &descriptors->a));
  JAX_GROUPED_RETURN_IF_FAILED(InitLayout(library, scratch, 1, problem.a_type, groups, &descriptors->b));
  return InitLayout(library, scratch, 2, problem.result_type, groups, &descriptors->d);
}

namespace {

// Returns the setup of a problem. cuBLASLt's A is our b, and its B is our a.
GemmSetup SetupOf(const GemmProblem& problem, const Groups& groups, const GemmBuffers& buffers,
                  const ColumnMajor& operands) {
  GemmSetup setup{};
  setup.matrices[0] = operands.a;
  setup.matrices[1] = operands.b;
  setup.matrices[2] = operands.d;
  setup.elements_per_weight = problem.elements_per_weight;
  setup.beta = problem.accumulate ? 1.0f : 0.0f;
  setup.zero_rest = buffers.zero_other_rows && problem.product != Product::kWgrad && !problem.accumulate;
  setup.scaled = problem.scaled;
  if (!problem.scaled) return setup;
  const QuantizedLayout a = LayoutOfA(problem, groups);
  setup.element_row_blocks = a.ElementRowBlocks();
  setup.scales[0] = {buffers.b_scale, problem.b_mode, static_cast<int32_t>(problem.out_features),
                     buffers.weight_scales};
  setup.scales[1] = {buffers.a_scale, problem.a_mode, static_cast<int32_t>(a.features), 0};
  return setup;
}

}  // namespace

Status LaunchCublasLt(const CublasLt& library, cublasLtHandle_t handle, const Algorithm& algorithm, cudaStream_t stream,
                      const GemmProblem& problem, const Groups& groups, const GemmBuffers& buffers) {
  const ColumnMajor operands = ToColumnMajor(problem, buffers);
  const GemmScratch scratch(buffers.scratch, groups.batch, groups.num_groups);
  GemmSetup setup = SetupOf(problem, groups, buffers, operands);
  // Each call starts from a zeroed workspace. XLA lends the workspace's memory to other buffers between calls, and
  // cuBLASLt releases up to 13.7 are known to trust what an earlier matmul left there. On an H200 the zeros cost
  // nothing: the algorithms use 0.2 MB at most.
  //
  // tests/gpu/workspace_stress.py compares this with a separate workspace for every matmul. With cuBLASLt 13.10 it
  // found no difference in 5000 replays of a captured step of four layers, with one or two executables at a time and
  // the memory overwritten in between. With two executables it found none without the zeros either: the older releases
  // are the only reason for them.
  setup.workspace = {buffers.workspace, static_cast<int64_t>(algorithm.workspace_bytes)};
  JAX_GROUPED_RETURN_IF_FAILED(LaunchGemmSetup(stream, groups, setup, scratch));
  Descriptors descriptors;
  JAX_GROUPED_RETURN_IF_FAILED(InitDescriptors(library, problem, operands, scratch, &descriptors));
  // C is D itself. With beta = 1 the product is added in place; with beta = 0 C is not read.
  return library.Check(library.Matmul(handle, &descriptors.matmul, scratch.Alpha(), scratch.Pointers(0), &descriptors.a,
                                      scratch.Pointers(1), &descriptors.b, scratch.Beta(), scratch.Pointers(2),
                                      &descriptors.d, scratch.Pointers(2), &descriptors.d, &algorithm.choice,
                                      buffers.workspace, algorithm.workspace_bytes, stream),
                       "cublasLtMatmul");
}

}  // namespace jax_grouped
