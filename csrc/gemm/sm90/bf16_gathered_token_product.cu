// Products of gathered 16-bit tokens with their group's weight (fprop and dgrad). Rows are tokens, columns are features
// of the result, and a stage is 64 of the depth. With SwiGLU, a tile has 128 features of the gate and the same 128 of
// the factor, so that a thread has both numbers of each result.

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

namespace jax_grouped::sm90 {

// The group table counts the rows of tiles before a group, and their pairs, as row blocks of these kinds.
constexpr RowBlock kGatheredTileRows = RowBlock::k128;
constexpr RowBlock kGatheredPairRows = RowBlock::k256;
static_assert(RowsOf(kGatheredTileRows) == GatheredTile::kRows);
static_assert(RowsOf(kGatheredPairRows) == kCluster * GatheredTile::kRows);

struct GatheredTokenArguments {
  CUtensorMap weights;
  CUtensorMap all_results;     // the results of all groups in one map
  const CUtensorMap* results;  // one map per group; null if the product is not wanted
  GroupTable table;            // the first batch element's
  GatheredRows tokens;
  int32_t element_cluster_tiles;  // of a batch element that has the most tiles possible
  int32_t cluster_tiles;          // of all batch elements
  int32_t features;               // of the result; with SwiGLU, of the activation's
  int32_t elements_per_weight;
  cudaDataType_t result_type;
  uint8_t* activated;  // [tokens, features]; with SwiGLU
};

// Features that a tile has of those in the arguments.
template <bool kSwiGlu>
constexpr int kTileWidth = kSwiGlu ? Fragment::kColumns : GatheredTile::kColumns;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// A tile, as the producer sees it.
struct GatheredTokenTile {
  OutputTile output;
  int32_t weight = 0;
  bool shared = false;  // both blocks of the cluster have the same weights
};

// The tiles of a block, one per cluster tile. An index has no tile if its batch element has no more tiles.
template <bool kSwiGlu>
class GatheredTokenTiles {
 public:
  __device__ explicit GatheredTokenTiles(const GatheredTokenArguments& args)
      : args_(args), wide_(static_cast<int32_t>(CeilDiv(args.features, kTileWidth<kSwiGlu>))) {}

  __device__ GatheredTokenTile At(int32_t index) {
    GatheredTokenTile tile;
    if (index >= args_.cluster_tiles) return tile;
    if (const int32_t element = index / args_.element_cluster_tiles; element != element_) {
      element_ = element;
      group_ = after_ = 0;
    }
    if (index >= after_ && !Find(index)) return tile;
    const TilePosition position = PositionOf(index - before_, high_, wide_);
    tile.output.group = element_ * args_.table.num_groups + group_;
    tile.output.group_row = first_token_;
    tile.output.row = position.row * GatheredTile::kRows;
    tile.output.column = position.column * kTileWidth<kSwiGlu>;
    tile.output.rows = rows_ - tile.output.row;
    tile.output.stages = static_cast<int32_t>(CeilDiv(args_.tokens.columns, GatheredTile::kDepth));
    tile.weight = element_ / args_.elements_per_weight * args_.table.num_groups + group_;
    tile.shared = position.shared;
    return tile;
  }

 private:
  // Advances to the group that contains the cluster tile `index`. Returns false if there is none. The lanes inspect 32
  // groups at once. They issue all loads about these groups before any of the values arrives.
  __device__ bool Find(int32_t index) {
    const GroupTable table = args_.table.At(element_);
    const int32_t* tiles = table.BlocksBefore(kGatheredTileRows);
    const int32_t* pairs = table.BlocksBefore(kGatheredPairRows);
    for (; group_ < table.num_groups; group_ += 32) {
      const int32_t group = min(group_ + Lane(), table.num_groups - 1);
      const int32_t tiles_before = tiles[group];
      const int32_t tiles_after = tiles[group + 1];
      const int32_t pairs_before = pairs[group];
      const int32_t pairs_after = pairs[group + 1];
      const int32_t first_token = table.FirstRow()[group];
      const int32_t last_token = table.FirstRow()[group + 1];
      const auto before = static_cast<int32_t>(ClusterTiles(tiles_before, pairs_before, wide_));
      const auto after = static_cast<int32_t>(ClusterTiles(tiles_after, pairs_after, wide_));
      const uint32_t found = __ballot_sync(kFullWarp, after > index);
      if (found == 0) continue;
      const int lane = __ffs(found) - 1;
      group_ += lane;
      before_ = FromLane(lane, before);
      after_ = FromLane(lane, after);
      high_ = FromLane(lane, tiles_after - tiles_before);
      first_token_ = FromLane(lane, first_token);
      rows_ = FromLane(lane, last_token) - first_token_;
      return true;
    }
    return false;
  }

