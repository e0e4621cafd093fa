// Device side of group_layout.h: finding groups from sizes that only the device knows. Groups are those of one batch
// element, rows are counted from its first.

#ifndef JAX_GROUPED_CSRC_COMMON_GROUP_LAYOUT_CUH_
#define JAX_GROUPED_CSRC_COMMON_GROUP_LAYOUT_CUH_

#include <cstdint>
#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>
#include <cub/warp/warp_scan.cuh>

#include "csrc/common/group_layout.h"

namespace jax_grouped {

// The size at `index` of the whole list, which may be negative: 0 for an index that does not exist.
__device__ inline int32_t LoadSize(const Groups& groups, int64_t index) {
  return index >= 0 && index < groups.total ? groups.sizes[index] : 0;
}

// The rows of that group.
__device__ inline int64_t GroupSize(const Groups& groups, int64_t index) { return max(LoadSize(groups, index), 0); }

// Index of the first local group, brought to where every local index fits 32 bits.
__device__ inline int64_t FirstGroup(const Groups& groups) {
  return min(max(static_cast<int64_t>(*groups.offset), -static_cast<int64_t>(groups.num_groups)),
             static_cast<int64_t>(groups.total));
}

struct RowRange {
  int64_t begin;
  int64_t end;
};

// The rows of all local groups together. For the whole block; every thread gets the result.
template <int kThreads>
__device__ RowRange LocalRows(const Groups& groups) {
  using Reduce = cub::BlockReduce<int64_t, kThreads>;
  __shared__ typename Reduce::TempStorage storage;
  __shared__ RowRange result;

  const int64_t first = FirstGroup(groups);
  const int64_t last = first + groups.num_groups;
  int64_t before = 0;
  int64_t local = 0;
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

// Calls visit(i, rows) for every local group i, each from one thread. For the whole block. `begin` is the first row of
// the first local group.
template <int kThreads, typename Visit>
__device__ void ForEachGroup(const Groups& groups, int64_t begin, Visit visit) {
  using Scan = cub::BlockScan<int64_t, kThreads, cub::BLOCK_SCAN_WARP_SCANS>;
  __shared__ typename Scan::TempStorage storage;

  const int64_t first = FirstGroup(groups);
  const auto run = static_cast<int32_t>(CeilDiv(groups.num_groups, kThreads));
  const int32_t run_begin = min(static_cast<int32_t>(threadIdx.x) * run, groups.num_groups);
  const int32_t run_end = min(run_begin + run, groups.num_groups);
  int64_t rows = 0;
#pragma unroll 8
  for (int32_t i = run_begin; i < run_end; ++i) rows += GroupSize(groups, first + i);
  int64_t start;
  Scan(storage).ExclusiveSum(rows, start);
  start += begin;
  for (int32_t i = run_begin; i < run_end; ++i) {
    const int64_t end = start + GroupSize(groups, first + i);
    visit(i, RowRange{min(start, groups.capacity), min(end, groups.capacity)});
    start = end;
  }
}

// How many units of each kind so many rows of one group have.
__device__ inline UnitCounts CountUnits(int32_t rows) {
  UnitCounts counts;
#pragma unroll
  for (int i = 0; i < kNumUnits; ++i) {
    const uint32_t unit = UnitRows(static_cast<Unit>(i));
    counts.count[i] = static_cast<int32_t>((static_cast<uint32_t>(rows) + unit - 1) / unit);
  }
  return counts;
}

struct AddUnitCounts {
  __device__ UnitCounts operator()(const UnitCounts& a, const UnitCounts& b) const {
    UnitCounts sum;
#pragma unroll
    for (int i = 0; i < kNumUnits; ++i) sum.count[i] = a.count[i] + b.count[i];
    return sum;
  }
};

// Adds rows up to a capacity: those past it do not exist, and so sums fit 32 bits whatever the sizes are.
struct AddRows {
  uint32_t capacity;
  __device__ uint32_t operator()(uint32_t a, uint32_t b) const { return min(a + b, capacity); }
};

// What the scan of a team gives a thread: the sum of what lies before its own value, and of all values. Both include
// what the scan begins with.
template <typename T>
struct Sums {
  T before;
  T all;
};

// The threads of a block that count groups together.
template <int kBlockThreads>
struct WholeBlock {
  static constexpr int kThreads = kBlockThreads;

  template <typename T, typename Add>
  __device__ static Sums<T> Scan(const T& own, const T& first, const Add& add) {
    using Scan = cub::BlockScan<T, kThreads, cub::BLOCK_SCAN_WARP_SCANS>;
    __shared__ typename Scan::TempStorage storage;
    Sums<T> sums;
    Scan(storage).ExclusiveScan(own, sums.before, first, add, sums.all);
    sums.all = add(first, sums.all);
    __syncthreads();  // The next scan may write to the storage.
    return sums;
  }
};

struct FirstWarp {
  static constexpr int kThreads = 32;

  template <typename T, typename Add>
  __device__ static Sums<T> Scan(const T& own, const T& first, const Add& add) {
    using Scan = cub::WarpScan<T>;
    typename Scan::TempStorage storage;
    Sums<T> sums;
    Scan(storage).ExclusiveScan(own, sums.before, first, add, sums.all);
    sums.all = add(first, sums.all);
    return sums;
  }
};

// FillGroupTable for a team. Every thread has kRun groups one after the other, then those kRun * kThreads further.
// Longer runs take fewer scans, which take most of the time, but more instructions where a thread has but one group.
template <typename Team, int kRun>
__device__ void FillGroupTableTogether(const Groups& batch, int32_t element, const UnitCounts& element_units,
                                       const GroupTable& table) {
  const Groups groups = batch.At(element);
  const AddRows add_rows{static_cast<uint32_t>(groups.capacity)};
  const auto rows_of = [&](int32_t size) { return min(static_cast<uint32_t>(max(size, 0)), add_rows.capacity); };
  int32_t group = threadIdx.x * kRun;
  int32_t sizes[kRun];
  const auto load_sizes = [&](int64_t first) {
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      sizes[i] = group + i < groups.num_groups ? LoadSize(groups, first + group + i) : 0;
    }
  };
  // The usual offset is 0; the sizes for it are under way before it is known.
  load_sizes(0);
  const int64_t first = FirstGroup(groups);
  uint32_t row = 0;
  if (first > 0) {
    uint32_t before = 0;
#pragma unroll 4
    for (int64_t i = threadIdx.x; i < first; i += Team::kThreads) {
      before = add_rows(before, rows_of(LoadSize(groups, i)));
    }
    row = Team::Scan(before, row, add_rows).all;
  }
  UnitCounts units;
#pragma unroll
  for (int i = 0; i < kNumUnits; ++i) units.count[i] = element * element_units.count[i];
  const auto element_row = static_cast<int32_t>(element * batch.capacity);
  const auto write = [&](int32_t index, uint32_t first_row, const UnitCounts& units_before) {
    table.FirstRow()[index] = element_row + static_cast<int32_t>(first_row);
#pragma unroll
    for (int i = 0; i < kNumUnits; ++i) table.UnitsBefore(static_cast<Unit>(i))[index] = units_before.count[i];
  };

#pragma unroll 1
  for (int32_t base = 0; base < groups.num_groups; base += kRun * Team::kThreads, group += kRun * Team::kThreads) {
    if (base > 0 || first != 0) load_sizes(first);
    uint32_t own_rows = 0;
#pragma unroll
    for (const int32_t size : sizes) own_rows = add_rows(own_rows, rows_of(size));
    const Sums<uint32_t> rows = Team::Scan(own_rows, row, add_rows);
    uint32_t rows_before = rows.before;
    UnitCounts own_units[kRun];
    UnitCounts all_own_units{};
    uint32_t first_rows[kRun];
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      first_rows[i] = rows_before;
      rows_before = add_rows(rows_before, rows_of(sizes[i]));
      own_units[i] = CountUnits(static_cast<int32_t>(rows_before - first_rows[i]));
      all_own_units = AddUnitCounts()(all_own_units, own_units[i]);
    }
    const Sums<UnitCounts> sums = Team::Scan(all_own_units, units, AddUnitCounts());
    UnitCounts units_before = sums.before;
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      if (group + i < groups.num_groups) write(group + i, first_rows[i], units_before);
      units_before = AddUnitCounts()(units_before, own_units[i]);
    }
    row = rows.all;
    units = sums.all;
  }
  if (threadIdx.x == 0) write(groups.num_groups, row, units);
}

