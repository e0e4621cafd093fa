// The quantization kernel. A block brings a tile of up to 128 x 128 elements into shared memory and quantizes it from
// there, so that every element is read once and written in either orientation.

#ifndef JAX_GROUPED_CSRC_KERNELS_QUANTIZE_TILES_CUH_
#define JAX_GROUPED_CSRC_KERNELS_QUANTIZE_TILES_CUH_

#include <cstdint>
#include <cstring>

#include "csrc/kernels/quantize_pass.cuh"

namespace jax_grouped {

// Warps are slots.
constexpr int kTileThreads = 32 * kSlots;

// What the warps of a block tell each other about their slots.
struct Exchange {
  Pass pass;
  Scale scales[kSlots];
  uint32_t amax[kSlots];  // bits
};

template <ScalingMode kMode, typename Fp8, typename Source>
class TileQuantizer {
  using Element = typename Source::Element;
  using Pair = PairOf<Element>;
  using Largest = typename Pair::Largest;

  // Whether all rows of a slot have one scale in a tile.
  static constexpr bool kSlotScales = kMode == ScalingMode::kTensor || kMode == ScalingMode::kBlock2D;
  // 16 lanes have 8 columns each of a row, so a warp has two rows at a time, and a slot after 8 steps.
  static constexpr int kSteps = kFp8Alignment / 2;
  static constexpr int kRowLanes = 16;
  // Lanes of a row that share a scale.
  static constexpr int kScaleLanes = kMode == ScalingMode::kMx ? kMxBlock / 8 : kRowLanes;

 public:
  __device__ TileQuantizer(const QuantizeArguments& args, const Tile<Element>& tile, Exchange& exchange,
                           int64_t first_column)
      : args_(args), tile_(tile), exchange_(exchange), first_column_(first_column) {}

  // Quantizes the first `count` chunks of a pass. For the whole block.
  __device__ void Run(const Source& source, const Pass& pass, int count) {
    count_ = count;
    const int slot = Warp();
    const bool has_slot = slot < count;
    const Chunk& chunk = exchange_.pass.chunks[slot];
    const bool needs_columns = args_.column_data != nullptr || args_.partial_sums != nullptr;
    uint32_t amax[kSteps];
    bool finite = true;
    if (has_slot) {
      if (Lane() == 0) exchange_.pass.chunks[slot] = pass.chunks[slot];
      __syncwarp();
      // Under way before the rows, needed after them.
      float given_scale = 0.0f;
      uint32_t group_amax = 0;
      if constexpr (kMode == ScalingMode::kTensor) {
        if (args_.given_scale) {
          given_scale = args_.scale[chunk.group];
        } else {
          group_amax = args_.amax[chunk.group];
        }
      }
      source.LoadSlot(tile_, slot, chunk, first_column_);
      // Without rows to scale, the columns tell their largest values.
      const bool by_rows = kSlotScales || args_.row_data != nullptr;
      const uint32_t largest = by_rows ? FindRowAmax(slot, amax, &finite) : 0;
      if (Lane() == 0) exchange_.amax[slot] = largest;
      if constexpr (kMode == ScalingMode::kTensor) FindGroupScale(slot, given_scale, group_amax);
    }
    if constexpr (kMode == ScalingMode::kBlock2D) {
      __syncthreads();
      if (has_slot && Lane() == 0 && slot == exchange_.pass.FirstOfBlock(slot)) {
        WriteBlockScales(chunk, SlotScale(slot).inverse);
      }
    }
    if (has_slot && args_.row_data != nullptr) QuantizeRows(slot, amax, finite);
    if (needs_columns) {
      __syncthreads();
      QuantizeColumns();
    }
    __syncthreads();
    // With current scaling, they were found before the scales.
    if (kMode != ScalingMode::kTensor || args_.given_scale) {
      RecordAmax(exchange_.pass, exchange_.amax, count, args_.amax);
    }
  }

 private:
  __device__ static int Warp() { return threadIdx.x / 32; }
  __device__ static int Lane() { return threadIdx.x % 32; }
  __device__ static int RowOfStep(int step) { return step * 2 + Lane() / kRowLanes; }
  __device__ int64_t RowColumn() const { return first_column_ + Lane() % kRowLanes * 8; }

