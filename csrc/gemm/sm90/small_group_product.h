// FP8 products of tokens with their group's weight on Hopper (fprop and dgrad) where groups have few tokens.

#ifndef JAX_GROUPED_CSRC_GEMM_SM90_SMALL_GROUP_PRODUCT_H_
#define JAX_GROUPED_CSRC_GEMM_SM90_SMALL_GROUP_PRODUCT_H_

#include <cuda_runtime_api.h>

#include "csrc/common/status.h"
#include "csrc/gemm/problem.h"
#include "csrc/groups/layout.h"

namespace jax_grouped {
namespace sm90 {

// Enqueues the same products as LaunchTokenProduct, with a workspace of the same size. Fast if reading the weights
// takes longer than multiplying them.
Status LaunchSmallGroupProduct(cudaStream_t stream, int device, const GemmProblem& problem, const Groups& groups,
                               const GemmBuffers& buffers);

}  // namespace sm90
}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_GEMM_SM90_SMALL_GROUP_PRODUCT_H_
