// The chosen implementation of each problem on each device.

#ifndef JAX_GROUPED_CSRC_GEMM_CUBLASLT_PLANS_H_
#define JAX_GROUPED_CSRC_GEMM_CUBLASLT_PLANS_H_

#include <cublasLt.h>

#include <cstddef>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "csrc/common/status.h"
#include "csrc/gemm/cublaslt/library.h"
#include "csrc/gemm/problem.h"

namespace jax_grouped {

struct Algorithm {
  cublasLtMatmulAlgo_t choice;
  size_t workspace_bytes;
};

// Describes an algorithm for people: its number, tile, stages, cluster shape and workspace.
std::string Describe(const CublasLt& library, const Algorithm& algorithm);

struct Plan {
  cublasLtHandle_t handle;  // null if one of our own kernels computes the problem
  Algorithm algorithm;      // with a handle
};

// The plans of the process, shared by all threads. The lock of the plans is held for look-ups and insertions only, as
// launches look them up. Making one can take until the device is idle.
class Plans {
 public:
  using Key = std::pair<int, GemmProblem>;  // the device and the problem on it

  static Plans& Get();

  bool Find(const Key& key, Plan* plan);

  // Adds a plan with the heuristic's first algorithm unless the key has a plan. Fails if the device does not support
  // the product.
  Status Ensure(const CublasLt& library, const Key& key);

  // Adds a plan that computes the problem with one of our own kernels.
  void AddOwnKernel(const Key& key);

  std::map<Key, Plan> Copy();

 private:
  std::mutex adding_;  // Held while a handle or a plan is made.
  // Handles live as long as the process: the driver may be gone before a destructor runs.
  std::map<int, cublasLtHandle_t> handles_;
  std::mutex mutex_;
  std::map<Key, Plan> plans_;
};

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_GEMM_CUBLASLT_PLANS_H_
