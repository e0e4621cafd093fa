// Windows, passes and work items: the parts of the input that the quantization kernels work on. They are cut along the
// borders of groups. With groups of 150, 90 and 40 rows:
//
//   chunk      0 1 2 3 4 5 6 7  8 9  10 11 12 13 14 15  16 17 18     16 rows of one group, or its last rows
//   group      |------- 0 ---------||------- 1 -------||-- 2 --|
//   row block  |----- 0 ------||-1-||------- 2 -------||-- 3 --|     128 rows of one group, or its last rows
//   pass       |----- 0 ------||---------- 1 ---------||-- 2 ...     whole row blocks in up to 8 slots, one per chunk
//   window     |-------------------------- 0 ----------------...     the row blocks that start in 32 chunks
//
// A work item is every fourth pass of a window, in the 128 columns of a tile. One block of threads does it; resident
// blocks take one after the other. A slab is one or more adjacent tiles of columns: all work items of a slab begin
// before those of the next one.

#ifndef JAX_GROUPED_CSRC_QUANTIZE_PASS_CUH_
#define JAX_GROUPED_CSRC_QUANTIZE_PASS_CUH_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "csrc/quantize/quantize.h"
#include "csrc/quantize/source.cuh"

namespace jax_grouped {

// Threads of a block. Each slot has one warp.
constexpr int kTileThreads = 32 * kSlots;

// Up to 8 chunks of whole row blocks, one in each slot of a tile.
struct Pass {
  Chunk chunks[kSlots];

  // Return the first and the last slot of the row block that contains `slot`.
  __device__ int FirstOfBlock(int slot) const { return slot - chunks[slot].row / kFp8Alignment % kSlots; }
  __device__ int LastOfBlock(int slot) const {
    const int after = (chunks[slot].group_rows - chunks[slot].row - 1) / kFp8Alignment;
    return min(slot + after, FirstOfBlock(slot) + kSlots - 1);
  }
};

// A window of the input. A row block is the 128 rows that share a scale: 8 chunks, or fewer in the last block of a
// group. A window has the row blocks that start in its 32 chunks. It has all of each block, so it reaches up to 7
// chunks past the 32. A pass takes as many successive row blocks as fit its slots.
struct alignas(16) Window {
  static constexpr int kChunks = kChunksPerWindow + kSlots;
  // Largest number of passes. Two successive passes have at least 9 chunks together, and the 7 passes before the last
  // one have at most 31.
  static constexpr int kMostPasses = 8;
  // Work items between which the passes are divided: the number of passes if all are full.
  static constexpr int kParts = kChunksPerWindow / kSlots;

  int32_t num_passes;
  int32_t pass_begins[kMostPasses + 1];  // first chunk of each pass, and the end of the last pass
  int32_t groups_begin;                  // the rows of all groups of the batch element
  int32_t groups_end;
  int32_t first_row;    // the element's first row
  int32_t other_begin;  // this window's part of the element's rows of no group, counted among these rows
  int32_t other_end;
  uint32_t taken;  // work items that resident blocks have taken, counted in the first window of all
  Chunk chunks[kChunks];
};
static_assert(sizeof(Window) == kWindowBytes);

// Raises the amax of each group, if anybody reads them, to those of its slots, find_amax(slot). Issues one atomic
// operation per group: many operations on the same address would be slow. A thread must call it for each of the `count`
// slots.
template <typename FindAmax>
__device__ void RecordAmax(int slot, const Chunk* chunks, const FindAmax& find_amax, int count, uint32_t* group_amax) {
  if (slot >= count || group_amax == nullptr) return;
  const int32_t group = chunks[slot].group;
  if (slot > 0 && chunks[slot - 1].group == group) return;
  uint32_t amax = 0;
  for (int i = slot; i < count && chunks[i].group == group; ++i) amax = max(amax, find_amax(i));
  if (amax >= kTinyBits) atomicMax(group_amax + group, amax);
}

__device__ inline Window* WindowAt(const QuantizeArguments& args, int32_t element, int32_t index) {
  return args.windows + static_cast<int64_t>(element) * args.num_windows + index;
}

// Returns the number of work items in one tile of columns.
JAX_GROUPED_HOST_DEVICE inline int64_t NumWorkItems(const QuantizeArguments& args) {
  return static_cast<int64_t>(args.groups.batch) * args.num_windows * Window::kParts;
}

// The work of one block of threads.
struct WorkItem {
  // Limit of a launch's second and third axes, which count blocks with 16 bits.
  static constexpr int64_t kMostAlongAxis = 1 << 15;

