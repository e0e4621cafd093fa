// Grouped matmuls of 16-bit operands or of scaled FP8 operands, with group sizes that only the device knows: through
// cuBLASLt, or by kernels of our own where these are faster.

#ifndef JAX_GROUPED_CSRC_GEMM_GEMM_H_
#define JAX_GROUPED_CSRC_GEMM_GEMM_H_

#include <cuda_runtime_api.h>

#include <string>
#include <vector>

#include "csrc/common/status.h"
#include "csrc/gemm/problem.h"
#include "csrc/groups/layout.h"

namespace jax_grouped {

// Chooses an algorithm and keeps it for later calls with the same problem on the same device, which is the current one:
// the heuristic's first, or with `autotune` the fastest (autotune.h), which calls without it then use, too; graphs that
// have captured a call keep the algorithm that it had. Cheap when that has been done. Fails if the device lacks the
// product. Not for a stream that is being captured.
Status PrepareGemm(int device, const GemmProblem& problem, bool autotune);

// Enqueues the product of a prepared problem: d = a b, or d += a b if it accumulates. Tokens of `d` that belong to no
// local group become zero, or keep their value if it accumulates. May be captured.
Status EnqueueGemm(int device, cudaStream_t stream, const GemmProblem& problem, const Groups& groups,
                   const GemmBuffers& buffers);

// One line for each problem prepared, with what computes it, for people.
std::vector<std::string> DescribePlans();

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_GEMM_GEMM_H_
