// Kernels that start while the kernel before them, their setup, still runs: "programmatic dependent launch" in the CUDA
// Programming Guide. The setup calls cudaTriggerProgrammaticLaunchCompletion as soon as it likes; they call
// cudaGridDependencySynchronize, in all threads, before they touch memory.

#ifndef JAX_GROUPED_CSRC_COMMON_EARLY_LAUNCH_CUH_
#define JAX_GROUPED_CSRC_COMMON_EARLY_LAUNCH_CUH_

#include <cuda_runtime.h>

#include "csrc/common/status.h"

namespace jax_grouped {

// kernel<<<blocks, threads, shared_bytes, stream>>>(args...), but early.
template <typename... Args>
Status LaunchEarly(void (*kernel)(Args...), dim3 blocks, int threads, int shared_bytes, cudaStream_t stream,
                   const Args&... args) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return Status::FromCuda(cudaLaunchKernelEx(&config, kernel, args...), "Launching a kernel after its setup");
}

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_COMMON_EARLY_LAUNCH_CUH_
