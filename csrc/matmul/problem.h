// The grouped matmuls there are, how they are worded, and which GPUs have them.

#ifndef JAX_GROUPED_CSRC_MATMUL_PROBLEM_H_
#define JAX_GROUPED_CSRC_MATMUL_PROBLEM_H_

#include <library_types.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "csrc/common/group_layout.h"
#include "csrc/common/status.h"

namespace jax_grouped {

enum class Product : int { kFprop, kDgrad, kWgrad };

// Everything that the choice of an algorithm depends on; a batch has the tokens and groups of all its elements. All
// arrays are row-major:
//
//   product  a                        b                                   d
//   kFprop   x  [tokens, in_features]   kernel [groups, in_, out_features]  y       [tokens, out_features]
//   kDgrad   dy [tokens, out_features]  kernel [groups, in_, out_features]  dx      [tokens, in_features]
//   kWgrad   x  [tokens, in_features]   dy     [tokens, out_features]       dkernel [groups, in_, out_features]
//
// Scaled operands are quantized along what the product sums over, as Hopper and the MX format need it: kernels are
// columnwise for kFprop and rowwise for kDgrad, both operands of kWgrad are columnwise, others rowwise. group_layout.h
// has their layouts; scales of kMx are swizzled.
struct MatmulProblem {
  Product product;
  cudaDataType_t a_type;  // CUDA_R_16BF or CUDA_R_16F, b's too; or for scaled operands CUDA_R_8F_E4M3 or _E5M2
  cudaDataType_t b_type;
  cudaDataType_t result_type;  // that of 16-bit operands or CUDA_R_32F; any of these three for scaled operands
  bool scaled;
  ScalingMode a_mode;  // of scaled operands: kTensor or kMx for both, or kBlock1D for tokens and kBlock2D for kernels
  ScalingMode b_mode;
  int64_t tokens;       // capacity of the token arrays
  int64_t in_features;  // multiples of kFeatureAlignment, as out_features; of kFp8Alignment for scaled operands
  int64_t out_features;
  int64_t num_groups;
  int32_t elements_per_kernel;  // successive batch elements that share kernels: 1 without a batch, and for kWgrad
  bool accumulate;              // whether the product is added to d
};

bool operator<(const MatmulProblem& first, const MatmulProblem& second);

// Device memory of one call. `a`, `b`, `d` and the scales of blocks start on 16-byte boundaries.
struct MatmulBuffers {
  const void* a;
  const void* b;
  const void* a_scale;  // inverse scales: E8M0 with kMx, float32 otherwise; null without
  const void* b_scale;
  int64_t kernel_scales;  // inverse scales of one kernel; 0 for kWgrad and without
  void* d;
  void* scratch;  // MatmulScratch::Bytes(num_groups), or ScaledMatmulScratch's
  void* workspace;
};

// Bytes of MatmulBuffers::workspace: what NVIDIA recommends for Hopper.
constexpr size_t kWorkspaceBytes = size_t{32} << 20;

// How many kernels there are.
int64_t NumKernels(const MatmulProblem& problem);

// Where the operands of a scaled problem lie.
QuantizedLayout LayoutOfA(const MatmulProblem& problem, const Groups& groups);
QuantizedLayout LayoutOfB(const MatmulProblem& problem, const Groups& groups);

// Fails, with what to use instead, unless GPUs of a compute capability have the product.
Status CheckCapability(const MatmulProblem& problem, int major, int minor);

// The problem in one line, for people. The files of TunedAlgorithms know a problem by it, too, so problems that differ
// must not read the same, and another wording has everything timed again.
std::string Describe(const MatmulProblem& problem);

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_MATMUL_PROBLEM_H_
