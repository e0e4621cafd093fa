// Device side of layout.h: functions that find groups from sizes that only the device knows. The groups are those of
// one batch element. Rows are counted from the element's first row.

#ifndef JAX_GROUPED_CSRC_GROUPS_LAYOUT_CUH_
#define JAX_GROUPED_CSRC_GROUPS_LAYOUT_CUH_

#include <cstdint>
#include <cub/block/block_reduce.cuh>

#include "csrc/common/warp.cuh"
#include "csrc/groups/layout.h"

namespace jax_grouped {

// Returns the size at `index` of the whole list, or 0 past its end. An index that has wrapped around below 0 is also
// past the end.
__device__ inline int32_t LoadSize(const Groups& groups, uint32_t index) {
  if (index >= static_cast<uint32_t>(groups.total)) return 0;
  return groups.stack_rows > 0 ? groups.stack_rows : groups.sizes[index];
}

// Returns the number of rows of the group at `index`.
__device__ inline int64_t GroupSize(const Groups& groups, uint32_t index) { return max(LoadSize(groups, index), 0); }

// Returns the index of the first local group, clamped so that every local index fits 32 bits. Whole warps must call it.
__device__ inline int32_t FirstGroup(const Groups& groups) {
  return Uniform(min(max(*groups.offset, -groups.num_groups), groups.total));
}

// Returns a batch element's `i`-th row of no group, where groups have the rows [begin, end) of the array.
__device__ inline int64_t OtherRow(int64_t first_row, int64_t i, int64_t begin, int64_t end) {
  return first_row + i < begin ? first_row + i : first_row + i - begin + end;
}

struct RowRange {
  int64_t begin;
  int64_t end;
};

// Returns the rows of all local groups together. All threads of the block must call it, and all get the result.
template <int kThreads>
__device__ RowRange LocalRows(const Groups& groups) {
  using Reduce = cub::BlockReduce<int64_t, kThreads>;
  __shared__ typename Reduce::TempStorage storage;
  __shared__ RowRange result;

  const int32_t first = FirstGroup(groups);
  const int64_t last = int64_t{first} + groups.num_groups;
  int64_t before = 0;
  int64_t local = 0;
#pragma unroll 1  // There are seldom more groups than threads.
  for (int64_t i = threadIdx.x; i < groups.total && i < last; i += kThreads) {
    (i < first ? before : local) += GroupSize(groups, i);
  }
  before = Reduce(storage).Sum(before);
  __syncthreads();
  local = Reduce(storage).Sum(local);
  if (threadIdx.x == 0) {
    result.begin = min(before, groups.capacity);
    result.end = min(before + local, groups.capacity);
  }
  __syncthreads();
  return result;
}

// Returns the group among [low, high) that contains `index`, which counts rows or row blocks, as `starts` does. It is
// the last group that starts at or before the index, and so never an empty one. The index must lie in a group.
__device__ inline int32_t FindGroup(const int32_t* starts, int32_t low, int32_t high, int32_t index) {
  while (high - low > 1) {
    const int32_t middle = (low + high) / 2;
    (starts[middle] <= index ? low : high) = middle;
  }
  return low;
}

// Up to 16 consecutive rows of one group. Columnwise data consists of chunks. Chunks are counted through all groups,
// from the first that a batch element may have. They are copied whole, so they have no padding.
struct alignas(16) Chunk {
  int32_t group;  // index in the batch
  int32_t group_rows;
  int32_t row;            // the chunk's first row, counted in the group
  int32_t first_row;      // the chunk's first row, counted in the array
  int32_t rows;           // number of rows
  RowBlockCounts before;  // row blocks before the group
  int32_t filler[2];      // unused

