// Tile in the registers of a block's warps, for inputs that are computed in float32. A tile in shared memory would take
// twice the space of a 16-bit one, and every number would be stored there once and loaded four times.

#ifndef JAX_GROUPED_CSRC_QUANTIZE_REGISTER_TILE_CUH_
#define JAX_GROUPED_CSRC_QUANTIZE_REGISTER_TILE_CUH_

#include <cstdint>

#include "csrc/common/warp.cuh"
#include "csrc/quantize/source.cuh"

namespace jax_grouped {

// A tile of 128 x 128 elements. Each warp holds the 16 rows of its slot, and a lane 8 columns of 8 successive rows.
// Shared memory holds the input until it is in registers, and what the warps exchange about columns.
struct RegisterTile {
  using Element = float;
  using Pair = PairOf<float>;
  static constexpr bool kInRegisters = true;
  static constexpr int kLaneRows = kFp8Alignment / 2;
  // Blocks of threads that are resident on an SM at once: a thread has 64 elements and needs up to 128 registers.
  static constexpr int kBlocks = 2;

  // Arrays of the input that a source may stage, and 16-byte vectors of each that a lane stages at once.
  static constexpr int kStagedArrays = 3;
  static constexpr int kStagedVectors = 8;

  struct Exchange {
    union {
      uint4 staged[kStagedArrays][kStagedVectors][32 * kSlots];  // of the input, each thread's own, before the data
      uint4 data[kTileColumns][kSlots];                          // FP8, columnwise: 16 bytes of each column and slot
    };
    float sums[kSlots][kTileColumns];      // of the slots' columns
    uint32_t amax[kSlots][kTileColumns];   // bits, and later the scales of the columns
    float weights[kSlots][kFp8Alignment];  // of the slots' rows
  };
  static constexpr int kBytes = sizeof(Exchange);

  Exchange* exchange;
  alignas(16) Pair rows[kLaneRows][4];

  __device__ explicit RegisterTile(void* shared) : exchange(static_cast<Exchange*>(shared)) {}

  // Returns the lane's first row in its slot.
  __device__ static int FirstRow() { return Lane() / 16 * kLaneRows; }
  // Returns the row of a slot that a lane holds in one of kLaneRows steps.
  __device__ static int RowOfStep(int step) { return FirstRow() + step; }
  static constexpr int kRowsPerStep = 1;

  // Loads the lane's 8 columns of the row of a step.
  __device__ __forceinline__ void LoadStep(int, int step, Pair (&pairs)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = rows[step][i];
  }

  // Returns an element of the lane.
  __device__ __forceinline__ float At(int row, int column) const {
    const Pair& pair = rows[row][column / 2];
    return column % 2 == 0 ? pair.First() : pair.Second();
  }

  // Returns where the exchange holds the columnwise data of a slot in a column. Lanes that write 8 columns of a slot,
  // and lanes that read one column of all slots, access different banks.
  __device__ uint4* Data(int column, int slot) const { return &exchange->data[column][slot ^ (column / 8 % kSlots)]; }
};
}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_QUANTIZE_REGISTER_TILE_CUH_
