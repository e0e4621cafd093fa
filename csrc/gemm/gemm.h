// Grouped matmuls of 16-bit operands or of scaled FP8 operands, with group sizes that only the device knows. They run
// through cuBLASLt, or through kernels of our own where these are faster.

#ifndef JAX_GROUPED_CSRC_GEMM_GEMM_H_
#define JAX_GROUPED_CSRC_GEMM_GEMM_H_

#include <cuda_runtime_api.h>

#include <string>
#include <vector>

#include "csrc/common/status.h"
#include "csrc/gemm/problem.h"
#include "csrc/groups/layout.h"

namespace jax_grouped {

// Chooses an algorithm and keeps it for later calls with the same problem on the same device, which must be the current
// one. The choice is one of our own kernels, or the first algorithm of cuBLASLt's heuristic.
//
// A repeated call is cheap. Fails if the device does not support the product. Must not be called while the stream is
// being captured.
Status PrepareGemm(int device, const GemmProblem& problem);

// Enqueues the product of a prepared problem: d = a b, or d += a b if it accumulates. Tokens of `d` that belong to no
// local group become zero, or keep their value if it accumulates. May be captured.
Status EnqueueGemm(int device, cudaStream_t stream, const GemmProblem& problem, const Groups& groups,
                   const GemmBuffers& buffers);

// Returns one line of text for each prepared problem, with its implementation.
std::vector<std::string> DescribePlans();

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_GEMM_GEMM_H_
