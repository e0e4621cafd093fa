// Kernel launches. Each returns its own error: cudaGetLastError would also return an error that an earlier call has
// left.

#ifndef JAX_GROUPED_CSRC_COMMON_LAUNCH_CUH_
#define JAX_GROUPED_CSRC_COMMON_LAUNCH_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <library_types.h>

#include <utility>

#include "csrc/common/status.h"

namespace jax_grouped {

// The shape of a launch.
struct Grid {
  dim3 blocks;
  dim3 threads;
  int shared_bytes = 0;  // dynamic shared memory of a block
};

// Launches a kernel with attributes. `what` begins the sentence of an error, as in Status::FromCuda. The arguments are
// converted to the types of the kernel's parameters.
template <typename... Parameters, typename... Args>
Status LaunchWith(cudaLaunchAttribute* attributes, unsigned num_attributes, const char* what, cudaStream_t stream,
                  const Grid& grid, void (*kernel)(Parameters...), Args&&... args) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid.blocks;
  config.blockDim = grid.threads;
  config.dynamicSmemBytes = static_cast<size_t>(grid.shared_bytes);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = num_attributes;
  return Status::FromCuda(cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...), what);
}

// Calls function(number) with a number of a type of 16 or 32 bits.
template <typename Function>
Status WithFloatType(cudaDataType_t type, const Function& function) {
  switch (type) {
    case CUDA_R_16BF:
      return function(__nv_bfloat16());
    case CUDA_R_16F:
      return function(__half());
    case CUDA_R_32F:
      return function(float());
    default:
      return Status::Failed("Kernels take bfloat16, float16 or float32.");
  }
}

// Launches kernel<<<grid, stream>>>(args...).
template <typename... Parameters, typename... Args>
Status Launch(const char* what, cudaStream_t stream, const Grid& grid, void (*kernel)(Parameters...), Args&&... args) {
  return LaunchWith(nullptr, 0, what, stream, grid, kernel, std::forward<Args>(args)...);
}

// Returns the attribute of a kernel that starts while the previous kernel, its setup, still runs. The CUDA Programming
// Guide calls this "programmatic dependent launch". The setup calls cudaTriggerProgrammaticLaunchCompletion as soon as
// it likes. All threads of the kernel call cudaGridDependencySynchronize before they touch memory.
inline cudaLaunchAttribute EarlyLaunch() {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  return attribute;
}

// Launches a kernel with the attribute of EarlyLaunch.
template <typename... Parameters, typename... Args>
Status LaunchEarly(const char* what, cudaStream_t stream, const Grid& grid, void (*kernel)(Parameters...),
                   Args&&... args) {
  cudaLaunchAttribute attribute = EarlyLaunch();
  return LaunchWith(&attribute, 1, what, stream, grid, kernel, std::forward<Args>(args)...);
}

// Launches a kernel whose blocks go before those of kernels on other streams that have not begun.
template <typename... Parameters, typename... Args>
Status LaunchUrgent(const char* what, cudaStream_t stream, const Grid& grid, void (*kernel)(Parameters...),
                    Args&&... args) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributePriority;
  JAX_GROUPED_RETURN_IF_FAILED(
      Status::FromCuda(cudaDeviceGetStreamPriorityRange(nullptr, &attribute.val.priority), "Asking for priorities"));
  return LaunchWith(&attribute, 1, what, stream, grid, kernel, std::forward<Args>(args)...);
}

// Launches a kernel whose blocks wait for each other and must therefore all be resident at once. Fails with
// cudaErrorCooperativeLaunchTooLarge if they cannot be.
template <typename... Parameters, typename... Args>
Status LaunchCooperative(const char* what, cudaStream_t stream, const Grid& grid, void (*kernel)(Parameters...),
                         Args&&... args) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  return LaunchWith(&attribute, 1, what, stream, grid, kernel, std::forward<Args>(args)...);
}

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_COMMON_LAUNCH_CUH_
