// The algorithms that cuBLASLt's heuristic proposes for a problem.

#ifndef JAX_GROUPED_CSRC_GEMM_CUBLASLT_ALGORITHMS_H_
#define JAX_GROUPED_CSRC_GEMM_CUBLASLT_ALGORITHMS_H_

#include <cublasLt.h>

#include <cstddef>
#include <string>
#include <vector>

#include "csrc/common/status.h"
#include "csrc/gemm/cublaslt/library.h"
#include "csrc/gemm/problem.h"

namespace jax_grouped {

struct Algorithm {
  cublasLtMatmulAlgo_t choice;
  size_t workspace_bytes;
};

// Returns the heuristic's algorithms in its order: at least one, at most `most`.
Status ProposeAlgorithms(const CublasLt& library, cublasLtHandle_t handle, const GemmProblem& problem, int most,
                         std::vector<Algorithm>* algorithms);

// Returns true if the current device can run an algorithm that an earlier process chose for the problem, within its
// workspace.
bool CanRun(const CublasLt& library, cublasLtHandle_t handle, const GemmProblem& problem, const Algorithm& algorithm);

// Describes an algorithm for people: its number, tile, stages, cluster shape and workspace.
std::string Describe(const CublasLt& library, const Algorithm& algorithm);

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_GEMM_CUBLASLT_ALGORITHMS_H_
