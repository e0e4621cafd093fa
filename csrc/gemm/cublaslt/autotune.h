// Choice of an algorithm by its measured speed.

#ifndef JAX_GROUPED_CSRC_GEMM_CUBLASLT_AUTOTUNE_H_
#define JAX_GROUPED_CSRC_GEMM_CUBLASLT_AUTOTUNE_H_

#include "csrc/common/status.h"
#include "csrc/gemm/cublaslt/library.h"
#include "csrc/gemm/cublaslt/plans.h"

namespace jax_grouped {

// Sets the plan of a prepared problem to the fastest algorithm in the heuristic's list, once per process. Takes the
// algorithm that was found earlier on a GPU of the same name (TunedAlgorithms), or times the list now. The current
// device must be the key's.
//
// Timing takes up to seconds. It needs as much memory as a call of the problem, or, for a small problem, up to twice
// the L2 cache more. If timing fails, for lack of memory or any other reason, the plan keeps its algorithm. A thread
// that captures a stream must not call this.
Status Tune(const CublasLt& library, const Plans::Key& key);

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_GEMM_CUBLASLT_AUTOTUNE_H_