  __device__ int32_t Before(RowBlock block) const { return before.count[static_cast<int>(block)]; }
  // Returns the group's number of chunks.
  __device__ int32_t PerColumn() const { return (group_rows + kFp8Alignment - 1) / kFp8Alignment; }
};
static_assert(sizeof(Chunk) == 5 * sizeof(int32_t) + sizeof(RowBlockCounts) + sizeof(Chunk::filler));

// Returns the chunk at `index`, which must be in `group`. `element` is the group's batch element.
__device__ inline Chunk LoadChunk(const GroupTable& table, int32_t element, int32_t group, int32_t index) {
  Chunk chunk{};
  chunk.group = element * table.num_groups + group;
#pragma unroll
  for (int i = 0; i < kNumRowBlocks; ++i) chunk.before.count[i] = table.BlocksBefore(static_cast<RowBlock>(i))[group];
  const int32_t group_begin = table.FirstRow()[group];
  chunk.group_rows = table.FirstRow()[group + 1] - group_begin;
  chunk.row = (index - chunk.Before(RowBlock::k16)) * kFp8Alignment;
  chunk.first_row = group_begin + chunk.row;
  chunk.rows = min(kFp8Alignment, chunk.group_rows - chunk.row);
  return chunk;
}

// Returns the position of a chunk of one feature in columnwise data, counted in chunks of 16 elements.
__device__ inline int64_t ColumnDataChunk(const ScaleLayout& layout, const Chunk& chunk, int64_t feature) {
  return layout.features * chunk.Before(RowBlock::k16) + feature * chunk.PerColumn() + chunk.row / kFp8Alignment;
}

// Returns the byte offset of a block's scale of kMx. These scales consist of tiles of 128 x 4, in the order that
// Blackwell's tensor cores read.
__device__ inline int64_t InScaleTile(int64_t tile, int outer, int inner) {
  return 512 * tile + outer % 32 * 16 + outer / 32 * 4 + inner;
}

// Returns the number of rowwise kBlock1D scales, with zeros as padding, that `rows` rows have per block of features.
__device__ inline int64_t ScaleRows(int32_t rows) { return RoundUp(rows, 4); }

// Returns the position of the kBlock1D scale of one row of a group in rowwise data. The group has `rows` rows, and
// `blocks_before` blocks of 4 rows lie before it.
__device__ inline int64_t RowBlockScalePosition(int64_t feature_blocks, int32_t blocks_before, int64_t block,
                                                int32_t rows, int32_t row) {
  return 4 * (feature_blocks * blocks_before) + block * ScaleRows(rows) + row;
}

// Returns the position of the scale of one row of a chunk in rowwise data. `block` counts along the features.
template <ScalingMode kMode>
__device__ int64_t RowScalePosition(const ScaleLayout& layout, const Chunk& chunk, int row_in_chunk, int32_t block) {
  const int32_t row = chunk.row + row_in_chunk;
  switch (kMode) {
    case ScalingMode::kTensor:
      return chunk.group;
    case ScalingMode::kBlock1D:
      return RowBlockScalePosition(layout.FeatureBlocks(), chunk.Before(RowBlock::k4), block, chunk.group_rows, row);
    case ScalingMode::kBlock2D:
      return RoundUp(layout.FeatureBlocks(), 4) * (chunk.Before(RowBlock::k128) + row / kBlock) + block;
    case ScalingMode::kMx:
      break;
  }
  const int64_t tile = layout.FeatureBlocks() * (chunk.Before(RowBlock::k128) + row / kBlock) + block / 4;
  return InScaleTile(tile, row % kBlock, block % 4);
}

// Returns the position of the scale of a chunk's rows in columnwise data, for one feature, or for one block of features
// with kBlock2D.
template <ScalingMode kMode>
__device__ int64_t ColumnScalePosition(const ScaleLayout& layout, const Chunk& chunk, int64_t feature) {
  switch (kMode) {
    case ScalingMode::kTensor:
      return chunk.group;
    case ScalingMode::kBlock1D:
      return layout.features * (chunk.Before(RowBlock::k128) + chunk.row / kBlock) + feature;
    case ScalingMode::kBlock2D:
      return 4 * (layout.FeatureBlocks() * chunk.Before(RowBlock::k512) +
                  feature * CeilDiv(chunk.group_rows, 4 * kBlock)) +
             chunk.row / kBlock;
    case ScalingMode::kMx:
      break;
  }
  const int64_t tile = layout.FeatureBlocks() * chunk.Before(RowBlock::k128) +
                       feature / kBlock * CeilDiv(chunk.group_rows, kBlock) + chunk.row / kBlock;
  return InScaleTile(tile, static_cast<int>(feature % kBlock), chunk.row % kBlock / kMxBlock);
}

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_GROUPS_LAYOUT_CUH_
