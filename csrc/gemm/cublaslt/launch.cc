#include "csrc/gemm/cublaslt/launch.h"

#include "csrc/gemm/cublaslt/descriptors.h"
#include "csrc/gemm/cublaslt/setup.h"

namespace jax_grouped {
namespace {

// The setup kernel of scaled operands. cuBLASLt's A is b, and its B is a.
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
  // XLA lends the workspace's memory to other buffers between calls, and cuBLASLt releases up to 13.7 are known to
  // trust what an earlier matmul left there. So each call starts from zeros. On an H200 that costs nothing with the
  // heuristic's first algorithms, which use 0.2 MB at most; those in the rest of its list may use up to
  // kWorkspaceBytes, and are timed with their zeros. tests/gpu/workspace_stress.py compares this with a workspace of
  // its own for every matmul: with 13.10, no difference in 5000 replays of a captured step of four layers, one or two
  // executables at a time, the memory overwritten in between; nor, with two, without the zeros, whose only reason are
  // older releases.
  const Region workspace{buffers.workspace, static_cast<int64_t>(algorithm.workspace_bytes)};
  const float beta = problem.accumulate ? 1.0f : 0.0f;
  JAX_GROUPED_RETURN_IF_FAILED(
      problem.scaled ? SetUpScaled(stream, problem, groups, buffers, operands, beta, zero_rest, workspace, scratch)
                     : LaunchGemmSetup(stream, groups, problem.elements_per_weight, operands.a, operands.b, operands.d,
                                       beta, zero_rest, workspace, scratch));
  Descriptors descriptors;
  JAX_GROUPED_RETURN_IF_FAILED(InitDescriptors(library, problem, operands, scratch, &descriptors));
  // C is D itself: with beta = 1 the product is added in place, with beta = 0 it is not read.
  return library.Check(library.Matmul(handle, &descriptors.matmul, scratch.Alpha(), scratch.Pointers(0), &descriptors.a,
                                      scratch.Pointers(1), &descriptors.b, scratch.Beta(), scratch.Pointers(2),
                                      &descriptors.d, scratch.Pointers(2), &descriptors.d, &algorithm.choice,
                                      buffers.workspace, algorithm.workspace_bytes, stream),
                       "cublasLtMatmul");
}

}  // namespace jax_grouped