  // Number of successive work items in a tile of columns before the next tile begins. Their columnwise writes are
  // adjacent, and memory takes these 1 to 2 % faster. The last items of a raster group may not exist. In a single
  // launch blocks wait for each other, so every item must exist there.
  JAX_GROUPED_HOST_DEVICE static constexpr int RasterGroup(bool single_launch) { return single_launch ? 1 : 8; }

  // The third axis, along which blocks advance last, counts slabs. If there is one slab, it counts what the second axis
  // has no room for.
  static dim3 Blocks(const QuantizeArguments& args) {
    const int raster_group = RasterGroup(args.single_launch);
    const int64_t raster_groups = CeilDiv(NumWorkItems(args), raster_group);
    const int64_t along_y = raster_groups < kMostAlongAxis ? raster_groups : kMostAlongAxis;
    const int64_t along_z =
        HasSlabs(args) ? CeilDiv(args.num_column_tiles, args.slab_tiles) : CeilDiv(raster_groups, along_y);
    return dim3(args.slab_tiles * raster_group, static_cast<unsigned>(along_y), static_cast<unsigned>(along_z));
  }

  // Returns true if a launch has room for slabs.
  static bool CanHaveSlabs(const QuantizeArguments& args) {
    return !args.single_launch && CeilDiv(NumWorkItems(args), RasterGroup(false)) <= kMostAlongAxis &&
           args.num_column_tiles <= kMostAlongAxis;
  }

  // Returns the number of work items in all tiles of columns, with those of the last raster group that do not exist.
  JAX_GROUPED_HOST_DEVICE static uint32_t Count(const QuantizeArguments& args, uint32_t column_tiles) {
    constexpr int kRaster = RasterGroup(false);
    return static_cast<uint32_t>(CeilDiv(NumWorkItems(args), kRaster) * kRaster * column_tiles);
  }

  uint32_t first_column;
  int32_t element;
  int32_t window;  // counted in the element
  int part;
  bool exists;

  // Returns the work item at an index in [0, Count(args, column_tiles)).
  __device__ WorkItem(const QuantizeArguments& args, uint32_t index, uint32_t column_tiles) {
    constexpr uint32_t kRaster = RasterGroup(false);
    const uint32_t raster_group = index / (kRaster * column_tiles);
    const uint32_t in_group = index - raster_group * (kRaster * column_tiles);
    first_column = in_group / kRaster * kTileColumns;
    Find(args, raster_group * kRaster + in_group % kRaster);
  }

  // Returns the work of this block.
  __device__ WorkItem(const QuantizeArguments& args, bool single_launch) {
    const uint32_t raster_group = RasterGroup(single_launch);
    const bool has_slabs = !single_launch && HasSlabs(args);
    uint32_t tile = blockIdx.x / raster_group + (has_slabs ? blockIdx.z * args.slab_tiles : 0);
    // The two halves of a gated activation's gradient read the same inputs. Their tiles alternate, so that the second
    // of two tiles finds the inputs in the cache.
    if (args.interleave_halves) tile = tile % 2 * ((args.num_column_tiles + 1) / 2) + tile / 2;
    first_column = tile * kTileColumns;
    const uint32_t raster_index = has_slabs ? blockIdx.y : blockIdx.z * kMostAlongAxis + blockIdx.y;
    Find(args, raster_index * raster_group + blockIdx.x % raster_group);
    // The last slab may have fewer tiles.
    exists = exists && tile < args.num_column_tiles;
  }

 private:
  JAX_GROUPED_HOST_DEVICE static bool HasSlabs(const QuantizeArguments& args) {
    return args.slab_tiles < args.num_column_tiles;
  }

  __device__ void Find(const QuantizeArguments& args, uint32_t index) {
    exists = index < NumWorkItems(args);
    part = static_cast<int>(index % Window::kParts);
    const auto window_of_all = static_cast<int32_t>(index / Window::kParts);
    element = args.groups.batch == 1 ? 0 : window_of_all / args.num_windows;
    window = window_of_all - element * args.num_windows;
  }
};

// Tells whether the kernel of gated_gradient.cu takes a quantization with `activated_data`: a gated backward form with
// kBlock1D or given scales, 16-bit inputs, a multiple of 128 gates and both orientations, without dbias or skip.
bool IsGatedGradient(const Quantization& args);

// Launches that kernel. The setup must have been launched before.
Status LaunchGatedGradient(cudaStream_t stream, const Quantization& quantization);

// Tells whether the kernel of gathered_columns.cu takes a quantization: rows of 16-bit or FP8 numbers that are
// gathered, with kBlock1D and columnwise only, without dbias.
bool IsGatheredColumns(const Quantization& args);

// Launches that kernel. The setup must have been launched before.
Status LaunchGatheredColumns(cudaStream_t stream, const Quantization& args);

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_QUANTIZE_PASS_CUH_
