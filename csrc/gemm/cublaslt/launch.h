// One grouped matmul through cuBLASLt: the setup that makes its arguments on the device from the group sizes, its
// descriptors and its launch.

#ifndef JAX_GROUPED_CSRC_GEMM_CUBLASLT_LAUNCH_H_
#define JAX_GROUPED_CSRC_GEMM_CUBLASLT_LAUNCH_H_

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "csrc/common/status.h"
#include "csrc/gemm/cublaslt/library.h"
#include "csrc/gemm/cublaslt/plans.h"
#include "csrc/gemm/problem.h"
#include "csrc/gemm/scratch.h"
#include "csrc/groups/layout.h"

namespace jax_grouped {

// One of the matrices A, B and D, for all groups. It is column-major with `rows` rows, as cuBLASLt sees it.
struct Operand {
  void* base;
  int32_t element_bytes;
  int32_t rows;     // also the leading dimension; 0 if a group's rows are its tokens, padded to kFp8Alignment
  int32_t columns;  // per group; 0 if a group's columns are its tokens
};

// The inverse scales of A or B: swizzled E8M0 with kMx, float32 otherwise.
struct OperandScales {
  const void* base;
  ScalingMode mode;
  int32_t features;       // for tokens
  int64_t weight_stride;  // from one weight's scales to the next one's; 0 for tokens
};

// Memory to zero. It starts on a 16-byte boundary. The bytes from its end up to the next 16-byte boundary belong to it,
// too.
struct Region {
  void* base;
  int64_t bytes;
};

// Everything that the setup kernel needs besides the groups.
struct GemmSetup {
  Operand matrices[GemmScratch::kMatrices];  // A, B and D
  bool scaled;
  OperandScales scales[2];            // of A and B
  RowBlockCounts element_row_blocks;  // room of a batch element's scaled operands
  int32_t elements_per_weight;        // successive batch elements that share weights
  float beta;
  bool zero_rest;  // writes zeros to the tokens of D outside the local groups; their rows must be multiples of 16 bytes
  Region workspace;  // gets zeros
};

// Writes the arguments of a grouped product, and the zeros that it needs, in one launch. `scratch` gets the pointers,
// sizes and scalars (alpha = 1, beta) of every local group of the batch, and the pointers to its scales.
Status LaunchGemmSetup(cudaStream_t stream, const Groups& groups, const GemmSetup& setup, const GemmScratch& scratch);

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

// Enqueues the product with the given algorithm, as EnqueueGemm describes. May be captured.
Status LaunchCublasLt(const CublasLt& library, cublasLtHandle_t handle, const Algorithm& algorithm, cudaStream_t stream,
                      const GemmProblem& problem, const Groups& groups, const GemmBuffers& buffers);

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_GEMM_CUBLASLT_LAUNCH_H_
