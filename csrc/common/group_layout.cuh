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

// Rows of the group at `index` of the whole list: 0 for a negative size or an index that does not exist.
__device__ inline int64_t GroupSize(const Groups& groups, int64_t index) {
  if (index < 0 || index >= groups.total) return 0;
  return max(groups.sizes[index], 0);
}

// Index of the first local group, brought to where every local index fits 32 bits.
__device__ inline int64_t FirstGroup(const Groups& groups) {
  return min(max(static_cast<int64_t>(*groups.offset), -static_cast<int64_t>(groups.num_groups)),
             static_cast<int64_t>(groups.total));
}

struct RowRange {
  int64_t begin;
  int64_t end;
};

// What a thread adds up, of every kThreads-th group: rows before the local groups, and rows in them.
struct RowSums {
  int64_t before = 0;
  int64_t local = 0;

  template <int kThreads>
  __device__ static RowSums Of(const Groups& groups) {
    RowSums sums;
    const int64_t first = FirstGroup(groups);
    const int64_t last = first + groups.num_groups;
    for (int64_t i = threadIdx.x; i < groups.total && i < last; i += kThreads) {
      (i < first ? sums.before : sums.local) += GroupSize(groups, i);
    }
    return sums;
  }

  __device__ RowRange Range(int64_t capacity) const { return {min(before, capacity), min(before + local, capacity)}; }
};

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

// The threads of a block that count groups together.
template <int kBlockThreads>
struct WholeBlock {
  static constexpr int kThreads = kBlockThreads;

  // The rows of all local groups together; every thread gets the result.
  __device__ static RowRange LocalRows(const Groups& groups) {
    using Reduce = cub::BlockReduce<int64_t, kThreads>;
    __shared__ typename Reduce::TempStorage storage;
    __shared__ RowRange result;
    RowSums sums = RowSums::Of<kThreads>(groups);
    sums.before = Reduce(storage).Sum(sums.before);
    __syncthreads();
    sums.local = Reduce(storage).Sum(sums.local);
    if (threadIdx.x == 0) result = sums.Range(groups.capacity);
    __syncthreads();
    return result;
  }

  // At most once for each type between two synchronizations of the block.
  template <typename T, typename Add>
  __device__ static T ExclusiveScan(const T& own, const T& first, const Add& add) {
    using Scan = cub::BlockScan<T, kThreads, cub::BLOCK_SCAN_WARP_SCANS>;
    __shared__ typename Scan::TempStorage storage;
    T before;
    Scan(storage).ExclusiveScan(own, before, first, add);
    return before;
  }
};

struct FirstWarp {
  static constexpr int kThreads = 32;

  __device__ static RowRange LocalRows(const Groups& groups) {
    RowSums sums = RowSums::Of<kThreads>(groups);
    for (int distance = kThreads / 2; distance > 0; distance /= 2) {
      sums.before += __shfl_xor_sync(0xffffffff, sums.before, distance);
      sums.local += __shfl_xor_sync(0xffffffff, sums.local, distance);
    }
    return sums.Range(groups.capacity);
  }

  template <typename T, typename Add>
  __device__ static T ExclusiveScan(const T& own, const T& first, const Add& add) {
    using Scan = cub::WarpScan<T>;
    typename Scan::TempStorage storage;
    T before;
    Scan(storage).ExclusiveScan(own, before, first, add);
    return before;
  }
};

// Up to so many groups are counted by a warp: the warps of a block would spend most of the time on each other.
constexpr int32_t kMostGroupsOfWarp = 8 * FirstWarp::kThreads;

// Calls work(team) in all threads of the team that is to count so many groups. For the whole block, which is
// synchronized afterwards.
template <int kThreads, typename Work>
__device__ void WithTeam(int32_t num_groups, Work work) {
  if (num_groups > kMostGroupsOfWarp) {
    work(WholeBlock<kThreads>());
  } else if (threadIdx.x < FirstWarp::kThreads) {
    work(FirstWarp());
  }
  __syncthreads();
}

