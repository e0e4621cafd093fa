// Quantization along the columns of a tile that lies in registers, and sums of the columns. Warps exchange what they
// know of columns through shared memory.

#ifndef JAX_GROUPED_CSRC_QUANTIZE_REGISTER_COLUMNS_CUH_
#define JAX_GROUPED_CSRC_QUANTIZE_REGISTER_COLUMNS_CUH_

#include <cstdint>

#include "csrc/common/warp.cuh"
#include "csrc/quantize/register_tile.cuh"
#include "csrc/quantize/rows.cuh"
#include "csrc/quantize/state.cuh"

namespace jax_grouped {

template <typename State>
class RegisterColumnQuantizer {
  static constexpr ScalingMode kMode = State::kMode;
  using Fp8 = typename State::Fp8;
  using Pair = RegisterTile::Pair;
  static constexpr int kLaneColumns = 8;
  static constexpr int kLaneRows = RegisterTile::kLaneRows;

 public:
  __device__ explicit RegisterColumnQuantizer(const State& state) : state_(state) {}

  // Stores the amaxes and the sums of the slot's columns. All threads of the block must call it, and must be
  // synchronized between it and Quantize.
  __device__ void Prepare(const RowQuantizer<State>& rows) {
    if (Uniform(Warp()) >= state_.count) return;
    if constexpr (State::kSlotScales) {
      finite_ = rows.IsFinite();
    } else if (state_.args.column_data != nullptr) {
      StoreAmax();
    }
    if (state_.args.partial_sums != nullptr) StoreSums();
  }

  // All threads of the block must call it.
  __device__ void Quantize() {
    if (state_.args.partial_sums != nullptr) AddUpSums();
    if (state_.args.column_data == nullptr) return;
    if constexpr (!State::kSlotScales) {
      FindScales();
      __syncthreads();
    }
    if (Uniform(Warp()) < state_.count) {
      if (finite_) {
        StoreData<false>();
      } else {
        StoreData<true>();
      }
    }
    __syncthreads();
    WriteData();
  }

 private:
  __device__ RegisterTile::Exchange& Shared() const { return *state_.tile.exchange; }
  __device__ const Chunk& ChunkAt(int slot) const { return state_.exchange.pass.chunks[slot]; }
  __device__ static int FirstColumn() { return Lane() % 16 * kLaneColumns; }
  // Returns the number of the lane's rows that exist.
  __device__ int ExistingRows() const { return ChunkAt(Warp()).rows - RegisterTile::FirstRow(); }

  // Return the first and the last of the slots that share the scales of `slot`.
  __device__ int FirstOfScale(int slot) const {
    const int first = state_.exchange.pass.FirstOfBlock(slot);
    return kMode == ScalingMode::kMx ? slot - (slot - first) % 2 : first;
  }
  __device__ int LastOfScale(int slot) const {
    const int last = state_.exchange.pass.LastOfBlock(slot);
    return kMode == ScalingMode::kMx ? min(FirstOfScale(slot) + 1, last) : last;
  }

  __device__ void StoreAmax() {
    float amax[kLaneColumns];
#pragma unroll
    for (int i = 0; i < kLaneColumns; ++i) {
      amax[i] = fabsf(state_.tile.At(0, i));
#pragma unroll
      for (int row = 1; row < kLaneRows; ++row) amax[i] = MaxOrNan(amax[i], fabsf(state_.tile.At(row, i)));
    }
    float largest = amax[0];
#pragma unroll
    for (const float of_column : amax) largest = MaxOrNan(largest, of_column);
    finite_ = __all_sync(kFullWarp, __float_as_uint(largest) < kInfinityBits);
    if (!finite_) {
#pragma unroll
      for (int i = 0; i < kLaneColumns; ++i) {
        uint32_t bits = 0;
#pragma unroll
        for (int row = 0; row < kLaneRows; ++row) bits = max(bits, FiniteBits(state_.tile.At(row, i)));
        amax[i] = __uint_as_float(bits);
      }
    }
    // The lanes of the other rows get half of the columns.
    const bool upper = Lane() / 16 == 1;
    uint32_t bits[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float other = __shfl_xor_sync(kFullWarp, upper ? amax[i] : amax[i + 4], 16);
      bits[i] = __float_as_uint(fmaxf(upper ? amax[i + 4] : amax[i], other));
    }
    *reinterpret_cast<uint4*>(&Shared().amax[Warp()][FirstColumn() + (upper ? 4 : 0)]) = {bits[0], bits[1], bits[2],
                                                                                          bits[3]};
    // If rows are scaled, they have found the slot's amax.
    if (state_.args.row_data != nullptr) return;
    const uint32_t of_slot = __reduce_max_sync(kFullWarp, max(max(bits[0], bits[1]), max(bits[2], bits[3])));
    if (Lane() == 0) state_.exchange.amax[Warp()] = of_slot;
  }

