// FP8 products of tokens with their group's weight (fprop and dgrad). A stage is 128 of the depth. With scales of
// 1x128, the kernel can gather the rows of tokens, and compute SwiGLU and quantize its result in blocks of 1x128.
//
// Each block has 128 of a cluster tile's 256 rows. Its two waves are the products with 128 features each: with adjacent
// ones, or with SwiGLU with 128 of the gate and the same 128 of the factor. A thread then has both numbers of each
// result, and a quad of lanes has whole scaling blocks. Each block copies one half of the weights to both.

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
#include "csrc/groups/layout.cuh"
#include "csrc/groups/layout.h"
#include "csrc/groups/table.cuh"

namespace jax_grouped::sm90 {

// A cluster tile; kBoxRows of its rows are a block's.
template <bool kHasSwiGlu>
struct TokenTile {
  static constexpr int kRows = kTileRows;
  static constexpr RowBlock kRowBlock = RowBlock::k256;
  static constexpr int kColumns = kHasSwiGlu ? kTileColumns : kWaves * kTileColumns;
  static constexpr int kBoxRows = kRows / kCluster;
};
static_assert(RowsOf(TokenTile<false>::kRowBlock) == TokenTile<false>::kRows);
static_assert(TokenTile<false>::kBoxRows == Fragment::kRows * kMathGroups);
static_assert(kWaves == kCluster, "each block copies the weights of one wave");

// The types and properties of a kernel. `Number` is the 16-bit type of the result with SwiGLU, void without it.
template <typename Tokens, typename Weights, ScalingMode mode, bool gathers, typename Number>
struct TokenKind {
  using TokenType = Tokens;
  using WeightType = Weights;
  using T = Number;
  static constexpr ScalingMode kMode = mode;
  static constexpr bool kGathers = gathers;
  static constexpr bool kHasSwiGlu = !std::is_void_v<Number>;
  static constexpr Registers kRegisters = kGathers ? Registers{56, 224} : sm90::kRegisters;
  static_assert(CanBeDivided(kRegisters));
  using Tile = TokenTile<kHasSwiGlu>;
};

struct TokenArguments {
  TokenOperands operands;
  const uint8_t* gathered;     // [gathered_from, depth], in place of a map of tokens
  const int32_t* row_indices;  // of the rows of `gathered`, one per token
  int32_t gathered_from;
  CUtensorMap all_results;     // the results of all groups in one map
  const CUtensorMap* results;  // one map per group; null if the product is not wanted
  cudaDataType_t result_type;
  uint8_t* activated;      // [tokens, features]; with SwiGLU
  float* activated_scale;  // inverse scales
  ScaleRule scale_rule;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Memory of a stage: the ring's room for rows has the weights of the waves, and that for columns the tokens.
constexpr int kWaveWeightBytes = kTileColumns * kDepth;
__device__ inline uint32_t StageTokens(const Addresses& shared, int stage) { return shared.Columns(stage); }
__device__ inline uint32_t StageWeights(const Addresses& shared, int stage, int wave) {
  return shared.Rows(stage) + wave * kWaveWeightBytes;
}
// Returns the address of four scales of a wave's weights: of this stage and its neighbours.
__device__ inline uint32_t WaveScale(const Addresses& shared, int stage, int wave) {
  return shared.ColumnScale(stage) + wave * 4 * sizeof(float);
}

// The rows that a producer warp gathers, 32 of a block's. Each lane knows the index of one row, of which it copies the
// scale. Eight lanes copy a row's 128 bytes of a stage. The loop over stages has few instructions, because they
// compete with those of the math groups.
class RowGatherer {
 public:
  __device__ explicit RowGatherer(const TokenArguments& args)
      : args_(args), scale_stride_(static_cast<int32_t>(ScaleRows(args.gathered_from))) {}

  // Loads the indices of a block's tile, whose rows begin with `token`. They arrive while other copies are started.
  __device__ void LoadNext(int64_t token, int32_t rows) {
    // Results of further rows are not stored, whatever they are.
    next_ = OwnRow() < rows ? args_.row_indices[token + OwnRow()] : 0;
  }

  // Starts the tile whose indices were loaded.
  __device__ void Begin() {
    const int64_t depth = args_.operands.depth;
    exists_ = static_cast<uint32_t>(next_) < static_cast<uint32_t>(args_.gathered_from);
    const int32_t row = exists_ ? next_ : 0;
    scale_ = args_.operands.token_scale + row;
#pragma unroll
    for (int i = 0; i < kRows; ++i) rows_[i] = args_.gathered + FromLane(RowLane(i), row) * depth + Column();
    all_exist_ = __all_sync(kFullWarp, exists_);
  }