// FillGroupTable for a team. Every thread has a run of groups, in quads.
template <typename Team>
__device__ void FillGroupTableTogether(const Groups& batch, int32_t element, const UnitCounts& element_units,
                                       const GroupTable& table) {
  constexpr int kQuad = 4;
  const Groups groups = batch.At(element);
  const AddRows add_rows{static_cast<uint32_t>(groups.capacity)};
  const auto run = static_cast<int32_t>(RoundUp(CeilDiv(groups.num_groups, Team::kThreads), kQuad));
  const int32_t run_begin = min(static_cast<int32_t>(threadIdx.x) * run, groups.num_groups);
  const int32_t run_end = min(run_begin + run, groups.num_groups);

  // Groups past the last one have no rows, as have those that do not exist. The usual offset is 0; the sizes for it are
  // under way before it is known.
  const int64_t first = FirstGroup(groups);
  const Groups usual{groups.sizes, nullptr, min(groups.total, groups.num_groups), groups.num_groups, 0, 1};
  const auto load_sizes = [&](int32_t quad, uint32_t (&sizes)[kQuad]) {
    int64_t size[kQuad];
#pragma unroll
    for (int i = 0; i < kQuad; ++i) size[i] = GroupSize(usual, quad + i);
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      if (first != 0) size[i] = quad + i < groups.num_groups ? GroupSize(groups, first + quad + i) : 0;
      sizes[i] = min(static_cast<uint32_t>(size[i]), add_rows.capacity);
    }
  };
  // Calls visit(quad, begins, units) with the first rows of every quad's groups, and of the next one, and their units.
  const auto for_each_quad = [&](uint32_t start, auto visit) {
    for (int32_t quad = run_begin; quad < run_end; quad += kQuad) {
      uint32_t sizes[kQuad];
      load_sizes(quad, sizes);
      uint32_t begins[kQuad + 1] = {start};
      UnitCounts units[kQuad];
#pragma unroll
      for (int i = 0; i < kQuad; ++i) {
        begins[i + 1] = add_rows(begins[i], sizes[i]);
        units[i] = CountUnits(static_cast<int32_t>(begins[i + 1] - begins[i]));
      }
      start = begins[kQuad];
      visit(quad, begins, units);
    }
  };

  uint32_t rows = 0;
  for (int32_t quad = run_begin; quad < run_end; quad += kQuad) {
    uint32_t sizes[kQuad];
    load_sizes(quad, sizes);
#pragma unroll
    for (const uint32_t size : sizes) rows = add_rows(rows, size);
  }
  // Only with an offset are there rows before the local groups.
  const uint32_t before = first > 0 ? static_cast<uint32_t>(Team::LocalRows(groups).begin) : 0;
  const uint32_t start = Team::ExclusiveScan(rows, before, add_rows);

  UnitCounts counts{};
  for_each_quad(start, [&](int32_t, const auto&, const auto& units) {
#pragma unroll
    for (const UnitCounts& own : units) counts = AddUnitCounts()(counts, own);
  });
  UnitCounts first_units;
#pragma unroll
  for (int i = 0; i < kNumUnits; ++i) first_units.count[i] = element * element_units.count[i];
  UnitCounts next = Team::ExclusiveScan(counts, first_units, AddUnitCounts());

  // Where four groups begin is written at once; past the last one, that is where it ends.
  const auto element_row = static_cast<int32_t>(element * batch.capacity);
  const auto last = static_cast<int32_t>(GroupTable::Stride(groups.num_groups)) - kQuad;
  const auto write = [&](int32_t quad, const uint32_t (&begins)[kQuad + 1], const UnitCounts(&units)[kQuad]) {
    const auto row = [&](int i) { return element_row + static_cast<int32_t>(begins[i]); };
    reinterpret_cast<int4*>(table.FirstRow() + quad)[0] = {row(0), row(1), row(2), row(3)};
#pragma unroll
    for (int unit = 0; unit < kNumUnits; ++unit) {
      int32_t begin[kQuad + 1] = {next.count[unit]};
#pragma unroll
      for (int i = 0; i < kQuad; ++i) begin[i + 1] = begin[i] + units[i].count[unit];
      int32_t* starts = table.UnitsBefore(static_cast<Unit>(unit));
      reinterpret_cast<int4*>(starts + quad)[0] = {begin[0], begin[1], begin[2], begin[3]};
      if (quad + kQuad == groups.num_groups) starts[last] = begin[kQuad];
      next.count[unit] = begin[kQuad];
    }
    if (quad + kQuad == groups.num_groups) table.FirstRow()[last] = row(kQuad);
  };
  for_each_quad(start, write);
}

// Fills in the table of one element of a batch, whose arrays have room for so many units per element. For the whole
// block.
template <int kThreads>
__device__ void FillGroupTable(const Groups& batch, int32_t element, const UnitCounts& element_units,
                               const GroupTable& table) {
  WithTeam<kThreads>(batch.num_groups,
                     [&](auto team) { FillGroupTableTogether<decltype(team)>(batch, element, element_units, table); });
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
  int32_t filler[2];  // chunks are copied whole

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
