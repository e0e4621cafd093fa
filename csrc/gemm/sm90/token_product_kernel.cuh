// Device side of token_product.h. Rows are tokens, columns are features of the result, and a stage is 128 of the depth.

#ifndef JAX_GROUPED_CSRC_GEMM_SM90_TOKEN_PRODUCT_KERNEL_CUH_
#define JAX_GROUPED_CSRC_GEMM_SM90_TOKEN_PRODUCT_KERNEL_CUH_

#include <library_types.h>

#include <cstdint>

#include "csrc/common/warp.cuh"
#include "csrc/gemm/sm90/instructions.cuh"
#include "csrc/gemm/sm90/staging.cuh"
#include "csrc/gemm/sm90/tile_products.cuh"
#include "csrc/groups/layout.h"

namespace jax_grouped {
namespace sm90 {

// The group table counts the rows of tiles before a group as row blocks of this kind.
constexpr RowBlock kTileRowBlock = RowBlock::k256;
static_assert(RowsOf(kTileRowBlock) == kTileRows);

struct TokenArguments {
  CUtensorMap tokens;
  CUtensorMap weights;            // one below the other
  CUtensorMap all_results;        // the results of all groups in one map
  const CUtensorMap* results;     // one map per group
  GroupTable table;               // the first batch element's
  int32_t element_cluster_tiles;  // of a batch element that has the most tiles possible
  int32_t cluster_tiles;          // of all batch elements
  const float* token_scale;
  const float* weight_scale;
  int64_t weight_scales;
  int32_t depth;
  int32_t features;
  int32_t elements_per_weight;
  cudaDataType_t result_type;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// The tiles of a block, one per cluster tile. An index has no tile if its batch element has no more tiles.
template <ScalingMode kMode>
class TokenTiles {
 public:
  __device__ explicit TokenTiles(const TokenArguments& args)
      : args_(args), wide_(static_cast<int32_t>(CeilDiv(args.features, kCluster * kTileColumns))) {}

  __device__ const OutputTile& At(int32_t index) {
    if (const int32_t element = index / args_.element_cluster_tiles; element != element_) Enter(element);
    tile_.blocks = 0;
    const int32_t row_tile = index / wide_;  // counted through the batch, as in the table
    if (row_tile >= after_ && !Find(row_tile)) return tile_;
    tile_.blocks = static_cast<int32_t>(CeilDiv(args_.depth, kDepth));
    SetTilePosition(index - before_ * wide_, after_ - before_, wide_, &tile_);
    tile_.rows = rows_ - tile_.row;
    return tile_;
  }

  // Properties of the last tile's group: its weight, its first token, its number of tokens, and the blocks of 4 rows
  // before its scales.
  __device__ int32_t Weight() const { return weight_; }
  __device__ int32_t FirstToken() const { return first_token_; }
  __device__ int32_t Tokens() const { return rows_; }
  __device__ int32_t FirstScaleBlock() const { return first_scale_block_; }

 private:
  __device__ void Enter(int32_t element) {
    element_ = element;
    group_ = 0;
    after_ = 0;
  }

  // Advances to the group that contains row `row_tile` of tiles. Returns false if there is none. The lanes inspect 32
  // groups at once. They issue all loads about these groups before any of the values arrives.
  __device__ bool Find(int32_t row_tile) {
    const GroupTable table = args_.table.At(element_);
    const int32_t* before = table.BlocksBefore(kTileRowBlock);
    const int32_t first_weight = element_ / args_.elements_per_weight * table.num_groups;
    for (; group_ < table.num_groups; group_ += 32) {
      const int32_t group = min(group_ + static_cast<int32_t>(threadIdx.x) % 32, table.num_groups - 1);
      const int32_t tiles_before = before[group];
      const int32_t tiles_after = before[group + 1];
      const int32_t first_token = table.FirstRow()[group];
      const int32_t last_token = table.FirstRow()[group + 1];
      const int32_t scale_block = table.BlocksBefore(RowBlock::k4)[group];
      float scale = 1.0f;
      if constexpr (kMode == ScalingMode::kTensor) {
        scale = MultiplyScales(args_.token_scale[element_ * table.num_groups + group],
                               args_.weight_scale[(first_weight + group) * args_.weight_scales]);
      }
      const uint32_t found = __ballot_sync(kFullWarp, tiles_after > row_tile);
      if (found == 0) continue;
      const int lane = __ffs(found) - 1;
      group_ += lane;
      before_ = FromLane(lane, tiles_before);
      after_ = FromLane(lane, tiles_after);
      weight_ = first_weight + group_;
      first_token_ = FromLane(lane, first_token);
      rows_ = FromLane(lane, last_token) - first_token_;
      first_scale_block_ = FromLane(lane, scale_block);
      tile_.group = element_ * table.num_groups + group_;
      tile_.group_row = first_token_;
      tile_.scale = FromLane(lane, scale);
      return true;
    }
    return false;
  }

