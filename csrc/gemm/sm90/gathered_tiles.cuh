// Common parts of the product kernels on Hopper that gather rows of 16-bit tokens. Tiles of the result are 128 x 256. A
// tile is computed from stages of 64 numbers along the contraction axis, one stage after another.
//
// The roles, the barriers and the rings are those of tile_products.cuh, with these differences:
//
// - The producer is a whole warp group. Its threads gather one operand with copies of 16 bytes (cp.async). A thread of
//   its first warp copies the other operand by the TMA.
// - Products accumulate in place. Each math group keeps the products of one stage in flight while it waits for the next
//   stage. It releases a stage when the products of the next stage have begun.
// - full[stage] ends a phase with an arrival for the TMA's bytes and one of every producer thread after its copies.
//   empty[stage] ends a phase with an arrival of every math warp of the cluster.
//
// Operand A, which has the rows of the tiles, is gathered. Operand B, which has the columns, is not.
//
// Sustained reads from the L2 cache reach about 30 bytes per clock and SM. A stage takes 1024 clocks on the tensor
// cores and has 48 KiB of operands. The blocks of a cluster therefore compute two tiles of the same columns, and each
// block copies one half of operand B to both. If a group has an odd number of rows of tiles, the tiles of the last row
// are paired with their neighbours in it. These blocks share nothing.

#ifndef JAX_GROUPED_CSRC_GEMM_SM90_GATHERED_TILES_CUH_
#define JAX_GROUPED_CSRC_GEMM_SM90_GATHERED_TILES_CUH_

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>
#include <library_types.h>

#include <array>
#include <cstddef>
#include <cstdint>

#include "csrc/common/status.h"
#include "csrc/common/warp.cuh"
#include "csrc/gemm/gemm.h"
#include "csrc/gemm/sm90/instructions.cuh"
#include "csrc/gemm/sm90/launch.cuh"
#include "csrc/gemm/sm90/staging.cuh"
#include "csrc/gemm/sm90/tensor_map.h"
#include "csrc/gemm/sm90/tile_products.cuh"
#include "csrc/groups/layout.h"

namespace jax_grouped::sm90 {

// Sizes of the tiles and the stages.
struct GatheredTile {
  static constexpr int kRows = kMathGroups * Fragment::kRows;
  static constexpr int kColumns = WideFragment::kColumns;
  static constexpr int kDepth = 64;
  static constexpr int kStages = 4;
  static constexpr int kStagedBoxes = 1;  // that a math group writes at once; it has room for twice as many
  static constexpr int kStagingBytes = 2 * kStagedBoxes * kBoxBytes;
  static constexpr Registers kRegisters{56, 224};
  // Pairs of rows of tiles in a swath; see kSwath.
  static constexpr int kSwath = 8;
};
static_assert(CanBeDivided(GatheredTile::kRegisters));

// One operand's part of a stage. It consists of boxes of 128 bytes by kBoxRows rows, one after another, each swizzled
// as the TMA does. If the operand is contiguous along the contraction axis, a box has kBoxRows of its rows. If the
// operand is transposed, a box has 64 of its columns and all of the stage's depth.
template <int kExtent, bool kTransposed>
struct OperandBoxes {
  static constexpr int kBoxRows = kTransposed ? GatheredTile::kDepth : GatheredTile::kRows;
  static constexpr int kBoxExtent = kTransposed ? 64 : kBoxRows;
  static constexpr int kCount = kExtent / kBoxExtent;
  static constexpr int kBytes = kBoxRows * 128;
  static_assert(kCount * kBytes == kExtent * GatheredTile::kDepth * 2);

  // Returns the descriptor of the part that begins at `first` of the operand's own axis.
  __device__ static uint64_t Descriptor(uint32_t stage, int first) {
    if constexpr (kTransposed) return TransposedOperand(stage + first / kBoxExtent * kBytes, GatheredTile::kDepth);
    return SwizzledOperand(stage + first * 128);
  }

