// FP8 products of tokens with both halves of their group's weight, the gate's features and the factor's, with SwiGLU
// and the quantization of its result in blocks of 1x128. A stage is 128 of the depth.
//
// Each block has 128 of a cluster tile's 256 rows. Its two waves are the products with 128 features of the gate and
// the same 128 of the factor, so that a thread has both numbers of each result, and a quad of lanes has whole scaling
// blocks. Each block copies one half of the weights to both.

#include "csrc/gemm/sm90/products.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <library_types.h>

#include <cstdint>
#include <type_traits>

#include "csrc/common/fp8.cuh"
#include "csrc/common/warp.cuh"
#include "csrc/gemm/sm90/instructions.cuh"
#include "csrc/gemm/sm90/launch.cuh"
#include "csrc/gemm/sm90/staging.cuh"
#include "csrc/gemm/sm90/tile_products.cuh"
#include "csrc/gemm/sm90/token_tiles.cuh"
#include "csrc/groups/layout.h"
#include "csrc/groups/table.cuh"

namespace jax_grouped::sm90 {

// A cluster tile; kBlockRows of its rows are a block's.
struct SwiGluTile {
  static constexpr int kRows = kTileRows;
  static constexpr RowBlock kRowBlock = RowBlock::k256;
  static constexpr int kBlocks = 1;
  static constexpr int kBlockRows = kRows / kCluster;
  static constexpr int kBoxRows = kBlockRows;
};
static_assert(RowsOf(SwiGluTile::kRowBlock) == SwiGluTile::kRows);
static_assert(SwiGluTile::kBlockRows == Fragment::kRows * kMathGroups);

struct SwiGluArguments {
  TokenOperands operands;      // their features are those of the activation's result
  CUtensorMap all_results;     // the input of the activation, of all groups in one map
  const CUtensorMap* results;  // one map per group; null if it is not wanted
  uint8_t* activated;          // [tokens, features]
  float* activated_scale;      // inverse scales
  ScaleRule scale_rule;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Memory of a stage: the ring's room for rows has the weights, and that for columns the tokens.
__device__ inline uint32_t StageWeights(const Addresses& shared, int stage) { return shared.Rows(stage); }
__device__ inline uint32_t StageTokens(const Addresses& shared, int stage) { return shared.Columns(stage); }
constexpr int kHalfWeightBytes = kTileColumns * kDepth;
constexpr int kScaleBytes = 4 * sizeof(float);  // of four stages' scales of one half

__device__ __forceinline__ void ProduceSwiGlu(const TokenOperands& operands, const Addresses& shared) {
  const auto rank = static_cast<int32_t>(RankInCluster());
  TokenTiles<ScalingMode::kBlock1D, SwiGluTile> tiles(operands);
  TileQueue queue(shared);
  Stage stage;
  for (int32_t index = FirstTileIndex(); index < operands.cluster_tiles; index += Clusters()) {
    OutputTile tile = tiles.At(index);
    tile.row += rank * SwiGluTile::kBlockRows;
    tile.rows -= rank * SwiGluTile::kBlockRows;
    tile.scale_block = tiles.FirstScaleBlock();
    queue.Post(tile);
    if (tile.stages == 0) continue;
    const int32_t token = tiles.FirstToken() + tile.row;
    const int32_t feature = (2 * tiles.Weight() + rank) * operands.features + tile.column;
    const bool has_rows = tile.rows > 0;
    const uint32_t bytes = 2 * kHalfWeightBytes + (has_rows ? SwiGluTile::kBlockRows * kDepth : 0);
    StageScales scales(operands, tiles, tile);
    const int64_t factor_scales = operands.features / kBlock * RoundUp(tile.stages, 4);
    for (int32_t block = 0; block < tile.stages; ++block, stage.Advance()) {
      const int s = stage.index;
      WaitForPhase(shared.Empty(s), stage.parity ^ 1);
      if (Lane() == 0) {
        const uint32_t full = shared.Full(s);
        ArriveExpecting(full, bytes);
        LoadBox<kCluster>(StageWeights(shared, s) + rank * kHalfWeightBytes, &operands.weights,
                          {block * kDepth, feature}, full);
        if (has_rows) LoadBox<1>(StageTokens(shared, s), &operands.tokens, {block * kDepth, token}, full);
      }
      scales.Copy<SwiGluTile::kBlockRows>(block, shared.RowScale(s), shared.ColumnScale(s));
      scales.CopyWeights(block, shared.ColumnScale(s) + kScaleBytes, factor_scales);
      ArriveAfterCopies(shared.Full(s));
      __syncwarp();
    }
  }
}

// Quantizes 64 rows of a tile in blocks of 1x128.
__device__ __forceinline__ void StoreQuantized(const SwiGluArguments& args, const OutputTile& tile,
                                               const ThreadPosition& position, Fragment& values,
                                               Staging<kStagedBoxes>& staging) {
  const auto for_values = [&](const auto& visit) {
#pragma unroll
    for (int i = 0; i < Fragment::kValues; ++i) visit(i / 2 % 2, values.value[i]);
  };
  uint32_t amax[2] = {0, 0};
  for_values([&](int half, float& value) { amax[half] = max(amax[half], __float_as_uint(value) & 0x7fffffff); });
  if (__any_sync(kFullWarp, max(amax[0], amax[1]) >= kInfinityBits)) {
    amax[0] = amax[1] = 0;
    for_values([&](int half, float& value) {
      amax[half] = max(amax[half], FiniteBits(value));
      value = HideInfinity(value);
    });
  }
  const int32_t features = args.operands.features;
  const int first_row = FirstRow(position.group, 0);
  float scale[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    // A quad of lanes has a row.
    amax[half] = max(amax[half], __shfl_xor_sync(kFullWarp, amax[half], 1));
    amax[half] = max(amax[half], __shfl_xor_sync(kFullWarp, amax[half], 2));
    const auto found = ScaleFromAmax<E4m3>(amax[half], args.scale_rule);
    scale[half] = found.scale;
    const int32_t row = first_row + position.Row() + 8 * half;
    if (position.lane % 4 == 0 && row < RoundUp(tile.rows, 4)) {
      const int64_t blocks_before = int64_t{features / kBlock} * tile.scale_block;
      const int64_t stride = RoundUp(tile.row + tile.rows, 4);
      args.activated_scale[4 * blocks_before + tile.column / kBlock * stride + tile.row + row] =
          row < tile.rows ? found.inverse : 0.0f;
    }
  }
  const auto write = [&](uint32_t memory) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = position.Row() + 8 * half;
#pragma unroll
      for (int i = 0; i < Fragment::kColumns / 8; ++i) {
        const float* value = values.value + 4 * i + 2 * half;
        const int byte = 8 * i + position.Column();
        StoreShared16(memory + row * kBoxRowBytes + (byte ^ (row % 8 * 16)),
                      Quantize2<E4m3>(value[0], value[1], scale[half]));
      }
    }
  };
  staging.CopyRows(write, tile.rows - first_row, features,
                   args.activated + int64_t{tile.group_row + tile.row + first_row} * features + tile.column);
}

