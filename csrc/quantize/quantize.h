// Quantization of the rows of each group to FP8, and back.

#ifndef JAX_GROUPED_CSRC_QUANTIZE_QUANTIZE_H_
#define JAX_GROUPED_CSRC_QUANTIZE_QUANTIZE_H_

#include <cuda_runtime_api.h>
#include <library_types.h>

#include <cstdint>

#include "csrc/common/activation.h"
#include "csrc/common/scale_rule.h"
#include "csrc/common/status.h"
#include "csrc/groups/layout.h"

namespace jax_grouped {

struct Window;

// Arguments of the kernels of one quantization besides the source of the input. Device memory is that of all elements
// of a batch. Results that are not wanted are null. Those marked with * follow from the others in LaunchQuantize.
struct QuantizeArguments {
  Groups groups;
  RowBlockCounts element_row_blocks;  // room of a batch element's arrays
  GroupTable table;                   // * the first batch element's
  Window* windows;                    // * [batch, num_windows]
  ScaleLayout layout;                 // of the result; its features are a multiple of kFp8Alignment
  int32_t num_windows;                // * per element
  uint32_t num_column_tiles;          // *
  uint32_t slab_tiles;                // * tiles of columns in a slab; all of them if there is one slab
  bool interleave_halves;             // *
  bool group_scales;                  // * one scale per group
  bool single_launch;                 // *
  ScaleRule scale_rule;
  const float* given_scale;  // [num_groups]; null for current scaling
  const bool* skip;  // [batch]; where it is true, nothing else is read and nothing is written; null without a cache
  uint8_t* row_data;
  void* row_scale;
  uint8_t* column_data;
  void* column_scale;
  uint32_t* amax;       // [num_groups], bits of float32; null if nobody reads them, except with current scaling
  float* partial_sums;  // [blocks of 128 rows, features], scratch, only for dbias
  // Those of the activation's result, if its columnwise copy is made too.
  uint32_t* activated_amax;            // [num_groups], bits of float32, or null
  float* activated_scale;              // inverse scales
  const float* given_activated_scale;  // [num_groups], as `given_scale`

  JAX_GROUPED_HOST_DEVICE bool Skips(int32_t element) const { return skip != nullptr && skip[element]; }
};

// A quantization: the arguments of its kernels, and what chooses the kernels and reads their input.
struct Quantization : QuantizeArguments {
  ScalingMode mode;
  cudaDataType_t input_type;   // CUDA_R_16BF, CUDA_R_16F or CUDA_R_32F; an FP8 type if x has scales
  cudaDataType_t output_type;  // CUDA_R_8F_E4M3 or CUDA_R_8F_E5M2
  Activation activation;       // of the input, computed in float32 before quantization
  bool backward;               // quantize the gradient of the activation's input; x is the gradient of its result
  const void* x;               // [x_rows, input features], of input_type
  int64_t x_rows;
  const void* activation_input;  // as x, only for a backward form
  // [tokens], or null if `x` has the tokens in order, and x_rows is their number. Token i is then the row at
  // row_indices[i], or zeros if there is no such row. Only without an activation.
  const int32_t* row_indices;
  // Inverse scales of an FP8 `x`, or null: those of kBlock1D for a stack of groups of x_group_rows rows. Only for
  // kBlock1D without an activation.
  const float* x_scale;
  int64_t x_group_rows;
  const float* row_weights;  // [tokens], factors of the activation's result or its gradient; null for 1
  int64_t row_scale_bytes;
  int64_t column_scale_bytes;
  float* dbias;  // [num_groups, features]
  // [tokens, tiles of 128 features of x], or null: the inner products of each row of the activation's result with its
  // gradient x, without row_weights; 0 for rows of no group. Only for a backward form.
  float* inner_products;
  // The columnwise copy of the activation's result times row_weights, of e4m3, in the same mode, or null. Only for a
  // backward form. Its features are half of the result's with a gate, else the same.
  uint8_t* activated_data;
  int64_t activated_scale_bytes;
  void* scratch;  // QuantizeScratchBytes
};

// Quantizes in one pass over the input, or two passes for current scaling. With `activated_data`, a quantization that
// the kernel of gated_gradient.cu does not take needs as many again.
//
// dbias is summed in float32 in a fixed order: 16 rows in order, then these sums pairwise within 128 rows of a group,
// then the results in order.
Status LaunchQuantize(cudaStream_t stream, Quantization quantization);

// Writes out[t][c] = data * scale_inv, computed in float32 and converted to `output_type`. Writes zero to rows of
// no group.
//
//   data       as `layout` says, of `input_type` (CUDA_R_8F_E4M3 or CUDA_R_8F_E5M2)
//   scale_inv  as `layout` says
//   out        [groups.AllRows(), layout.features] of `output_type` (CUDA_R_16BF, CUDA_R_16F or CUDA_R_32F)
//   table      [batch, GroupTable::Size(layout.num_groups)], scratch
Status LaunchDequantize(cudaStream_t stream, const Groups& groups, const QuantizedLayout& layout, const void* data,
                        cudaDataType_t input_type, const void* scale_inv, void* out, cudaDataType_t output_type,
                        int32_t* table);

// A quantization of the rows of a permutation, with scales of kBlock1D, or given ones of kTensor. Device memory is that
// of all elements of a batch. The groups' capacity is the number of rows.
struct PermutedQuantization {
  Groups groups;
  RowBlockCounts element_row_blocks;  // room of a batch element's arrays
  cudaDataType_t input_type;          // CUDA_R_16BF, CUDA_R_16F or CUDA_R_32F; an FP8 type if x has scales
  cudaDataType_t output_type;         // CUDA_R_8F_E4M3 or CUDA_R_8F_E5M2
  int64_t tokens;                     // of all elements
  int choices;                        // per token
  int32_t features;                   // a multiple of kFp8Alignment
  ScaleRule scale_rule;
  const void* x;         // [tokens, features]
  const float* x_scale;  // of an FP8 x, or null: as in Quantization
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
Status LaunchQuantizePermuted(cudaStream_t stream, const PermutedQuantization& quantization);

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_QUANTIZE_QUANTIZE_H_
