#include "csrc/gemm/sm90/token_product.h"

#include <cstdint>

#include "csrc/gemm/sm90/group_rows.cuh"
#include "csrc/gemm/sm90/launch.cuh"
#include "csrc/gemm/sm90/tensor_map.h"
#include "csrc/gemm/sm90/token_product_kernel.cuh"
#include "csrc/groups/table.cuh"

namespace jax_grouped {
namespace sm90 {
static_assert(kTileTokens == kTileRows && kTileFeatures == kTileColumns, "the header tells the tiles of the kernel");

int64_t MaxTokenProductWorkspaceBytes(int64_t all_groups) { return GroupRowsWorkspace::MaxBytes(all_groups); }

Status LaunchTokenProduct(cudaStream_t stream, int device, const GemmProblem& problem, const Groups& groups,
                          const GemmBuffers& buffers) {
  const GroupRowsWorkspace workspace(buffers.workspace, groups.batch, groups.num_groups);
  const int64_t depth = Depth(problem);
  const int64_t features = ResultFeatures(problem);
  TokenArguments args{};
  using RowBlocks = Counts<RowBlock::k4, kTileRowBlock>;
  JAX_GROUPED_RETURN_IF_FAILED(LaunchGroupRows<RowBlocks>(
      "Launching the setup of a grouped product", stream, groups, ResultBoxes(problem, buffers.d, groups.AllRows()),
      LayoutOfA(problem, groups).ElementRowBlocks(), buffers.zero_other_rows, false, workspace, &args.all_results));

  const int64_t row_tiles = MaxRowBlocks(groups.capacity, groups.num_groups, kTileRows);
  const auto element_cluster_tiles = static_cast<int32_t>(row_tiles * CeilDiv(features, kCluster * kTileColumns));
  args.results = workspace.maps;
  args.table = workspace.table;
  args.element_cluster_tiles = element_cluster_tiles;
  args.cluster_tiles = groups.batch * element_cluster_tiles;
  args.token_scale = static_cast<const float*>(buffers.a_scale);
  args.weight_scale = static_cast<const float*>(buffers.b_scale);
  args.weight_scales = buffers.weight_scales;
  args.depth = static_cast<int32_t>(depth);
  args.features = static_cast<int32_t>(features);
  args.elements_per_weight = problem.elements_per_weight;
  args.result_type = problem.result_type;
  JAX_GROUPED_RETURN_IF_FAILED(
      EncodeTensorMap(Fp8Boxes(buffers.a, depth, groups.AllRows(), kTileRows / kCluster), &args.tokens));
  JAX_GROUPED_RETURN_IF_FAILED(
      EncodeTensorMap(Fp8Boxes(buffers.b, depth, NumWeights(problem) * features, kTileColumns), &args.weights));
  return WithTypes(problem, [&](auto tokens, auto weights, auto mode) {
    const auto kernel = GroupedTokenProduct<decltype(tokens), decltype(weights), decltype(mode)::value>;
    ClusterLaunch launch;
    JAX_GROUPED_RETURN_IF_FAILED(
        launch.Configure(reinterpret_cast<const void*>(kernel), sizeof(Shared), stream, device, args.cluster_tiles));
    return Status::FromCuda(cudaLaunchKernelEx(launch.config(), kernel, args), "Launching a grouped product");
  });
}

}  // namespace sm90
}  // namespace jax_grouped
