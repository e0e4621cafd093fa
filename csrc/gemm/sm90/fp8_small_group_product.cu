// FP8 products of tokens with their group's weight (fprop and dgrad) where groups have few tokens. Tiles, roles and
// barriers are those of tile_products.cuh, with these differences:
//
// - Reading the weights bounds the speed, so that a ring holds as many stages as fit: an SM keeps 96 KiB of weights on
//   the way. Of the tokens, only boxes that the group has rows in are copied.
// - Blocks form no clusters. A stage is free as soon as this block's math threads have read it.
// - Tiles have 128 rows, of which each math group multiplies 64. It stores its sums from registers, as few of the rows
//   exist.
// - The producer is the only warp beside the math groups, which need no more registers than a launch gives them.
// - Few groups need no setup kernel (BlocksFindGroups): every block then fills in the group table in its shared memory,
//   and the math groups zero the rows of no group.

#include "csrc/gemm/sm90/products.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <library_types.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "csrc/common/device.h"
#include "csrc/common/launch.cuh"
#include "csrc/common/warp.cuh"
#include "csrc/gemm/sm90/instructions.cuh"
#include "csrc/gemm/sm90/launch.cuh"
#include "csrc/gemm/sm90/staging.cuh"
#include "csrc/gemm/sm90/tile_products.cuh"
#include "csrc/gemm/sm90/token_tiles.cuh"
#include "csrc/groups/layout.h"
#include "csrc/groups/table.cuh"

