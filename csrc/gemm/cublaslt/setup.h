// A CUDA kernel that makes the arguments of a grouped matmul from group sizes on the device.

#ifndef JAX_GROUPED_CSRC_GEMM_CUBLASLT_SETUP_H_
#define JAX_GROUPED_CSRC_GEMM_CUBLASLT_SETUP_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "csrc/common/status.h"
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

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_GEMM_CUBLASLT_SETUP_H_
