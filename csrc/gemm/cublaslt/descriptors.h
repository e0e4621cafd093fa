// A grouped matmul in cuBLASLt's terms.

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

// Returns the size of one element of an operand or result.
int32_t ElementBytes(cudaDataType_t type);

// The problem's matrices as cuBLASLt sees them. cuBLASLt's matrices are column-major, so each of ours appears
// transposed. The product of row-major matrices is computed as d^T = b^T a^T.
struct ColumnMajor {
  Operand a;
  Operand b;
  Operand d;
  cublasOperation_t transpose_a;
  cublasOperation_t transpose_b;
};

ColumnMajor ToColumnMajor(const GemmProblem& problem, const GemmBuffers& buffers);

// The descriptors of one call. They hold addresses in the call's scratch memory, so every call makes its own.
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
