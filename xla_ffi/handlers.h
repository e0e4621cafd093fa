// The custom calls. `Initialize` runs outside graph capture; `Execute` may be captured. stages.h captures it before a
// program begins, to load its kernels.

#ifndef JAX_GROUPED_XLA_FFI_HANDLERS_H_
#define JAX_GROUPED_XLA_FFI_HANDLERS_H_

#include "xla/ffi/api/api.h"

namespace jax_grouped {

// Computes a grouped matmul:
//   jax_grouped_gemm(a, b, group_sizes, group_offset[, a_scale, b_scale][, row_indices][, accumulator])
//       {product, scaled, a_mode, b_mode, tokens, expected_tokens, weight_batch, gathered, accumulate, zero_other_rows,
//        batch_invariant, swiglu, keeps_product, pow2_scales, amax_epsilon}
//       -> (d[, activated data[, activated scales]], scratch, workspace)
//
// Scaled operands are FP8 arrays, quantized along the contraction axis; a_scale and b_scale are their inverse scales.
// Row i of an operand that is gathered is the one of index row_indices[i], counted through the batch; there is then no
// accumulator. Of scaled operands, only a with scales of 1x128 is gathered, an array that is quantized as one group.
// With an accumulator, d is the accumulator plus the product. The caller should alias the two buffers; otherwise the
// accumulator is copied to d first. A call may be for a batch: each operand then holds the arrays of all batch
// elements, one after another, and group_offset has an entry for every element. Of weights there are weight_batch, each
// for an equal run of batch elements. Without zero_other_rows, rows of no group may hold anything in d. With
// batch_invariant, fprop and dgrad have one order of sums for all sizes. With swiglu, fprop of gathered tokens or of
// block-scaled operands also returns SwiGLU of d, for the latter quantized rowwise; rows of no group hold anything in
// it. Without keeps_product, d holds anything.
XLA_FFI_DECLARE_HANDLER_SYMBOL(GemmInitialize);
XLA_FFI_DECLARE_HANDLER_SYMBOL(GemmExecute);

// Computes the gradient of a grouped bias:
//   jax_grouped_bias_grad(dy, group_sizes, group_offset) -> (dbias, partial_sums, group tables)
XLA_FFI_DECLARE_HANDLER_SYMBOL(BiasGradExecute);

// Computes the gradient of an activation's input, of the weights of its rows, and the weighted rows:
//   jax_grouped_activation_grad(input, da, weights[, order]) {activation, limit, alpha, offset}
//       -> (dinput, weighted, inner_products)
//
// Row i has weight order[i], or weight i without order. Rows without a weight may hold anything in the results.
XLA_FFI_DECLARE_HANDLER_SYMBOL(ActivationGradExecute);

// Copies each token of x to the rows of its choices, and with zero_tail zeros to rows of no token:
//   jax_grouped_permute_rows(x, order, inverse) {zero_tail} -> (rows)
XLA_FFI_DECLARE_HANDLER_SYMBOL(PermuteRowsExecute);

// Sums the rows of each token's choices, times their weights if there are any:
//   jax_grouped_sum_rows(rows, inverse[, weights]) -> (sums)
XLA_FFI_DECLARE_HANDLER_SYMBOL(SumRowsExecute);

// Chooses each token's experts:
//   jax_grouped_route(logits[, bias][, choice])
//       {batch, score, normalize_weights, expert_groups, top_groups, group_score, has_bias, has_choice} ->
//       (experts, weights, probabilities, block_counts, block_sums)
//
// The last two results have sums for each block of tokens, and are for jax_grouped_group_pairs.
XLA_FFI_DECLARE_HANDLER_SYMBOL(RouteExecute);

// Sorts pairs of a token and a choice by expert:
//   jax_grouped_group_pairs(experts, block_counts, block_sums) {batch} ->
//       (order, inverse, group_sizes, dropped, expert_load, sums)
//   jax_grouped_group_pairs(experts) {batch} -> (order, inverse, group_sizes, dropped, expert_load, block_counts)
//
// The second form counts the pairs of the blocks first. Its last result is scratch memory.
XLA_FFI_DECLARE_HANDLER_SYMBOL(GroupPairsExecute);

// Quantizes the rows of each group:
//   jax_grouped_quantize(x, group_sizes, group_offset[, x_scale][, row_indices][, scale][, activation_input]
//                        [, row_weights][, activated_scale][, skip, previous results...]) {...} ->
//       ([rowwise data, scales,] [columnwise data, scales,] amax[, dbias][, inner_products]
//        [, activated data, scales, amax], scratch, partial sums)
//
// The attributes say which optional operands and results there are. An FP8 x has x_scale: its inverse scales, as in a
// rowwise stack of blocks of 1 x 128. The caller should alias the previous results to the results; otherwise they are
// copied. With stack_rows, every group has that number of rows, and group_sizes are not read: the arrays have no room
// for groups of other sizes. xla_ffi/quantize.cc has the attributes.
XLA_FFI_DECLARE_HANDLER_SYMBOL(QuantizeExecute);

// Quantizes each token of x rowwise and writes it to the rows of its choices: in blocks of 1 x 128, or with the given
// scales of the groups:
//   jax_grouped_quantize_permuted(x, inverse, group_sizes, group_offset[, x_scale or scale])
//       {num_groups, given_scale, pow2_scales, amax_epsilon} -> (data, scales, group tables[, amax])
XLA_FFI_DECLARE_HANDLER_SYMBOL(QuantizePermutedExecute);

// Dequantizes an array:
//   jax_grouped_dequantize(data, scale_inv, group_sizes, group_offset) {...} -> (out, group table)
XLA_FFI_DECLARE_HANDLER_SYMBOL(DequantizeExecute);

}  // namespace jax_grouped

#endif  // JAX_GROUPED_XLA_FFI_HANDLERS_H_
