// Properties of a GPU that launches depend on.

#ifndef JAX_GROUPED_CSRC_COMMON_DEVICE_H_
#define JAX_GROUPED_CSRC_COMMON_DEVICE_H_

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

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_COMMON_DEVICE_H_
