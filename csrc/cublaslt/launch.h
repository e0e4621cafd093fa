// The launches of one grouped matmul.

#ifndef JAX_GROUPED_CSRC_CUBLASLT_LAUNCH_H_
#define JAX_GROUPED_CSRC_CUBLASLT_LAUNCH_H_

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include "csrc/common/group_layout.h"
#include "csrc/common/status.h"
#include "csrc/cublaslt/algorithms.h"
#include "csrc/cublaslt/library.h"
#include "csrc/matmul/problem.h"

namespace jax_grouped {

// Enqueues the product by that algorithm, as EnqueueGroupedMatmul describes it. May be captured.
Status LaunchGroupedMatmul(const CublasLt& library, cublasLtHandle_t handle, const Algorithm& algorithm,
                           cudaStream_t stream, const MatmulProblem& problem, const Groups& groups,
                           const MatmulBuffers& buffers);

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_CUBLASLT_LAUNCH_H_
