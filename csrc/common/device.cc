#include "csrc/common/device.h"

#include <cuda_runtime_api.h>

#include <map>
#include <mutex>
#include <set>
#include <utility>

namespace jax_grouped {

Status GetDeviceProperties(int device, DeviceProperties* properties) {
  static std::mutex* mutex = new std::mutex();
  static auto* known = new std::map<int, DeviceProperties>();
  std::lock_guard<std::mutex> lock(*mutex);
  DeviceProperties& found = (*known)[device];
  const auto get = [device](cudaDeviceAttr attribute, int* value) {
    return Status::FromCuda(cudaDeviceGetAttribute(value, attribute, device), "cudaDeviceGetAttribute");
  };
  if (found.processors == 0) {
    JAX_GROUPED_RETURN_IF_FAILED(get(cudaDevAttrComputeCapabilityMajor, &found.major));
    JAX_GROUPED_RETURN_IF_FAILED(get(cudaDevAttrComputeCapabilityMinor, &found.minor));
    JAX_GROUPED_RETURN_IF_FAILED(get(cudaDevAttrMultiProcessorCount, &found.processors));
  }
  *properties = found;
  return Status::Ok();
}

Status GetDeviceProperties(DeviceProperties* properties) {
  int device = 0;
  JAX_GROUPED_RETURN_IF_FAILED(Status::FromCuda(cudaGetDevice(&device), "Asking for the device"));
  return GetDeviceProperties(device, properties);
}

Status AllowSharedMemory(const void* kernel, int bytes, int carveout) {
  static std::mutex* mutex = new std::mutex();
  static auto* allowed = new std::set<std::pair<int, const void*>>();
  int device = 0;
  JAX_GROUPED_RETURN_IF_FAILED(Status::FromCuda(cudaGetDevice(&device), "Asking for the device"));
  std::unique_lock<std::mutex> lock(*mutex);
  if (allowed->count({device, kernel}) > 0) return Status::Ok();
  // Setting them loads the kernel, which can take until the device is idle. Meanwhile other threads set the same.
  lock.unlock();
  const auto set = [kernel](cudaFuncAttribute attribute, int value) {
    return Status::FromCuda(cudaFuncSetAttribute(kernel, attribute, value), "Reserving shared memory");
  };
  JAX_GROUPED_RETURN_IF_FAILED(set(cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  JAX_GROUPED_RETURN_IF_FAILED(set(cudaFuncAttributePreferredSharedMemoryCarveout, carveout));
  lock.lock();
  allowed->emplace(device, kernel);
  return Status::Ok();
}

}  // namespace jax_grouped
