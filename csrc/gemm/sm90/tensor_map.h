// Tensor maps. They describe to Hopper's copy engine (TMA) a tensor in global memory and the boxes to copy.

#ifndef JAX_GROUPED_CSRC_GEMM_SM90_TENSOR_MAP_H_
#define JAX_GROUPED_CSRC_GEMM_SM90_TENSOR_MAP_H_

#include <cuda.h>

#include <vector>

#include "csrc/common/status.h"

namespace jax_grouped::sm90 {

// A tensor of up to five dimensions, the inner one first, and the boxes that are copied at once. A box has 128 bytes
// along the inner dimension. These bytes are swizzled in shared memory.
struct BoxedTensor {
  const void* base;
  CUtensorMapDataType type;
  std::vector<cuuint64_t> sizes;
  std::vector<cuuint64_t> strides;  // in bytes, for all dimensions except the inner one
  std::vector<cuuint32_t> box;
};

// Encodes a tensor map. Fails if the driver is too old.
Status EncodeTensorMap(const BoxedTensor& tensor, CUtensorMap* map);

}  // namespace jax_grouped::sm90

#endif  // JAX_GROUPED_CSRC_GEMM_SM90_TENSOR_MAP_H_
