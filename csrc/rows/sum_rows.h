// Sums of the rows of each token.

#ifndef JAX_GROUPED_CSRC_ROWS_SUM_ROWS_H_
#define JAX_GROUPED_CSRC_ROWS_SUM_ROWS_H_

#include <cuda_runtime_api.h>
#include <library_types.h>

#include <cstdint>

#include "csrc/common/status.h"

namespace jax_grouped {

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

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_ROWS_SUM_ROWS_H_
