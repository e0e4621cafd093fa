// The weight gradient of FP8 operands on Hopper, by a CUDA kernel of our own.

#ifndef JAX_GROUPED_CSRC_GEMM_SM90_WGRAD_H_
#define JAX_GROUPED_CSRC_GEMM_SM90_WGRAD_H_

#include <cuda_runtime_api.h>
#include <library_types.h>

#include <cstddef>
#include <cstdint>

#include "csrc/common/status.h"
#include "csrc/gemm/sm90/operand.h"
#include "csrc/groups/layout.h"

namespace jax_grouped {
namespace sm90 {

// dkernel[g] = x[g]^T dy[g] for every group of a batch. Both operands are columnwise FP8, as csrc/groups/layout.h has
// them.
struct Wgrad {
  Fp8Operand x;
  Fp8Operand dy;
  ScalingMode mode;             // kTensor or kBlock1D
  void* dkernel;                // [groups, in_features, out_features]
  cudaDataType_t dkernel_type;  // CUDA_R_16BF, CUDA_R_16F or CUDA_R_32F
  bool accumulate;              // whether to add to dkernel, which then has 32 bits
  int64_t in_features;          // multiples of kFp8Alignment
  int64_t out_features;
  UnitCounts element_units;  // for which x and dy have room per batch element
};

// Bytes of scratch, on a 128-byte boundary.
int64_t WgradScratchBytes(int64_t batch, int64_t num_groups);

// Tensor cores add up the products of 128 tokens, float32 arithmetic the sums of these. Empty groups give zeros. May be
// captured. Fails if the driver is too old.
Status LaunchWgrad(cudaStream_t stream, int device, const Wgrad& wgrad, const Groups& groups, void* scratch);

}  // namespace sm90
}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_GEMM_SM90_WGRAD_H_
