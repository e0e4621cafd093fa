// What the quantization kernels work on: windows of the input, cut along the borders of groups.

#ifndef JAX_GROUPED_CSRC_QUANTIZE_PASS_CUH_
#define JAX_GROUPED_CSRC_QUANTIZE_PASS_CUH_

#include <cstdint>

#include "csrc/quantize/source.cuh"

namespace jax_grouped {

// Warps are slots.
constexpr int kTileThreads = 32 * kSlots;

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

// Row blocks are the 128 rows that share a scale: 8 chunks, the last block of a group fewer. A window has the blocks
// that start in its 32 chunks, all of them whole, so it reaches up to 7 chunks past them. A pass takes as many
// successive blocks as fit its slots.
struct alignas(16) Window {
  static constexpr int kChunks = kChunksPerWindow + kSlots;
  // Two successive passes have at least 9 chunks together, and 7 passes before the last one at most 31.
  static constexpr int kMostPasses = 8;
  // Blocks of threads that share out the passes: as many as there are if all are full.
  static constexpr int kParts = kChunksPerWindow / kSlots;

  int32_t num_passes;
  int32_t pass_begins[kMostPasses + 1];  // their first chunks, and the end of the last
  int32_t groups_begin;                  // the rows of all groups of the batch element
  int32_t groups_end;
  int32_t first_row;      // the element's first row
  int32_t outside_begin;  // this window's share of the element's rows that are in no group, counted among these
  int32_t outside_end;
  int32_t filler;
  Chunk chunks[kChunks];
};
static_assert(sizeof(Window) == kWindowBytes);

// Adds the slots' largest values to those of their groups, with one atomic operation per group: memory would be slow at
// many to the same address. For the whole block.
__device__ inline void RecordAmax(const Chunk* chunks, const uint32_t* slot_amax, int count, uint32_t* group_amax) {
  const int slot = threadIdx.x;
  if (slot >= count) return;
  const int32_t group = chunks[slot].group;
  if (slot > 0 && chunks[slot - 1].group == group) return;
  uint32_t amax = 0;
  for (int i = slot; i < count && chunks[i].group == group; ++i) amax = max(amax, slot_amax[i]);
  if (amax >= kTinyBits) atomicMax(group_amax + group, amax);
}

// What a kernel of one call gets besides its source.
struct QuantizeArguments {
  Groups groups;
  UnitCounts element_units;  // for which the arrays of a batch element have room
  GroupTable table;          // of the first element
  Window* windows;           // [batch, num_windows]
  ScaleLayout layout;
  int32_t num_windows;  // of an element
  uint32_t num_column_tiles;
  bool pow2_scales;
  bool given_scale;
  bool interleave_halves;
  bool group_scales;  // whether there is one scale for each group
  bool single_launch;
  float amax_epsilon;
  const float* scale;
  const bool* skip;  // [batch]
  uint8_t* row_data;
  void* row_scale;
  uint8_t* column_data;
  void* column_scale;
  uint32_t* amax;  // bits of float32
  float* partial_sums;

  __device__ Window* WindowAt(int32_t element, int32_t index) const {
    return windows + static_cast<int64_t>(element) * num_windows + index;
  }
  __device__ bool Skips(int32_t element) const { return skip != nullptr && skip[element]; }

  // How many blocks of threads share out all windows; as many again for every tile of columns.
  JAX_GROUPED_HOST_DEVICE int64_t Shares() const {
    return static_cast<int64_t>(groups.batch) * num_windows * Window::kParts;
  }
};

// What a block of threads takes: some passes of a window, in the columns of a tile.
struct Share {
  // Blocks of a launch are counted in 16 bits along its second and third axes.
  static constexpr int64_t kMostAlongAxis = 1 << 15;

  // So many successive shares take a tile of columns before the next tile is begun: what they write columnwise lies
  // side by side, and memory takes it 1 to 2 % faster. Some of the last may not exist, so in a single launch, whose
  // blocks wait for each other, every share is on its own.
  JAX_GROUPED_HOST_DEVICE static constexpr int Band(bool single_launch) { return single_launch ? 1 : 8; }

  static dim3 Blocks(const QuantizeArguments& args) {
    const int band = Band(args.single_launch);
    const int64_t bands = CeilDiv(args.Shares(), band);
    const int64_t along_y = bands < kMostAlongAxis ? bands : kMostAlongAxis;
    return dim3(args.num_column_tiles * band, static_cast<unsigned>(along_y),
                static_cast<unsigned>(CeilDiv(bands, along_y)));
  }

  uint32_t first_column;
  int32_t element;
  int32_t window;  // counted in the element
  int part;
  bool exists;

  __device__ Share(const QuantizeArguments& args, bool single_launch) {
    const uint32_t band = Band(single_launch);
    uint32_t tile = blockIdx.x / band;
    // The halves of a gated activation's gradient read the same inputs, so their tiles alternate, and the second of two
    // finds them in the cache.
    if (args.interleave_halves) tile = tile % 2 * ((args.num_column_tiles + 1) / 2) + tile / 2;
    first_column = tile * kTileColumns;
    const uint32_t index = (blockIdx.z * kMostAlongAxis + blockIdx.y) * band + blockIdx.x % band;
    exists = index < args.Shares();
    part = static_cast<int>(index % Window::kParts);
    const auto window_of_all = static_cast<int32_t>(index / Window::kParts);
    element = args.groups.batch == 1 ? 0 : window_of_all / args.num_windows;
    window = window_of_all - element * args.num_windows;
  }
};

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_QUANTIZE_PASS_CUH_