  // For every step, the bits of the largest finite absolute value of the lane's 8 elements. Returns the largest of the
  // slot, and whether all are finite.
  __device__ uint32_t FindRowAmax(int slot, uint32_t (&amax)[kSteps], bool* finite) {
    uint32_t largest = 0;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      alignas(16) Pair row[4];
      tile_.Load8(slot, RowOfStep(step), Lane() % kRowLanes, row);
      const uint2 bits = PairwiseAmax(row);
      amax[step] = max(bits.x, bits.y);
      largest = max(largest, amax[step]);
    }
    largest = __reduce_max_sync(kFullWarp, largest);
    *finite = largest < kInfinityBits;
    if (*finite) return largest;
    largest = 0;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      alignas(16) Pair row[4];
      tile_.Load8(slot, RowOfStep(step), Lane() % kRowLanes, row);
      const uint2 bits = PairwiseFiniteAmax(row);
      amax[step] = max(bits.x, bits.y);
      largest = max(largest, amax[step]);
    }
    return __reduce_max_sync(kFullWarp, largest);
  }

  // The scale of the slot's group; the first block of the group writes its inverse, if it was not given.
  __device__ void FindGroupScale(int slot, float given, uint32_t group_amax) {
    if (Lane() == 0) {
      const Chunk& chunk = exchange_.pass.chunks[slot];
      const Scale scale =
          args_.given_scale ? ClampScale(given) : ScaleFromAmax<Fp8>(group_amax, args_.amax_epsilon, args_.pow2_scales);
      exchange_.scales[slot] = scale;
      if (!args_.given_scale && chunk.row == 0 && first_column_ == 0) {
        if (args_.row_scale != nullptr) static_cast<float*>(args_.row_scale)[chunk.group] = scale.inverse;
        if (args_.column_scale != nullptr) static_cast<float*>(args_.column_scale)[chunk.group] = scale.inverse;
      }
    }
    __syncwarp();
  }

  // The scale of the slot's group, or of its 128 x 128 block.
  __device__ Scale SlotScale(int slot) const {
    if constexpr (kMode == ScalingMode::kTensor) return exchange_.scales[slot];
    uint32_t amax = 0;
    for (int i = exchange_.pass.FirstOfBlock(slot); i <= exchange_.pass.LastOfBlock(slot); ++i) {
      amax = max(amax, exchange_.amax[i]);
    }
    return ScaleFromAmax<Fp8>(amax, args_.amax_epsilon, args_.pow2_scales);
  }

  // The scale of a 128 x 128 block in both orientations, with the zeros that fill up the rows of scales.
  __device__ void WriteBlockScales(const Chunk& chunk, float inverse) {
    const auto block = static_cast<int32_t>(first_column_ / kBlock);
    if (args_.row_scale != nullptr) {
      float* scales = static_cast<float*>(args_.row_scale) + RowScalePosition<kMode>(args_.layout, chunk, 0, 0);
      scales[block] = inverse;
      const auto blocks = static_cast<int32_t>(args_.layout.FeatureBlocks());
      if (block == blocks - 1) {
        for (int i = blocks; i < RoundUp(blocks, 4); ++i) scales[i] = 0.0f;
      }
    }
    if (args_.column_scale != nullptr) {
      float* scale = static_cast<float*>(args_.column_scale) + ColumnScalePosition<kMode>(args_.layout, chunk, block);
      *scale = inverse;
      const int32_t row_block = chunk.row / kBlock;
      const auto row_blocks = static_cast<int32_t>(CeilDiv(chunk.group_rows, kBlock));
      if (row_block == row_blocks - 1) {
        for (int i = row_blocks; i < RoundUp(row_blocks, 4); ++i) scale[i - row_block] = 0.0f;
      }
    }
  }

  __device__ void QuantizeRows(int slot, uint32_t (&amax)[kSteps], bool finite) {
    const Chunk& chunk = exchange_.pass.chunks[slot];
    float scales[kSteps];
    if constexpr (kSlotScales) {
      const float scale = SlotScale(slot).scale;
#pragma unroll
      for (float& step_scale : scales) step_scale = scale;
    } else {
      FindRowScales(chunk, amax, scales);
    }
    if (RowColumn() >= args_.layout.features) return;
    if (finite) {
      WriteRows<false>(slot, chunk, scales);
    } else {
      WriteRows<true>(slot, chunk, scales);
    }
  }

  template <bool kHideInfinity>
  __device__ void WriteRows(int slot, const Chunk& chunk, const float (&scales)[kSteps]) {
    const int64_t first_row = chunk.first_row + static_cast<int64_t>(RowOfStep(0));
    uint8_t* out = args_.row_data + first_row * args_.layout.features + RowColumn();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      alignas(16) Pair row[4];
      tile_.Load8(slot, RowOfStep(step), Lane() % kRowLanes, row);
      const uint2 data = Quantize8<kHideInfinity>(row, scales[step]);
      if (RowOfStep(step) < chunk.rows) __stcs(reinterpret_cast<uint2*>(out), data);
      out += 2 * args_.layout.features;
    }
  }

  template <bool kHideInfinity>
  __device__ static uint2 Quantize8(const Pair (&pairs)[4], float scale) {
    const auto quantize = [scale](const Pair& pair) {
      if constexpr (kHideInfinity) {
        return Quantize2<Fp8>(HideInfinity(pair.First()), HideInfinity(pair.Second()), scale);
      }
      return Quantize2<Fp8>(pair.First(), pair.Second(), scale);
    };
    return {quantize(pairs[0]) | quantize(pairs[1]) << 16, quantize(pairs[2]) | quantize(pairs[3]) << 16};
  }

  // Scales of the blocks that the lane's parts of rows are in, from their largest values; writes the inverses.
  //
  // Lanes that share scales share out the rows: in each exchange a lane passes on half of its steps, so that in the end
  // each lane has few, or one, complete, computes their scales once, and hands them to the others.
  __device__ void FindRowScales(const Chunk& chunk, uint32_t (&amax)[kSteps], float (&scales)[kSteps]) {
    constexpr int kOwned = kScaleLanes < kSteps ? kSteps / kScaleLanes : 1;
    int first_step = 0;
    int count = kSteps;
#pragma unroll
    for (int distance = kScaleLanes / 2; distance > 0; distance /= 2) {
      if (count > 1) {
        count /= 2;
        const bool upper = Lane() & distance;
        first_step += upper ? count : 0;
#pragma unroll
        for (int i = 0; i < count; ++i) {
          const uint32_t sent = upper ? amax[i] : amax[i + count];
          const uint32_t kept = upper ? amax[i + count] : amax[i];
          amax[i] = max(kept, __shfl_xor_sync(kFullWarp, sent, distance));
        }
      } else {
        amax[0] = max(amax[0], __shfl_xor_sync(kFullWarp, amax[0], distance));
      }
    }
    float owned[kOwned];
#pragma unroll
    for (int i = 0; i < kOwned; ++i) owned[i] = WriteRowScale(chunk, RowOfStep(first_step + i), amax[i]);
    // The inverse of the exchange: which lane has a step.
    constexpr int kLanesPerStep = kScaleLanes * kOwned / kSteps;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int source = Lane() / kScaleLanes * kScaleLanes + step / kOwned * kLanesPerStep;
      scales[step] = __shfl_sync(kFullWarp, owned[step % kOwned], source);
    }
  }

  // The scale of a block of a row with this largest value. Inverses are written for rows in groups of 4, or 16, and are
  // zero where there is no row.
  __device__ float WriteRowScale(const Chunk& chunk, int row, uint32_t amax) {
    const bool exists = row < chunk.rows;
    const auto block = static_cast<int32_t>(first_column_ / (kScaleLanes * 8)) + Lane() % kRowLanes / kScaleLanes;
    if constexpr (kMode == ScalingMode::kMx) {
      const uint32_t exponent = MxExponent<Fp8>(amax, args_.amax_epsilon);
      // The first columns of a block exist if any do.
      if (first_column_ + Lane() % kRowLanes / kScaleLanes * kMxBlock < args_.layout.features) {
        static_cast<uint8_t*>(args_.row_scale)[RowScalePosition<kMode>(args_.layout, chunk, row, block)] =
            exists ? exponent : 0;
      }
      return MxScale(exponent);
    } else {
      const Scale scale = ScaleFromAmax<Fp8>(amax, args_.amax_epsilon, args_.pow2_scales);
      if (Lane() % 2 == 0 && row < RoundUp(chunk.rows, 4)) {
        static_cast<float*>(args_.row_scale)[RowScalePosition<kMode>(args_.layout, chunk, row, block)] =
            exists ? scale.inverse : 0.0f;
      }
      return scale.scale;
    }
  }

  // A lane has a pair of columns in one slot, so that 8 lanes write 128 bytes side by side; a warp has 8 columns, then
  // 8 columns of the other half of the tile.
  __device__ void QuantizeColumns() {
    const Columns columns = FindColumns();
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      const int pair = half * (kTileColumns / 4) + Warp() * 4 + Lane() % 4;
      // No lane leaves before the last exchange.
      const bool exists = columns.has_slot && first_column_ + pair * 2 < args_.layout.features;
      if (args_.partial_sums != nullptr) WriteSums(columns, pair, exists);
      if (args_.column_data == nullptr) continue;

      // What is read again is read from the tile: 16 pairs would fill the registers.
      Largest largest{};
      if (columns.has_slot) {
        ForEach4([&](int, const Pair(&rows)[4]) { largest = Pair::Max(largest, PairwiseLargest(rows)); }, columns,
                 pair);
      }
      const uint2 bits = Pair::ToFloatBits(largest);
      const bool finite = max(bits.x, bits.y) < kInfinityBits;
      float2 scale = {columns.scale, columns.scale};
      if constexpr (!kSlotScales) {
        if (!finite) {
          uint2 amax{};
          ForEach4([&](int, const Pair(&rows)[4]) { amax = Larger(amax, PairwiseFiniteAmax(rows)); }, columns, pair);
          largest = Pair::FromFloatBits(amax);
        }
        if (args_.row_data == nullptr) TellAmax(columns, largest);
        scale = ColumnScales(columns, pair, largest, exists);
      }
      if (!exists) continue;
      if (finite) {
        WriteColumns<false>(columns, pair, scale);
      } else {
        WriteColumns<true>(columns, pair, scale);
      }
    }
  }

  // What is the same for all columns of a lane.
  struct Columns {
    int slot;
    bool has_slot;
    int rows;
    // The slots that share a scale, and those of the row block, [first, last].
    int first;
    int last;
    int first_of_block;
    int last_of_block;
    float scale;     // of the slot, where it has one
    int per_column;  // chunks of the group
    int64_t unit;    // where the chunk of the tile's first column is, in units of 16 bytes
  };

  __device__ Columns FindColumns() const {
    Columns columns{};
    columns.slot = columns.first = columns.last = columns.first_of_block = columns.last_of_block = Lane() / 4;
    columns.has_slot = columns.slot < count_;
    if (!columns.has_slot) return columns;
    const Chunk& chunk = exchange_.pass.chunks[columns.slot];
    columns.rows = chunk.rows;
    columns.first = columns.first_of_block = exchange_.pass.FirstOfBlock(columns.slot);
    columns.last = columns.last_of_block = exchange_.pass.LastOfBlock(columns.slot);
    if constexpr (kMode == ScalingMode::kMx) {
      columns.first = columns.slot - (columns.slot - columns.first) % 2;
      columns.last = min(columns.first + 1, columns.last);
    }
    if constexpr (kSlotScales) columns.scale = SlotScale(columns.slot).scale;
    columns.per_column = chunk.PerColumn();
    columns.unit = ColumnDataUnit(args_.layout, chunk, first_column_);
    return columns;
  }

  // Makes a slot's largest value at least that of 8 columns, which 4 lanes have.
  __device__ void TellAmax(const Columns& columns, Largest largest) {
    const uint2 bits = Pair::ToFloatBits(largest);
    uint32_t amax = max(bits.x, bits.y);
    amax = max(amax, __shfl_xor_sync(kFullWarp, amax, 1));
    amax = max(amax, __shfl_xor_sync(kFullWarp, amax, 2));
    if (columns.has_slot && Lane() % 4 == 0) atomicMax(&exchange_.amax[columns.slot], amax);
  }

  // Calls visit(i, rows) with every 4 rows of a pair of columns.
  template <typename Visit>
  __device__ void ForEach4(Visit visit, const Columns& columns, int pair) const {
#pragma unroll
    for (int i = 0; i < kFp8Alignment / 4; ++i) {
      Pair rows[4];
      tile_.LoadColumns(columns.slot, 4 * i, pair, rows);
      visit(i, rows);
    }
  }

  __device__ static uint2 Larger(uint2 a, uint2 b) { return {max(a.x, b.x), max(a.y, b.y)}; }

  // Exchanges a value of one or two words.
  template <typename T, typename Exchange>
  __device__ static T Shuffle(T value, Exchange exchange) {
    uint32_t words[sizeof(T) / sizeof(uint32_t)];
    memcpy(words, &value, sizeof(T));
#pragma unroll
    for (uint32_t& word : words) word = exchange(word);
    memcpy(&value, words, sizeof(T));
    return value;
  }

  // Combines a value of the slots that share a scale, or of a row block: the last of these slots has the result.
  template <typename T, typename Combine>
  __device__ static T Accumulate(T value, int slot, int first, Combine combine) {
#pragma unroll
    for (int distance = 1; distance < kSlots; distance *= 2) {
      const T before = Shuffle(value, [&](auto word) { return __shfl_up_sync(kFullWarp, word, 4 * distance); });
      if (slot - distance >= first) value = combine(before, value);
    }
    return value;
  }

  // The scales of a lane's two columns; also writes their inverses.
  __device__ float2 ColumnScales(const Columns& columns, int pair, Largest largest, bool exists) {
    largest = Accumulate(largest, columns.slot, columns.first, Pair::Max);
    largest = Shuffle(largest, [&](auto word) { return __shfl_sync(kFullWarp, word, columns.last * 4 + Lane() % 4); });
    const uint2 amax = Pair::ToFloatBits(largest);
    const bool writes = exists && columns.slot == columns.first;
    const int64_t column = first_column_ + pair * 2;
    if constexpr (kMode == ScalingMode::kMx) {
      const uint32_t exponents[2] = {MxExponent<Fp8>(amax.x, args_.amax_epsilon),
                                     MxExponent<Fp8>(amax.y, args_.amax_epsilon)};
      for (int i = 0; i < 2 && writes; ++i) {
        const int64_t position =
            ColumnScalePosition<kMode>(args_.layout, exchange_.pass.chunks[columns.slot], column + i);
        static_cast<uint8_t*>(args_.column_scale)[position] = static_cast<uint8_t>(exponents[i]);
      }
      return {MxScale(exponents[0]), MxScale(exponents[1])};
    } else {
      const Scale scales[2] = {ScaleFromAmax<Fp8>(amax.x, args_.amax_epsilon, args_.pow2_scales),
                               ScaleFromAmax<Fp8>(amax.y, args_.amax_epsilon, args_.pow2_scales)};
      if (writes) {
        const int64_t position = ColumnScalePosition<kMode>(args_.layout, exchange_.pass.chunks[columns.slot], column);
        *reinterpret_cast<float2*>(static_cast<float*>(args_.column_scale) + position) = {scales[0].inverse,
                                                                                          scales[1].inverse};
      }
      return {scales[0].scale, scales[1].scale};
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
    if (columns.rows < kFp8Alignment) {
      // The padding is zero even where a scale is not a number.
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int missing = min(max(4 * (i + 1) - columns.rows, 0), 4);
        const uint32_t mask = missing == 4 ? 0 : kFullWarp >> (8 * missing);
        first[i] &= mask;
        second[i] &= mask;
      }
    }
    auto* units = reinterpret_cast<uint4*>(args_.column_data) + columns.unit +
                  static_cast<int64_t>(pair * 2) * columns.per_column;
    __stcs(units, uint4{first[0], first[1], first[2], first[3]});
    __stcs(units + columns.per_column, uint4{second[0], second[1], second[2], second[3]});
  }

  // Sums of a row block's rows, for dbias.
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
    const Chunk& chunk = exchange_.pass.chunks[columns.slot];
    const int64_t column = first_column_ + pair * 2;
    const int64_t row_block = chunk.Before(Unit::k128) + chunk.row / kBlock;
    *reinterpret_cast<float2*>(args_.partial_sums + row_block * args_.layout.features + column) = sum;
  }

  const QuantizeArguments& args_;
  const Tile<Element>& tile_;
  Exchange& exchange_;
  const int64_t first_column_;
  int count_ = 0;
};

