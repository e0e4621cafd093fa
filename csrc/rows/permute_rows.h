// Copies of tokens, one for each of their choices, in the order of rows.

#ifndef JAX_GROUPED_CSRC_ROWS_PERMUTE_ROWS_H_
#define JAX_GROUPED_CSRC_ROWS_PERMUTE_ROWS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "csrc/common/status.h"

namespace jax_grouped {

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

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_ROWS_PERMUTE_ROWS_H_
