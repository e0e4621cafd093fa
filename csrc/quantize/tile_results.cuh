// Results of the quantization of a tile: rowwise and columnwise data and scales, and sums of its columns.

#ifndef JAX_GROUPED_CSRC_QUANTIZE_TILE_RESULTS_CUH_
#define JAX_GROUPED_CSRC_QUANTIZE_TILE_RESULTS_CUH_

#include <cstdint>
#include <cstring>

#include "csrc/common/warp.cuh"
#include "csrc/quantize/pass.cuh"

namespace jax_grouped {

// Shared memory in which the warps exchange values about their slots.
struct WarpExchange {
  Pass pass;
  Scale scales[kSlots];
  uint32_t amax[kSlots];  // bits
};

template <ScalingMode kScalingMode, typename Fp8Type, typename T>
struct TileState {
  static constexpr ScalingMode kMode = kScalingMode;
  using Fp8 = Fp8Type;
  using Element = T;
  // True if all rows of a slot have one scale in a tile.
  static constexpr bool kSlotScales = kMode == ScalingMode::kTensor || kMode == ScalingMode::kBlock2D;

  const QuantizeArguments& args;
  const InputTile<Element>& tile;
  WarpExchange& exchange;
  uint32_t first_column;
  int count;  // chunks in the pass

  // Returns the scale of the slot's group, or of its 128 x 128 block.
  __device__ Scale SlotScale(int slot) const {
    if constexpr (kMode == ScalingMode::kTensor) return exchange.scales[slot];
    uint32_t amax = 0;
    for (int i = exchange.pass.FirstOfBlock(slot); i <= exchange.pass.LastOfBlock(slot); ++i) {
      amax = max(amax, exchange.amax[i]);
    }
    return ScaleFromAmax<Fp8>(amax, args.scale_rule);
  }
};

template <typename State>
class RowQuantizer {
  static constexpr ScalingMode kMode = State::kMode;
  using Fp8 = typename State::Fp8;
  using Pair = PairOf<typename State::Element>;

  // Steps per slot. 16 lanes hold 8 columns each of a row, so a warp processes two rows per step and a slot in 8 steps.
  static constexpr int kSteps = kFp8Alignment / 2;
  static constexpr int kRowLanes = 16;
  // Lanes of a row that share a scale.
  static constexpr int kScaleLanes = kMode == ScalingMode::kMx ? kMxBlock / 8 : kRowLanes;

 public:
  __device__ explicit RowQuantizer(const State& state) : state_(state) {}

  // Finds the slot's largest finite absolute value and stores it in the exchange. Must precede Quantize.
  __device__ void FindAmax() {
    const auto find = [&](const auto& amax) {
      uint32_t largest = 0;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        alignas(16) Pair row[4];
        state_.tile.Load8(Warp(), RowOfStep(step), Lane() % kRowLanes, row);
        const uint2 bits = amax(row);
        amax_[step] = max(bits.x, bits.y);
        largest = max(largest, amax_[step]);
      }
      return __reduce_max_sync(kFullWarp, largest);
    };
    uint32_t largest = find([](const auto& row) { return PairwiseAmax(row); });
    finite_ = largest < kInfinityBits;
    if (!finite_) {
      largest = find([](const auto& row) {
        __syncwarp();  // One step at a time needs fewer registers.
        return PairwiseFiniteAmax(row);
      });
    }
    if (Lane() == 0) state_.exchange.amax[Warp()] = largest;
  }

  __device__ void Quantize() {
    float scales[kSteps];
    if constexpr (State::kSlotScales) {
      const float scale = state_.SlotScale(Warp()).scale;
#pragma unroll
      for (float& step_scale : scales) step_scale = scale;
    } else {
      FindScales(scales);
    }
    if (RowColumn() >= state_.args.layout.features) return;
    if (finite_) {
      Write<false>(scales);
    } else {
      Write<true>(scales);
    }
  }

 private:
  __device__ static int RowOfStep(int step) { return step * 2 + Lane() / kRowLanes; }
  __device__ uint32_t RowColumn() const { return state_.first_column + Lane() % kRowLanes * 8; }
  __device__ const Chunk& SlotChunk() const { return state_.exchange.pass.chunks[Warp()]; }

