#include "csrc/gemm/sm90/gathered_token_product.h"

#include <cstdint>

#include "csrc/gemm/sm90/gathered_launch.cuh"
#include "csrc/gemm/sm90/gathered_token_product_kernel.cuh"
#include "csrc/gemm/sm90/group_rows.cuh"
#include "csrc/gemm/sm90/launch.cuh"
#include "csrc/gemm/sm90/tensor_map.h"

namespace jax_grouped {
namespace sm90 {

Status LaunchGatheredTokenProduct(cudaStream_t stream, int device, const GemmProblem& problem, const Groups& groups,
                                  const GemmBuffers& buffers) {
  const GroupRowsWorkspace workspace(buffers.workspace, groups.batch, groups.num_groups);
  const bool is_fprop = problem.product == Product::kFprop;
  const int64_t features = ResultFeatures(problem);
  const int64_t row_tiles = MaxRowBlocks(groups.capacity, groups.num_groups, RowsOf(kGatheredTileRows));
  const int64_t row_pairs = MaxRowBlocks(groups.capacity, groups.num_groups, RowsOf(kGatheredPairRows));
  const int64_t cluster_tiles = ClusterTiles(row_tiles, row_pairs, CeilDiv(features, GatheredTile::kColumns));
  GatheredTokenArguments args{};
  using RowBlocks = Counts<kGatheredTileRows, kGatheredPairRows>;
  JAX_GROUPED_RETURN_IF_FAILED(LaunchGroupRows<RowBlocks>(
      "Launching the setup of a gathered product", stream, groups, ResultBoxes(problem, buffers.d, groups.AllRows()),
      LayoutOfA(problem, groups).ElementRowBlocks(), buffers.zero_other_rows, false, workspace, &args.all_results));
  args.results = workspace.maps;
  args.table = workspace.table;
  args.tokens = Gathered(problem, buffers, buffers.a, Depth(problem));
  args.element_cluster_tiles = static_cast<int32_t>(cluster_tiles);
  args.cluster_tiles = groups.batch * args.element_cluster_tiles;
  args.features = static_cast<int32_t>(features);
  args.elements_per_weight = problem.elements_per_weight;
  args.result_type = problem.result_type;
  const int64_t box_rows = is_fprop ? OperandBoxes<GatheredTile::kColumns, true>::kBoxRows
                                    : OperandBoxes<GatheredTile::kColumns, false>::kBoxRows;
  JAX_GROUPED_RETURN_IF_FAILED(EncodeTensorMap(
      Boxes16(problem.b_type, buffers.b, {problem.out_features, problem.in_features, NumWeights(problem)}, box_rows),
      &args.weights));
  return WithGatheredTypes(problem.a_type, [&](auto number) {
    using T = decltype(number);
    return LaunchClusters("Launching a gathered product", stream, device, args.cluster_tiles,
                          is_fprop ? GatheredTokenProduct<T, true> : GatheredTokenProduct<T, false>, args);
  });
}

}  // namespace sm90
}  // namespace jax_grouped
