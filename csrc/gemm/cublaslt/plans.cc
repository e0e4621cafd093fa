#include "csrc/gemm/cublaslt/plans.h"

#include <vector>

#include "csrc/common/device.h"

namespace jax_grouped {
namespace {

Status CheckDevice(int device, const GemmProblem& problem) {
  DeviceProperties properties;
  JAX_GROUPED_RETURN_IF_FAILED(GetDeviceProperties(device, &properties));
  return CheckCapability(problem, properties.major, properties.minor);
}

}  // namespace

Plans& Plans::Get() {
  static Plans* plans = new Plans();
  return *plans;
}

bool Plans::Find(const Key& key, Plan* plan) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = plans_.find(key);
  if (found == plans_.end()) return false;
  *plan = found->second;
  return true;
}

Status Plans::Ensure(const CublasLt& library, const Key& key) {
  std::lock_guard<std::mutex> adding(adding_);
  Plan plan;
  if (Find(key, &plan)) return Status::Ok();
  const auto& [device, problem] = key;
  JAX_GROUPED_RETURN_IF_FAILED(CheckDevice(device, problem));
  cublasLtHandle_t& handle = handles_[device];
  if (handle == nullptr) JAX_GROUPED_RETURN_IF_FAILED(library.Check(library.Create(&handle), "cublasLtCreate"));
  std::vector<Algorithm> first;
  JAX_GROUPED_RETURN_IF_FAILED(ProposeAlgorithms(library, handle, problem, 1, &first));
  std::lock_guard<std::mutex> lock(mutex_);
  plans_.emplace(key, Plan{handle, first.front(), Origin::kHeuristic});
  return Status::Ok();
}

void Plans::AddOwnKernel(const Key& key) {
  std::lock_guard<std::mutex> lock(mutex_);
  plans_.emplace(key, Plan{nullptr, {}, Origin::kOwnKernel});
}

void Plans::Replace(const Key& key, const Plan& plan) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (const auto found = plans_.find(key); found != plans_.end()) found->second = plan;
}

std::map<Plans::Key, Plan> Plans::Copy() {
  std::lock_guard<std::mutex> lock(mutex_);
  return plans_;
}

}  // namespace jax_grouped
