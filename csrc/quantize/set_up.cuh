// Work before quantization: group tables, windows, and the results of groups without rows.

#ifndef JAX_GROUPED_CSRC_QUANTIZE_SET_UP_CUH_
#define JAX_GROUPED_CSRC_QUANTIZE_SET_UP_CUH_

#include <cstdint>

#include "csrc/common/warp.cuh"
#include "csrc/quantize/pass.cuh"

namespace jax_grouped {

// Writes the results of groups without rows: their amax is 0, and their scale is the given one or that of zeros. The
// results of other groups are overwritten later. Threads divide the groups of a batch element between them.
template <typename Fp8>
__device__ void InitializeGroups(const QuantizeArguments& args, int32_t element, uint32_t thread, uint32_t threads) {
  for (int64_t i = thread; i < args.groups.num_groups; i += threads) {
    const int64_t group = static_cast<int64_t>(element) * args.groups.num_groups + i;
    args.amax[group] = 0;
    if (args.activated_amax != nullptr) args.activated_amax[group] = 0;
    if (!args.group_scales) continue;
    if (args.activated_scale != nullptr) {
      args.activated_scale[group] = ClampScale(args.given_activated_scale[group]).inverse;
    }
    const Scale scale =
        args.given_scale ? ClampScale(args.scale[group]) : ScaleFromAmax<Fp8>(0, args.amax_epsilon, args.pow2_scales);
    if (args.row_scale != nullptr) static_cast<float*>(args.row_scale)[group] = scale.inverse;
    if (args.column_scale != nullptr) static_cast<float*>(args.column_scale)[group] = scale.inverse;
  }
}

// Fills in a window from `table`, which need not be the table in `args`. Whole warps must call it.
__device__ inline void FillWindow(const QuantizeArguments& args, const GroupTable& table, int32_t element,
                                  int32_t index, Window* window) {
  const auto lane = static_cast<int>(threadIdx.x % 32);
  const int32_t* starts = table.BlocksBefore(RowBlock::k16);
  const int32_t first = starts[0] + index * static_cast<int32_t>(kChunksPerWindow);

  // Every lane has one of the window's own chunks, and one of the chunks after them.
  const int32_t chunk = first + lane;
  const bool exists = chunk < starts[table.num_groups];
  const int32_t group = exists ? FindGroup(starts, 0, table.num_groups, chunk) : 0;
  const uint32_t blocks = __ballot_sync(kFullWarp, exists && (chunk - starts[group]) % kSlots == 0);
  const int last_block = 31 - __clz(blocks);  // -1 without blocks
  const int32_t last_group = __shfl_sync(kFullWarp, group, max(last_block, 0));
  const int begin = blocks == 0 ? 0 : __ffs(blocks) - 1;
  const int end = blocks == 0 ? 0 : min(last_block + kSlots, starts[last_group + 1] - first);
  if (exists && lane >= begin && lane < end) window->chunks[lane] = LoadChunk(table, element, group, chunk);
  if (lane + 32 < end) window->chunks[lane + 32] = LoadChunk(table, element, last_group, chunk + 32);

  int passes = 0;
  for (int chunks_before = begin; chunks_before < end; ++passes) {
    if (lane == 0) window->pass_begins[passes] = chunks_before;
    // The pass ends with the last block that fits.
    const int most = chunks_before + kSlots;
    chunks_before = end <= most ? end : 31 - __clz(blocks & kFullWarp >> (31 - min(most, 31)));
  }
  if (lane > 0) return;
  window->num_passes = passes;
  window->taken = 0;
  window->pass_begins[passes] = end;
  window->groups_begin = table.FirstRow()[0];
  window->groups_end = table.FirstRow()[table.num_groups];
  window->first_row = static_cast<int32_t>(element * args.groups.capacity);
  const auto outside = static_cast<int32_t>(args.groups.capacity) - (window->groups_end - window->groups_begin);
  const int32_t per_window = outside / args.num_windows + (outside % args.num_windows > 0);
  window->outside_begin = static_cast<int32_t>(min(static_cast<int64_t>(per_window) * index, int64_t{outside}));
  window->outside_end = static_cast<int32_t>(min(int64_t{window->outside_begin} + per_window, int64_t{outside}));
}

// Stores a batch element's table for the sums of dbias. All threads of the block must call it.
__device__ inline void StoreTable(const QuantizeArguments& args, const GroupTable& table, int32_t element) {
  if (args.partial_sums == nullptr) return;
  int32_t* copy = args.table.At(element).base;
  for (int64_t i = threadIdx.x; i < GroupTable::Size(table.num_groups); i += blockDim.x) copy[i] = table.base[i];
}

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_QUANTIZE_SET_UP_CUH_
