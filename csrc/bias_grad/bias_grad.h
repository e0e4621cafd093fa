// The gradient of a grouped bias: the sum of each group's rows.

#ifndef JAX_GROUPED_CSRC_BIAS_GRAD_BIAS_GRAD_H_
#define JAX_GROUPED_CSRC_BIAS_GRAD_BIAS_GRAD_H_

#include <cuda_runtime_api.h>
#include <library_types.h>

#include <cstdint>

#include "csrc/common/status.h"
#include "csrc/groups/layout.h"

namespace jax_grouped {

// Writes dbias[g][n], the sum of dy[t][n] over the tokens t of local group g of the batch, in float32.
//
// The order of additions is fixed. A group's rows form tiles of kBiasGradRows. Within a tile, each of 8 lanes adds
// every eighth row; then the lanes are added in order. The tiles are added last, in order.
//
//   dy            [groups.AllRows(), features] of `type` (CUDA_R_16BF, CUDA_R_16F or CUDA_R_32F), from a 16-byte
//                 boundary on
//   partial_sums  [batch * BiasGradTiles(groups.capacity, groups.num_groups), features], scratch
//   tables        [batch, GroupTable::Size(groups.num_groups)], scratch
Status LaunchBiasGrad(cudaStream_t stream, const Groups& groups, const void* dy, cudaDataType_t type, int64_t features,
                      float* partial_sums, int32_t* tables, float* dbias);

// Writes dbias[g][n], the sum of partial_sums[tile][n] over the tiles of local group g of the batch, in order. `table`
// is the first batch element's. It counts the tiles before each group.
Status LaunchAddTiles(cudaStream_t stream, const float* partial_sums, int64_t features, const Groups& groups,
                      const GroupTable& table, float* dbias);

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_BIAS_GRAD_BIAS_GRAD_H_
