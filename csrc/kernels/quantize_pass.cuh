// What the quantization kernels work on: windows of the input, cut along the borders of groups.

#ifndef JAX_GROUPED_CSRC_KERNELS_QUANTIZE_PASS_CUH_
#define JAX_GROUPED_CSRC_KERNELS_QUANTIZE_PASS_CUH_

#include <cstdint>

#include "csrc/kernels/quantize_source.cuh"

namespace jax_grouped {

constexpr uint32_t kFullWarp = 0xffffffff;

// Up to 8 chunks, of whole row blocks, in as many slots of a tile.
struct Pass {
  Chunk chunks[kSlots];

  // The slots of the row block that has this one, [first, last].
  __device__ int FirstOfBlock(int slot) const { return slot - chunks[slot].row / kFp8Alignment % kSlots; }
  __device__ int LastOfBlock(int slot) const {
    const int after = (chunks[slot].group_rows - chunks[slot].row - 1) / kFp8Alignment;
    return min(slot + after, FirstOfBlock(slot) + kSlots - 1);
  }
};

// Adds the slots' largest values to those of their groups, with one atomic operation per group: memory would be slow at
// many to the same address. For the whole block.
__device__ inline void RecordAmax(const Pass& pass, const uint32_t* slot_amax, int count, uint32_t* group_amax) {
  const int slot = threadIdx.x;
  if (slot >= count) return;
  const int32_t group = pass.chunks[slot].group;
  if (slot > 0 && pass.chunks[slot - 1].group == group) return;
  uint32_t amax = 0;
  for (int i = slot; i < count && pass.chunks[i].group == group; ++i) amax = max(amax, slot_amax[i]);
  if (amax >= kTinyBits) atomicMax(group_amax + group, amax);
}

// Row blocks are the 128 rows that share a scale: 8 chunks, the last block of a group fewer. A window has the blocks
// that start in its 8 chunks, all of them whole. So it reaches up to 7 chunks past its own, and is worked on in two
// passes: all blocks but the last have at most 7 chunks together.
struct alignas(16) Window {
  int32_t counts[2];      // chunks of each pass
  int32_t outside_begin;  // this window's share of the rows that are in no group, counted among these
  int32_t outside_end;
  int32_t groups_begin;  // the rows of all groups
  int32_t groups_end;
  Pass passes[2];
};
static_assert(sizeof(Window) == kWindowBytes && kSlots == kChunksPerWindow);

// What a kernel of one call gets besides its source.
struct QuantizeArguments {
  GroupTable table;
  const Window* windows;
  int64_t tokens;
  ScaleLayout layout;
  uint32_t num_windows;
  uint32_t num_column_tiles;
  bool pow2_scales;
  bool given_scale;
  bool interleave_halves;
  float amax_epsilon;
  const float* scale;
  const bool* skip;
  uint8_t* row_data;
  void* row_scale;
  uint8_t* column_data;
  void* column_scale;
  uint32_t* amax;  // bits of float32
  float* partial_sums;

  __device__ bool Skips() const { return skip != nullptr && *skip; }

  // Column tiles in the order in which they are taken. The halves of a gated activation's gradient read the same
  // inputs, so their tiles alternate, and the second of two finds them in the cache.
  __device__ int64_t FirstColumn(uint32_t tile) const {
    if (interleave_halves) tile = tile % 2 * ((num_column_tiles + 1) / 2) + tile / 2;
    return static_cast<int64_t>(tile) * kTileColumns;
  }
};

// Fills in one slot of both passes of a window; slot 0 also fills in the rest.
__device__ inline void FillWindow(const GroupTable& table, int64_t tokens, int32_t num_windows, int32_t index, int slot,
                                  Window* window) {
  const int32_t* starts = table.UnitsBefore(Unit::k16);
  const int32_t total = starts[table.num_groups];
  // The first chunk, not before `chunk`, that starts a row block of its group, or else is past it.
  const auto next_row_block = [&](int32_t group, int32_t chunk) {
    const int32_t start = starts[group];
    return min(start + (chunk - start + kSlots - 1) / kSlots * kSlots, starts[group + 1]);
  };
  const int32_t first = index * kSlots;
  const int32_t next = first + kSlots;
  int32_t first_group = 0;
  int32_t last_group = 0;
  int32_t begin = 0;
  int32_t middle = 0;
  int32_t end = 0;
  if (first < total) {
    first_group = FindGroup(starts, 0, table.num_groups, first);
    last_group = next < starts[first_group + 1]
                     ? first_group
                     : FindGroup(starts, first_group, table.num_groups, min(next, total - 1));
    begin = next_row_block(first_group, first);
    end = next < total ? next_row_block(last_group, next) : total;
    middle = end;
    if (end - begin > kSlots) {
      middle = end - 1 - (end - 1 - starts[FindGroup(starts, first_group, last_group + 1, end - 1)]) % kSlots;
    }
  }
  if (slot < middle - begin) {
    window->passes[0].chunks[slot] = LoadChunk(table, begin + slot, first_group, last_group + 1);
  }
  if (slot < end - middle) {
    window->passes[1].chunks[slot] = LoadChunk(table, middle + slot, first_group, last_group + 1);
  }
  if (slot != 0) return;
  window->counts[0] = middle - begin;
  window->counts[1] = end - middle;
  window->groups_begin = table.FirstRow()[0];
  window->groups_end = table.FirstRow()[table.num_groups];
  const auto outside = static_cast<int32_t>(tokens) - (window->groups_end - window->groups_begin);
  const int32_t share = outside / num_windows + (outside % num_windows > 0);
  window->outside_begin = static_cast<int32_t>(min(static_cast<int64_t>(share) * index, int64_t{outside}));
  window->outside_end = static_cast<int32_t>(min(int64_t{window->outside_begin} + share, int64_t{outside}));
}

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_KERNELS_QUANTIZE_PASS_CUH_
