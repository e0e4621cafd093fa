// Properties of a GPU that launches depend on, and permission for kernels to use more dynamic shared memory than the
// default limit.

#ifndef JAX_GROUPED_CSRC_COMMON_DEVICE_H_
#define JAX_GROUPED_CSRC_COMMON_DEVICE_H_

#include <cuda_runtime_api.h>

#include "csrc/common/status.h"

namespace jax_grouped {

struct DeviceProperties {
  int major;  // compute capability
  int minor;
  int processors;
};

// Returns the device's properties. Asks the driver once for each device.
Status GetDeviceProperties(int device, DeviceProperties* properties);
// Returns the properties of the current device.
Status GetDeviceProperties(DeviceProperties* properties);

// Raises a kernel's limit of dynamic shared memory on the current device to `bytes`, and sets its preferred carveout of
// the L1 cache.
//
// Both are attributes of the function on a device, not of a launch. A launch is refused if another thread has lowered
// the attribute meanwhile. A graph takes the values that hold when it is instantiated. So all callers give one `bytes`
// for a kernel, the largest size that any of its launches asks for. Only threads that come first together set it twice.
Status AllowSharedMemory(const void* kernel, int bytes, int carveout = cudaSharedmemCarveoutDefault);

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_COMMON_DEVICE_H_
