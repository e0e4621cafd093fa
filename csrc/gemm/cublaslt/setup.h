// A CUDA kernel that turns group sizes on the device into the arguments of a grouped matmul.

#ifndef JAX_GROUPED_CSRC_GEMM_CUBLASLT_SETUP_H_
#define JAX_GROUPED_CSRC_GEMM_CUBLASLT_SETUP_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "csrc/common/status.h"
#include "csrc/gemm/scratch.h"
#include "csrc/groups/layout.h"

namespace jax_grouped {

// One of the matrices A, B and D, for all groups. Column-major with `rows` rows, as cuBLASLt sees it.
struct Operand {
  void* base;
  int32_t element_bytes;
  int32_t rows;     // also the leading dimension; 0 if a group's rows are its tokens, padded to kFp8Alignment
  int32_t columns;  // of every group; 0 if a group's columns are its tokens
};

// The inverse scales of A or B: swizzled E8M0 with kMx, float32 otherwise.
struct OperandScales {
  const void* base;
  ScalingMode mode;
  int32_t features;       // of tokens
  int64_t weight_stride;  // from one weight's scales to the next one's; 0 for tokens
};

// Memory to zero, from a 16-byte boundary on; the bytes up to the next such boundary after its end belong to it, too.
struct Region {
  void* base;
  int64_t bytes;
};

// In one launch, writes pointers, sizes and scalars (alpha = 1, beta) of every local group of the batch to `scratch`;
// zeros to `workspace`; and, with `zero_rest`, zeros to the tokens of D that belong to no local group. D then has a row
// size that is a multiple of 16 bytes. `elements_per_weight` successive batch elements share weights.
Status LaunchGemmSetup(cudaStream_t stream, const Groups& groups, int32_t elements_per_weight, const Operand& a,
                       const Operand& b, const Operand& d, float beta, bool zero_rest, const Region& workspace,
                       const GemmScratch& scratch);

// The same for scaled operands, of whose arrays a batch element has room for `element_units`.
Status LaunchScaledGemmSetup(cudaStream_t stream, const Groups& groups, const UnitCounts& element_units,
                             int32_t elements_per_weight, const Operand& a, const OperandScales& a_scales,
                             const Operand& b, const OperandScales& b_scales, const Operand& d, float beta,
                             bool zero_rest, const Region& workspace, const GemmScratch& scratch);

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_GEMM_CUBLASLT_SETUP_H_