template <typename T>
__device__ __forceinline__ void MultiplySwiGlu(const SwiGluArguments& args, const Addresses& shared,
                                               const ThreadPosition& position) {
  TileQueue queue(shared);
  constexpr cudaDataType_t kType = std::is_same_v<T, __half> ? CUDA_R_16F : CUDA_R_16BF;
  Staging<kStagedBoxes> staging(shared.Staging(position.group), position, kType);
  const int first_row = FirstRow(position.group, 0);
  Stage stage;
  for (int32_t index = FirstTileIndex(); index < args.operands.cluster_tiles; index += Clusters()) {
    const OutputTile tile = queue.Take();
    Fragment sums[kWaves];
    Clear(sums);
    for (int32_t block = 0; block < tile.stages; ++block, stage.Advance()) {
      const int s = stage.index;
      WaitForPhase(shared.Full(s), stage.parity);
      if (first_row < tile.rows) {
#pragma unroll
        for (int wave = 0; wave < kWaves; ++wave) {
          AddBlock<E4m3, E4m3, ScalingMode::kBlock1D>(
              StageTokens(shared, s) + first_row * kDepth, StageWeights(shared, s) + wave * kHalfWeightBytes,
              shared.RowScale(s) + (first_row + position.Row()) * sizeof(float),
              shared.ColumnScale(s) + wave * kScaleBytes + block % 4 * sizeof(float), sums[wave]);
        }
      }
      Release(shared.Empty(s));
    }
    if (tile.stages == 0 || first_row >= tile.rows) continue;
    const int32_t features = args.operands.features;
    if (args.results != nullptr) {
      // The rows below this group's last row may belong to another group.
      const bool whole = first_row + Fragment::kRows <= tile.rows;
      const CUtensorMap* result = whole ? &args.all_results : args.results + tile.group;
      const int32_t row = tile.row + first_row + (whole ? tile.group_row : 0);
      if (!whole && position.warp == 0) AcquireTensorMap(result);
#pragma unroll
      for (int wave = 0; wave < kWaves; ++wave) {
        staging.StoreRows(sums[wave], kTileColumns, [&](uint32_t box, int column) {
          StoreBox(result, {wave * features + tile.column + column, row}, box);
        });
      }
    }
    ApplySwiGlu<T>(sums[1], sums[0]);
    StoreQuantized(args, tile, position, sums[0], staging);
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

template <typename T>
__global__ void __cluster_dims__(kCluster) __launch_bounds__(kThreads, 1)
    Fp8SwiGluProduct(const __grid_constant__ SwiGluArguments args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t memory[];
  const Addresses shared{SharedAddress(memory)};
  SetUpCluster<kStages>(shared, kFullArrivals<ScalingMode::kBlock1D>, kEmptyArrivals, 32);
  const auto produce = [&] {
    if (LeadsProducer()) ProduceSwiGlu(args.operands, shared);
  };
  RunBlock<kProducerRegisters, kMathRegisters>(
      produce, [&](const ThreadPosition& position) { MultiplySwiGlu<T>(args, shared, position); });
#endif
}

Status LaunchFp8SwiGluProduct(cudaStream_t stream, int device, const GemmProblem& problem, const Groups& groups,
                              const GemmBuffers& buffers) {
  const SwiGluResult& activated = buffers.swiglu;
  const GroupRowsWorkspace workspace(buffers.workspace, groups.batch, groups.num_groups);
  SwiGluArguments args{};
  using RowBlocks = Counts<RowBlock::k4, SwiGluTile::kRowBlock>;
  JAX_GROUPED_RETURN_IF_FAILED(LaunchGroupRows<RowBlocks>(
      "Launching the setup of a product with SwiGLU", stream, groups, ResultBoxes(problem, buffers.d, groups.AllRows()),
      LayoutOfA(problem, groups).ElementRowBlocks(), buffers.zero_other_rows && activated.keeps_product, false,
      workspace, &args.all_results));
  if (activated.keeps_product) args.results = workspace.maps;
  args.activated = activated.data;
  args.activated_scale = activated.scale;
  args.scale_rule = activated.scale_rule;
  TokenOperands& operands = args.operands;
  JAX_GROUPED_RETURN_IF_FAILED(EncodeOperands<SwiGluTile>(problem, groups, buffers, workspace.table, &operands));
  // EncodeOperands counts all features; a cluster tile has 128 of the gate and the same 128 of the factor.
  operands.features /= 2;
  operands.element_cluster_tiles /= 2;
  operands.cluster_tiles /= 2;
  const auto launch = [&](auto number) {
    return LaunchClusters("Launching a product with SwiGLU", stream, device, sizeof(Shared), operands.cluster_tiles,
                          Fp8SwiGluProduct<decltype(number)>, args);
  };
  return problem.result_type == CUDA_R_16F ? launch(__half()) : launch(__nv_bfloat16());
}

}  // namespace jax_grouped::sm90