  template <bool kHideInfinity>
  __device__ void Write(const float (&scales)[kSteps]) const {
    const Chunk& chunk = SlotChunk();
    const int64_t first_row = chunk.first_row + static_cast<int64_t>(RowOfStep(0));
    uint8_t* out = state_.args.row_data + first_row * state_.args.layout.features + RowColumn();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      alignas(16) Pair row[4];
      state_.tile.Load8(Warp(), RowOfStep(step), Lane() % kRowLanes, row);
      const uint2 data = Quantize8<Fp8, kHideInfinity>(row, scales[step]);
      if (RowOfStep(step) < chunk.rows) *reinterpret_cast<uint2*>(out) = data;
      out += 2 * state_.args.layout.features;
    }
  }

  // Computes the scales of the blocks that contain the lane's parts of rows, from their amaxes. Writes the inverses.
  //
  // Lanes that share scales divide the rows between them: each gets the complete amaxes of one step or a few, computes
  // their scales once, and passes them to the others.
  __device__ void FindScales(float (&scales)[kSteps]) {
    constexpr int kOwned = kScaleLanes < kSteps ? kSteps / kScaleLanes : 1;
    const auto larger = [](uint32_t a, uint32_t b) { return max(a, b); };
    const int first_step = ReduceSteps<kScaleLanes>(amax_, larger);
    float owned[kOwned];
#pragma unroll
    for (int i = 0; i < kOwned; ++i) owned[i] = WriteScale(RowOfStep(first_step + i), amax_[i]);
    // The exchange is inverted here: each step's scale comes from the lane that holds the step.
    constexpr int kLanesPerStep = kScaleLanes * kOwned / kSteps;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int source = Lane() / kScaleLanes * kScaleLanes + step / kOwned * kLanesPerStep;
      scales[step] = __shfl_sync(kFullWarp, owned[step % kOwned], source);
    }
  }

  // Returns the scale of a row's block from its amax. Writes the inverse, and zeros for rows that do not exist: those
  // that pad a group to a multiple of 4, or with kMx to 16, where the rest of a tile is zeroed before.
  __device__ float WriteScale(int row, uint32_t amax) const {
    const Chunk& chunk = SlotChunk();
    const bool exists = row < chunk.rows;
    const auto block = static_cast<int32_t>(state_.first_column / (kScaleLanes * 8)) + Lane() % kRowLanes / kScaleLanes;
    if constexpr (kMode == ScalingMode::kMx) {
      const uint32_t exponent = MxExponent<Fp8>(amax, state_.args.scale_rule);
      // If any columns of a block exist, its first columns do.
      if (state_.first_column + Lane() % kRowLanes / kScaleLanes * kMxBlock < state_.args.layout.features) {
        static_cast<uint8_t*>(state_.args.row_scale)[RowScalePosition<kMode>(state_.args.layout, chunk, row, block)] =
            exists ? exponent : 0;
      }
      return MxScale(exponent);
    } else {
      const Scale scale = ScaleFromAmax<Fp8>(amax, state_.args.scale_rule);
      if (Lane() % 2 == 0 && row < ScaleRows(chunk.rows)) {
        static_cast<float*>(state_.args.row_scale)[RowScalePosition<kMode>(state_.args.layout, chunk, row, block)] =
            exists ? scale.inverse : 0.0f;
      }
      return scale.scale;
    }
  }

  const State& state_;
  uint32_t amax_[kSteps];
  bool finite_ = true;
};

// Quantizer of a tile's columns. A lane handles a pair of columns in each half of the tile, in one slot, so that 8
// lanes write 128 contiguous bytes. A warp handles 8 columns of each half.
template <typename State>
class ColumnQuantizer {
  static constexpr ScalingMode kMode = State::kMode;
  using Fp8 = typename State::Fp8;
  using Pair = PairOf<typename State::Element>;
  using Largest = typename Pair::Largest;
  static constexpr int kScales = 4;  // of a lane: two columns in each half of the tile

