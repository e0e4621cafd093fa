// Grouped matmuls of 16-bit operands or of scaled FP8 operands, with group sizes that only the device knows. They run
// through cuBLASLt, or through kernels of our own where these are faster.

#ifndef JAX_GROUPED_CSRC_GEMM_GEMM_H_
#define JAX_GROUPED_CSRC_GEMM_GEMM_H_

#include <cuda_runtime_api.h>
#include <library_types.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "csrc/common/scale_rule.h"
#include "csrc/common/status.h"
#include "csrc/groups/layout.h"

namespace jax_grouped {

enum class Product : int32_t { kFprop, kDgrad, kWgrad };

// The operand of a product whose rows are gathered: row i is row row_indices[i] of the array that is given in its
// place, or zeros if there is no such row. A scaled array is quantized as a single group.
enum class Gather : int32_t { kNone, kA, kB };

// A grouped matmul: everything that the choice of an algorithm depends on. A batch has the tokens and groups of all its
// elements. All arrays are row-major:
//
//   product  a                        b                                   d
//   kFprop   x  [tokens, in_features]   weight [groups, in_, out_features]  y       [tokens, out_features]
//   kDgrad   dy [tokens, out_features]  weight [groups, in_, out_features]  dx      [tokens, in_features]
//   kWgrad   x  [tokens, in_features]   dy     [tokens, out_features]       dweight [groups, in_, out_features]
//
// Scaled operands are quantized along the contraction axis, as Hopper and the MX format require. Weights are columnwise
// for kFprop and rowwise for kDgrad. Both operands of kWgrad are columnwise. All others are rowwise.
// csrc/groups/layout.h has their layouts.
struct GemmProblem {
  Product product;
  cudaDataType_t a_type;  // CUDA_R_16BF or CUDA_R_16F for both a and b; for scaled operands CUDA_R_8F_E4M3 or _E5M2
  cudaDataType_t b_type;
  cudaDataType_t result_type;  // the type of 16-bit operands, or CUDA_R_32F; any of these three for scaled operands
  bool scaled;
  ScalingMode a_mode;  // for scaled operands: kTensor or kMx for both, or kBlock1D for tokens and kBlock2D for weights
  ScalingMode b_mode;
  int64_t tokens;           // capacity of the token arrays
  int64_t expected_tokens;  // number of them that belongs to groups, as far as known; chooses algorithms
  int64_t in_features;  // multiple of kFeatureAlignment, or of kFp8Alignment for scaled operands; so is out_features
  int64_t out_features;
  int64_t num_groups;
  int32_t elements_per_weight;  // successive batch elements that share weights; 1 without a batch, and for kWgrad
  bool accumulate;              // adds the product to d
  Gather gathered;              // kB for kWgrad only; of scaled operands, kA with kBlock1D or kNone
  bool batch_invariant;         // kFprop and kDgrad: has one order of sums for all sizes
  bool swiglu;                  // kFprop of gathered tokens or of block-scaled operands: computes SwiGLU too
  int64_t gathered_from;        // rows of the array from which rows are gathered, of all batch elements; 0 with kNone
};

bool operator<(const GemmProblem& first, const GemmProblem& second);

// SwiGLU of the result of a kFprop, whose first half of features are the gate's. It is computed from the result's
// numbers, which have 16 bits, and has their type, or with block-scaled operands is quantized in blocks of 1x128 as
// float8_e4m3fn. Half of the features must be a multiple of kBlock.
struct SwiGluResult {
  uint8_t* data;
  float* scale;  // inverse scales, if it is quantized
  ScaleRule scale_rule;
  bool keeps_product;  // otherwise the product's result is not written
};

// Device memory of one call. `a`, `b`, `d`, the block scales, `scratch` and the data of `swiglu` start on 16-byte
// boundaries.
struct GemmBuffers {
  const void* a;
  const void* b;
  const void* a_scale;  // inverse scales: E8M0 with kMx, float32 otherwise; null for operands without scales
  const void* b_scale;
  int64_t weight_scales;       // inverse scales per weight; 0 for kWgrad and without scales
  const int32_t* row_indices;  // [tokens], for a gathered operand
  void* d;
  SwiGluResult swiglu;
  bool zero_other_rows;  // of d, of kFprop and kDgrad; rows of no group otherwise hold anything
  void* scratch;         // GemmScratch::Bytes() is its size
  void* workspace;       // kWorkspaceBytes, from a boundary of kWorkspaceAlignmentBytes on
};

// Size of GemmBuffers::workspace in bytes, as NVIDIA recommends for Hopper.
constexpr size_t kWorkspaceBytes = size_t{32} << 20;

// Alignment of GemmBuffers::workspace: that of a CUtensorMap, because our own kernels keep an array of these there. XLA
// gives all results of a custom call this alignment.
constexpr int64_t kWorkspaceAlignmentBytes = 128;

// Most groups of a product with a gathered operand or with SwiGLU, of all batch elements. Our kernels keep three arrays
// of them in the workspace: tensor maps, a table and an order.
constexpr int64_t kMostGatheredGroups = 65536;

// Returns the number of weight matrices.
int64_t NumWeights(const GemmProblem& problem);

// Returns the depth of a kFprop or kDgrad (the length of its sums), and the features of its result.
int64_t Depth(const GemmProblem& problem);
int64_t ResultFeatures(const GemmProblem& problem);

// Returns the layout of an operand of a scaled problem.
QuantizedLayout LayoutOfA(const GemmProblem& problem, const Groups& groups);
QuantizedLayout LayoutOfB(const GemmProblem& problem, const Groups& groups);

// Fails unless GPUs of a compute capability support the product. The error names the alternative.
Status CheckCapability(const GemmProblem& problem, int major, int minor);

// Describes the problem in one line of text.
std::string Describe(const GemmProblem& problem);

// Chooses an algorithm and keeps it for later calls with the same problem on the same device, which must be the current
// one. The choice is one of our own kernels, or the first algorithm of cuBLASLt's heuristic.
//
// A repeated call is cheap. Fails if the device does not support the product. Must not be called while the stream is
// being captured.
Status PrepareGemm(int device, const GemmProblem& problem);

// Enqueues the product of a prepared problem: d = a b, or d += a b if it accumulates. Tokens of `d` that belong to no
// local group become zero with zero_other_rows, or keep their value if it accumulates. May be captured.
Status EnqueueGemm(int device, cudaStream_t stream, const GemmProblem& problem, const Groups& groups,
                   const GemmBuffers& buffers);

// Returns one line of text for each prepared problem, with its implementation.
std::vector<std::string> DescribePlans();

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_GEMM_GEMM_H_
