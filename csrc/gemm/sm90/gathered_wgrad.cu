#include "csrc/gemm/sm90/gathered_wgrad.h"

#include <cstdint>

#include "csrc/gemm/sm90/gathered_launch.cuh"
#include "csrc/gemm/sm90/gathered_wgrad_kernel.cuh"
#include "csrc/gemm/sm90/group_rows.cuh"
#include "csrc/gemm/sm90/launch.cuh"
#include "csrc/gemm/sm90/tensor_map.h"
#include "csrc/groups/table.cuh"

namespace jax_grouped {
namespace sm90 {

Status LaunchGatheredWgrad(cudaStream_t stream, int device, const GemmProblem& problem, const Groups& groups,
                           const GemmBuffers& buffers) {
  const GroupRowsWorkspace workspace(buffers.workspace, groups.batch, groups.num_groups);
  const bool gathers_x = problem.gathered == Gather::kA;
  const void* const gathered = gathers_x ? buffers.a : buffers.b;
  const void* const copied = gathers_x ? buffers.b : buffers.a;
  const int64_t gathered_features = gathers_x ? problem.in_features : problem.out_features;
  const int64_t copied_features = gathers_x ? problem.out_features : problem.in_features;
  // The map of each group ends with its last row, past which the copies make zeros. The map of all rows and the table's
  // counts have no use.
  CUtensorMap all_rows;
  JAX_GROUPED_RETURN_IF_FAILED(LaunchGroupRows<Counts<RowBlock::k128>>(
      "Launching the setup of a gathered weight gradient", stream, groups,
      Boxes16(problem.a_type, copied, {copied_features, groups.AllRows(), 1}, GatheredTile::kDepth),
      LayoutOfA(problem, groups).ElementRowBlocks(), false, true, workspace, &all_rows));

  const int64_t high = CeilDiv(gathered_features, GatheredTile::kRows);
  const int64_t wide = CeilDiv(copied_features, GatheredTile::kColumns);
  GatheredWgradArguments args{};
  args.maps = workspace.maps;
  args.table = workspace.table;
  args.order = workspace.order;
  args.gathered = Gathered(problem, buffers, gathered, gathered_features);
  args.group_tiles = static_cast<int32_t>(ClusterTiles(high, CeilDiv(high, kCluster), wide));
  args.cluster_tiles = groups.AllGroups() * args.group_tiles;
  args.tile_counter = workspace.tile_counter;
  args.column_features = static_cast<int32_t>(copied_features);
  args.dweight_type = problem.result_type;
  // Boxes of the transposes of float32 tiles have 32 rows; see Staging::StoreTransposed.
  const int box_rows = !gathers_x && problem.result_type == CUDA_R_32F ? 32 : Fragment::kRows;
  JAX_GROUPED_RETURN_IF_FAILED(
      EncodeTensorMap(WgradBoxes(problem, buffers.d, groups.AllGroups(), box_rows), &args.dweight));
  return WithGatheredTypes(problem.a_type, [&](auto number) {
    using T = decltype(number);
    return LaunchClusters("Launching a gathered weight gradient", stream, device, args.cluster_tiles,
                          gathers_x ? GatheredWgrad<T, false> : GatheredWgrad<T, true>, args);
  });
}

}  // namespace sm90
}  // namespace jax_grouped