// FillGroupTable for the first warp.
__device__ inline void FillGroupTableByWarp(const Groups& batch, int32_t element, const UnitCounts& element_units,
                                            const GroupTable& table) {
  if (batch.num_groups <= FirstWarp::kThreads) {
    FillGroupTableTogether<FirstWarp, 1>(batch, element, element_units, table);
  } else {
    FillGroupTableTogether<FirstWarp, 4>(batch, element, element_units, table);
  }
}

// Up to so many groups are counted by a warp: the warps of a block would spend most of the time on each other.
constexpr int32_t kMostGroupsOfWarp = 256;

// Fills in the table of one element of a batch, whose arrays have room for so many units per element. For the whole
// block, which is synchronized afterwards.
template <int kThreads>
__device__ void FillGroupTable(const Groups& batch, int32_t element, const UnitCounts& element_units,
                               const GroupTable& table) {
  if (batch.num_groups > kMostGroupsOfWarp) {
    FillGroupTableTogether<WholeBlock<kThreads>, 4>(batch, element, element_units, table);
  } else if (threadIdx.x < FirstWarp::kThreads) {
    FillGroupTableByWarp(batch, element, element_units, table);
  }
  __syncthreads();
}

// The group whose units include `unit`, among the groups [low, high): the last one that starts at or before it, so
// never an empty one. `unit` is not before the first of them, and before the end of the last.
__device__ inline int32_t FindGroup(const int32_t* starts, int32_t low, int32_t high, int32_t unit) {
  while (high - low > 1) {
    const int32_t middle = (low + high) / 2;
    (starts[middle] <= unit ? low : high) = middle;
  }
  return low;
}