  // Computes the scales of columns, in place of the amaxes of the first slot that has them. Writes their inverses.
  __device__ void FindScales() const {
    const int column = threadIdx.x % kTileColumns;
    const int64_t feature = state_.first_column + int64_t{column};
    const bool exists = feature < state_.args.layout.features;
    for (int slot = threadIdx.x / kTileColumns; slot < state_.count; slot += kTileThreads / kTileColumns) {
      if (slot != FirstOfScale(slot)) continue;
      uint32_t amax = 0;
      for (int i = slot; i <= LastOfScale(slot); ++i) amax = max(amax, Shared().amax[i][column]);
      const int64_t position = ColumnScalePosition<kMode>(state_.args.layout, ChunkAt(slot), feature);
      float scale = 0.0f;
      if constexpr (kMode == ScalingMode::kMx) {
        const uint32_t exponent = MxExponent<Fp8>(amax, state_.args.amax_epsilon);
        scale = MxScale(exponent);
        if (exists) static_cast<uint8_t*>(state_.args.column_scale)[position] = static_cast<uint8_t>(exponent);
      } else {
        const Scale both = ScaleFromAmax<Fp8>(amax, state_.args.amax_epsilon, state_.args.pow2_scales);
        scale = both.scale;
        if (exists) static_cast<float*>(state_.args.column_scale)[position] = both.inverse;
      }
      Shared().amax[slot][column] = __float_as_uint(scale);
    }
  }

  template <bool kHideInfinity>
  __device__ void StoreData() const {
    float scales[kLaneColumns];
    if constexpr (State::kSlotScales) {
      const float scale = state_.SlotScale(Warp()).scale;
#pragma unroll
      for (float& of_column : scales) of_column = scale;
    } else {
      const auto* shared = reinterpret_cast<const float4*>(&Shared().amax[FirstOfScale(Warp())][FirstColumn()]);
      reinterpret_cast<float4*>(scales)[0] = shared[0];
      reinterpret_cast<float4*>(scales)[1] = shared[1];
    }
    const auto quantize = [](float low, float high, float scale) {
      if constexpr (kHideInfinity) return Quantize2<Fp8>(HideInfinity(low), HideInfinity(high), scale);
      return Quantize2<Fp8>(low, high, scale);
    };
    // The padding is zero. Without this mask, it would repeat a row.
    const int rows = min(max(ExistingRows(), 0), kLaneRows);
    const uint64_t mask = rows == 0 ? 0 : ~uint64_t{0} >> (8 * (kLaneRows - rows));
    auto* data = reinterpret_cast<uint2*>(state_.tile.Data(FirstColumn(), Warp())) + Lane() / 16;
#pragma unroll
    for (int i = 0; i < kLaneColumns; ++i) {
      const auto rows_of = [&](int row) {
        return quantize(state_.tile.At(row, i), state_.tile.At(row + 1, i), scales[i]);
      };
      const uint2 eight = {rows_of(0) | rows_of(2) << 16, rows_of(4) | rows_of(6) << 16};
      data[i * sizeof(Shared().data[0]) / sizeof(uint2)] = {eight.x & static_cast<uint32_t>(mask),
                                                            eight.y & static_cast<uint32_t>(mask >> 32)};
    }
  }

  // Writes all columns. 8 threads write the data of all slots of a column, which lie side by side in a group.
  __device__ void WriteData() const {
    const int slot = threadIdx.x % kSlots;
    if (slot >= state_.count) return;
    const Chunk& chunk = ChunkAt(slot);
    const int per_column = chunk.PerColumn();
    const int first = threadIdx.x / kSlots;
    auto* to = reinterpret_cast<uint4*>(state_.args.column_data) +
               ColumnDataChunk(state_.args.layout, chunk, state_.first_column) + int64_t{first} * per_column;
    constexpr int kStep = kTileThreads / kSlots;
#pragma unroll
    for (int column = 0; column < kTileColumns; column += kStep) {
      if (state_.first_column + int64_t{first + column} >= state_.args.layout.features) return;
      *to = *state_.tile.Data(first + column, slot);
      to += int64_t{kStep} * per_column;
    }
  }

  // Stores the sums of the slot's columns: 16 rows in order.
  __device__ void StoreSums() const {
    const int rows = ExistingRows();
    const bool upper = Lane() / 16 == 1;
#pragma unroll
    for (int i = 0; i < kLaneColumns; ++i) {
      float sum = 0.0f;
      // The upper rows are added to the sum of the lower ones.
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float lower = __shfl_up_sync(kFullWarp, sum, 16);
        if (half == 1 && !upper) continue;
        sum = half == 1 ? lower : 0.0f;
#pragma unroll
        for (int row = 0; row < kLaneRows; ++row) sum += row < rows ? state_.tile.At(row, i) : 0.0f;
      }
      if (upper) Shared().sums[Warp()][FirstColumn() + i] = sum;
    }
  }

  // Writes the sums of the columns of each row block. Adds up the slots pairwise, from the last one on.
  __device__ void AddUpSums() const {
    const int column = threadIdx.x % kTileColumns;
    const int64_t feature = state_.first_column + int64_t{column};
    if (feature >= state_.args.layout.features) return;
    for (int slot = threadIdx.x / kTileColumns; slot < state_.count; slot += kTileThreads / kTileColumns) {
      if (slot != state_.exchange.pass.FirstOfBlock(slot)) continue;
      const int last = state_.exchange.pass.LastOfBlock(slot);
      float sums[kSlots];
#pragma unroll
      for (int i = 0; i < kSlots; ++i) sums[i] = last - i >= slot ? Shared().sums[last - i][column] : 0.0f;
#pragma unroll
      for (int count = kSlots / 2; count > 0; count /= 2) {
#pragma unroll
        for (int i = 0; i < count; ++i) sums[i] = sums[2 * i + 1] + sums[2 * i];
      }
      const Chunk& chunk = ChunkAt(slot);
      const int64_t row_block = chunk.Before(RowBlock::k128) + chunk.row / kBlock;
      state_.args.partial_sums[row_block * state_.args.layout.features + feature] = sums[0];
    }
  }

  const State& state_;
  bool finite_ = true;
};

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_QUANTIZE_REGISTER_COLUMNS_CUH_
