// Weight gradients of 16-bit tokens, of which one operand is gathered. Rows are features of the operand that is
// gathered, columns are features of the other, and a stage is 64 tokens. If dy is gathered, a tile is thus the
// transpose of a tile of the result.

#include "csrc/gemm/sm90/products.h"

#include <library_types.h>

#include <cstdint>

#include "csrc/common/warp.cuh"
#include "csrc/gemm/sm90/gathered_tiles.cuh"
#include "csrc/gemm/sm90/instructions.cuh"
#include "csrc/gemm/sm90/launch.cuh"
#include "csrc/gemm/sm90/staging.cuh"
#include "csrc/gemm/sm90/tensor_map.h"
#include "csrc/groups/layout.h"
#include "csrc/groups/table.cuh"

namespace jax_grouped::sm90 {

struct GatheredWgradArguments {
  CUtensorMap dweight;
  const CUtensorMap* maps;  // of the operand that is not gathered, for every group
  GroupTable table;         // the first batch element's
  const int32_t* order;     // of the groups of each batch element: those with the most rows first, for short last tiles
  GatheredRows gathered;
  int32_t cluster_tiles;    // of all groups
  int32_t* tile_counter;    // of TileScheduler
  int32_t group_tiles;      // cluster tiles of one group
  int32_t column_features;  // of the operand that is not gathered
  cudaDataType_t dweight_type;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// A tile, as the producer sees it.
struct GatheredWgradTile {
  OutputTile output;
  int32_t tokens = 0;   // of the group
  bool shared = false;  // both blocks of the cluster have the same part of the operand that is not gathered
};

// The tiles of a block, one per cluster tile.
class GatheredWgradTiles {
 public:
  __device__ explicit GatheredWgradTiles(const GatheredWgradArguments& args)
      : args_(args),
        high_(static_cast<int32_t>(CeilDiv(args.gathered.columns, GatheredTile::kRows))),
        wide_(static_cast<int32_t>(CeilDiv(args.column_features, GatheredTile::kColumns))) {}

  __device__ GatheredWgradTile At(int32_t index) {
    if (index >= args_.cluster_tiles) return {};
    if (const int32_t place = index / args_.group_tiles; place != place_) Enter(place);
    const TilePosition position = PositionOf(index % args_.group_tiles, high_, wide_);
    tile_.output.row = position.row * GatheredTile::kRows;
    tile_.output.column = position.column * GatheredTile::kColumns;
    tile_.output.rows = args_.gathered.columns - tile_.output.row;
    tile_.shared = position.shared;
    return tile_;
  }

 private:
  // Advances to the group at a place in the order.
  __device__ void Enter(int32_t place) {
    place_ = place;
    const int32_t element = place / args_.table.num_groups;
    const int32_t group = Uniform(args_.order[place]);
    const int32_t* first = args_.table.At(element).FirstRow() + group;
    tile_.output.group = element * args_.table.num_groups + group;
    tile_.output.group_row = Uniform(first[0]);
    tile_.tokens = Uniform(first[1]) - tile_.output.group_row;
    tile_.output.stages = static_cast<int32_t>(CeilDiv(tile_.tokens, GatheredTile::kDepth));
  }

