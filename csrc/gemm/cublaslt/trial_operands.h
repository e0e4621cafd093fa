// Operands to time a problem with.

#ifndef JAX_GROUPED_CSRC_GEMM_CUBLASLT_TRIAL_OPERANDS_H_
#define JAX_GROUPED_CSRC_GEMM_CUBLASLT_TRIAL_OPERANDS_H_

#include <cuda_runtime_api.h>

#include <memory>
#include <vector>

#include "csrc/common/status.h"
#include "csrc/gemm/problem.h"
#include "csrc/groups/layout.h"

namespace jax_grouped {

// Calls of a problem in device memory of their own: groups of equal sizes, random elements with magnitudes from 1/2 to
// 2, inverse scales of 1. Zeros would not do, as they draw less power and so let the GPU run faster.
class TrialOperands {
 public:
  // Allocates on the current device and fills in on `stream`.
  Status Create(const GemmProblem& problem, cudaStream_t stream);

  const Groups& groups() const { return groups_; }

  // Of the call of that number. Calls take turns among copies of the arrays, eight at most, that fill the device's L2
  // cache twice: a small product would else find there what the one before it has read.
  const GemmBuffers& Buffers(int call) const { return buffers_[call % buffers_.size()]; }

 private:
  struct Free {
    void operator()(char* memory) const { cudaFree(memory); }
  };

  std::unique_ptr<char, Free> memory_;
  Groups groups_{};
  std::vector<GemmBuffers> buffers_;
};

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_GEMM_CUBLASLT_TRIAL_OPERANDS_H_
