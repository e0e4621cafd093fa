// FP8 products of tokens with their group's weight (fprop and dgrad). Rows are tokens, columns are features of the
// result, and a stage is 128 of the depth.

#include "csrc/gemm/sm90/products.h"

#include <library_types.h>

#include <cstdint>

#include "csrc/common/warp.cuh"
#include "csrc/gemm/sm90/instructions.cuh"
#include "csrc/gemm/sm90/launch.cuh"
#include "csrc/gemm/sm90/staging.cuh"
#include "csrc/gemm/sm90/tile_products.cuh"
#include "csrc/gemm/sm90/token_tiles.cuh"
#include "csrc/groups/layout.h"
#include "csrc/groups/table.cuh"

namespace jax_grouped::sm90 {

struct TokenTile {
  static constexpr int kRows = kTileRows;
  static constexpr RowBlock kRowBlock = RowBlock::k256;
  static constexpr int kBlocks = kCluster;
  static constexpr int kBoxRows = kTileRows / kCluster;
};
static_assert(RowsOf(TokenTile::kRowBlock) == TokenTile::kRows);

struct TokenArguments {
  TokenOperands operands;
  CUtensorMap all_results;     // the results of all groups in one map
  const CUtensorMap* results;  // one map per group
  cudaDataType_t result_type;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

template <ScalingMode kMode>
__device__ void ProduceTokens(const TokenOperands& operands, const Addresses& shared) {
  // Each block of the cluster copies one slice of the tile's rows to all blocks.
  constexpr int kSliceRows = TokenTile::kBoxRows;
  const int32_t first_in_slice = RankInCluster() * kSliceRows;
  TokenTiles<kMode, TokenTile> tiles(operands);
  TileQueue queue(shared);
  Stage stage;
  for (int32_t index = FirstTileIndex(); index < operands.cluster_tiles; index += Clusters()) {
    const OutputTile& tile = tiles.At(index);
    queue.Post(tile);
    if (tile.stages == 0) continue;
    const int32_t token = tiles.FirstToken() + tile.row + first_in_slice;
    const int32_t feature = tiles.Weight() * operands.features + tile.column;
    // The slices of a group's last tile that have no rows are not copied.
    const auto slices = static_cast<int32_t>(CeilDiv(min(tile.rows, kTileRows), kSliceRows));
    const uint32_t bytes = slices * kSliceRows * kDepth + sizeof(Shared::columns[0]);
    StageScales scales(operands, tiles, tile);
    for (int32_t block = 0; block < tile.stages; ++block, stage.Advance()) {
      const int s = stage.index;
      WaitForPhase(shared.Empty(s), stage.parity ^ 1);
      if (Lane() == 0) {
        const uint32_t full = shared.Full(s);
        ArriveExpecting(full, bytes);
        if (first_in_slice < tile.rows) {
          LoadBox<kCluster>(shared.Rows(s) + first_in_slice * kDepth, &operands.tokens, {block * kDepth, token}, full);
        }
        LoadBox<1>(shared.Columns(s), &operands.weights, {block * kDepth, feature}, full);
      }
      if constexpr (kMode == ScalingMode::kBlock1D) {
        scales.Copy<kTileRows>(block, shared.RowScale(s), shared.WeightScale(s));
        ArriveAfterCopies(shared.Full(s));
      }
      __syncwarp();
    }
  }
}

template <typename TokenType, typename WeightType, ScalingMode kMode>
__device__ void MultiplyTokens(const TokenArguments& args, const Addresses& shared, const ThreadPosition& position) {
  TileQueue queue(shared);
  Staging<kStagedBoxes> staging(shared.Staging(position.group), position, args.result_type);
  Stage stage;
  for (int32_t index = FirstTileIndex(); index < args.operands.cluster_tiles; index += Clusters()) {
    const OutputTile tile = queue.Take();
    Fragment sums[kWaves];
    Clear(sums);
    for (int32_t block = 0; block < tile.stages; ++block, stage.Advance()) {
      const int s = stage.index;
      WaitForPhase(shared.Full(s), stage.parity);
#pragma unroll
      for (int wave = 0; wave < kWaves; ++wave) {
        const int first_row = FirstRow(position.group, wave);
        if (first_row >= tile.rows) continue;
        AddBlock<TokenType, WeightType, kMode>(shared.Rows(s) + first_row * kDepth, shared.Columns(s),
                                               shared.RowScale(s) + (first_row + position.Row()) * sizeof(float),
                                               shared.WeightScale(s) + block % 4 * sizeof(float), sums[wave]);
      }
      Release(shared.Empty(s));
    }
    if (tile.stages == 0 || tile.column >= args.operands.features) continue;
#pragma unroll
    for (int wave = 0; wave < kWaves; ++wave) {
      const int first_row = FirstRow(position.group, wave);
      if (first_row >= tile.rows) continue;
      if constexpr (kMode == ScalingMode::kTensor) Scale(tile.scale, sums[wave]);
      // The rows below this group's last row may belong to another group.
      const bool whole = first_row + Fragment::kRows <= tile.rows;
      const CUtensorMap* result = whole ? &args.all_results : args.results + tile.group;
      const int32_t row = tile.row + first_row + (whole ? tile.group_row : 0);
      if (!whole && position.warp == 0) AcquireTensorMap(result);
      staging.StoreRows(sums[wave], args.operands.features - tile.column,
                        [&](uint32_t box, int column) { StoreBox(result, {tile.column + column, row}, box); });
    }
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

template <typename TokenType, typename WeightType, ScalingMode kMode>
__global__ void __cluster_dims__(kCluster) __launch_bounds__(kThreads, 1)
    Fp8TokenProduct(const __grid_constant__ TokenArguments args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t memory[];
  const Addresses shared{SharedAddress(memory)};
  SetUpCluster<kStages>(shared, kFullArrivals<kMode>, kEmptyArrivals, 32);
  const auto produce = [&] {
    if (LeadsProducer()) ProduceTokens<kMode>(args.operands, shared);
  };
  RunBlock<kProducerRegisters, kMathRegisters>(produce, [&](const ThreadPosition& position) {
    MultiplyTokens<TokenType, WeightType, kMode>(args, shared, position);
  });
#endif
}

static_assert(kTileTokens == kTileRows && kTileFeatures == kTileColumns, "the header tells the tiles of the kernel");

int64_t MaxFp8TokenProductWorkspaceBytes(int64_t all_groups) { return GroupRowsWorkspace::MaxBytes(all_groups); }

Status LaunchFp8TokenProduct(cudaStream_t stream, int device, const GemmProblem& problem, const Groups& groups,
                             const GemmBuffers& buffers) {
  const GroupRowsWorkspace workspace(buffers.workspace, groups.batch, groups.num_groups);
  TokenArguments args{};
  using RowBlocks = Counts<RowBlock::k4, TokenTile::kRowBlock>;
  JAX_GROUPED_RETURN_IF_FAILED(LaunchGroupRows<RowBlocks>(
      "Launching the setup of a grouped product", stream, groups, ResultBoxes(problem, buffers.d, groups.AllRows()),
      LayoutOfA(problem, groups).ElementRowBlocks(), buffers.zero_other_rows, false, workspace, &args.all_results));
  args.results = workspace.maps;
  args.result_type = problem.result_type;
  JAX_GROUPED_RETURN_IF_FAILED(EncodeOperands<TokenTile>(problem, groups, buffers, workspace.table, &args.operands));
  return WithTypes(problem, [&](auto tokens, auto weights, auto mode) {
    const auto kernel = Fp8TokenProduct<decltype(tokens), decltype(weights), decltype(mode)::value>;
    return LaunchClusters("Launching a grouped product", stream, device, sizeof(Shared), args.operands.cluster_tiles,
                          kernel, args);
  });
}

}  // namespace jax_grouped::sm90
