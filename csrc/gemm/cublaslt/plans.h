// The chosen implementation of each problem on each device.

#ifndef JAX_GROUPED_CSRC_GEMM_CUBLASLT_PLANS_H_
#define JAX_GROUPED_CSRC_GEMM_CUBLASLT_PLANS_H_

#include <cublasLt.h>

#include <map>
#include <mutex>
#include <utility>

#include "csrc/common/status.h"
#include "csrc/gemm/cublaslt/algorithms.h"
#include "csrc/gemm/cublaslt/library.h"
#include "csrc/gemm/problem.h"

namespace jax_grouped {

enum class Origin {
  kOwnKernel,  // no cuBLASLt algorithm
  kHeuristic,  // the first in its list
  kNotTimed,   // the first in its list: timing the others failed
  kTuned,      // the fastest in its list
};

struct Plan {
  cublasLtHandle_t handle;
  Algorithm algorithm;
  Origin origin;
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

  // Replaces the plan of a key if it has one.
  void Replace(const Key& key, const Plan& plan);

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
