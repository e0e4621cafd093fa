// FP8 products of tokens with their group's weight on Hopper (fprop and dgrad), by a CUDA kernel of our own.

#ifndef JAX_GROUPED_CSRC_GEMM_SM90_TOKEN_PRODUCT_H_
#define JAX_GROUPED_CSRC_GEMM_SM90_TOKEN_PRODUCT_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "csrc/common/status.h"
#include "csrc/gemm/problem.h"
#include "csrc/groups/layout.h"

namespace jax_grouped {
namespace sm90 {

// Size of a tile of the result. One SM computes one tile at a time.
constexpr int64_t kTileTokens = 256;
constexpr int64_t kTileFeatures = 128;

// Returns the most bytes of the workspace that the product can use with `all_groups` groups in the batch.
int64_t MaxTokenProductWorkspaceBytes(int64_t all_groups);

// Enqueues a scaled kFprop or kDgrad that does not accumulate. Scaling is kTensor, or kBlock1D for tokens and kBlock2D
// for weights. Tokens of no local group become zero. Tensor cores accumulate products over 128 of the depth; float32
// arithmetic accumulates their sums. May be captured. Fails if the driver is too old.
Status LaunchTokenProduct(cudaStream_t stream, int device, const GemmProblem& problem, const Groups& groups,
                          const GemmBuffers& buffers);

}  // namespace sm90
}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_GEMM_SM90_TOKEN_PRODUCT_H_
