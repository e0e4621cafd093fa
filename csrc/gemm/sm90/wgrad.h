// The weight gradient of FP8 operands on Hopper, by a CUDA kernel of our own.

#ifndef JAX_GROUPED_CSRC_GEMM_SM90_WGRAD_H_
#define JAX_GROUPED_CSRC_GEMM_SM90_WGRAD_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "csrc/common/status.h"
#include "csrc/gemm/problem.h"
#include "csrc/groups/layout.h"

namespace jax_grouped {
namespace sm90 {

// Returns the most bytes of the workspace that the product can use with `all_groups` groups in the batch.
int64_t MaxWgradWorkspaceBytes(int64_t all_groups);

// Enqueues a scaled kWgrad with kTensor or kBlock1D. If it accumulates, its result must have 32 bits. Empty groups give
// zeros. Tensor cores accumulate the products of 128 tokens; float32 arithmetic accumulates their sums. May be
// captured. Fails if the driver is too old.
Status LaunchWgrad(cudaStream_t stream, int device, const GemmProblem& problem, const Groups& groups,
                   const GemmBuffers& buffers);

}  // namespace sm90
}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_GEMM_SM90_WGRAD_H_
