// Tiles of products of tokens: rows are tokens, columns are features of the result, and a stage is 128 of the depth.

#ifndef JAX_GROUPED_CSRC_GEMM_SM90_TOKEN_TILES_CUH_
#define JAX_GROUPED_CSRC_GEMM_SM90_TOKEN_TILES_CUH_

#include <cuda.h>

#include <cstdint>

#include "csrc/common/status.h"
#include "csrc/common/warp.cuh"
#include "csrc/gemm/gemm.h"
#include "csrc/gemm/sm90/instructions.cuh"
#include "csrc/gemm/sm90/launch.cuh"
#include "csrc/gemm/sm90/tensor_map.h"
#include "csrc/gemm/sm90/tile_products.cuh"
#include "csrc/groups/layout.cuh"
#include "csrc/groups/layout.h"

namespace jax_grouped::sm90 {

// The operands of a product. A kernel has a type `Tile` for its cluster tiles: kRows rows, which are row blocks of kind
// kRowBlock, and kColumns of `features`. Tokens are copied in boxes of kBoxRows rows, unless they are gathered.
struct TokenOperands {
  CUtensorMap tokens;             // not set if they are gathered
  CUtensorMap weights;            // one below the other
  GroupTable table;               // the first batch element's
  int32_t element_cluster_tiles;  // of a batch element that has the most tiles possible
  int32_t cluster_tiles;          // of all batch elements
  const float* token_scale;
  const float* weight_scale;
  int64_t weight_scales;
  int32_t depth;
  int32_t features;  // of the result; with SwiGLU, of the activation's
  int32_t elements_per_weight;
};

// Describes the operands of a problem. The table is that of its groups.
template <typename Tile>
Status EncodeOperands(const GemmProblem& problem, const Groups& groups, const GemmBuffers& buffers,
                      const GroupTable& table, TokenOperands* operands) {
  const int64_t depth = Depth(problem);
  const int64_t weight_features = ResultFeatures(problem);
  const int64_t features = problem.swiglu ? weight_features / 2 : weight_features;
  const int64_t row_tiles = MaxRowBlocks(groups.capacity, groups.num_groups, Tile::kRows);
  operands->table = table;
  operands->element_cluster_tiles = static_cast<int32_t>(row_tiles * CeilDiv(features, Tile::kColumns));
  operands->cluster_tiles = groups.batch * operands->element_cluster_tiles;
  operands->token_scale = static_cast<const float*>(buffers.a_scale);
  operands->weight_scale = static_cast<const float*>(buffers.b_scale);
  operands->weight_scales = buffers.weight_scales;
  operands->depth = static_cast<int32_t>(depth);
  operands->features = static_cast<int32_t>(features);
  operands->elements_per_weight = problem.elements_per_weight;
  if (problem.gathered == Gather::kNone) {
    JAX_GROUPED_RETURN_IF_FAILED(
        EncodeTensorMap(Fp8Boxes(buffers.a, depth, groups.AllRows(), Tile::kBoxRows), &operands->tokens));
  }
  const int64_t weight_rows = NumWeights(problem) * weight_features;
  return EncodeTensorMap(Fp8Boxes(buffers.b, depth, weight_rows, kTileColumns), &operands->weights);
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Finds cluster tiles by their index. An index has no tile if its batch element has no more tiles.
template <ScalingMode kMode, typename Tile>
class TokenTiles {
 public:
  __device__ TokenTiles(const TokenOperands& operands, const GroupTable& table)
      : operands_(operands), tables_(table), wide_(static_cast<int32_t>(CeilDiv(operands.features, Tile::kColumns))) {}

  __device__ const OutputTile& At(int32_t index) {
    if (const int32_t element = index / operands_.element_cluster_tiles; element != element_) {
      element_ = element;
      group_ = after_ = 0;
    }
    tile_.stages = 0;
    const int32_t row_tile = index / wide_;  // counted through the batch, as in the table
    if (row_tile >= after_ && !Find(row_tile)) return tile_;
    tile_.stages = static_cast<int32_t>(CeilDiv(operands_.depth, kDepth));
    SetTilePosition<Tile::kRows, Tile::kColumns>(index - before_ * wide_, after_ - before_, wide_, &tile_);
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
  // Advances to the group that contains row `row_tile` of tiles. Returns false if there is none. The lanes inspect 32
  // groups at once. They issue all loads about these groups before any of the values arrives.
  __device__ bool Find(int32_t row_tile) {
    const GroupTable table = tables_.At(element_);
    const int32_t* before = table.BlocksBefore(Tile::kRowBlock);
    const int32_t first_weight = element_ / operands_.elements_per_weight * table.num_groups;
    for (; group_ < table.num_groups; group_ += 32) {
      const int32_t group = min(group_ + static_cast<int32_t>(threadIdx.x) % 32, table.num_groups - 1);
      const int32_t tiles_before = before[group];
      const int32_t tiles_after = before[group + 1];
      const int32_t first_token = table.FirstRow()[group];
      const int32_t last_token = table.FirstRow()[group + 1];
      const int32_t scale_block = table.BlocksBefore(RowBlock::k4)[group];
      float scale = 1.0f;
      if constexpr (kMode == ScalingMode::kTensor) {
        scale = MultiplyScales(operands_.token_scale[element_ * table.num_groups + group],
                               operands_.weight_scale[(first_weight + group) * operands_.weight_scales]);
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

  const TokenOperands& operands_;
  const GroupTable& tables_;  // the first batch element's
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

// The scales of a tile's stages: 1x128 of tokens and 128x128 of weights. Not for scales of tensors.
class StageScales {
 public:
  template <typename Tiles>
  __device__ StageScales(const TokenOperands& operands, const Tiles& tiles, const OutputTile& tile)
      : stride_(static_cast<int32_t>(ScaleRows(tiles.Tokens()))), count_(stride_ - tile.row) {
    token_ =
        operands.token_scale + RowBlockScalePosition(tile.stages, tiles.FirstScaleBlock(), 0, tiles.Tokens(), tile.row);
    const int64_t first = tile.column / kBlock * RoundUp(tile.stages, 4);
    weight_ = operands.weight_scale + tiles.Weight() * operands.weight_scales + first;
  }

  // Starts copies of the scales of the tile's tokens. Stages must follow one another. Whole warps must call it.
  template <int kRows>
  __device__ __forceinline__ void CopyTokens(uint32_t token_scale) {
    CopyFloats<kRows>(token_scale, token_, count_);
    token_ += stride_;
  }

  // Starts a copy of the weights' scales of block `block` and its neighbours, which lie `distance` scales after those
  // of the tile's first column. Whole warps must call it.
  __device__ __forceinline__ void CopyWeights(int32_t block, uint32_t weight_scale, int64_t distance) const {
    // Four scales are copied because copies are of 16 bytes.
    CopyFloats<4>(weight_scale, weight_ + distance + block / 4 * 4, 4);
  }

 private:
  const float* token_;
  const float* weight_;
  int32_t stride_;
  int32_t count_;
};

// Adds the product of 64 tokens and the weights of a stage to the sums of a math group. With 1x128 scales,
// `token_scale` is the address of the scale of the thread's first row, and `weight_scale` that of the weights' scale.
// There must be no branch in it, because the group waits for the tensor cores.
template <typename TokenType, typename WeightType, ScalingMode kMode>
__device__ __forceinline__ void AddBlock(uint32_t tokens, uint32_t weights, uint32_t token_scale, uint32_t weight_scale,
                                         Fragment& sums) {
  Fragment product;
  StartProduct<TokenType, WeightType>(tokens, weights, product);
  float scale[2] = {1.0f, 1.0f};
  if constexpr (kMode == ScalingMode::kBlock1D) {
    const float factor = LoadShared(weight_scale);
    scale[0] = MultiplyScales(LoadShared(token_scale), factor);
    scale[1] = MultiplyScales(LoadShared(token_scale + 8 * sizeof(float)), factor);
  }
  WaitForProducts();
  Pin(product);
  if constexpr (kMode == ScalingMode::kBlock1D) {
#pragma unroll
    for (int i = 0; i < Fragment::kValues; ++i) sums.value[i] += product.value[i] * scale[i / 2 % 2];
  } else {
    Add(product, sums);
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace jax_grouped::sm90

#endif  // JAX_GROUPED_CSRC_GEMM_SM90_TOKEN_TILES_CUH_