// Zeroes a window's share of the rows that are in no group, in a tile's columns.
__device__ inline void ZeroOutside(const QuantizeArguments& args, const Window& window, int64_t first_column) {
  const int64_t column = first_column + threadIdx.x % 8 * 16;
  if (column >= args.layout.features) return;
  for (int32_t i = window.outside_begin + static_cast<int32_t>(threadIdx.x / 8); i < window.outside_end;
       i += kTileThreads / 8) {
    const int64_t row = i < window.groups_begin ? i : i - window.groups_begin + window.groups_end;
    *reinterpret_cast<uint4*>(args.row_data + row * args.layout.features + column) = uint4{};
  }
}

template <ScalingMode kMode, typename Fp8, typename Source>
__global__ void __launch_bounds__(kTileThreads, sizeof(typename Source::Element) == 2 ? 5 : 3)
    QuantizeTiles(const __grid_constant__ QuantizeArguments args, const __grid_constant__ Source source) {
  extern __shared__ uint4 shared[];
  __shared__ Exchange exchange;
  if (args.Skips()) return;
  const Window& window = args.windows[blockIdx.x / args.num_column_tiles];
  const int64_t first_column = args.FirstColumn(blockIdx.x % args.num_column_tiles);
  const Tile<typename Source::Element> tile{reinterpret_cast<char*>(shared)};
  TileQuantizer<kMode, Fp8, Source> quantizer(args, tile, exchange, first_column);
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    const int count = window.counts[i];
    if (count == 0) break;
    if (i > 0) __syncthreads();
    quantizer.Run(source, window.passes[i], count);
  }
  if (args.row_data != nullptr && window.outside_begin < window.outside_end) ZeroOutside(args, window, first_column);
}

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_KERNELS_QUANTIZE_TILES_CUH_