  // Step of a descriptor's start from one product's 16 numbers of the depth to the next.
  static constexpr int kDepthStep = (kTransposed ? 16 * 128 : 16 * 2) / 16;
};

struct alignas(1024) GatheredShared {
  uint8_t a[GatheredTile::kStages][GatheredTile::kRows * GatheredTile::kDepth * 2];
  uint8_t b[GatheredTile::kStages][GatheredTile::kColumns * GatheredTile::kDepth * 2];
  uint8_t staging[kMathGroups][GatheredTile::kStagingBytes];
  Ring<GatheredTile::kStages> ring;
};
static_assert(sizeof(GatheredShared) <= kMostSharedBytes);
static_assert(offsetof(GatheredShared, b) % 1024 == 0 && offsetof(GatheredShared, staging) % 1024 == 0);

// Addresses of the members of GatheredShared.
struct GatheredAddresses : RingAddresses<GatheredShared> {
  __device__ uint32_t A(int stage) const {
    return base + offsetof(GatheredShared, a) + stage * sizeof(GatheredShared::a[0]);
  }
  __device__ uint32_t B(int stage) const {
    return base + offsetof(GatheredShared, b) + stage * sizeof(GatheredShared::b[0]);
  }
  __device__ uint32_t Staging(int group) const {
    return base + offsetof(GatheredShared, staging) + group * GatheredTile::kStagingBytes;
  }
};

// The array of which rows are gathered, and the row of it in each row of the operand.
struct GatheredRows {
  const char* base;
  int64_t row_bytes;
  int32_t rows;
  int32_t columns;
  const int32_t* indices;
};

// Returns the number of cluster tiles of `high` rows and `wide` columns of tiles, where `pairs` is ceil(high / 2). It
// is linear in `high` and `pairs`, so it also holds for their sums over groups.
JAX_GROUPED_HOST_DEVICE constexpr int64_t ClusterTiles(int64_t high, int64_t pairs, int64_t wide) {
  return (high - pairs) * wide + (2 * pairs - high) * CeilDiv(wide, kCluster);
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

using GatheredStage = RingSlot<GatheredTile::kStages>;

// Position of a block's tile, in tiles.
struct TilePosition {
  int32_t row;
  int32_t column;  // may lie right of the result, unless `shared`
  bool shared;     // both blocks of the cluster have the same columns
};

// Returns the position of the cluster tile `index` of `high` x `wide` tiles.
__device__ __forceinline__ TilePosition PositionOf(int32_t index, int32_t high, int32_t wide) {
  const auto rank = static_cast<int32_t>(RankInCluster());
  const int32_t pairs = high / kCluster;
  if (index >= pairs * wide) return {high - 1, (index - pairs * wide) * kCluster + rank, false};
  const int32_t swath = index / (GatheredTile::kSwath * wide);
  const int32_t in_swath = index % (GatheredTile::kSwath * wide);
  const int32_t swath_pairs = min(GatheredTile::kSwath, pairs - swath * GatheredTile::kSwath);
  const int32_t pair = swath * GatheredTile::kSwath + in_swath % swath_pairs;
  return {pair * kCluster + rank, in_swath / swath_pairs, true};
}

// Threads of the producer. Each copies the same 16 bytes of 128 in every 16th row of a box.
struct GatherPosition {
  static constexpr int kChunks = 8;
  static constexpr int kRowStep = kWarpGroupThreads / kChunks;

  __device__ static int Chunk() { return static_cast<int>(threadIdx.x) % kChunks; }
  __device__ static int Row() { return static_cast<int>(threadIdx.x) % kWarpGroupThreads / kChunks; }
  // Returns the thread's first byte in a box that is swizzled as by the TMA: the chunk's position is exclusively or'ed
  // with the row. The rows of a thread differ by multiples of 8, so all have the same swizzle.
  __device__ static uint32_t Offset() { return Row() * 128 + (Chunk() ^ Row() % 8) * 16; }
};
static_assert(GatherPosition::kRowStep % 8 == 0);

// The rows that a thread copies of a box of kBoxRows rows; -1 for zeros.
template <int kBoxRows>
struct RowsOfThread {
  static constexpr int kCount = kBoxRows / GatherPosition::kRowStep;
  int32_t row[kCount];

  // Loads the indices of rows `first` on, of which `rows` exist.
  __device__ __forceinline__ void Load(const GatheredRows& from, int64_t first, int32_t rows) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int in_box = GatherPosition::Row() + i * GatherPosition::kRowStep;
      row[i] = in_box < rows ? from.indices[first + in_box] : -1;
    }
  }

