#include "csrc/common/device.h"

#include <cuda_runtime_api.h>

#include <map>
#include <mutex>
#include <set>
#include <utility>

namespace jax_grouped {
namespace {

Status AskDriver(int device, DeviceProperties* properties) {
  const auto get = [device](cudaDeviceAttr attribute, int* value) {
    return Status::FromCuda(cudaDeviceGetAttribute(value, attribute, device), "cudaDeviceGetAttribute");
  };
  JAX_GROUPED_RETURN_IF_FAILED(get(cudaDevAttrComputeCapabilityMajor, &properties->major));
  JAX_GROUPED_RETURN_IF_FAILED(get(cudaDevAttrComputeCapabilityMinor, &properties->minor));
  return get(cudaDevAttrMultiProcessorCount, &properties->processors);
}

}  // namespace

Status GetDeviceProperties(int device, DeviceProperties* properties) {
  static std::mutex* mutex = new std::mutex();
  static auto* known = new std::map<int, DeviceProperties>();
  std::lock_guard<std::mutex> lock(*mutex);
  const auto found = known->find(device);
  if (found == known->end()) {
    JAX_GROUPED_RETURN_IF_FAILED(AskDriver(device, properties));
    known->emplace(device, *properties);
  } else {
    *properties = found->second;
  }
  return Status::Ok();
}

Status GetDeviceProperties(DeviceProperties* properties) {
  int device = 0;
  JAX_GROUPED_RETURN_IF_FAILED(Status::FromCuda(cudaGetDevice(&device), "Asking for the device"));
  return GetDeviceProperties(device, properties);
}

namespace {

Status SetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  return Status::FromCuda(cudaFuncSetAttribute(kernel, attribute, value), "Reserving shared memory");
}

}  // namespace

Status AllowSharedMemory(const void* kernel, int bytes, int carveout) {
  static std::mutex* mutex = new std::mutex();
  static auto* allowed = new std::set<std::pair<int, const void*>>();
  int device = 0;
  JAX_GROUPED_RETURN_IF_FAILED(Status::FromCuda(cudaGetDevice(&device), "Asking for the device"));
  std::unique_lock<std::mutex> lock(*mutex);
  if (allowed->count({device, kernel}) > 0) return Status::Ok();
  // Setting them loads the kernel, which can take until the device is idle. Meanwhile other threads set the same.
  lock.unlock();
  JAX_GROUPED_RETURN_IF_FAILED(SetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  JAX_GROUPED_RETURN_IF_FAILED(SetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, carveout));
  lock.lock();
  allowed->emplace(device, kernel);
  return Status::Ok();
}

}  // namespace jax_grouped
