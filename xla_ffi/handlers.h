// The custom calls. `Initialize` runs outside graph capture, `Execute` may be captured.

#ifndef JAX_GROUPED_XLA_FFI_HANDLERS_H_
#define JAX_GROUPED_XLA_FFI_HANDLERS_H_

#include "xla/ffi/api/c_api.h"

namespace jax_grouped {

// jax_grouped_matmul(a, b, group_sizes, group_offset[, accumulator]) {product, kernel_batch, autotune} ->
//     (d, scratch, workspace)
//
// With an accumulator, which is meant to be aliased to d, the product is added to it. group_offset has an entry for
// every element of a batch, whose operands lie one after another; kernel_batch elements have kernels of their own. With
// autotune, cuBLASLt's algorithms are timed once, before the first call.
XLA_FFI_Error* MatmulInitialize(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* MatmulExecute(XLA_FFI_CallFrame* frame);

// jax_grouped_scaled_matmul(a, a_scale, b, b_scale, group_sizes, group_offset[, accumulator]) {product, a_mode, b_mode,
//     tokens, kernel_batch, autotune} -> (d, scratch, workspace)
//
// The same of operands in FP8 with their inverse scales, quantized along what the product sums over.
XLA_FFI_Error* ScaledMatmulInitialize(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* ScaledMatmulExecute(XLA_FFI_CallFrame* frame);

// jax_grouped_bias_grad(dy, group_sizes, group_offset) -> (dbias, partial_sums, starts)
XLA_FFI_Error* BiasGradExecute(XLA_FFI_CallFrame* frame);

// jax_grouped_quantize(x, group_sizes, group_offset[, scale][, activation_input][, skip, previous results...]) {...} ->
//     ([rowwise data, scales,] [columnwise data, scales,] amax[, dbias], scratch, partial sums)
//
// The attributes say which of these there are. Previous results are meant to be aliased to the results.
XLA_FFI_Error* QuantizeExecute(XLA_FFI_CallFrame* frame);

// jax_grouped_dequantize(data, scale_inv, group_sizes, group_offset) {...} -> (out, group table)
XLA_FFI_Error* DequantizeExecute(XLA_FFI_CallFrame* frame);

}  // namespace jax_grouped

#endif  // JAX_GROUPED_XLA_FFI_HANDLERS_H_