// Up to 16 consecutive rows of one group: what columnwise data is made of. Chunks are counted through all groups, from
// where those of a batch element may begin.
struct alignas(16) Chunk {
  int32_t group;  // counted through the batch
  int32_t group_rows;
  int32_t row;        // its first row, counted in the group
  int32_t first_row;  // and in the array
  int32_t rows;       // how many it has
  UnitCounts before;  // units before the group
  int32_t filler;     // chunks are copied whole

  __device__ int32_t Before(Unit unit) const { return before.count[static_cast<int>(unit)]; }
  // How many chunks the group has.
  __device__ int32_t PerColumn() const { return (group_rows + kFp8Alignment - 1) / kFp8Alignment; }
};

// The chunk of that index, which is in that group; `element` is the group's batch element.
__device__ inline Chunk LoadChunk(const GroupTable& table, int32_t element, int32_t group, int32_t index) {
  Chunk chunk{};
  chunk.group = element * table.num_groups + group;
#pragma unroll
  for (int i = 0; i < kNumUnits; ++i) chunk.before.count[i] = table.UnitsBefore(static_cast<Unit>(i))[group];
  const int32_t group_begin = table.FirstRow()[group];
  chunk.group_rows = table.FirstRow()[group + 1] - group_begin;
  chunk.row = (index - chunk.Before(Unit::k16)) * kFp8Alignment;
  chunk.first_row = group_begin + chunk.row;
  chunk.rows = min(kFp8Alignment, chunk.group_rows - chunk.row);
  return chunk;
}

// The static part of where scales lie.
struct ScaleLayout {
  int64_t features;
  bool swizzled;

  __device__ int64_t FeatureBlocks() const { return CeilDiv(features, kBlock); }
};

// Position of a chunk of one feature in columnwise data, in units of its 16 elements.
__device__ inline int64_t ColumnDataUnit(const ScaleLayout& layout, const Chunk& chunk, int64_t feature) {
  return layout.features * chunk.Before(Unit::k16) + feature * chunk.PerColumn() + chunk.row / kFp8Alignment;
}

// The byte of a block in a 128 x 4 tile of swizzled scales.
__device__ inline int64_t InSwizzledTile(int64_t tile, int outer, int inner) {
  return 512 * tile + outer % 32 * 16 + outer / 32 * 4 + inner;
}

// Position of the scale of one row of a chunk in rowwise data. `block` counts along the features.
template <ScalingMode kMode>
__device__ int64_t RowScalePosition(const ScaleLayout& layout, const Chunk& chunk, int row_in_chunk, int32_t block) {
  const int32_t row = chunk.row + row_in_chunk;
  switch (kMode) {
    case ScalingMode::kTensor:
      return chunk.group;
    case ScalingMode::kBlock1D:
      return layout.FeatureBlocks() * 4 * chunk.Before(Unit::k4) + block * RoundUp(chunk.group_rows, 4) + row;
    case ScalingMode::kBlock2D:
      return RoundUp(layout.FeatureBlocks(), 4) * (chunk.Before(Unit::k128) + row / kBlock) + block;
    case ScalingMode::kMx:
      break;
  }
  if (layout.swizzled) {
    const int64_t tile = layout.FeatureBlocks() * (chunk.Before(Unit::k128) + row / kBlock) + block / 4;
    return InSwizzledTile(tile, row % kBlock, block % 4);
  }
  return CeilDiv(layout.features, kMxBlock) * (16 * static_cast<int64_t>(chunk.Before(Unit::k16)) + row) + block;
}

// Position of the scale of a chunk's rows in columnwise data, for one feature, or one block of features with kBlock2D.
template <ScalingMode kMode>
__device__ int64_t ColumnScalePosition(const ScaleLayout& layout, const Chunk& chunk, int64_t feature) {
  switch (kMode) {
    case ScalingMode::kTensor:
      return chunk.group;
    case ScalingMode::kBlock1D:
      return layout.features * (chunk.Before(Unit::k128) + chunk.row / kBlock) + feature;
    case ScalingMode::kBlock2D:
      return 4 * (layout.FeatureBlocks() * chunk.Before(Unit::k512) + feature * CeilDiv(chunk.group_rows, 4 * kBlock)) +
             chunk.row / kBlock;
    case ScalingMode::kMx:
      break;
  }
  if (layout.swizzled) {
    const int64_t tile = layout.FeatureBlocks() * chunk.Before(Unit::k128) +
                         feature / kBlock * CeilDiv(chunk.group_rows, kBlock) + chunk.row / kBlock;
    return InSwizzledTile(tile, static_cast<int>(feature % kBlock), chunk.row % kBlock / kMxBlock);
  }
  return layout.features * chunk.Before(Unit::k32) + feature * CeilDiv(chunk.group_rows, kMxBlock) +
         chunk.row / kMxBlock;
}

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_COMMON_GROUP_LAYOUT_CUH_
