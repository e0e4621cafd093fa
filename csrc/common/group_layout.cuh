// Device side of group_layout.h: finding groups from sizes that only the device knows.

#ifndef JAX_GROUPED_CSRC_COMMON_GROUP_LAYOUT_CUH_
#define JAX_GROUPED_CSRC_COMMON_GROUP_LAYOUT_CUH_

#include <cstdint>
#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>

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
  using Scan = cub::BlockScan<int64_t, kThreads>;
  __shared__ typename Scan::TempStorage storage;

  const int64_t first = FirstGroup(groups);
  int64_t running = begin;
  for (int32_t chunk = 0; chunk < groups.num_groups; chunk += kThreads) {
    const int32_t i = chunk + static_cast<int32_t>(threadIdx.x);
    const int64_t size = i < groups.num_groups ? GroupSize(groups, first + i) : 0;
    int64_t start;
    int64_t total;
    Scan(storage).ExclusiveSum(size, start, total);
    start += running;
    if (i < groups.num_groups) {
      visit(i, RowRange{min(start, groups.capacity), min(start + size, groups.capacity)});
    }
    running += total;
    __syncthreads();
  }
}

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_COMMON_GROUP_LAYOUT_CUH_
