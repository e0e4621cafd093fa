// Grouped matmuls through cuBLASLt, of 16-bit operands or of scaled FP8 operands, with group sizes that only the device
// knows.

#ifndef JAX_GROUPED_CSRC_CUBLASLT_GROUPED_MATMUL_H_
#define JAX_GROUPED_CSRC_CUBLASLT_GROUPED_MATMUL_H_

#include <cuda_runtime_api.h>
#include <library_types.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

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
// Scaled operands are quantized along what the product sums over, as Hopper needs it: kernels are columnwise for kFprop
// and rowwise for kDgrad, both operands of kWgrad are columnwise, others rowwise. group_layout.h has their layouts.
struct MatmulProblem {
  Product product;
  cudaDataType_t a_type;  // CUDA_R_16BF or CUDA_R_16F, b's too; or for scaled operands CUDA_R_8F_E4M3 or _E5M2
  cudaDataType_t b_type;
  cudaDataType_t result_type;  // that of 16-bit operands or CUDA_R_32F; any of these three for scaled operands
  bool scaled;
  ScalingMode a_mode;  // of scaled operands: kTensor for both, or kBlock1D for tokens and kBlock2D for kernels
  ScalingMode b_mode;
  int64_t tokens;       // capacity of the token arrays
  int64_t in_features;  // multiples of kFeatureAlignment, as out_features; of kFp8Alignment for scaled operands
  int64_t out_features;
  int64_t num_groups;
};

// Device memory of one call. `a`, `b`, `d` and the scales of blocks start on 16-byte boundaries.
struct MatmulBuffers {
  const void* a;
  const void* b;
  const float* a_scale;  // inverse scales; null without
  const float* b_scale;
  int64_t kernel_scales;  // inverse scales of one kernel
  void* d;
  void* scratch;  // MatmulScratch::Bytes(num_groups), or ScaledMatmulScratch's
  void* workspace;
};

// Bytes of MatmulBuffers::workspace: what NVIDIA recommends for Hopper.
constexpr size_t kWorkspaceBytes = size_t{32} << 20;

// Chooses an algorithm and keeps it for later calls with the same problem on the same device. Cheap when that has been
// done. Not for a stream that is being captured.
Status PrepareGroupedMatmul(int device, const MatmulProblem& problem);

// Enqueues the product of a prepared problem: d = a b, or d += a b with `accumulate`. Tokens of `d` that belong to no
// local group become zero, or keep their value with `accumulate`. Of kernels, `elements_per_kernel` successive batch
// elements share [groups.num_groups]. May be captured.
Status EnqueueGroupedMatmul(int device, cudaStream_t stream, const MatmulProblem& problem, const Groups& groups,
                            int32_t elements_per_kernel, const MatmulBuffers& buffers, bool accumulate);

// One line for each algorithm kept, for people.
std::vector<std::string> DescribePlans();

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_CUBLASLT_GROUPED_MATMUL_H_
