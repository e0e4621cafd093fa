// The products that our own kernels compute on Hopper. All may be captured. They fail if the driver is too old.

#ifndef JAX_GROUPED_CSRC_GEMM_SM90_PRODUCTS_H_
#define JAX_GROUPED_CSRC_GEMM_SM90_PRODUCTS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "csrc/common/status.h"
#include "csrc/gemm/gemm.h"
#include "csrc/groups/layout.h"

namespace jax_grouped::sm90 {

// Size of a tile of the result of LaunchFp8TokenProduct. Two SMs compute one tile at a time.
constexpr int64_t kTileTokens = 256;
constexpr int64_t kTileFeatures = 256;

// Return the most bytes of the workspace that the FP8 products can use with `all_groups` groups in the batch.
int64_t MaxFp8TokenProductWorkspaceBytes(int64_t all_groups);
int64_t MaxFp8WgradWorkspaceBytes(int64_t all_groups);

// Enqueues a scaled kFprop or kDgrad that does not accumulate. Scaling is kTensor, or kBlock1D for tokens and kBlock2D
// for weights. With kBlock1D, operand a may be gathered, and a kFprop may have SwiGLU. Tokens of no local group become
// zero with zero_other_rows. Tensor cores accumulate products over 128 of the depth; float32 arithmetic accumulates
// their sums.
Status LaunchFp8TokenProduct(cudaStream_t stream, int device, const GemmProblem& problem, const Groups& groups,
                             const GemmBuffers& buffers);

// Enqueues the same products without gathered rows and SwiGLU. Fast where groups have few tokens: if reading the
// weights takes longer than multiplying them.
Status LaunchFp8SmallGroupProduct(cudaStream_t stream, int device, const GemmProblem& problem, const Groups& groups,
                                  const GemmBuffers& buffers);

// Enqueues a scaled kWgrad with kTensor or kBlock1D. If it accumulates, its result must have 32 bits; otherwise empty
// groups give zeros. Tensor cores accumulate the products of 128 tokens; float32 arithmetic accumulates their sums.
Status LaunchFp8Wgrad(cudaStream_t stream, int device, const GemmProblem& problem, const Groups& groups,
                      const GemmBuffers& buffers);

// Enqueues an unscaled kFprop, perhaps with SwiGLU, or kDgrad whose operand a is gathered, and that does not
// accumulate. Tokens of no local group become zero with zero_other_rows. Tensor cores accumulate in float32.
Status LaunchGatheredTokenProduct(cudaStream_t stream, int device, const GemmProblem& problem, const Groups& groups,
                                  const GemmBuffers& buffers);

// Enqueues an unscaled kWgrad of which one operand is gathered, and that does not accumulate. Tensor cores accumulate
// in float32.
Status LaunchGatheredWgrad(cudaStream_t stream, int device, const GemmProblem& problem, const Groups& groups,
                           const GemmBuffers& buffers);

}  // namespace jax_grouped::sm90

#endif  // JAX_GROUPED_CSRC_GEMM_SM90_PRODUCTS_H_
