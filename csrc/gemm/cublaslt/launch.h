// Launches of one grouped matmul through cuBLASLt.

#ifndef JAX_GROUPED_CSRC_GEMM_CUBLASLT_LAUNCH_H_
#define JAX_GROUPED_CSRC_GEMM_CUBLASLT_LAUNCH_H_

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include "csrc/common/status.h"
#include "csrc/gemm/cublaslt/plans.h"
#include "csrc/gemm/problem.h"
#include "csrc/groups/layout.h"

namespace jax_grouped {

// Enqueues the product with the given algorithm, as EnqueueGemm describes. May be captured.
Status LaunchCublasLt(const CublasLt& library, cublasLtHandle_t handle, const Algorithm& algorithm, cudaStream_t stream,
                      const GemmProblem& problem, const Groups& groups, const GemmBuffers& buffers);

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_GEMM_CUBLASLT_LAUNCH_H_
