// The grouped matmuls there are, how they are worded, and which GPUs have them.

#ifndef JAX_GROUPED_CSRC_GEMM_PROBLEM_H_
#define JAX_GROUPED_CSRC_GEMM_PROBLEM_H_

#include <library_types.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "csrc/common/status.h"
#include "csrc/groups/layout.h"

namespace jax_grouped {

enum class Product : int32_t { kFprop, kDgrad, kWgrad };

// Everything that the choice of an algorithm depends on; a batch has the tokens and groups of all its elements. All
// arrays are row-major:
//
//   product  a                        b                                   d
//   kFprop   x  [tokens, in_features]   weight [groups, in_, out_features]  y       [tokens, out_features]
//   kDgrad   dy [tokens, out_features]  weight [groups, in_, out_features]  dx      [tokens, in_features]
//   kWgrad   x  [tokens, in_features]   dy     [tokens, out_features]       dweight [groups, in_, out_features]
//
// Scaled operands are quantized along what the product sums over, as Hopper and the MX format need it: weights are
// columnwise for kFprop and rowwise for kDgrad, both operands of kWgrad are columnwise, others rowwise.
// csrc/groups/layout.h has their layouts; scales of kMx are swizzled.
struct GemmProblem {
  Product product;
  cudaDataType_t a_type;  // CUDA_R_16BF or CUDA_R_16F, b's too; or for scaled operands CUDA_R_8F_E4M3 or _E5M2
  cudaDataType_t b_type;
  cudaDataType_t result_type;  // that of 16-bit operands or CUDA_R_32F; any of these three for scaled operands
  bool scaled;
  ScalingMode a_mode;  // of scaled operands: kTensor or kMx for both, or kBlock1D for tokens and kBlock2D for weights
  ScalingMode b_mode;
  int64_t tokens;       // capacity of the token arrays
  int64_t in_features;  // multiples of kFeatureAlignment, as out_features; of kFp8Alignment for scaled operands
  int64_t out_features;
  int64_t num_groups;
  int32_t elements_per_weight;  // successive batch elements that share weights: 1 without a batch, and for kWgrad
  bool accumulate;              // whether the product is added to d
};

bool operator<(const GemmProblem& first, const GemmProblem& second);

// Device memory of one call. `a`, `b`, `d` and the scales of blocks start on 16-byte boundaries.
struct GemmBuffers {
  const void* a;
  const void* b;
  const void* a_scale;  // inverse scales: E8M0 with kMx, float32 otherwise; null without
  const void* b_scale;
  int64_t weight_scales;  // inverse scales of one weight; 0 for kWgrad and without
  void* d;
  void* scratch;  // GemmScratch::Bytes
  void* workspace;
};

// Bytes of GemmBuffers::workspace: what NVIDIA recommends for Hopper.
constexpr size_t kWorkspaceBytes = size_t{32} << 20;

// Number of weight matrices.
int64_t NumWeights(const GemmProblem& problem);

// Of kFprop and kDgrad: the length of the sums, and the features of the result.
int64_t Depth(const GemmProblem& problem);
int64_t ResultFeatures(const GemmProblem& problem);

// Where the operands of a scaled problem lie.
QuantizedLayout LayoutOfA(const GemmProblem& problem, const Groups& groups);
QuantizedLayout LayoutOfB(const GemmProblem& problem, const Groups& groups);

// Fails, with what to use instead, unless GPUs of a compute capability have the product.
Status CheckCapability(const GemmProblem& problem, int major, int minor);

// The problem in one line, for people. The files of TunedAlgorithms know a problem by it, too, so problems that differ
// must not read the same, and another wording has everything timed again.
std::string Describe(const GemmProblem& problem);

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_GEMM_PROBLEM_H_
