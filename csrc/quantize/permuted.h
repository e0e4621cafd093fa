// Rowwise quantization of tokens to the rows of all their choices.

#ifndef JAX_GROUPED_CSRC_QUANTIZE_PERMUTED_H_
#define JAX_GROUPED_CSRC_QUANTIZE_PERMUTED_H_

#include <cuda_runtime_api.h>
#include <library_types.h>

#include <cstdint>

#include "csrc/common/status.h"
#include "csrc/groups/layout.h"

namespace jax_grouped {

// The static part, with scales of kBlock1D, or given ones of kTensor.
struct PermutedProblem {
  cudaDataType_t input_type;   // CUDA_R_16BF, CUDA_R_16F or CUDA_R_32F; an FP8 type if x has scales
  cudaDataType_t output_type;  // CUDA_R_8F_E4M3 or CUDA_R_8F_E5M2
  int64_t tokens;              // per batch element
  int choices;                 // per token
  int64_t features;            // a multiple of kFp8Alignment
  bool pow2_scales;
  float amax_epsilon;
};

// Device memory for all elements of a batch. The groups' capacity is the number of rows.
struct PermutedBuffers {
  const void* x;         // [tokens, features]
  const float* x_scale;  // of an FP8 x, or null: as in QuantizeBuffers
  int64_t x_group_rows;
  const int32_t* inverse;    // [tokens, choices]: the row of each pair, counted in its element; no row if in no group
  uint8_t* data;             // [rows, features]
  float* scale;              // rowwise scales of kBlock1D, or [num_groups] of kTensor
  const float* given_scale;  // [num_groups] for kTensor, not with x_scale; null for kBlock1D
  uint32_t* amax;            // [num_groups] for kTensor, bits of float32
  int32_t* table;            // [batch, GroupTable::Size(num_groups)], scratch
};

// Gives each row the bits that LaunchQuantize gives it. Reads each token once (per 32 choices) and quantizes it once,
// or with given scales once for each choice. Every row of a group must occur in `inverse` once. Rows of no group become
// zero.
Status LaunchQuantizePermuted(cudaStream_t stream, const Groups& groups, const PermutedProblem& problem,
                              const RowBlockCounts& element_row_blocks, const PermutedBuffers& buffers);

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_QUANTIZE_PERMUTED_H_
