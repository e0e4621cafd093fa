// Operands to time a problem with.

#ifndef JAX_GROUPED_CSRC_CUBLASLT_TRIAL_OPERANDS_H_
#define JAX_GROUPED_CSRC_CUBLASLT_TRIAL_OPERANDS_H_

#include <cuda_runtime_api.h>

#include <memory>
#include <vector>

#include "csrc/common/group_layout.h"
#include "csrc/common/status.h"
#include "csrc/matmul/problem.h"

namespace jax_grouped {

// Calls of a problem in device memory of their own: groups of equal sizes, random elements with magnitudes from 1/2 to
// 2, inverse scales of 1. Zeros would not do, as they draw less power and so let the GPU run faster.
class TrialOperands {
 public:
  // Allocates on the current device and fills in on `stream`.
  Status Create(const MatmulProblem& problem, cudaStream_t stream);

  const Groups& groups() const { return groups_; }

  // Of the call of that number. Calls take turns among copies of the arrays, eight at most, that fill the device's L2
  // cache twice: a small product would else find there what the one before it has read.
  const MatmulBuffers& Buffers(int call) const { return buffers_[call % buffers_.size()]; }

 private:
  struct Free {
    void operator()(char* memory) const { cudaFree(memory); }
  };

  std::unique_ptr<char, Free> memory_;
  Groups groups_{};
  std::vector<MatmulBuffers> buffers_;
};

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_CUBLASLT_TRIAL_OPERANDS_H_