  // Starts copies of a stage. Rows and columns that do not exist become zeros. Blocks must follow one another.
  __device__ __forceinline__ void Copy(const Addresses& shared, int stage, int32_t block) {
    // The TMA's swizzle: a chunk's position is exclusively or'ed with the row, modulo 8.
    const uint32_t to =
        StageTokens(shared, stage) + (OwnRow() - Lane() + RowLane(0)) * kDepth + (Column() ^ RowLane(0) * kChunk);
    const auto copy = [&](auto all) {
      const bool has_column = block * kDepth + Column() < args_.operands.depth;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const bool copies =
            decltype(all)::value || (FromLane(RowLane(i), static_cast<int>(exists_)) != 0 && has_column);
        CopyChunkOrZeros((to ^ i * kRowsAtOnce % 8 * kChunk) + i * kRowsAtOnce * kDepth, rows_[i], copies);
        rows_[i] += kDepth;
      }
    };
    if (all_exist_ && (block + 1) * kDepth <= args_.operands.depth) {
      copy(std::true_type());
    } else {
      copy(std::false_type());
    }
    CopyFloatOrZero(shared.RowScale(stage) + OwnRow() * sizeof(float), scale_, exists_);
    scale_ += scale_stride_;
  }

 private:
  static constexpr int kChunk = 16;
  static constexpr int kLanesOfRow = kDepth / kChunk;
  static constexpr int kRowsAtOnce = 32 / kLanesOfRow;
  static constexpr int kRows = 32 / kRowsAtOnce;  // of which a lane copies a chunk

  // Returns the lane's row in the block's tile.
  __device__ static int OwnRow() { return static_cast<int>(threadIdx.x) - kMathThreads; }
  // Return the lane that knows the i-th row of which this lane copies a chunk, and the chunk's first byte.
  __device__ static int RowLane(int i) { return Lane() / kLanesOfRow + i * kRowsAtOnce; }
  __device__ static int Column() { return Lane() % kLanesOfRow * kChunk; }