  const GatheredWgradArguments& args_;
  int32_t high_;
  int32_t wide_;
  int32_t place_ = -1;
  GatheredWgradTile tile_;
};

__device__ inline void ProduceGatheredWgrad(const GatheredWgradArguments& args, const GatheredAddresses& shared) {
  using A = OperandBoxes<GatheredTile::kRows, true>;
  constexpr uint32_t kCopiedBytes = sizeof(GatheredShared::b[0]);
  const bool leads = LeadsProducer();
  GatheredWgradTiles tiles(args);
  TileScheduler scheduler(shared, args.tile_counter);
  TileQueue queue(shared);
  GatheredStage stage;
  int32_t group = -1;
  int32_t next_index = FirstTileIndex();
  GatheredWgradTile next_tile = tiles.At(next_index);
  RowsOfThread<GatheredTile::kDepth> next;
  next.Load(args.gathered, next_tile.output.group_row, next_tile.tokens);
  while (next_index < args.cluster_tiles) {
    const GatheredWgradTile tile = next_tile;
    const OutputTile& output = tile.output;
    const CUtensorMap* const map = args.maps + output.group;
    if (leads) {
      scheduler.Request();
      queue.Post(output);
      if (output.group != group) {
        group = output.group;
        AcquireTensorMap(map);
      }
    }
    const int32_t last = max(output.stages, 1) - 1;
    for (int32_t block = 0; block <= last; ++block) {
      // The next tile is found when the ring has begun to fill with this one.
      if (block == min(last, GatheredTile::kStages / 2)) {
        if (leads) scheduler.Publish();
        next_index = scheduler.Next();
        next_tile = tiles.At(next_index);
      }
      const RowsOfThread<GatheredTile::kDepth> rows = next;
      // The indices of the next stage arrive during this stage.
      const bool ends = block == last;
      const int32_t next_token = ends ? 0 : (block + 1) * GatheredTile::kDepth;
      const int32_t next_row = ends ? next_tile.output.group_row : output.group_row;
      const int32_t next_tokens = ends ? next_tile.tokens : tile.tokens;
      next.Load(args.gathered, int64_t{next_row} + next_token, next_tokens - next_token);
      if (output.stages == 0) break;
      const int s = stage.index;
      WaitForPhase(shared.Empty(s), stage.parity ^ 1);
      if (leads && Lane() == 0) {
        ArriveExpecting(shared.Full(s), kCopiedBytes);
        LoadOperand<GatheredTile::kColumns, true>(map, shared.B(s), output.column, block * GatheredTile::kDepth, 0,
                                                  tile.shared, shared.Full(s));
      }
      __syncwarp();
#pragma unroll
      for (int box = 0; box < A::kCount; ++box) {
        rows.Copy(args.gathered, output.row + box * A::kBoxExtent, shared.A(s) + box * A::kBytes);
      }
      ArriveAfterCopies(shared.Full(s));
      stage.Advance();
    }
  }
  if (leads) queue.Post(OutputTile());
}

// Stores a math group's part of a tile. With kGathersDy the tile is transposed: its rows are the features of dy.
template <bool kGathersDy>
__device__ __forceinline__ void StoreWgrad(const GatheredWgradArguments& args, const OutputTile& tile, int first_row,
                                           const WideFragment& sums, Staging<GatheredTile::kStagedBoxes>& staging) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int32_t column = tile.column + half * Fragment::kColumns;
    if (column >= args.column_features) continue;
    if constexpr (kGathersDy) {
      staging.StoreTransposed(sums.halves[half], [&](uint32_t box, int x_feature, int dy_feature) {
        StoreBox(&args.dweight, {tile.row + first_row + dy_feature, column + x_feature, tile.group}, box);
      });
    } else {
      staging.StoreRows(sums.halves[half], args.column_features - column, [&](uint32_t box, int dy_feature) {
        StoreBox(&args.dweight, {column + dy_feature, tile.row + first_row, tile.group}, box);
      });
    }
  }
}

template <typename T, bool kGathersDy>
__device__ void MultiplyGatheredWgrad(const GatheredWgradArguments& args, const GatheredAddresses& shared,
                                      const ThreadPosition& position) {
  TileQueue queue(shared);
  Staging<GatheredTile::kStagedBoxes> staging(shared.Staging(position.group), position, args.dweight_type);
  GatheredStage stage;
  for (;;) {
    const OutputTile tile = queue.Take();
    if (Uniform(tile.group) < 0) break;
    const int first_row = position.group * Fragment::kRows;
    WideFragment sums;
    Clear(sums);
    MultiplyStages<T, true, true>(shared, position.group, tile.stages, tile.rows, stage, sums);
    if (first_row < tile.rows) StoreWgrad<kGathersDy>(args, tile, first_row, sums, staging);
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

template <typename T, bool kGathersDy>
__global__ void __cluster_dims__(kCluster) __launch_bounds__(kThreads, 1)
    GatheredWgrad(const __grid_constant__ GatheredWgradArguments args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t memory[];
  const GatheredAddresses shared{SharedAddress(memory)};
  SetUpCluster<GatheredTile::kStages>(shared, kGatheredFullArrivals, kGatheredEmptyArrivals, kWarpGroupThreads);
  RunBlock<GatheredTile::kRegisters>(
      [&] { ProduceGatheredWgrad(args, shared); },
      [&](const ThreadPosition& position) { MultiplyGatheredWgrad<T, kGathersDy>(args, shared, position); });
#endif
}

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
    return LaunchClusters("Launching a gathered weight gradient", stream, device, sizeof(GatheredShared),
                          args.cluster_tiles, gathers_x ? GatheredWgrad<T, false> : GatheredWgrad<T, true>, args);
  });
}

}  // namespace jax_grouped::sm90
