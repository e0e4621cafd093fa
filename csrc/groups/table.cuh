// Device functions that fill in the group tables of layout.h, and zero the rows of no group.

#ifndef JAX_GROUPED_CSRC_GROUPS_TABLE_CUH_
#define JAX_GROUPED_CSRC_GROUPS_TABLE_CUH_

#include <algorithm>
#include <cstdint>
#include <cub/block/block_scan.cuh>
#include <cub/warp/warp_scan.cuh>

#include "csrc/common/launch.cuh"
#include "csrc/common/warp.cuh"
#include "csrc/groups/layout.cuh"

namespace jax_grouped {

// Addition of rows up to a capacity. Rows past it do not exist, so sums fit 32 bits whatever the sizes are.
struct AddRows {
  uint32_t capacity;
  __device__ uint32_t operator()(uint32_t a, uint32_t b) const { return min(a + b, capacity); }
};

// Results of a scan for one thread: the sum of the values before its own, and the sum of all values. Both include the
// scan's initial value.
template <typename T>
struct Sums {
  T before;
  T all;
};

// Numbers of row blocks of several kinds.
template <RowBlock... kRowBlocks>
struct Counts {
  static constexpr int kKinds = sizeof...(kRowBlocks);
  int32_t count[kKinds];

  // Returns the row blocks of one group with `rows` rows.
  __device__ static Counts CountIn(uint32_t rows) {
    return {{static_cast<int32_t>((rows + RowsOf(kRowBlocks) - 1) / RowsOf(kRowBlocks))...}};
  }
  // Returns the row blocks for which arrays have room before a batch element.
  __device__ static Counts BeforeElement(int32_t element, const RowBlockCounts& element_row_blocks) {
    return {{element * element_row_blocks.count[static_cast<int>(kRowBlocks)]...}};
  }
  __device__ void Write(const GroupTable& table, int32_t group) const {
    int i = 0;
    ((table.BlocksBefore(kRowBlocks)[group] = count[i++]), ...);
  }

  // Returns the counts get(i) for each kind i.
  template <typename Get>
  __device__ static Counts Each(const Get& get) {
    Counts counts;
#pragma unroll
    for (int i = 0; i < kKinds; ++i) counts.count[i] = get(i);
    return counts;
  }
};

using AllRowBlocks = Counts<RowBlock::k4, RowBlock::k16, RowBlock::k128, RowBlock::k256, RowBlock::k512>;

template <RowBlock... kRowBlocks>
__device__ Counts<kRowBlocks...> operator+(const Counts<kRowBlocks...>& a, const Counts<kRowBlocks...>& b) {
  return Counts<kRowBlocks...>::Each([&](int i) { return a.count[i] + b.count[i]; });
}

// Teams of threads that count groups together: the first warp, or the whole block.
struct FirstWarp {
  static constexpr int kThreads = 32;