  const TokenArguments& args_;
  int32_t scale_stride_;
  int32_t next_ = 0;
  bool exists_ = false;
  bool all_exist_ = false;
  const float* scale_ = nullptr;
  const uint8_t* rows_[kRows]{};
};

template <typename Kind>
__device__ __forceinline__ void ProduceTokens(const TokenArguments& args, const Addresses& shared) {
  using Tile = typename Kind::Tile;
  const TokenOperands& operands = args.operands;
  const auto rank = static_cast<int32_t>(RankInCluster());
  const bool leads = !Kind::kGathers || LeadsProducer();
  // Features, and scales, from the first wave's weights to the second's.
  const int32_t wave_features = Kind::kHasSwiGlu ? operands.features : kTileColumns;
  const int64_t wave_scales = int64_t{wave_features / kBlock} * RoundUp(CeilDiv(operands.depth, kDepth), 4);
  const int32_t weight_features = Kind::kHasSwiGlu ? 2 * operands.features : operands.features;
  TokenTiles<Kind::kMode, Tile> tiles(operands, operands.table);
  TileQueue queue(shared);
  Stage stage;
  RowGatherer gatherer(args);
  const auto find = [&](int32_t index) {
    OutputTile tile = tiles.At(index);
    tile.row += rank * Tile::kBoxRows;
    tile.rows -= rank * Tile::kBoxRows;
    return tile;
  };
  const auto load_next = [&](int32_t index) {
    if (index >= operands.cluster_tiles) return;
    const OutputTile next = find(index);
    gatherer.LoadNext(int64_t{tiles.FirstToken()} + next.row, next.stages > 0 ? next.rows : 0);
  };
  if constexpr (Kind::kGathers) load_next(FirstTileIndex());
  for (int32_t index = FirstTileIndex(); index < operands.cluster_tiles; index += Clusters()) {
    OutputTile tile = find(index);
    tile.scale_block = tiles.FirstScaleBlock();
    if (leads) queue.Post(tile);
    if constexpr (Kind::kGathers) {
      gatherer.Begin();
      if (tile.stages == 0) load_next(index + Clusters());
    }
    if (tile.stages == 0) continue;
    const int32_t token = tiles.FirstToken() + tile.row;
    const int32_t feature = tiles.Weight() * weight_features + tile.column;
    const bool has_rows = tile.rows > 0;
    const bool has_two_waves = Kind::kHasSwiGlu || tile.column + kTileColumns < operands.features;
    const uint32_t bytes =
        (has_two_waves ? kWaves : 1) * kWaveWeightBytes + (has_rows && !Kind::kGathers ? Tile::kBoxRows * kDepth : 0);
    StageScales scales(operands, tiles, tile);
    for (int32_t block = 0; block < tile.stages; ++block, stage.Advance()) {
      // The next tile's indices arrive during the rest of this tile.
      if (Kind::kGathers && block == tile.stages / 2) load_next(index + Clusters());
      const int s = stage.index;
      WaitForPhase(shared.Empty(s), stage.parity ^ 1);
      if (leads && Lane() == 0) {
        const uint32_t full = shared.Full(s);
        ArriveExpecting(full, bytes);
        if (rank == 0 || has_two_waves) {
          LoadBox<kCluster>(StageWeights(shared, s, rank), &operands.weights,
                            {block * kDepth, feature + rank * wave_features}, full);
        }
        if (has_rows && !Kind::kGathers) {
          LoadBox<1>(StageTokens(shared, s), &operands.tokens, {block * kDepth, token}, full);
        }
      }
      __syncwarp();
      if constexpr (Kind::kGathers) {
        if (has_rows) gatherer.Copy(shared, s, block);
      } else if constexpr (Kind::kMode == ScalingMode::kBlock1D) {
        scales.CopyTokens<Tile::kBoxRows>(shared.RowScale(s));
      }
      if constexpr (Kind::kMode == ScalingMode::kBlock1D) {
        if (leads) {
          scales.CopyWeights(block, WaveScale(shared, s, 0), 0);
          if (has_two_waves) scales.CopyWeights(block, WaveScale(shared, s, 1), wave_scales);
        }
        ArriveAfterCopies(shared.Full(s));
      }
      __syncwarp();
    }
  }
}

// Quantizes 64 rows of a tile in blocks of 1x128.
__device__ __forceinline__ void StoreQuantized(const TokenArguments& args, const OutputTile& tile,
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
    if (position.lane % 4 == 0 && row < ScaleRows(tile.rows)) {
      const int64_t at = RowBlockScalePosition(features / kBlock, tile.scale_block, tile.column / kBlock,
                                               tile.row + tile.rows, tile.row);
      args.activated_scale[at + row] = row < tile.rows ? found.inverse : 0.0f;
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

template <typename Kind>
__device__ __forceinline__ void MultiplyTokens(const TokenArguments& args, const Addresses& shared,
                                               const ThreadPosition& position) {
  const int32_t features = args.operands.features;
  const int first_row = FirstRow(position.group, 0);
  TileQueue queue(shared);
  Staging<kStagedBoxes> staging(shared.Staging(position.group), position, args.result_type);
  Stage stage;
  for (int32_t index = FirstTileIndex(); index < args.operands.cluster_tiles; index += Clusters()) {
    const OutputTile tile = queue.Take();
    const auto has_wave = [&](int wave) {
      return wave == 0 || Kind::kHasSwiGlu || tile.column + wave * kTileColumns < features;
    };
    Fragment sums[kWaves];
    Clear(sums);
    for (int32_t block = 0; block < tile.stages; ++block, stage.Advance()) {
      const int s = stage.index;
      WaitForPhase(shared.Full(s), stage.parity);
      if constexpr (Kind::kGathers) FenceShared();
      if (first_row < tile.rows) {
#pragma unroll
        for (int wave = 0; wave < kWaves; ++wave) {
          if (!has_wave(wave)) continue;
          AddBlock<typename Kind::TokenType, typename Kind::WeightType, Kind::kMode>(
              StageTokens(shared, s) + first_row * kDepth, StageWeights(shared, s, wave),
              shared.RowScale(s) + (first_row + position.Row()) * sizeof(float),
              WaveScale(shared, s, wave) + block % 4 * sizeof(float), sums[wave]);
        }
      }
      Release(shared.Empty(s));
    }
    if (tile.stages == 0 || first_row >= tile.rows) continue;
    if (!Kind::kHasSwiGlu || args.results != nullptr) {
      // The rows below this group's last row may belong to another group.
      const bool whole = first_row + Fragment::kRows <= tile.rows;
      const CUtensorMap* result = whole ? &args.all_results : args.results + tile.group;
      const int32_t row = tile.row + first_row + (whole ? tile.group_row : 0);
      if (!whole && position.warp == 0) AcquireTensorMap(result);
#pragma unroll
      for (int wave = 0; wave < kWaves; ++wave) {
        if (!has_wave(wave)) continue;
        if constexpr (Kind::kMode == ScalingMode::kTensor) Scale(tile.scale, sums[wave]);
        const int32_t column = tile.column + wave * (Kind::kHasSwiGlu ? features : kTileColumns);
        staging.StoreRows(sums[wave], Kind::kHasSwiGlu ? kTileColumns : features - column,
                          [&](uint32_t box, int in_wave) { StoreBox(result, {column + in_wave, row}, box); });
      }
    }
    if constexpr (Kind::kHasSwiGlu) {
      ApplySwiGlu<typename Kind::T>(sums[1], sums[0]);
      StoreQuantized(args, tile, position, sums[0], staging);
    }
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

template <typename Kind>
__global__ void __cluster_dims__(kCluster) __launch_bounds__(kThreads, 1)
    Fp8TokenProduct(const __grid_constant__ TokenArguments args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t memory[];
  const Addresses shared{SharedAddress(memory)};
  // All threads of a producer that gathers copy rows.
  constexpr int kArrivals = Kind::kGathers ? 1 + kWarpGroupThreads : kFullArrivals<Kind::kMode>;
  SetUpCluster<kStages>(shared, kArrivals, kEmptyArrivals, 32);
  const auto produce = [&] {
    if (Kind::kGathers || LeadsProducer()) ProduceTokens<Kind>(args, shared);
  };
  RunBlock<Kind::kRegisters>(produce,
                             [&](const ThreadPosition& position) { MultiplyTokens<Kind>(args, shared, position); });
#endif
}

static_assert(kTileTokens == TokenTile<false>::kRows && kTileFeatures == TokenTile<false>::kColumns,
              "the header tells the tiles of the kernel");

int64_t MaxFp8TokenProductWorkspaceBytes(int64_t all_groups) { return GroupRowsWorkspace::MaxBytes(all_groups); }

Status LaunchFp8TokenProduct(cudaStream_t stream, int device, const GemmProblem& problem, const Groups& groups,
                             const GemmBuffers& buffers) {
  const GroupRowsWorkspace workspace(buffers.workspace, groups.batch, groups.num_groups);
  const SwiGluResult& activated = buffers.swiglu;
  const bool keeps_product = !problem.swiglu || activated.keeps_product;
  TokenArguments args{};
  using RowBlocks = Counts<RowBlock::k4, TokenTile<false>::kRowBlock>;
  JAX_GROUPED_RETURN_IF_FAILED(LaunchGroupRows<RowBlocks>(
      "Launching the setup of a grouped product", stream, groups, ResultBoxes(problem, buffers.d, groups.AllRows()),
      LayoutOfA(problem, groups).ElementRowBlocks(), buffers.zero_other_rows && keeps_product, false, workspace,
      &args.all_results));
  if (keeps_product) args.results = workspace.maps;
  args.result_type = problem.result_type;
  args.gathered = static_cast<const uint8_t*>(buffers.a);
  args.row_indices = buffers.row_indices;
  args.gathered_from = static_cast<int32_t>(problem.gathered_from);
  args.activated = activated.data;
  args.activated_scale = activated.scale;
  args.scale_rule = activated.scale_rule;
  const auto launch = [&](auto tokens, auto weights, auto mode, auto number) {
    using Number = std::remove_pointer_t<decltype(number)>;
    const auto launch_kind = [&](auto gathers) {
      using Kind =
          TokenKind<decltype(tokens), decltype(weights), decltype(mode)::value, decltype(gathers)::value, Number>;
      JAX_GROUPED_RETURN_IF_FAILED(
          EncodeOperands<typename Kind::Tile>(problem, groups, buffers, workspace.table, &args.operands));
      return LaunchClusters("Launching a grouped product", stream, device, sizeof(Shared), args.operands.cluster_tiles,
                            Fp8TokenProduct<Kind>, args);
    };
    if constexpr (decltype(mode)::value == ScalingMode::kBlock1D) {
      if (problem.gathered != Gather::kNone) return launch_kind(std::true_type());
    }
    return launch_kind(std::false_type());
  };
  const std::integral_constant<ScalingMode, ScalingMode::kBlock1D> in_blocks;
  if (problem.swiglu && problem.result_type == CUDA_R_16F) {
    return launch(E4m3(), E4m3(), in_blocks, static_cast<__half*>(nullptr));
  }
  if (problem.swiglu) return launch(E4m3(), E4m3(), in_blocks, static_cast<__nv_bfloat16*>(nullptr));
  return WithTypes(problem, [&](auto tokens, auto weights, auto mode) {
    return launch(tokens, weights, mode, static_cast<void*>(nullptr));
  });
}

}  // namespace jax_grouped::sm90