  const GatheredTokenArguments& args_;
  int32_t wide_;
  int32_t element_ = -1;
  // The group of the last tile, the cluster tiles before the group and up to its end, and its rows of tiles.
  int32_t group_ = 0;
  int32_t before_ = 0;
  int32_t after_ = 0;
  int32_t high_ = 0;
  int32_t first_token_ = 0;
  int32_t rows_ = 0;
};

template <bool kWeightTransposed, bool kSwiGlu>
__device__ void ProduceGatheredTokens(const GatheredTokenArguments& args, const GatheredAddresses& shared) {
  constexpr uint32_t kWeightBytes = sizeof(GatheredShared::b[0]);
  const bool leads = LeadsProducer();
  GatheredTokenTiles<kSwiGlu> tiles(args);
  TileQueue queue(shared);
  GatheredStage stage;
  GatheredTokenTile next;
  RowsOfThread<GatheredTile::kRows> next_rows;
  const auto find_next = [&](int32_t index) {
    next = tiles.At(index);
    next_rows.Load(args.tokens, next.output.group_row + next.output.row, next.output.rows);
  };
  find_next(FirstTileIndex());
  for (int32_t index = FirstTileIndex(); index < args.cluster_tiles; index += Clusters()) {
    const GatheredTokenTile tile = next;
    const RowsOfThread<GatheredTile::kRows> rows = next_rows;
    if (leads) queue.Post(tile.output);
    // The next tile is found when the ring has begun to fill with this one. Its indices arrive during this tile.
    const int32_t last = max(tile.output.stages, 1) - 1;
    for (int32_t block = 0; block <= last; ++block) {
      if (block == min(last, GatheredTile::kStages / 2)) find_next(index + Clusters());
      if (tile.output.stages == 0) break;
      const int s = stage.index;
      WaitForPhase(shared.Empty(s), stage.parity ^ 1);
      if (leads && Lane() == 0) {
        ArriveExpecting(shared.Full(s), kWeightBytes);
        LoadOperand<GatheredTile::kColumns, kWeightTransposed>(
            &args.weights, shared.B(s), tile.output.column, block * GatheredTile::kDepth, tile.weight, tile.shared,
            shared.Full(s), kSwiGlu ? args.features - Fragment::kColumns : 0);
      }
      __syncwarp();
      rows.Copy(args.tokens, block * GatheredTile::kDepth, shared.A(s));
      ArriveAfterCopies(shared.Full(s));
      stage.Advance();
    }
  }
}

template <typename T, bool kWeightTransposed, bool kSwiGlu>
__device__ void MultiplyGatheredTokens(const GatheredTokenArguments& args, const GatheredAddresses& shared,
                                       const ThreadPosition& position) {
  TileQueue queue(shared);
  Staging<GatheredTile::kStagedBoxes> staging(shared.Staging(position.group), position, args.result_type);
  GatheredStage stage;
  for (int32_t index = FirstTileIndex(); index < args.cluster_tiles; index += Clusters()) {
    const OutputTile tile = queue.Take();
    const int first_row = position.group * Fragment::kRows;
    const bool has_rows = first_row < tile.rows;
    WideFragment sums;
    Clear(sums);
    MultiplyStages<T, false, kWeightTransposed>(shared, position.group, tile.stages, tile.rows, stage, sums);
    if (!has_rows || tile.column >= args.features) continue;
    if (!kSwiGlu || args.results != nullptr) {
      // The rows below this group's last row may belong to another group.
      const bool whole = first_row + Fragment::kRows <= tile.rows;
      const CUtensorMap* result = whole ? &args.all_results : args.results + tile.group;
      const int32_t row = tile.row + first_row + (whole ? tile.group_row : 0);
      if (!whole && position.warp == 0) AcquireTensorMap(result);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int32_t column = tile.column + half * (kSwiGlu ? args.features : Fragment::kColumns);
        if (!kSwiGlu && column >= args.features) continue;
        staging.StoreRows(sums.halves[half], kSwiGlu ? Fragment::kColumns : args.features - column,
                          [&](uint32_t box, int in_half) { StoreBox(result, {column + in_half, row}, box); });
      }
    }
    if constexpr (kSwiGlu) {
      ApplySwiGlu<T>(sums.halves[1], sums.halves[0]);
      const int64_t stride = 2 * int64_t{args.features};
      uint8_t* const to = args.activated + (tile.group_row + tile.row + first_row) * stride + 2 * tile.column;
      constexpr int kBoxColumns = kBoxRowBytes / 2;
#pragma unroll
      for (int column = 0; column < Fragment::kColumns; column += kBoxColumns) {
        const auto write = [&](uint32_t memory) { WriteBoxes16<T, 1>(sums.halves[0], position, column, memory); };
        staging.CopyRows(write, tile.rows - first_row, stride, to + 2 * column);
      }
    }
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

template <typename T, bool kWeightTransposed, bool kSwiGlu>
__global__ void __cluster_dims__(kCluster) __launch_bounds__(kThreads, 1)
    GatheredTokenProduct(const __grid_constant__ GatheredTokenArguments args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t memory[];
  const GatheredAddresses shared{SharedAddress(memory)};
  SetUpCluster<GatheredTile::kStages>(shared, kGatheredFullArrivals, kGatheredEmptyArrivals, kWarpGroupThreads);
  RunBlock<GatheredTile::kRegisters>([&] { ProduceGatheredTokens<kWeightTransposed, kSwiGlu>(args, shared); },
                                     [&](const ThreadPosition& position) {
                                       MultiplyGatheredTokens<T, kWeightTransposed, kSwiGlu>(args, shared, position);
                                     });
#endif
}

Status LaunchGatheredTokenProduct(cudaStream_t stream, int device, const GemmProblem& problem, const Groups& groups,
                                  const GemmBuffers& buffers) {
  const GroupRowsWorkspace workspace(buffers.workspace, groups.batch, groups.num_groups);
  const bool is_fprop = problem.product == Product::kFprop;
  const int64_t features = ResultFeatures(problem) / (problem.swiglu ? 2 : 1);
  const int64_t width = problem.swiglu ? kTileWidth<true> : kTileWidth<false>;
  const int64_t row_tiles = MaxRowBlocks(groups.capacity, groups.num_groups, RowsOf(kGatheredTileRows));
  const int64_t row_pairs = MaxRowBlocks(groups.capacity, groups.num_groups, RowsOf(kGatheredPairRows));
  const int64_t cluster_tiles = ClusterTiles(row_tiles, row_pairs, CeilDiv(features, width));
  const bool keeps_product = !problem.swiglu || buffers.swiglu.keeps_product;
  GatheredTokenArguments args{};
  using RowBlocks = Counts<kGatheredTileRows, kGatheredPairRows>;
  JAX_GROUPED_RETURN_IF_FAILED(LaunchGroupRows<RowBlocks>(
      "Launching the setup of a gathered product", stream, groups, ResultBoxes(problem, buffers.d, groups.AllRows()),
      LayoutOfA(problem, groups).ElementRowBlocks(), buffers.zero_other_rows && keeps_product, false, workspace,
      &args.all_results));
  if (keeps_product) args.results = workspace.maps;
  args.table = workspace.table;
  args.tokens = Gathered(problem, buffers, buffers.a, Depth(problem));
  args.element_cluster_tiles = static_cast<int32_t>(cluster_tiles);
  args.cluster_tiles = groups.batch * args.element_cluster_tiles;
  args.features = static_cast<int32_t>(features);
  args.elements_per_weight = problem.elements_per_weight;
  args.result_type = problem.result_type;
  args.activated = buffers.swiglu.data;
  const int64_t box_rows = is_fprop ? OperandBoxes<GatheredTile::kColumns, true>::kBoxRows
                                    : OperandBoxes<GatheredTile::kColumns, false>::kBoxRows;
  JAX_GROUPED_RETURN_IF_FAILED(EncodeTensorMap(
      Boxes16(problem.b_type, buffers.b, {problem.out_features, problem.in_features, NumWeights(problem)}, box_rows),
      &args.weights));
  return WithGatheredTypes(problem.a_type, [&](auto number) {
    using T = decltype(number);
    const auto kernel = problem.swiglu ? GatheredTokenProduct<T, true, true>
                        : is_fprop     ? GatheredTokenProduct<T, true, false>
                                       : GatheredTokenProduct<T, false, false>;
    return LaunchClusters("Launching a gathered product", stream, device, sizeof(GatheredShared), args.cluster_tiles,
                          kernel, args);
  });
}

}  // namespace jax_grouped::sm90
