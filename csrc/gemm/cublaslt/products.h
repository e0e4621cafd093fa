// Grouped matmuls through cuBLASLt: the algorithm that each problem has on each device, the setup that makes a
// product's arguments on the device from the group sizes, and its launch.

#ifndef JAX_GROUPED_CSRC_GEMM_CUBLASLT_PRODUCTS_H_
#define JAX_GROUPED_CSRC_GEMM_CUBLASLT_PRODUCTS_H_

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "csrc/common/status.h"
#include "csrc/gemm/cublaslt/library.h"
#include "csrc/gemm/gemm.h"
#include "csrc/gemm/scratch.h"
#include "csrc/groups/layout.h"

namespace jax_grouped {

struct Algorithm {
  cublasLtMatmulAlgo_t choice;
  size_t workspace_bytes;
};

// Describes an algorithm for people: its number, tile, stages, cluster shape and workspace.
std::string Describe(const CublasLt& library, const Algorithm& algorithm);

struct Plan {
  cublasLtHandle_t handle;  // null if one of our own kernels computes the problem
  Algorithm algorithm;      // with a handle
};

// The plans of the process, shared by all threads. The lock of the plans is held for look-ups and insertions only, as
// launches look them up. Making one can take until the device is idle.
class Plans {
 public:
  using Key = std::pair<int, GemmProblem>;  // the device and the problem on it

  static Plans& Get();

  bool Find(const Key& key, Plan* plan);

  // Adds a plan with the heuristic's first algorithm unless the key has a plan. Fails if the device does not support
  // the product.
  Status Ensure(const CublasLt& library, const Key& key);

  // Adds a plan that computes the problem with one of our own kernels.
  void AddOwnKernel(const Key& key);

  std::map<Key, Plan> Copy();

 private:
  std::mutex adding_;  // Held while a handle or a plan is made.
  // Handles live as long as the process: the driver may be gone before a destructor runs.
  std::map<int, cublasLtHandle_t> handles_;
  std::mutex mutex_;
  std::map<Key, Plan> plans_;
};

// One of the matrices A, B and D, for all groups. It is column-major with `rows` rows, as cuBLASLt sees it.
struct Operand {
  void* base;
  int32_t element_bytes;
  int32_t rows;     // also the leading dimension; 0 if a group's rows are its tokens, padded to kFp8Alignment
  int32_t columns;  // per group; 0 if a group's columns are its tokens
};

// The inverse scales of A or B: E8M0 with kMx, float32 otherwise.
struct OperandScales {
  const void* base;
  ScalingMode mode;
  int32_t features;       // for tokens
  int64_t weight_stride;  // from one weight's scales to the next one's; 0 for tokens
};

// Memory to zero. It starts on a 16-byte boundary. The bytes from its end up to the next 16-byte boundary belong to it,
// too.
struct Region {
  void* base;
  int64_t bytes;
};

// Everything that the setup kernel needs besides the groups.
struct GemmSetup {
  Operand matrices[GemmScratch::kMatrices];  // A, B and D
  bool scaled;
  OperandScales scales[2];            // of A and B
  RowBlockCounts element_row_blocks;  // room of a batch element's scaled operands
  int32_t elements_per_weight;        // successive batch elements that share weights
  float beta;
  bool zero_other_rows;  // zeros the rows of D of no group, which must be multiples of 16 bytes
  Region workspace;      // gets zeros
};

// Writes the arguments of a grouped product, and the zeros that it needs, in one launch. `scratch` gets the pointers,
// sizes and scalars (alpha = 1, beta) of every local group of the batch, and the pointers to its scales.
Status LaunchGemmSetup(cudaStream_t stream, const Groups& groups, const GemmSetup& setup, const GemmScratch& scratch);

// The descriptors of one call. They hold addresses in the call's scratch memory, so every call makes its own.
struct Descriptors {
  cublasLtMatmulDescOpaque_t matmul;
  cublasLtMatrixLayoutOpaque_t a;
  cublasLtMatrixLayoutOpaque_t b;
  cublasLtMatrixLayoutOpaque_t d;
};

Status InitDescriptors(const CublasLt& library, const GemmProblem& problem, const GemmScratch& scratch,
                       Descriptors* descriptors);

// Enqueues the product with the given algorithm, as EnqueueGemm describes. May be captured.
Status LaunchCublasLt(const CublasLt& library, cublasLtHandle_t handle, const Algorithm& algorithm, cudaStream_t stream,
                      const GemmProblem& problem, const Groups& groups, const GemmBuffers& buffers);

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_GEMM_CUBLASLT_PRODUCTS_H_