namespace jax_grouped::sm90 {

struct SmallGroupTile {
  static constexpr int kRows = kMathGroups * Fragment::kRows;
  static constexpr RowBlock kRowBlock = RowBlock::k128;
  static constexpr int kColumns = kTileColumns;
  static constexpr int kBoxRows = 16;
  static constexpr int kStages = 6;
};
static_assert(RowsOf(SmallGroupTile::kRowBlock) == SmallGroupTile::kRows);
constexpr int kSmallGroupThreads = kMathThreads + 32;

using SmallGroupRowBlocks = Counts<RowBlock::k4, SmallGroupTile::kRowBlock>;

struct SmallGroupArguments {
  TokenOperands operands;
  void* result;
  cudaDataType_t result_type;
  Groups groups;
  int64_t zeroed_row_bytes;  // of the result, if this kernel zeros rows of no group; otherwise 0
};

struct alignas(1024) SmallGroupShared {
  uint8_t tokens[SmallGroupTile::kStages][SmallGroupTile::kRows * kDepth];
  uint8_t weights[SmallGroupTile::kStages][kTileColumns * kDepth];
  float token_scale[SmallGroupTile::kStages][SmallGroupTile::kRows];
  float weight_scale[SmallGroupTile::kStages][4];  // of the columns' block, for this stage and its neighbours
  Ring<SmallGroupTile::kStages> ring;
  int32_t table[kSharedTableSize];
};
static_assert(sizeof(SmallGroupShared) <= kMostSharedBytes);
static_assert(sizeof(SmallGroupShared) + sizeof(SmallGroupShared::tokens[0]) + sizeof(SmallGroupShared::weights[0]) >
                  kMostSharedBytes,
              "there is room for another stage");
static_assert(offsetof(SmallGroupShared, weights) % 1024 == 0);

// Addresses of the members of SmallGroupShared.
struct SmallGroupAddresses : RingAddresses<SmallGroupShared> {
  __device__ uint32_t Tokens(int stage) const {
    return base + offsetof(SmallGroupShared, tokens) + stage * sizeof(SmallGroupShared::tokens[0]);
  }
  __device__ uint32_t Weights(int stage) const {
    return base + offsetof(SmallGroupShared, weights) + stage * sizeof(SmallGroupShared::weights[0]);
  }
  __device__ uint32_t TokenScale(int stage) const {
    return base + offsetof(SmallGroupShared, token_scale) + stage * sizeof(SmallGroupShared::token_scale[0]);
  }
  __device__ uint32_t WeightScale(int stage) const {
    return base + offsetof(SmallGroupShared, weight_scale) + stage * sizeof(SmallGroupShared::weight_scale[0]);
  }
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

template <ScalingMode kMode>
__device__ void ProduceSmallGroups(const TokenOperands& operands, const GroupTable& table,
                                   const SmallGroupAddresses& shared) {
  TokenTiles<kMode, SmallGroupTile> tiles(operands, table);
  TileQueue queue(shared);
  RingSlot<SmallGroupTile::kStages> stage;
  for (auto index = static_cast<int32_t>(blockIdx.x); index < operands.cluster_tiles; index += gridDim.x) {
    const OutputTile& tile = tiles.At(index);
    queue.Post(tile);
    if (tile.stages == 0) continue;
    const int32_t token = tiles.FirstToken() + tile.row;
    const int32_t feature = tiles.Weight() * operands.features + tile.column;
    const int32_t rows = min(tile.rows, SmallGroupTile::kRows);
    const uint32_t bytes = RoundUp(rows, SmallGroupTile::kBoxRows) * kDepth + sizeof(SmallGroupShared::weights[0]);
    StageScales scales(operands, tiles, tile);
    for (int32_t block = 0; block < tile.stages; ++block, stage.Advance()) {
      const int s = stage.index;
      WaitForPhase(shared.Empty(s), stage.parity ^ 1);
      if (Lane() == 0) {
        const uint32_t full = shared.Full(s);
        ArriveExpecting(full, bytes);
        LoadBox<1>(shared.Weights(s), &operands.weights, {block * kDepth, feature}, full);
#pragma unroll 1
        for (int32_t row = 0; row < rows; row += SmallGroupTile::kBoxRows) {
          LoadBox<1>(shared.Tokens(s) + row * kDepth, &operands.tokens, {block * kDepth, token + row}, full);
        }
      }
      if constexpr (kMode == ScalingMode::kBlock1D) {
        scales.CopyTokens<SmallGroupTile::kRows>(shared.TokenScale(s));
        scales.CopyWeights(block, shared.WeightScale(s), 0);
        ArriveAfterCopies(shared.Full(s));
      }
      __syncwarp();
    }
  }
}

template <typename T>
__device__ __forceinline__ void StorePair(T* pair, float first, float second) {
  if constexpr (std::is_same_v<T, float>) {
    *reinterpret_cast<float2*>(pair) = make_float2(first, second);
  } else {
    *reinterpret_cast<uint32_t*>(pair) = PackPair<T>(first, second);
  }
}

// Stores the sums of a math group in `rows` rows and `columns` columns of the result, of which `result` is the first
// number.
template <typename T>
__device__ __forceinline__ void StoreSums(const Fragment& sums, const ThreadPosition& position, T* result,
                                          int32_t row_length, int32_t rows, int32_t columns) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = position.Row() + 8 * half;
    if (row >= rows) continue;
    T* const first = result + int64_t{row} * row_length + position.Column();
#pragma unroll
    for (int column = 0; column < Fragment::kColumns; column += 8) {
      const float* value = sums.value + column / 2 + 2 * half;
      if (column + position.Column() < columns) StorePair(first + column, value[0], value[1]);
    }
  }
}

