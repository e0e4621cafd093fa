#include "csrc/gemm/cublaslt/descriptors.h"

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

}  // namespace jax_grouped
