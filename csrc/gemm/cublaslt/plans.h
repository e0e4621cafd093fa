// What computes each problem on each device, as chosen so far.

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
  kOwnKernel,  // no algorithm of cuBLASLt
  kHeuristic,  // the first of its list
  kNotTimed,   // the same, as the others could not be timed
  kTuned,      // the fastest of its list
};

struct Plan {
  cublasLtHandle_t handle;
  Algorithm algorithm;
  Origin origin;
};

// For every thread. The lock is held for look-ups and questions to the heuristic, which take microseconds, and while a
// device's handle is made, once; whatever else takes longer is done outside, and its result put in afterwards.
class Plans {
 public:
  using Key = std::pair<int, GemmProblem>;  // the device and what runs there

  static Plans& Get();

  bool Find(const Key& key, Plan* plan);

  // Takes the heuristic's first algorithm unless there is a plan for the key. Fails if the device lacks the product.
  Status Ensure(const CublasLt& library, const Key& key);

  // Has a kernel of our own compute the problem.
  void AddOwnKernel(const Key& key);

  // Replaces the plan of a key, if it has one.
  void Replace(const Key& key, const Plan& plan);

  std::map<Key, Plan> Copy();

 private:
  std::mutex mutex_;
  // Handles live as long as the process: the driver may be gone before a destructor runs.
  std::map<int, cublasLtHandle_t> handles_;
  std::map<Key, Plan> plans_;
};

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_GEMM_CUBLASLT_PLANS_H_
