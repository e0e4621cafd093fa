#include "csrc/gemm/cublaslt/launch.h"

#include "csrc/gemm/cublaslt/descriptors.h"
#include "csrc/gemm/cublaslt/setup.h"

namespace jax_grouped {
namespace {

// Returns the setup of a problem. cuBLASLt's A is our b, and its B is our a.
GemmSetup SetupOf(const GemmProblem& problem, const Groups& groups, const GemmBuffers& buffers,
                  const ColumnMajor& operands) {
  GemmSetup setup{};
  setup.matrices[0] = operands.a;
  setup.matrices[1] = operands.b;
  setup.matrices[2] = operands.d;
  setup.elements_per_weight = problem.elements_per_weight;
  setup.beta = problem.accumulate ? 1.0f : 0.0f;
  setup.zero_rest = buffers.zero_other_rows && problem.product != Product::kWgrad && !problem.accumulate;
  setup.scaled = problem.scaled;
  if (!problem.scaled) return setup;
  const QuantizedLayout a = LayoutOfA(problem, groups);
  setup.element_row_blocks = a.ElementRowBlocks();
  setup.scales[0] = {buffers.b_scale, problem.b_mode, static_cast<int32_t>(problem.out_features),
                     buffers.weight_scales};
  setup.scales[1] = {buffers.a_scale, problem.a_mode, static_cast<int32_t>(a.features), 0};
  return setup;
}

}  // namespace

Status LaunchCublasLt(const CublasLt& library, cublasLtHandle_t handle, const Algorithm& algorithm, cudaStream_t stream,
                      const GemmProblem& problem, const Groups& groups, const GemmBuffers& buffers) {
  const ColumnMajor operands = ToColumnMajor(problem, buffers);
  const GemmScratch scratch(buffers.scratch, groups.batch, groups.num_groups);
  GemmSetup setup = SetupOf(problem, groups, buffers, operands);
  // Each call starts from a zeroed workspace. XLA lends the workspace's memory to other buffers between calls, and
  // cuBLASLt releases up to 13.7 are known to trust what an earlier matmul left there. On an H200 the zeros cost
  // nothing: the algorithms use 0.2 MB at most.
  //
  // tests/gpu/workspace_stress.py compares this with a separate workspace for every matmul. With cuBLASLt 13.10 it
  // found no difference in 5000 replays of a captured step of four layers, with one or two executables at a time and
  // the memory overwritten in between. With two executables it found none without the zeros either: the older releases
  // are the only reason for them.
  setup.workspace = {buffers.workspace, static_cast<int64_t>(algorithm.workspace_bytes)};
  JAX_GROUPED_RETURN_IF_FAILED(LaunchGemmSetup(stream, groups, setup, scratch));
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
