// Products of gathered 16-bit tokens with their group's weight on Hopper (fprop and dgrad), by a CUDA kernel of our
// own.

#ifndef JAX_GROUPED_CSRC_GEMM_SM90_GATHERED_TOKEN_PRODUCT_H_
#define JAX_GROUPED_CSRC_GEMM_SM90_GATHERED_TOKEN_PRODUCT_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "csrc/common/status.h"
#include "csrc/gemm/problem.h"
#include "csrc/groups/layout.h"

namespace jax_grouped {
namespace sm90 {

// Enqueues an unscaled kFprop or kDgrad whose operand a is gathered, and that does not accumulate. Tokens of no local
// group become zero. Tensor cores accumulate in float32. May be captured. Fails if the driver is too old.
Status LaunchGatheredTokenProduct(cudaStream_t stream, int device, const GemmProblem& problem, const Groups& groups,
                                  const GemmBuffers& buffers);

}  // namespace sm90
}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_GEMM_SM90_GATHERED_TOKEN_PRODUCT_H_
