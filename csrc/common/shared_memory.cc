#include "csrc/common/shared_memory.h"

#include <mutex>
#include <set>
#include <utility>

namespace jax_grouped {
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
  // The lock is held while the attributes are set: no other thread may launch before they are.
  std::lock_guard<std::mutex> lock(*mutex);
  if (allowed->count({device, kernel}) > 0) return Status::Ok();
  JAX_GROUPED_RETURN_IF_FAILED(SetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  JAX_GROUPED_RETURN_IF_FAILED(SetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, carveout));
  allowed->emplace(device, kernel);
  return Status::Ok();
}

}  // namespace jax_grouped