  // Starts the copies of columns `column` on to a box. Rows and columns that do not exist become zeros.
  __device__ __forceinline__ void Copy(const GatheredRows& from, int32_t column, uint32_t box) const {
    const int32_t own_column = column + GatherPosition::Chunk() * 8;
    const char* const at_column = from.base + int64_t{2} * own_column;
    const uint32_t own = box + GatherPosition::Offset();
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const bool exists = static_cast<uint32_t>(row[i]) < static_cast<uint32_t>(from.rows) && own_column < from.columns;
      CopyChunkOrZeros(own + i * GatherPosition::kRowStep * 128,
                       exists ? at_column + row[i] * from.row_bytes : from.base, exists);
    }
  }
};

// Copies an operand to a stage by the TMA. With `shared`, each block of the cluster copies one half to both blocks.
// `extent` counts along the operand's own axis, `depth` along the contraction axis. The second half of the operand
// begins `gap` after the end of the first half, along its own axis. One thread must call it.
template <int kExtent, bool kTransposed>
__device__ __forceinline__ void LoadOperand(const CUtensorMap* map, uint32_t stage, int32_t extent, int32_t depth,
                                            int32_t matrix, bool shared, uint32_t full, int32_t gap = 0) {
  using Boxes = OperandBoxes<kExtent, kTransposed>;
  const auto load = [&](int box, auto blocks) {
    const int32_t at = extent + box * Boxes::kBoxExtent + (box < Boxes::kCount / 2 ? 0 : gap);
    LoadBox<decltype(blocks)::value>(stage + box * Boxes::kBytes, map,
                                     {kTransposed ? at : depth, kTransposed ? depth : at, matrix}, full);
  };
  if (shared) {
    constexpr int kHalf = Boxes::kCount / kCluster;
    static_assert(kHalf * kCluster == Boxes::kCount);
    const int first = static_cast<int>(RankInCluster()) * kHalf;
#pragma unroll
    for (int i = 0; i < kHalf; ++i) load(first + i, std::integral_constant<int, kCluster>());
  } else {
#pragma unroll
    for (int i = 0; i < Boxes::kCount; ++i) load(i, std::integral_constant<int, 1>());
  }
}

// Arrivals that end a phase of `full` and of `empty`.
constexpr int kGatheredFullArrivals = 1 + kWarpGroupThreads;
constexpr int kGatheredEmptyArrivals = kMathThreads / 32 * kCluster;

// Releases a stage whose products this warp group has finished, in both blocks of the cluster: both copy to it.
__device__ __forceinline__ void ReleaseFromWarp(uint32_t empty) {
  if (const int lane = Lane(); lane < kCluster) ArriveAt(empty, lane);
}

__device__ __forceinline__ void Clear(WideFragment& sums) {
#pragma unroll
  for (Fragment& half : sums.halves) {
#pragma unroll
    for (float& value : half.value) value = 0.0f;
  }
}