  const TokenArguments& args_;
  int32_t wide_;
  OutputTile tile_;
  int32_t element_ = -1;
  // The group of the last tile, and the rows of tiles before the group and up to its end.
  int32_t group_ = 0;
  int32_t before_ = 0;
  int32_t after_ = 0;
  int32_t weight_ = 0;
  int32_t first_token_ = 0;
  int32_t rows_ = 0;
  int32_t first_scale_block_ = 0;
};

template <ScalingMode kMode>
__device__ void ProduceTokens(const TokenArguments& args, const Addresses& shared) {
  // Each block of the cluster copies one slice of the tile's rows to all blocks.
  constexpr int kSliceRows = kTileRows / kCluster;
  const int32_t first_in_slice = RankInCluster() * kSliceRows;
  TokenTiles<kMode> tiles(args);
  TileQueue queue(shared);
  Stage stage;
  for (int32_t index = FirstTileIndex(); index < args.cluster_tiles; index += Clusters()) {
    const OutputTile& tile = tiles.At(index);
    queue.Post(tile);
    if (tile.blocks == 0) continue;
    const int32_t token = tiles.FirstToken() + tile.row + first_in_slice;
    const int32_t feature = tiles.Weight() * args.features + tile.column;
    // The slices of a group's last tile that have no rows are not copied.
    const auto slices = static_cast<int32_t>(CeilDiv(min(tile.rows, kTileRows), kSliceRows));
    const uint32_t bytes = slices * kSliceRows * kDepth + sizeof(Shared::columns[0]);
    const float* scale = nullptr;
    const float* weight_scale = nullptr;
    int32_t scale_stride = 0;
    int32_t scales = 0;
    if constexpr (kMode == ScalingMode::kBlock1D) {
      scale_stride = static_cast<int32_t>(RoundUp(tiles.Tokens(), 4));
      scale = args.token_scale + int64_t{4} * tile.blocks * tiles.FirstScaleBlock() + tile.row;
      scales = scale_stride - tile.row;
      const int32_t feature_block = min(tile.column, args.features - 1) / kBlock;
      weight_scale = args.weight_scale + tiles.Weight() * args.weight_scales + feature_block * RoundUp(tile.blocks, 4);
    }
    for (int32_t block = 0; block < tile.blocks; ++block, stage.Advance()) {
      const int s = stage.index;
      WaitForPhase(shared.Empty(s), stage.parity ^ 1);
      if (Lane() == 0) {
        const uint32_t full = shared.Full(s);
        ArriveExpecting(full, bytes);
        if (first_in_slice < tile.rows) {
          LoadBox<kCluster>(shared.Rows(s) + first_in_slice * kDepth, &args.tokens, block * kDepth, token, full);
        }
        LoadBox<1>(shared.Columns(s), &args.weights, block * kDepth, feature, full);
      }
      if constexpr (kMode == ScalingMode::kBlock1D) {
        CopyFloats<kTileRows>(shared.RowScale(s), scale, scales);
        // Four scales are copied because copies are of 16 bytes.
        CopyFloats<4>(shared.WeightScale(s), weight_scale + block / 4 * 4, 4);
        ArriveAfterCopies(shared.Full(s));
        scale += scale_stride;
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
  for (int32_t index = FirstTileIndex(); index < args.cluster_tiles; index += Clusters()) {
    const OutputTile tile = queue.Take();
    Fragment sums[kWaves];
    Clear(sums);
    for (int32_t block = 0; block < tile.blocks; ++block, stage.Advance()) {
      const int s = stage.index;
      WaitForPhase(shared.Full(s), stage.parity);
#pragma unroll
      for (int wave = 0; wave < kWaves; ++wave) {
        // No branch may occur within a wave that has rows, because the wave waits for the tensor cores.
        if (FirstRow(position.group, wave) >= tile.rows) continue;
        Fragment product;
        StartProduct<TokenType, WeightType>(shared.Rows(s) + FirstRow(position.group, wave) * kDepth, shared.Columns(s),
                                            product);
        float scale[2] = {1.0f, 1.0f};
        if constexpr (kMode == ScalingMode::kBlock1D) {
          const float weight_scale = LoadShared(shared.WeightScale(s) + block % 4 * sizeof(float));
          RowScales row_scales;
          row_scales.Load(shared, s, position, wave);
          scale[0] = MultiplyScales(row_scales.rows[0], weight_scale);
          scale[1] = MultiplyScales(row_scales.rows[1], weight_scale);
        }
        WaitForProducts();
        Pin(product);
        if constexpr (kMode == ScalingMode::kBlock1D) {
#pragma unroll
          for (int i = 0; i < Fragment::kValues; ++i) sums[wave].value[i] += product.value[i] * scale[i / 2 % 2];
        } else {
          Add(product, sums[wave]);
        }
      }
      Release(shared.Empty(s));
    }
    if (tile.blocks == 0 || tile.column >= args.features) continue;
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
      staging.StoreRows(sums[wave], args.features - tile.column,
                        [&](uint32_t box, int column) { StoreBox(result, box, tile.column + column, row); });
    }
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

template <typename TokenType, typename WeightType, ScalingMode kMode>
__global__ void __cluster_dims__(kCluster) __launch_bounds__(kThreads, 1)
    GroupedTokenProduct(const __grid_constant__ TokenArguments args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t memory[];
  const Addresses shared{SharedAddress(memory)};
  SetUpBlock<kMode>(shared);
  if (threadIdx.x >= kMathThreads) {
    if (BecomeProducer()) ProduceTokens<kMode>(args, shared);
  } else {
    const ThreadPosition position = BecomeMathThread<kMathRegisters>();
    MultiplyTokens<TokenType, WeightType, kMode>(args, shared, position);
    // The block's shared memory must outlive the copies that read it. The end of the kernel guarantees that they
    // arrive.
    WaitForReads<0>();
  }
  EndBlock();
#endif
}

}  // namespace sm90
}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_GEMM_SM90_TOKEN_PRODUCT_KERNEL_CUH_
