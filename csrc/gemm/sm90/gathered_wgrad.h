// Weight gradients of 16-bit tokens on Hopper, of which one operand is gathered, by a CUDA kernel of our own.

#ifndef JAX_GROUPED_CSRC_GEMM_SM90_GATHERED_WGRAD_H_
#define JAX_GROUPED_CSRC_GEMM_SM90_GATHERED_WGRAD_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "csrc/common/status.h"
#include "csrc/gemm/problem.h"
#include "csrc/groups/layout.h"

namespace jax_grouped {
namespace sm90 {

// Enqueues an unscaled kWgrad of which one operand is gathered, and that does not accumulate. Tensor cores accumulate
// in float32. May be captured. Fails if the driver is too old.
Status LaunchGatheredWgrad(cudaStream_t stream, int device, const GemmProblem& problem, const Groups& groups,
                           const GemmBuffers& buffers);

}  // namespace sm90
}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_GEMM_SM90_GATHERED_WGRAD_H_
