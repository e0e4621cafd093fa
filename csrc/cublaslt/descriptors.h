// A grouped matmul as cuBLASLt is told about it.

#ifndef JAX_GROUPED_CSRC_CUBLASLT_DESCRIPTORS_H_
#define JAX_GROUPED_CSRC_CUBLASLT_DESCRIPTORS_H_

#include <cublasLt.h>

#include <cstdint>

#include "csrc/common/group_layout.h"
#include "csrc/common/status.h"
#include "csrc/cublaslt/library.h"
#include "csrc/kernels/matmul_setup.h"
#include "csrc/matmul/problem.h"

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

ColumnMajor ToColumnMajor(const MatmulProblem& problem, const MatmulBuffers& buffers);

// The descriptors of one call. They hold addresses of the call's scratch memory, so they are made anew each time.
struct Descriptors {
  cublasLtMatmulDescOpaque_t matmul;
  cublasLtMatrixLayoutOpaque_t a;
  cublasLtMatrixLayoutOpaque_t b;
  cublasLtMatrixLayoutOpaque_t d;
};

// Matmuls without scales have the first part of the scratch only.
Status InitDescriptors(const CublasLt& library, const MatmulProblem& problem, const ColumnMajor& operands,
                       const ScaledMatmulScratch& scratch, Descriptors* descriptors);

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_CUBLASLT_DESCRIPTORS_H_
