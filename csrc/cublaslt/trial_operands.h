// Operands to time a problem with.

#ifndef JAX_GROUPED_CSRC_CUBLASLT_TRIAL_OPERANDS_H_
#define JAX_GROUPED_CSRC_CUBLASLT_TRIAL_OPERANDS_H_

#include <cuda_runtime_api.h>

#include <memory>

#include "csrc/common/group_layout.h"
#include "csrc/common/status.h"
#include "csrc/cublaslt/problem.h"

namespace jax_grouped {

// One call of a problem in device memory of its own: groups of equal sizes, random elements with magnitudes from 1/2 to
// 2, inverse scales of 1. Zeros would not do, as they draw less power and so let the GPU run faster.
class TrialOperands {
 public:
  // Allocates on the current device and fills in on `stream`. Without the memory for it, `*allocated` is false.
  Status Create(const MatmulProblem& problem, cudaStream_t stream, bool* allocated);

  const Groups& groups() const { return groups_; }
  const MatmulBuffers& buffers() const { return buffers_; }

 private:
  struct Free {
    void operator()(char* memory) const { cudaFree(memory); }
  };

  std::unique_ptr<char, Free> memory_;
  Groups groups_{};
  MatmulBuffers buffers_{};
};

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_CUBLASLT_TRIAL_OPERANDS_H_