// Adds the products of a tile's stages to the sums of a math group, and releases the stages. `rows` is the number of
// rows of the result from the tile's first on. If the group has none, it only releases the stages.
//
// The second group begins a tile kLag stages after the first. Each can then use the tensor cores while the other stores
// its result. The signal is not used for tiles of fewer stages than the ring has: the first group could signal twice
// before the second has waited.
template <typename T, bool kATransposed, bool kBTransposed>
__device__ __forceinline__ void MultiplyStages(const GatheredAddresses& shared, int group, int32_t stages, int32_t rows,
                                               GatheredStage& stage, WideFragment& sums) {
  using A = OperandBoxes<GatheredTile::kRows, kATransposed>;
  using B = OperandBoxes<GatheredTile::kColumns, kBTransposed>;
  if (rows <= group * Fragment::kRows) {
#pragma unroll 1
    for (int32_t i = 0; i < stages; ++i, stage.Advance()) {
      WaitForPhase(shared.Full(stage.index), stage.parity);
      ReleaseFromWarp(shared.Empty(stage.index));
    }
    return;
  }
  constexpr int kLag = 2;
  const bool lags = stages >= GatheredTile::kStages && rows > Fragment::kRows;
  if (lags && group == 1) WaitForWarpGroup();
  int previous = -1;
  for (int32_t i = 0; i < stages; ++i, stage.Advance()) {
    if (lags && group == 0 && i == kLag) SignalWarpGroup();
    WaitForPhase(shared.Full(stage.index), stage.parity);
    FenceShared();
    const uint64_t a = A::Descriptor(shared.A(stage.index), group * Fragment::kRows);
    const uint64_t b = B::Descriptor(shared.B(stage.index), 0);
    Pin(sums);
    BeginProducts();
#pragma unroll
    for (int step = 0; step < GatheredTile::kDepth / 16; ++step) {
      MultiplyWide<T, kATransposed, kBTransposed>(a + step * A::kDepthStep, b + step * B::kDepthStep, sums);
    }
    CommitProducts();
    Pin(sums);
    WaitForProducts<1>();
    if (previous >= 0) ReleaseFromWarp(shared.Empty(previous));
    previous = stage.index;
  }
  WaitForProducts();
  Pin(sums);
  if (previous >= 0) ReleaseFromWarp(shared.Empty(previous));
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

static_assert(kMostGatheredGroups * (sizeof(CUtensorMap) + (GroupTable::Size(1) + 1) * sizeof(int32_t)) +
                      sizeof(int32_t) <=
                  kWorkspaceBytes,
              "GroupRowsWorkspace::MaxBytes() fits the workspace");

// Returns boxes of 64 16-bit numbers by `box_rows` rows of a stack of matrices. `sizes` are those of the stack, the row
// length first.
inline BoxedTensor Boxes16(cudaDataType_t type, const void* data, const std::array<int64_t, 3>& sizes,
                           int64_t box_rows) {
  BoxedTensor boxes{};
  boxes.base = data;
  boxes.type = ResultMapType(type);
  for (const int64_t size : sizes) boxes.sizes.push_back(static_cast<cuuint64_t>(size));
  const auto row_bytes = static_cast<cuuint64_t>(2 * sizes[0]);
  boxes.strides = {row_bytes, row_bytes * static_cast<cuuint64_t>(sizes[1])};
  boxes.box = {GatheredTile::kDepth, static_cast<cuuint32_t>(box_rows), 1};
  return boxes;
}

// Returns the gathered rows of `data`, an operand whose rows have `columns` numbers.
inline GatheredRows Gathered(const GemmProblem& problem, const GemmBuffers& buffers, const void* data,
                             int64_t columns) {
  GatheredRows rows{};
  rows.base = static_cast<const char*>(data);
  rows.row_bytes = 2 * columns;
  rows.rows = static_cast<int32_t>(problem.gathered_from);
  rows.columns = static_cast<int32_t>(columns);
  rows.indices = buffers.row_indices;
  return rows;
}

// Calls launch(number) with a number of a 16-bit type.
template <typename Launch>
Status WithGatheredTypes(cudaDataType_t type, const Launch& launch) {
  return type == CUDA_R_16BF ? launch(__nv_bfloat16()) : launch(__half());
}

}  // namespace jax_grouped::sm90

#endif  // JAX_GROUPED_CSRC_GEMM_SM90_GATHERED_TILES_CUH_
