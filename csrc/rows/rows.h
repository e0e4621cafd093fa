// Copies of tokens to rows, sums of the rows of each token, and the gradient of an activation without quantization,
// with what else a backward pass needs of the same numbers.

#ifndef JAX_GROUPED_CSRC_ROWS_ROWS_H_
#define JAX_GROUPED_CSRC_ROWS_ROWS_H_

#include <cuda_runtime_api.h>
#include <library_types.h>

#include <cstdint>

#include "csrc/common/activation.h"
#include "csrc/common/status.h"
#include "csrc/exchange/exchange.h"

namespace jax_grouped {

// 16-bit numbers of a vector. A row's features must be a multiple, and its array must start at one.
constexpr int kRowVector = 8;

// Bytes that a thread copies at once; `token_bytes` must be a multiple, and the arrays must start at one.
constexpr int kPermuteVectorBytes = 16;

struct PermuteRowsBuffers {
  const void* x;           // [tokens, token_bytes]
  const int32_t* order;    // [rows]: the pair of a token and a choice in each row, or one past all pairs in the tail
  const int32_t* inverse;  // [tokens, choices]: the row of each pair; no row if it is not in [0, rows)
  void* rows;              // [rows, token_bytes]
};

// Copies each token to the rows of its choices. With `zero_tail`, writes zeros to the tail. Reads each token once: rows
// that read their tokens would read them from memory again, because the rows that are written drive the tokens out of
// the L2 cache.
Status LaunchPermuteRows(cudaStream_t stream, const PermuteRowsBuffers& buffers, int64_t tokens, int choices,
                         int64_t rows, int64_t token_bytes, bool zero_tail);

// Device memory. Arrays without a type here are of 16-bit numbers, bfloat16 or float16. Rows are of whole vectors.
struct SumRowsBuffers {
  const void* rows;        // [rows, features]
  const int32_t* inverse;  // [tokens, choices]: the row of each choice; no row if it is not in [0, rows)
  const float* weights;    // [tokens, choices]: the factor of each choice's row; null for 1
  void* sums;              // [tokens, features]
};

// Sums the rows of each token in float32, first choice first, and rounds once. Reads nothing for a choice without a
// row.
Status LaunchSumRows(cudaStream_t stream, const SumRowsBuffers& buffers, cudaDataType_t type, int64_t tokens,
                     int choices, int64_t rows, int64_t features);

// Does so for the tokens of all devices, `tokens` of each, and writes each sum that is wanted into the memory of its
// token's device, between both barriers: see LaunchPushRows. Ignores `buffers.sums`.
Status LaunchPushSums(cudaStream_t stream, const SumRowsBuffers& buffers, const Peers& peers, const uint32_t* wanted,
                      const PeerArrays& to, cudaDataType_t type, int64_t tokens, int choices, int64_t rows,
                      int64_t features);

// Device memory. Arrays without a type here are of 16-bit numbers, bfloat16 or float16. Rows are of whole vectors. `a`
// is the activation of the input.
struct ActivationGradBuffers {
  const void* input;      // [rows, features]; [rows, 2 features] for a gated activation, the gate's first
  const void* da;         // [rows, features]: the gradient of the weighted `a` without its weight
  const float* weights;   // [num_weights]
  const int32_t* order;   // [rows]: the index of each row's weight, none of [0, num_weights) for a row that is not
                          // computed and may hold anything in all results; null for the row's own index
  void* dinput;           // as input: its gradient, from that of `a`, weight * da
  void* weighted;         // [rows, features]: weight * a
  float* inner_products;  // [rows]: the sum over the features of a * da, which is the gradient of the weight
};

// Reads both inputs once. Everything is computed in float32 and rounded once, and sums have a fixed order.
Status LaunchActivationGrad(cudaStream_t stream, const ActivationGradBuffers& buffers, const Activation& activation,
                            cudaDataType_t type, int64_t num_weights, int64_t rows, int64_t features);

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_ROWS_ROWS_H_
