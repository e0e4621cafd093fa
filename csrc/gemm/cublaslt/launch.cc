#include "csrc/gemm/cublaslt/launch.h"

#include "csrc/gemm/cublaslt/descriptors.h"
#include "csrc/gemm/cublaslt/setup.h"

namespace jax_grouped {
namespace {

// Launches the setup kernel of scaled operands. cuBLASLt's A is our b, and its B is our a.
Status SetUpScaled(cudaStream_t stream, const GemmProblem& problem, const Groups& groups, const GemmBuffers& buffers,
                   const ColumnMajor& operands, float beta, bool zero_rest, const Region& workspace,
                   const GemmScratch& scratch) {
  const QuantizedLayout a = LayoutOfA(problem, groups);
  const OperandScales b_scales{buffers.b_scale, problem.b_mode, static_cast<int32_t>(problem.out_features),
                               buffers.weight_scales};
  const OperandScales a_scales{buffers.a_scale, problem.a_mode, static_cast<int32_t>(a.features), 0};
  return LaunchScaledGemmSetup(stream, groups, a.ElementUnits(), problem.elements_per_weight, operands.a, b_scales,
                               operands.b, a_scales, operands.d, beta, zero_rest, workspace, scratch);
}

}  // namespace

Status LaunchCublasLt(const CublasLt& library, cublasLtHandle_t handle, const Algorithm& algorithm, cudaStream_t stream,
                      const GemmProblem& problem, const Groups& groups, const GemmBuffers& buffers) {
  const ColumnMajor operands = ToColumnMajor(problem, buffers);
  const GemmScratch scratch(buffers.scratch, groups.batch, groups.num_groups);
  const bool zero_rest = problem.product != Product::kWgrad && !problem.accumulate;
  // Each call starts from a zeroed workspace. XLA lends the workspace's memory to other buffers between calls, and
  // cuBLASLt releases up to 13.7 are known to trust what an earlier matmul left there. On an H200 the zeros cost
  // nothing with the heuristic's first algorithms, which use 0.2 MB at most. The other algorithms in its list may use
  // up to kWorkspaceBytes; they are timed with their zeros.
  //
  // tests/gpu/workspace_stress.py compares this with a separate workspace for every matmul. With cuBLASLt 13.10 it
  // found no difference in 5000 replays of a captured step of four layers, with one or two executables at a time and
  // the memory overwritten in between. With two executables it found none without the zeros either: the older releases
  // are the only reason for them.
  const Region workspace{buffers.workspace, static_cast<int64_t>(algorithm.workspace_bytes)};
  const float beta = problem.accumulate ? 1.0f : 0.0f;
  JAX_GROUPED_RETURN_IF_FAILED(
      problem.scaled ? SetUpScaled(stream, problem, groups, buffers, operands, beta, zero_rest, workspace, scratch)
                     : LaunchGemmSetup(stream, groups, problem.elements_per_weight, operands.a, operands.b, operands.d,
                                       beta, zero_rest, workspace, scratch));
  Descriptors descriptors;
  JAX_GROUPED_RETURN_IF_FAILED(InitDescriptors(library, problem, operands, scratch, &descriptors));
  // C is D itself. With beta = 1 the product is added in place; with beta = 0 C is not read.
  return library.Check(library.Matmul(handle, &descriptors.matmul, scratch.Alpha(), scratch.Pointers(0), &descriptors.a,
                                      scratch.Pointers(1), &descriptors.b, scratch.Beta(), scratch.Pointers(2),
                                      &descriptors.d, scratch.Pointers(2), &descriptors.d, &algorithm.choice,
                                      buffers.workspace, algorithm.workspace_bytes, stream),
                       "cublasLtMatmul");
}

}  // namespace jax_grouped
