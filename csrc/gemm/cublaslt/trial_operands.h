// Operands for timing a problem.

#ifndef JAX_GROUPED_CSRC_GEMM_CUBLASLT_TRIAL_OPERANDS_H_
#define JAX_GROUPED_CSRC_GEMM_CUBLASLT_TRIAL_OPERANDS_H_

#include <cuda_runtime_api.h>

#include <memory>
#include <vector>

#include "csrc/common/status.h"
#include "csrc/gemm/problem.h"
#include "csrc/groups/layout.h"

namespace jax_grouped {

// Calls of a problem in their own device memory. The groups have equal sizes, the elements are random with magnitudes
// from 1/2 to 2, and the inverse scales are 1. Zeros would not do: they draw less power, so the GPU would run faster.
class TrialOperands {
 public:
  // Allocates the arrays on the current device and fills them on `stream`.
  Status Create(const GemmProblem& problem, cudaStream_t stream);

  const Groups& groups() const { return groups_; }

  // Returns the buffers of call number `call`. Calls rotate through copies of the arrays, eight at most, that together
  // fill the device's L2 cache twice. Otherwise a small product would find in the cache what the previous one has read.
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