template <typename TokenType, typename WeightType, ScalingMode kMode>
__device__ void MultiplySmallGroups(const SmallGroupArguments& args, const SmallGroupAddresses& shared,
                                    const ThreadPosition& position) {
  const TokenOperands& operands = args.operands;
  const int first_row = position.group * Fragment::kRows;
  TileQueue queue(shared);
  RingSlot<SmallGroupTile::kStages> stage;
  for (auto index = static_cast<int32_t>(blockIdx.x); index < operands.cluster_tiles; index += gridDim.x) {
    const OutputTile tile = queue.Take();
    Fragment sums{};
    for (int32_t block = 0; block < tile.stages; ++block, stage.Advance()) {
      const int s = stage.index;
      WaitForPhase(shared.Full(s), stage.parity);
      if (first_row < tile.rows) {
        AddBlock<TokenType, WeightType, kMode>(shared.Tokens(s) + first_row * kDepth, shared.Weights(s),
                                               shared.TokenScale(s) + (first_row + position.Row()) * sizeof(float),
                                               shared.WeightScale(s) + block % 4 * sizeof(float), sums);
      }
      Arrive(shared.Empty(s));
    }
    const int32_t rows = tile.rows - first_row;
    const int32_t columns = operands.features - tile.column;
    if (tile.stages == 0 || rows <= 0) continue;
    if constexpr (kMode == ScalingMode::kTensor) Scale(tile.scale, sums);
    const int64_t first = int64_t{tile.group_row + tile.row + first_row} * operands.features + tile.column;
    const auto store = [&](auto* result) {
      StoreSums(sums, position, result + first, operands.features, rows, columns);
    };
    if (args.result_type == CUDA_R_32F) {
      store(static_cast<float*>(args.result));
    } else if (args.result_type == CUDA_R_16BF) {
      store(static_cast<__nv_bfloat16*>(args.result));
    } else {
      store(static_cast<__half*>(args.result));
    }
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

template <typename TokenType, typename WeightType, ScalingMode kMode>
__global__ void __launch_bounds__(kSmallGroupThreads, 1)
    Fp8SmallGroupProduct(const __grid_constant__ SmallGroupArguments args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t memory[];
  const SmallGroupAddresses shared{SharedAddress(memory)};
  if (threadIdx.x == kMathThreads) {  // not in the warp that finds the groups
    InitRings<SmallGroupTile::kStages>(shared, kFullArrivals<kMode>, kMathThreads);
    FenceBarrierInit();
    PrefetchTensorMap(&args.operands.tokens);
    PrefetchTensorMap(&args.operands.weights);
  }
  cudaGridDependencySynchronize();
  GroupTable table = args.operands.table;
  if (BlocksFindGroups(args.groups)) {
    table = FindGroups<SmallGroupRowBlocks>(args.groups, reinterpret_cast<SmallGroupShared*>(memory)->table);
  } else {
    __syncthreads();
  }
  if (threadIdx.x < kMathThreads) {
    // The producer copies the first operands meanwhile.
    if (args.zeroed_row_bytes > 0) {
      ZeroRowsAround<kMathThreads>({table.FirstRow()[0], table.FirstRow()[table.num_groups]}, args.groups.capacity,
                                   args.result, args.zeroed_row_bytes, blockIdx.x, gridDim.x);
    }
    MultiplySmallGroups<TokenType, WeightType, kMode>(args, shared, MathThreadPosition());
  } else {
    ProduceSmallGroups<kMode>(args.operands, table, shared);
  }
#endif
}

Status LaunchFp8SmallGroupProduct(cudaStream_t stream, int device, const GemmProblem& problem, const Groups& groups,
                                  const GemmBuffers& buffers) {
  const GroupRowsWorkspace workspace(buffers.workspace, groups.batch, groups.num_groups);
  SmallGroupArguments args{};
  args.result = buffers.d;
  args.result_type = problem.result_type;
  args.groups = groups;
  const bool finds_groups = BlocksFindGroups(groups);
  if (!finds_groups) {
    JAX_GROUPED_RETURN_IF_FAILED(LaunchGroupRows<SmallGroupRowBlocks>(
        "Launching the setup of a grouped product", stream, groups, ResultBoxes(problem, buffers.d, groups.AllRows()),
        LayoutOfA(problem, groups).ElementRowBlocks(), buffers.zero_other_rows, false, workspace, nullptr));
  } else if (buffers.zero_other_rows) {
    args.zeroed_row_bytes = ResultFeatures(problem) * ResultBytes(problem.result_type);
  }
  JAX_GROUPED_RETURN_IF_FAILED(
      EncodeOperands<SmallGroupTile>(problem, groups, buffers, workspace.table, &args.operands));
  DeviceProperties properties;
  JAX_GROUPED_RETURN_IF_FAILED(GetDeviceProperties(device, &properties));
  return WithTypes(problem, [&](auto tokens, auto weights, auto mode) {
    const auto kernel = Fp8SmallGroupProduct<decltype(tokens), decltype(weights), decltype(mode)::value>;
    constexpr int kSharedBytes = sizeof(SmallGroupShared);
    JAX_GROUPED_RETURN_IF_FAILED(AllowSharedMemory(reinterpret_cast<const void*>(kernel), kSharedBytes));
    const Grid grid{std::min(args.operands.cluster_tiles, properties.processors), kSmallGroupThreads, kSharedBytes};
    constexpr char kWhat[] = "Launching a grouped product";
    return finds_groups ? Launch(kWhat, stream, grid, kernel, args) : LaunchEarly(kWhat, stream, grid, kernel, args);
  });
}

}  // namespace jax_grouped::sm90