  template <typename T, typename Add>
  __device__ static Sums<T> Scan(const T& own, const T& first, const Add& add) {
    using Scan = cub::WarpScan<T>;
    typename Scan::TempStorage storage;  // Whole warps do not use it.
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

// Fills in a group table with the threads of a team. Every thread takes a run of successive groups, then its next run
// after the runs of all threads. Longer runs need fewer scans, which take most of the time.
//
// The same instructions count runs of every length. With a copy for each length in every setup, small steps took an
// eighth longer. All of that time was lost in the kernels after the setups, presumably because their instructions did
// not stay in the instruction cache.
template <typename Team, typename Blocks>
__device__ void FillGroupTableTogether(const Groups& batch, int32_t element, const RowBlockCounts& element_row_blocks,
                                       const GroupTable& table) {
  constexpr int kMostInRun = 4;
  const int run = batch.num_groups <= Team::kThreads ? 1 : kMostInRun;
  const Groups groups = batch.At(element);
  const AddRows add_rows{static_cast<uint32_t>(groups.capacity)};
  const auto count_rows = [&](int32_t size) { return min(static_cast<uint32_t>(max(size, 0)), add_rows.capacity); };
  int32_t group = threadIdx.x * run;
  int32_t sizes[kMostInRun]{};
  const auto load_sizes = [&](uint32_t first) {
#pragma unroll
    for (int i = 0; i < kMostInRun; ++i) {
      if (i == run) break;
      sizes[i] = group + i < groups.num_groups ? LoadSize(groups, first + group + i) : 0;
    }
  };
  // The usual offset is 0. The loads of its sizes are issued before the offset is known.
  load_sizes(0);
  const int32_t first = FirstGroup(groups);
  uint32_t row = 0;
  if (first > 0) {
    uint32_t before = 0;
#pragma unroll 4
    for (int32_t i = threadIdx.x; i < first; i += Team::kThreads) {
      before = add_rows(before, count_rows(LoadSize(groups, i)));
    }
    row = Team::Scan(before, row, add_rows).all;
  }
  auto blocks = Blocks::BeforeElement(element, element_row_blocks);
  const auto element_row = static_cast<int32_t>(element * batch.capacity);
  const auto write = [&](int32_t index, uint32_t first_row, const Blocks& blocks_before) {
    table.FirstRow()[index] = element_row + static_cast<int32_t>(first_row);
    blocks_before.Write(table, index);
  };
  const auto add_blocks = [](const Blocks& a, const Blocks& b) { return a + b; };

#pragma unroll 1
  for (int32_t base = 0; base < groups.num_groups; base += run * Team::kThreads, group += run * Team::kThreads) {
    if (base > 0 || first != 0) load_sizes(first);
    uint32_t own_rows = 0;
#pragma unroll
    for (const int32_t size : sizes) own_rows = add_rows(own_rows, count_rows(size));
    const Sums<uint32_t> rows = Team::Scan(own_rows, row, add_rows);
    // Adds up the row blocks of the thread's groups. Passes `visit` each group's index, and the rows and row blocks
    // before it.
    const auto add_up = [&](Blocks sum, const auto& visit) {
      uint32_t first_row = rows.before;
#pragma unroll
      for (int i = 0; i < kMostInRun; ++i) {
        if (i == run) break;
        visit(group + i, first_row, sum);
        const uint32_t end = add_rows(first_row, count_rows(sizes[i]));
        sum = sum + Blocks::CountIn(end - first_row);
        first_row = end;
      }
      return sum;
    };
    const Sums<Blocks> sums = Team::Scan(add_up({}, [](auto...) {}), blocks, add_blocks);
    add_up(sums.before, [&](int32_t index, uint32_t first_row, const Blocks& blocks_before) {
      if (index < groups.num_groups) write(index, first_row, blocks_before);
    });
    row = rows.all;
    blocks = sums.all;
  }
  if (threadIdx.x == 0) write(groups.num_groups, row, blocks);
}

// Number of groups up to which one warp counts them. The warps of a block would spend most of the time waiting for each
// other.
constexpr int32_t kMostGroupsOfWarp = 256;

// Tells whether every block of a kernel may find the groups itself, which takes a warp about a microsecond. A setup
// kernel would take that, and one or two microseconds more to start and to be waited for.
JAX_GROUPED_HOST_DEVICE inline bool BlocksFindGroups(const Groups& groups) {
  return groups.batch == 1 && groups.num_groups <= kMostGroupsOfWarp;
}

constexpr int64_t kSharedTableSize = GroupTable::Size(kMostGroupsOfWarp);

// Fills in the table of these groups in shared memory, which has kSharedTableSize numbers, and returns it. All threads
// of the block must call it; they are synchronized afterwards.
template <typename Blocks>
__device__ GroupTable FindGroups(const Groups& groups, int32_t* numbers) {
  const GroupTable table{numbers, groups.num_groups};
  if (Uniform(Warp()) == 0) FillGroupTableTogether<FirstWarp, Blocks>(groups, 0, RowBlockCounts{}, table);
  __syncthreads();
  return table;
}

// Fills in the table of one batch element. Its arrays have room for `element_row_blocks`. Of the table's counts,
// writes only those of `Blocks`, a `Counts`. All threads of the block must call it; they are synchronized afterwards.
template <int kThreads, typename Blocks>
__device__ void FillGroupTable(const Groups& batch, int32_t element, const RowBlockCounts& element_row_blocks,
                               const GroupTable& table) {
  if (batch.num_groups > kMostGroupsOfWarp) {
    FillGroupTableTogether<WholeBlock<kThreads>, Blocks>(batch, element, element_row_blocks, table);
  } else if (Uniform(Warp()) == 0) {
    FillGroupTableTogether<FirstWarp, Blocks>(batch, element, element_row_blocks, table);
  }
  __syncthreads();
}

constexpr int kTableThreads = 512;

// Fills in the table of one batch element per block.
template <typename Blocks>
__global__ void __launch_bounds__(kTableThreads)
    SetUpTables(Groups batch, const __grid_constant__ RowBlockCounts element_row_blocks, GroupTable tables) {
  const auto element = static_cast<int32_t>(blockIdx.x);
  FillGroupTable<kTableThreads, Blocks>(batch, element, element_row_blocks, tables.At(element));
}

// Launches the setup of kernels that need nothing but the tables of all batch elements. `tables` is the first one.
template <typename Blocks>
Status LaunchTables(const char* what, cudaStream_t stream, const Groups& groups,
                    const RowBlockCounts& element_row_blocks, const GroupTable& tables) {
  return Launch(what, stream, {dim3(groups.batch), kTableThreads}, SetUpTables<Blocks>, groups, element_row_blocks,
                tables);
}

// Zeros bytes [begin, end), in words of 16 bytes. `blocks` blocks divide the words between them; this one is `block`.
template <int kThreads>
__device__ void ZeroBytes(void* base, int64_t begin, int64_t end, uint32_t block, uint32_t blocks) {
  uint4* words = static_cast<uint4*>(base);
  const int64_t stride = static_cast<int64_t>(blocks) * kThreads;
  for (int64_t i = begin / 16 + block * kThreads + threadIdx.x; i < RoundUp(end, 16) / 16; i += stride) {
    words[i] = make_uint4(0, 0, 0, 0);
  }
}

// Zeros the rows of an array that are not in `kept`. Blocks divide them as in ZeroBytes.
template <int kThreads>
__device__ void ZeroRowsAround(const RowRange& kept, int64_t rows, void* base, int64_t row_bytes, uint32_t block,
                               uint32_t blocks) {
  ZeroBytes<kThreads>(base, 0, kept.begin * row_bytes, block, blocks);
  ZeroBytes<kThreads>(base, kept.end * row_bytes, rows * row_bytes, block, blocks);
}

// Zeros a batch element's rows of no local group, with all blocks except the first. `groups` are the element's.
template <int kThreads>
__device__ void ZeroOtherRows(const Groups& groups, int32_t element, void* base, int64_t row_bytes) {
  char* const first = static_cast<char*>(base) + element * groups.capacity * row_bytes;
  ZeroRowsAround<kThreads>(LocalRows<kThreads>(groups), groups.capacity, first, row_bytes, blockIdx.x - 1,
                           gridDim.x - 1);
}

// Returns the number of blocks for zeroing up to `bytes` bytes. There are enough to write at memory speed, and few
// enough to cost nothing if nothing must be zeroed.
inline int ZeroingBlocks(int64_t bytes) {
  constexpr int64_t kBytesPerBlock = 16 * 1024;
  constexpr int64_t kMostBlocks = 264;
  return static_cast<int>(std::clamp<int64_t>(bytes / kBytesPerBlock, 1, kMostBlocks));
}

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_GROUPS_TABLE_CUH_
