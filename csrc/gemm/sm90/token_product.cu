#include "csrc/gemm/sm90/token_product.h"

#include <cstdint>

#include "csrc/gemm/sm90/group_rows.cuh"
#include "csrc/gemm/sm90/launch.cuh"
#include "csrc/gemm/sm90/token_product_kernel.cuh"
#include "csrc/groups/table.cuh"

namespace jax_grouped {
namespace sm90 {
static_assert(kTileTokens == kTileRows && kTileFeatures == kTileColumns, "the header tells the tiles of the kernel");

int64_t MaxTokenProductWorkspaceBytes(int64_t all_groups) { return GroupRowsWorkspace::MaxBytes(all_groups); }

Status LaunchTokenProduct(cudaStream_t stream, int device, const GemmProblem& problem, const Groups& groups,
                          const GemmBuffers& buffers) {
  const GroupRowsWorkspace workspace(buffers.workspace, groups.batch, groups.num_groups);
  TokenArguments args{};
  using RowBlocks = Counts<RowBlock::k4, TokenTile::kRowBlock>;
  JAX_GROUPED_RETURN_IF_FAILED(LaunchGroupRows<RowBlocks>(
      "Launching the setup of a grouped product", stream, groups, ResultBoxes(problem, buffers.d, groups.AllRows()),
      LayoutOfA(problem, groups).ElementRowBlocks(), buffers.zero_other_rows, false, workspace, &args.all_results));
  args.results = workspace.maps;
  args.result_type = problem.result_type;
  JAX_GROUPED_RETURN_IF_FAILED(DescribeOperands<TokenTile>(problem, groups, buffers, workspace.table, &args.operands));
  return WithTypes(problem, [&](auto tokens, auto weights, auto mode) {
    const auto kernel = GroupedTokenProduct<decltype(tokens), decltype(weights), decltype(mode)::value>;
    ClusterLaunch launch;
    JAX_GROUPED_RETURN_IF_FAILED(launch.Configure(reinterpret_cast<const void*>(kernel), sizeof(Shared), stream, device,
                                                  args.operands.cluster_tiles));
    return Status::FromCuda(cudaLaunchKernelEx(launch.config(), kernel, args), "Launching a grouped product");
  });
}

}  // namespace sm90
}  // namespace jax_grouped
