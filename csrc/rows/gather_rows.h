// A copy of rows in another order.

#ifndef JAX_GROUPED_CSRC_ROWS_GATHER_ROWS_H_
#define JAX_GROUPED_CSRC_ROWS_GATHER_ROWS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "csrc/common/status.h"

namespace jax_grouped {

// Bytes that a thread copies at once; `row_bytes` must be a multiple, and the arrays must start at one.
constexpr int kGatherVectorBytes = 16;

// Writes row indices[i] of `x` [x_rows, row_bytes] as row i of `rows` [num_rows, row_bytes], or zeros if there is no
// such row.
Status LaunchGatherRows(cudaStream_t stream, const void* x, int64_t x_rows, int64_t row_bytes, const int32_t* indices,
                        int64_t num_rows, void* rows);

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_ROWS_GATHER_ROWS_H_
