// A grouped matmul as cuBLASLt is told about it.

#ifndef JAX_GROUPED_CSRC_GEMM_CUBLASLT_DESCRIPTORS_H_
#define JAX_GROUPED_CSRC_GEMM_CUBLASLT_DESCRIPTORS_H_

#include <cublasLt.h>

#include <cstdint>

#include "csrc/common/status.h"
#include "csrc/gemm/cublaslt/library.h"
#include "csrc/gemm/cublaslt/setup.h"
#include "csrc/gemm/problem.h"
#include "csrc/groups/layout.h"

namespace jax_grouped {

// Of operands and results.
int32_t ElementBytes(cudaDataType_t type);

// How cuBLASLt sees a problem. Its matrices are column-major, so each of ours is its transpose there, and the product
// of row-major matrices is computed as d^T = b^T a^T.
struct ColumnMajor {
  Operand a;
  Operand b;
  Operand d;
  cublasOperation_t transpose_a;
  cublasOperation_t transpose_b;
};

ColumnMajor ToColumnMajor(const GemmProblem& problem, const GemmBuffers& buffers);

// The descriptors of one call. They hold addresses of the call's scratch memory, so they are made anew each time.
struct Descriptors {
  cublasLtMatmulDescOpaque_t matmul;
  cublasLtMatrixLayoutOpaque_t a;
  cublasLtMatrixLayoutOpaque_t b;
  cublasLtMatrixLayoutOpaque_t d;
};

Status InitDescriptors(const CublasLt& library, const GemmProblem& problem, const ColumnMajor& operands,
                       const GemmScratch& scratch, Descriptors* descriptors);

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_GEMM_CUBLASLT_DESCRIPTORS_H_
