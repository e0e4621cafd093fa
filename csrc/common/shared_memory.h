// Permission for kernels to have more shared memory than a launch may ask for by default.

#ifndef JAX_GROUPED_CSRC_COMMON_SHARED_MEMORY_H_
#define JAX_GROUPED_CSRC_COMMON_SHARED_MEMORY_H_

#include <cuda_runtime_api.h>

#include "csrc/common/status.h"

namespace jax_grouped {

// Lets launches of a kernel on the current device have up to `bytes` of dynamic shared memory, and prefers a carveout
// of the L1 cache.
//
// Both are attributes of the function on a device, not of a launch: a launch whose attribute another thread has lowered
// meanwhile is refused, and a graph takes what holds when it is instantiated. So `bytes` is the most that any launch of
// the kernel asks for, and the attributes are set once.
Status AllowSharedMemory(const void* kernel, int bytes, int carveout = cudaSharedmemCarveoutDefault);

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_COMMON_SHARED_MEMORY_H_
