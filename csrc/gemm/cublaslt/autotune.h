// The choice of an algorithm by its speed.

#ifndef JAX_GROUPED_CSRC_GEMM_CUBLASLT_AUTOTUNE_H_
#define JAX_GROUPED_CSRC_GEMM_CUBLASLT_AUTOTUNE_H_

#include "csrc/common/status.h"
#include "csrc/gemm/cublaslt/library.h"
#include "csrc/gemm/cublaslt/plans.h"

namespace jax_grouped {

// Makes the plan of a prepared problem that of the fastest algorithm in the heuristic's list, once per process. Which
// one that is was found earlier on a GPU of that name (TunedAlgorithms), or is timed now, on the current device, which
// is the key's: that takes up to seconds, and as much memory as a call of the problem, or up to twice the L2 cache more
// for a small one. If that fails, for want of memory or any other reason, the algorithm stays. Not for a thread that
// captures a stream.
Status Tune(const CublasLt& library, const Plans::Key& key);

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_GEMM_CUBLASLT_AUTOTUNE_H_