 public:
  __device__ explicit ColumnQuantizer(const State& state) : state_(state) {}

  __device__ void Quantize() {
    const Columns columns = FindColumns();
    if (state_.args.partial_sums != nullptr) {
#pragma unroll 1
      for (int half = 0; half < 2; ++half) WriteSums(columns, PairOfHalf(half), Exists(columns, half));
    }
    if (state_.args.column_data == nullptr) return;

    // Lanes without a slot stay until the last shuffle. Values that are needed again are read again from the tile: 16
    // pairs would fill the registers.
    Largest largest[2]{};
    if (columns.has_slot) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const auto visit = [&](int, const Pair(&rows)[4]) {
          largest[half] = Pair::Max(largest[half], PairwiseLargest(rows));
        };
        ForEach4(visit, columns, PairOfHalf(half));
      }
    }
    const bool finite = Larger(Pair::Max(largest[0], largest[1])) < kInfinityBits;
    float2 scales[2] = {{columns.scale, columns.scale}, {columns.scale, columns.scale}};
    if constexpr (!State::kSlotScales) {
      if (!finite) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          uint2 amax{};
          const auto visit = [&](int, const Pair(&rows)[4]) {
            const uint2 bits = PairwiseFiniteAmax(rows);
            amax = {max(amax.x, bits.x), max(amax.y, bits.y)};
          };
          ForEach4(visit, columns, PairOfHalf(half));
          largest[half] = Pair::FromFloatBits(amax);
        }
      }
      if (state_.args.row_data == nullptr) TellAmax(columns, Pair::Max(largest[0], largest[1]));
      FindScales(columns, largest, scales);
    }
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      if (!Exists(columns, half)) continue;
      const float2 scale = half == 0 ? scales[0] : scales[1];
      if (finite) {
        WriteColumns<false>(columns, PairOfHalf(half), scale);
      } else {
        WriteColumns<true>(columns, PairOfHalf(half), scale);
      }
    }
  }

 private:
  // The values that all columns of a lane have in common.
  struct Columns {
    int slot;
    bool has_slot;
    int rows;
    // The slots that share a scale, and the slots of the row block, both as [first, last].
    int first;
    int last;
    int first_of_block;
    int last_of_block;
    float scale;     // the slot's, if it has its own scale
    int per_column;  // chunks in the group
    int64_t data;    // position of the chunk of the tile's first column, in chunks of 16 bytes
    // Number of slots, a power of two, between which the scales that they share are divided; its logarithm; and the
    // largest number of scales that a lane of the warp then computes.
    int sharing;
    int sharing_bits;
    int most_scales;
    bool all_full;  // all slots of the pass are full
  };

  __device__ static int PairOfHalf(int half) { return half * (kTileColumns / 4) + Warp() * 4 + Lane() % 4; }
  __device__ bool Exists(const Columns& columns, int half) const {
    return columns.has_slot && state_.first_column + PairOfHalf(half) * 2 < state_.args.layout.features;
  }

  __device__ Columns FindColumns() const {
    Columns columns{};
    columns.slot = columns.first = columns.last = columns.first_of_block = columns.last_of_block = Lane() / 4;
    columns.has_slot = columns.slot < state_.count;
    if (columns.has_slot) FindSlot(&columns);
    columns.all_full = __all_sync(kFullWarp, !columns.has_slot || columns.rows == kFp8Alignment);
    // Lanes without a slot compute no more scales than the others.
    const int slots = columns.has_slot ? columns.last - columns.first + 1 : kSlots;
    columns.sharing_bits = slots >= kScales ? 2 : slots >= 2 ? 1 : 0;
    columns.sharing = 1 << columns.sharing_bits;
    columns.most_scales = __reduce_max_sync(kFullWarp, kScales >> columns.sharing_bits);
    return columns;
  }

  __device__ void FindSlot(Columns* slot_columns) const {
    Columns& columns = *slot_columns;
    const Chunk& chunk = state_.exchange.pass.chunks[columns.slot];
    columns.rows = chunk.rows;
    columns.first = columns.first_of_block = state_.exchange.pass.FirstOfBlock(columns.slot);
    columns.last = columns.last_of_block = state_.exchange.pass.LastOfBlock(columns.slot);
    if constexpr (kMode == ScalingMode::kMx) {
      columns.first = columns.slot - (columns.slot - columns.first) % 2;
      columns.last = min(columns.first + 1, columns.last);
    }
    if constexpr (State::kSlotScales) columns.scale = state_.SlotScale(columns.slot).scale;
    columns.per_column = chunk.PerColumn();
    columns.data = ColumnDataChunk(state_.args.layout, chunk, state_.first_column);
  }

  // Raises a slot's amax to that of 16 columns, which 4 lanes hold.
  __device__ void TellAmax(const Columns& columns, Largest largest) {
    uint32_t amax = Larger(largest);
    amax = max(amax, __shfl_xor_sync(kFullWarp, amax, 1));
    amax = max(amax, __shfl_xor_sync(kFullWarp, amax, 2));
    if (columns.has_slot && Lane() % 4 == 0) atomicMax(&state_.exchange.amax[columns.slot], amax);
  }

  // Calls visit(i, rows) with every 4 rows of a pair of columns.
  template <typename Visit>
  __device__ void ForEach4(Visit visit, const Columns& columns, int pair) const {
#pragma unroll
    for (int i = 0; i < kFp8Alignment / 4; ++i) {
      Pair rows[4];
      state_.tile.LoadColumns(columns.slot, 4 * i, pair, rows);
      visit(i, rows);
    }
  }

  // Returns the bits of the larger of two largest values.
  __device__ static uint32_t Larger(Largest largest) {
    const uint2 bits = Pair::ToFloatBits(largest);
    return max(bits.x, bits.y);
  }

  // Moves a value of one or two words between lanes.
  template <typename T, typename Move>
  __device__ static T Shuffle(T value, Move move) {
    uint32_t words[sizeof(T) / sizeof(uint32_t)];
    memcpy(words, &value, sizeof(T));
#pragma unroll
    for (uint32_t& word : words) word = move(word);
    memcpy(&value, words, sizeof(T));
    return value;
  }

  // Combines a value over the slots that share a scale, or over a row block. The last of these slots holds the result.
  template <typename T, typename Combine>
  __device__ static T Accumulate(T value, int slot, int first, Combine combine) {
#pragma unroll
    for (int distance = 1; distance < kSlots; distance *= 2) {
      const T before = Shuffle(value, [&](auto word) { return __shfl_up_sync(kFullWarp, word, 4 * distance); });
      if (slot - distance >= first) value = combine(before, value);
    }
    return value;
  }

  // Finds the scales of a lane's columns, two in each half, from their largest values in the slot, and writes the
  // inverses. The slots that share these scales each compute some and pass them to the others: the divisions are a good
  // part of all the work.
  __device__ void FindScales(const Columns& columns, Largest (&largest)[2], float2 (&scales)[2]) const {
    uint32_t amax[kScales];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Largest shared_largest = Accumulate(largest[half], columns.slot, columns.first, Pair::Max);
      const int last = columns.last * 4 + Lane() % 4;
      const uint2 bits =
          Pair::ToFloatBits(Shuffle(shared_largest, [&](auto word) { return __shfl_sync(kFullWarp, word, last); }));
      amax[2 * half] = bits.x;
      amax[2 * half + 1] = bits.y;
    }
    const int turn = columns.slot - columns.first;
    const int mask = columns.sharing - 1;
    float found[kScales];
