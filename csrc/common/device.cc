#include "csrc/common/device.h"

#include <cuda_runtime_api.h>

namespace jax_grouped {

Status GetDeviceProperties(int device, DeviceProperties* properties) {
  const auto get = [device](cudaDeviceAttr attribute, int* value) {
    return Status::FromCuda(cudaDeviceGetAttribute(value, attribute, device), "cudaDeviceGetAttribute");
  };
  JAX_GROUPED_RETURN_IF_FAILED(get(cudaDevAttrComputeCapabilityMajor, &properties->major));
  JAX_GROUPED_RETURN_IF_FAILED(get(cudaDevAttrComputeCapabilityMinor, &properties->minor));
  return get(cudaDevAttrMultiProcessorCount, &properties->processors);
}

}  // namespace jax_grouped
