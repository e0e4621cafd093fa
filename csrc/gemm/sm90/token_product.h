// FP8 products of tokens with their group's weight on Hopper, fprop and dgrad, by a CUDA kernel of our own.

#ifndef JAX_GROUPED_CSRC_GEMM_SM90_TOKEN_PRODUCT_H_
#define JAX_GROUPED_CSRC_GEMM_SM90_TOKEN_PRODUCT_H_

#include <cuda_runtime_api.h>
#include <library_types.h>

#include <cstdint>

#include "csrc/common/status.h"
#include "csrc/gemm/sm90/operand.h"
#include "csrc/groups/layout.h"

namespace jax_grouped {
namespace sm90 {

// result[t] = tokens[t] weights[group of t]^T, zero for tokens of no local group. Tokens are rowwise, and weights have
// that orientation in which features follow one another along what the product sums over, as csrc/groups/layout.h has
// them.
struct TokenProduct {
  Fp8Operand tokens;      // [tokens, depth]
  Fp8Operand weights;     // [num_weights, features, depth]
  ScalingMode mode;       // kTensor, or kBlock1D for tokens with kBlock2D for weights
  int64_t weight_scales;  // of one weight
  void* result;           // [tokens, features]
  cudaDataType_t result_type;
  int64_t depth;  // multiples of kFp8Alignment
  int64_t features;
  int64_t num_weights;
  int32_t elements_per_weight;  // successive batch elements that share weights
  UnitCounts element_units;     // for which tokens have room per batch element
};

// Tiles of the result, each of which one processor computes at a time.
constexpr int64_t kTileTokens = 256;
constexpr int64_t kTileFeatures = 128;

// Bytes of scratch, on a 128-byte boundary.
int64_t TokenProductScratchBytes(int64_t batch, int64_t num_groups);

// Tensor cores add up products over 128 of the depth, float32 arithmetic the sums of these. May be captured. Fails if
// the driver is too old.
Status LaunchTokenProduct(cudaStream_t stream, int device, const TokenProduct& product, const Groups& groups,
                          void* scratch);

}  // namespace sm90
}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_GEMM_SM90_TOKEN_PRODUCT_H_