#pragma unroll
    for (int i = 0; i < kScales; ++i) {
      if (i >= columns.most_scales) break;
      // A lane that has computed its scales repeats them while others compute more: all lanes take part in the
      // shuffles.
      const int own = ((turn & mask) + (i << columns.sharing_bits)) % kScales;
      const int half = own / 2;
      const uint32_t first_amax = half == 0 ? amax[0] : amax[2];
      const uint32_t second_amax = half == 0 ? amax[1] : amax[3];
      const bool writes = turn < columns.sharing && i << columns.sharing_bits < kScales && Exists(columns, half);
      const float scale =
          WriteScale(columns, PairOfHalf(half) * 2 + own % 2, own % 2 == 0 ? first_amax : second_amax, writes);
#pragma unroll
      for (int j = 0; j < kScales; ++j) {
        const float passed = __shfl_sync(kFullWarp, scale, (columns.first + (j & mask)) * 4 + Lane() % 4);
        if (j >> columns.sharing_bits == i) found[j] = passed;
      }
    }
    scales[0] = {found[0], found[1]};
    scales[1] = {found[2], found[3]};
  }

  // Returns the scale of a column of the tile from its amax. Writes the inverse if `writes`.
  __device__ float WriteScale(const Columns& columns, int column, uint32_t amax, bool writes) const {
    const auto position = [&] {
      return ColumnScalePosition<kMode>(state_.args.layout, state_.exchange.pass.chunks[columns.slot],
                                        int64_t{state_.first_column} + column);
    };
    if constexpr (kMode == ScalingMode::kMx) {
      const uint32_t exponent = MxExponent<Fp8>(amax, state_.args.scale_rule);
      if (writes) static_cast<uint8_t*>(state_.args.column_scale)[position()] = static_cast<uint8_t>(exponent);
      return MxScale(exponent);
    } else {
      const Scale scale = ScaleFromAmax<Fp8>(amax, state_.args.scale_rule);
      if (writes) static_cast<float*>(state_.args.column_scale)[position()] = scale.inverse;
      return scale.scale;
    }
  }

  template <bool kHideInfinity>
  __device__ void WriteColumns(const Columns& columns, int pair, float2 scale) {
    const auto quantize = [](float low, float high, float factor) {
      if constexpr (kHideInfinity) return Quantize2<Fp8>(HideInfinity(low), HideInfinity(high), factor);
      return Quantize2<Fp8>(low, high, factor);
    };
    uint32_t first[4];
    uint32_t second[4];
    ForEach4(
        [&](int i, const Pair(&rows)[4]) {
          first[i] = quantize(rows[0].First(), rows[1].First(), scale.x) |
                     quantize(rows[2].First(), rows[3].First(), scale.x) << 16;
          second[i] = quantize(rows[0].Second(), rows[1].Second(), scale.y) |
                      quantize(rows[2].Second(), rows[3].Second(), scale.y) << 16;
        },
        columns, pair);
    if (!columns.all_full) {
      // The padding is zero even if a scale is NaN.
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int missing = min(max(4 * (i + 1) - columns.rows, 0), 4);
        const uint32_t mask = missing == 4 ? 0 : kFullWarp >> (8 * missing);
        first[i] &= mask;
        second[i] &= mask;
      }
    }
    auto* chunks = reinterpret_cast<uint4*>(state_.args.column_data) + columns.data +
                   static_cast<int64_t>(pair * 2) * columns.per_column;
    chunks[0] = {first[0], first[1], first[2], first[3]};
    chunks[columns.per_column] = {second[0], second[1], second[2], second[3]};
  }

  // Writes the sums of a row block's columns, for dbias.
  __device__ void WriteSums(const Columns& columns, int pair, bool exists) {
    float2 sum{};
    if (columns.has_slot) {
      ForEach4(
          [&](int, const Pair(&rows)[4]) {
#pragma unroll
            for (const Pair& row : rows) {
              sum.x += row.First();
              sum.y += row.Second();
            }
          },
          columns, pair);
    }
    const auto add = [](float a, float b) { return a + b; };
    sum.x = Accumulate(sum.x, columns.slot, columns.first_of_block, add);
    sum.y = Accumulate(sum.y, columns.slot, columns.first_of_block, add);
    if (!exists || columns.slot != columns.last_of_block) return;
    const Chunk& chunk = state_.exchange.pass.chunks[columns.slot];
    const int64_t column = state_.first_column + pair * 2;
    const int64_t row_block = chunk.Before(RowBlock::k128) + chunk.row / kBlock;
    *reinterpret_cast<float2*>(state_.args.partial_sums + row_block * state_.args.layout.features + column) = sum;
  }

  const State& state_;
};

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_QUANTIZE_TILE_RESULTS_CUH_
