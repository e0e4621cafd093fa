// Fills in the tables of groups that layout.h describes.

#ifndef JAX_GROUPED_CSRC_GROUPS_TABLE_CUH_
#define JAX_GROUPED_CSRC_GROUPS_TABLE_CUH_

#include <cstdint>
#include <cub/block/block_scan.cuh>
#include <cub/warp/warp_scan.cuh>

#include "csrc/common/warp.cuh"
#include "csrc/groups/layout.cuh"

namespace jax_grouped {

// Adds rows up to a capacity: those past it do not exist, and so sums fit 32 bits whatever the sizes are.
struct AddRows {
  uint32_t capacity;
  __device__ uint32_t operator()(uint32_t a, uint32_t b) const { return min(a + b, capacity); }
};

// What a scan gives a thread: the sum of what lies before its own value, and of all values. Both include what the scan
// begins with.
template <typename T>
struct Sums {
  T before;
  T all;
};

// How many units there are of each of some kinds.
template <Unit... kUnits>
struct Counts {
  static constexpr int kKinds = sizeof...(kUnits);
  int32_t count[kKinds];

  // The units of so many rows of one group.
  __device__ static Counts Of(uint32_t rows) {
    return {{static_cast<int32_t>((rows + UnitRows(kUnits) - 1) / UnitRows(kUnits))...}};
  }
  // Those for which arrays have room before a batch element.
  __device__ static Counts BeforeElement(int32_t element, const UnitCounts& element_units) {
    return {{element * element_units.count[static_cast<int>(kUnits)]...}};
  }
  __device__ void Write(const GroupTable& table, int32_t group) const {
    int i = 0;
    ((table.UnitsBefore(kUnits)[group] = count[i++]), ...);
  }

  // get(i) for the i-th kind.
  template <typename Get>
  __device__ static Counts Each(const Get& get) {
    Counts counts;
#pragma unroll
    for (int i = 0; i < kKinds; ++i) counts.count[i] = get(i);
    return counts;
  }
};

using AllUnits = Counts<Unit::k4, Unit::k16, Unit::k32, Unit::k128, Unit::k256, Unit::k512>;

template <Unit... kUnits>
__device__ Counts<kUnits...> operator+(const Counts<kUnits...>& a, const Counts<kUnits...>& b) {
  return Counts<kUnits...>::Each([&](int i) { return a.count[i] + b.count[i]; });
}

// The threads that count groups together: those of the first warp, or of the whole block.
struct FirstWarp {
  static constexpr int kThreads = 32;

  template <typename T, typename Add>
  __device__ static Sums<T> Scan(const T& own, const T& first, const Add& add) {
    using Scan = cub::WarpScan<T>;
    typename Scan::TempStorage storage;  // Of no use to a whole warp.
    Sums<T> sums;
    Scan(storage).ExclusiveScan(own, sums.before, first, add, sums.all);
    sums.all = add(first, sums.all);
    return sums;
  }
};

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

// FillGroupTable for a team. Every thread has a run of groups one after the other, then the next run after those of all
// threads. Longer runs take fewer scans, which take most of the time. The same instructions count runs of every length:
// with a copy for each in every setup, small steps took an eighth longer, all of it in the kernels after the setups,
// whose instructions presumably did not stay in their cache.
template <typename Team, typename Units>
__device__ void FillGroupTableTogether(const Groups& batch, int32_t element, const UnitCounts& element_units,
                                       const GroupTable& table) {
  constexpr int kMostInRun = 4;
  const int run = batch.num_groups <= Team::kThreads ? 1 : kMostInRun;
  const Groups groups = batch.At(element);
  const AddRows add_rows{static_cast<uint32_t>(groups.capacity)};
  const auto rows_of = [&](int32_t size) { return min(static_cast<uint32_t>(max(size, 0)), add_rows.capacity); };
  int32_t group = threadIdx.x * run;
  int32_t sizes[kMostInRun]{};
  const auto load_sizes = [&](uint32_t first) {
#pragma unroll
    for (int i = 0; i < kMostInRun; ++i) {
      if (i == run) break;
      sizes[i] = group + i < groups.num_groups ? LoadSize(groups, first + group + i) : 0;
    }
  };
  // The usual offset is 0; the sizes for it are under way before it is known.
  load_sizes(0);
  const int32_t first = FirstGroup(groups);
  uint32_t row = 0;
  if (first > 0) {
    uint32_t before = 0;
#pragma unroll 4
    for (int32_t i = threadIdx.x; i < first; i += Team::kThreads) {
      before = add_rows(before, rows_of(LoadSize(groups, i)));
    }
    row = Team::Scan(before, row, add_rows).all;
  }
  auto units = Units::BeforeElement(element, element_units);
  const auto element_row = static_cast<int32_t>(element * batch.capacity);
  const auto write = [&](int32_t index, uint32_t first_row, const Units& units_before) {
    table.FirstRow()[index] = element_row + static_cast<int32_t>(first_row);
    units_before.Write(table, index);
  };
  const auto add_units = [](const Units& a, const Units& b) { return a + b; };

#pragma unroll 1
  for (int32_t base = 0; base < groups.num_groups; base += run * Team::kThreads, group += run * Team::kThreads) {
    if (base > 0 || first != 0) load_sizes(first);
    uint32_t own_rows = 0;
#pragma unroll
    for (const int32_t size : sizes) own_rows = add_rows(own_rows, rows_of(size));
    const Sums<uint32_t> rows = Team::Scan(own_rows, row, add_rows);
    // Adds up the units of the thread's groups; `visit` is given the rows and the units before each.
    const auto add_up = [&](Units sum, const auto& visit) {
      uint32_t first_row = rows.before;
#pragma unroll
      for (int i = 0; i < kMostInRun; ++i) {
        if (i == run) break;
        visit(group + i, first_row, sum);
        const uint32_t end = add_rows(first_row, rows_of(sizes[i]));
        sum = sum + Units::Of(end - first_row);
        first_row = end;
      }
      return sum;
    };
    const Sums<Units> sums = Team::Scan(add_up({}, [](auto...) {}), units, add_units);
    add_up(sums.before, [&](int32_t index, uint32_t first_row, const Units& units_before) {
      if (index < groups.num_groups) write(index, first_row, units_before);
    });
    row = rows.all;
    units = sums.all;
  }
  if (threadIdx.x == 0) write(groups.num_groups, row, units);
}

// Up to so many groups are counted by a warp: the warps of a block would spend most of the time on each other.
constexpr int32_t kMostGroupsOfWarp = 256;

// Fills in the table of one element of a batch, whose arrays have room for so many units per element; of its counts
// only those of `Units`, a `Counts`. For the whole block, which is synchronized afterwards.
template <int kThreads, typename Units>
__device__ void FillGroupTable(const Groups& batch, int32_t element, const UnitCounts& element_units,
                               const GroupTable& table) {
  if (batch.num_groups > kMostGroupsOfWarp) {
    FillGroupTableTogether<WholeBlock<kThreads>, Units>(batch, element, element_units, table);
  } else if (Uniform(Warp()) == 0) {
    FillGroupTableTogether<FirstWarp, Units>(batch, element, element_units, table);
  }
  __syncthreads();
}

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_GROUPS_TABLE_CUH_
