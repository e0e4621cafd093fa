// Columnwise quantization of gathered rows of 16-bit numbers, or of FP8 numbers with scales, with kBlock1D. A warp has
// up to 128 rows of 32 columns in registers and needs no other warp. Four lanes have a slot: each has 8 columns of its
// 16 rows, one chunk per column.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "csrc/common/fp8.cuh"
#include "csrc/common/launch.cuh"
#include "csrc/common/warp.cuh"
#include "csrc/groups/layout.cuh"
#include "csrc/quantize/pass.cuh"
#include "csrc/quantize/source.cuh"

namespace jax_grouped {
namespace {

constexpr int kLaneColumns = 8;
constexpr int kLanePairs = kLaneColumns / 2;
constexpr int kSlotLanes = 32 / kSlots;
constexpr int kWarpColumns = kSlotLanes * kLaneColumns;
constexpr int kWarps = kTileColumns / kWarpColumns;
// Blocks of threads that are resident on an SM at once. A lane's rows need half of its 128 registers.
constexpr int kResidentBlocks = 4;

// 16 rows of a lane's columns, pair by pair.
template <typename T>
using Columns = PairOf<T>[kLanePairs][kFp8Alignment];
template <typename T>
using Largest = typename PairOf<T>::Largest[kLanePairs];

// The quantized columns of a warp. Lanes store columns of different slots, and load all slots of a column: the order of
// the slots keeps both free of bank conflicts.
struct StagedColumns {
  uint4 chunks[kWarpColumns][kSlots];
  __device__ uint4& At(int column, int slot) { return chunks[column][slot ^ column / kLaneColumns * 2]; }
};

// The lanes of a slot divide the indices of its rows between them: lane i has those of rows 4 i to 4 i + 3.
constexpr int kIndices = kFp8Alignment / kSlotLanes;
static_assert(kIndices == 4);

// Loads a lane's indices; -1 for rows that do not exist.
__device__ void LoadIndices(const int32_t* row_indices, int64_t rows, const Chunk& chunk,
                            int32_t (&indices)[kIndices]) {
#pragma unroll
  for (int i = 0; i < kIndices; ++i) {
    const int row = Lane() % kSlotLanes * kIndices + i;
    const int32_t index = row < chunk.rows ? __ldg(row_indices + chunk.first_row + row) : -1;
    indices[i] = static_cast<uint32_t>(index) < static_cast<uint32_t>(rows) ? index : -1;
  }
}

// Returns what the lane with the index of a slot's row has.
template <typename T>
__device__ T OfRow(const T (&owned)[kIndices], int row) {
  return __shfl_sync(kFullWarp, owned[row % kIndices], row / kIndices, kSlotLanes);
}

// Loads a lane's columns of a chunk's rows. Rows that do not exist become zero. Whole warps must call it.
template <typename T>
__device__ void LoadRows(const PlainSource<T>& source, const Chunk& chunk, uint32_t column, Columns<T>& columns) {
  int32_t indices[kIndices];
  LoadIndices(source.row_indices, source.rows, chunk, indices);
  const auto* from = reinterpret_cast<const char*>(source.x + column);
  // An address is then one instruction: a product of 32-bit numbers, and a sum.
  const auto row_bytes = static_cast<uint32_t>(Uniform(static_cast<int32_t>(source.features * sizeof(T))));
  const auto load = [&](bool all) {
#pragma unroll
    for (int i = 0; i < kFp8Alignment; ++i) {
      const int32_t index = OfRow(indices, i);
      alignas(16) PairOf<T> row[kLanePairs]{};
      if (all || index >= 0) {
        const char* at = from + uint64_t{static_cast<uint32_t>(index)} * row_bytes;
        *reinterpret_cast<uint4*>(row) = __ldg(reinterpret_cast<const uint4*>(at));
      }
#pragma unroll
      for (int j = 0; j < kLanePairs; ++j) columns[j][i] = row[j];
    }
  };
  if (__all_sync(kFullWarp, (indices[0] | indices[1] | indices[2] | indices[3]) >= 0)) return load(true);
  load(false);
}

// The same for rows that have scales, one for all columns of the warp.
__device__ void LoadRows(const ScaledSource& source, const Chunk& chunk, uint32_t column,
                         Columns<__nv_bfloat16>& columns) {
  const ScaledRows& x = source.x;
  int32_t indices[kIndices];
  float scales[kIndices];
  LoadIndices(source.row_indices, x.rows, chunk, indices);
#pragma unroll
  for (int i = 0; i < kIndices; ++i) scales[i] = indices[i] >= 0 ? x.LoadScale(indices[i], column) : 0.0f;
  uint2 bytes[kFp8Alignment];
#pragma unroll
  for (int i = 0; i < kFp8Alignment; ++i) {
    const int32_t index = OfRow(indices, i);
    bytes[i] = index >= 0 ? x.Load8(index, column) : uint2{};
  }
#pragma unroll
  for (int i = 0; i < kFp8Alignment; ++i) {
    PairOf<__nv_bfloat16> row[kLanePairs];
    x.Convert8(bytes[i], OfRow(scales, i), row);
#pragma unroll
    for (int j = 0; j < kLanePairs; ++j) columns[j][i] = row[j];
  }
}

// Finds the largest finite absolute values of a lane's columns, and makes NaN of infinity. Whole warps must call it.
template <typename T>
__device__ void FindLargest(Columns<T>& columns, Largest<T>& largest) {
  using Pair = PairOf<T>;
#pragma unroll
  for (int j = 0; j < kLanePairs; ++j) largest[j] = PairwiseLargest(columns[j]);
  const uint2 bits = Pair::ToFloatBits(Pair::Max(Pair::Max(largest[0], largest[1]), Pair::Max(largest[2], largest[3])));
  if (__all_sync(kFullWarp, max(bits.x, bits.y) < kInfinityBits)) return;
#pragma unroll
  for (int j = 0; j < kLanePairs; ++j) {
    largest[j] = {};
#pragma unroll
    for (Pair& pair : columns[j]) {
      // Infinity times 0 is NaN, which __hmax2 drops. Finite numbers stay as they are.
      pair.values = __hfma2(pair.values, typename Pair::Largest{}, pair.values);
      largest[j] = __hmax2(largest[j], __habs2(pair.values));
    }
  }
}

// Exchanges two pairs with the lane at a distance. Returns the larger values of both lanes: those of the first pair to
// the lower lane, and of the second pair to the upper lane.
template <typename Pair>
__device__ typename Pair::Largest Exchange(int distance, typename Pair::Largest first, typename Pair::Largest second) {
  const bool upper = Lane() & distance;
  return Pair::Max(upper ? second : first, __shfl_xor_sync(kFullWarp, upper ? first : second, distance));
}

// Finds the scales of a lane's columns, from their largest values in its slot. Writes the inverses, and raises the amax
// of the groups. Lanes past the last of the `slots` repeat it.
template <typename Fp8, typename T>
__device__ void FindScales(const QuantizeArguments& args, const Chunk& chunk, int slots, uint32_t first_column,
                           uint32_t known_amax, const Largest<T>& largest, float (&scales)[kLaneColumns]) {
  using Pair = PairOf<T>;
  const int turn = Lane() / kSlotLanes;
  const int first_lane = (min(turn, slots - 1) - chunk.row / kFp8Alignment % kSlots) * kSlotLanes;
  const int column = Lane() % kSlotLanes * kLaneColumns + turn;
  const int64_t position = ColumnScalePosition<ScalingMode::kBlock1D>(args.layout, chunk, first_column);
  // Most passes have one row block. Each of the 8 lanes that have the same columns finds the scale of one of them.
  for (uint32_t blocks = __ballot_sync(kFullWarp, Lane() == first_lane); blocks != 0; blocks &= blocks - 1) {
    const int block_lane = __ffs(blocks) - 1;
    const bool in_block = first_lane == block_lane;
    const auto own = [&](int j) { return in_block ? largest[j] : typename Pair::Largest{}; };
    const auto in_half = Exchange<Pair>(8, Exchange<Pair>(16, own(0), own(2)), Exchange<Pair>(16, own(1), own(3)));
    const uint2 bits = Pair::ToFloatBits(Exchange<Pair>(4, in_half, in_half));
    const uint32_t amax = turn % 2 == 0 ? bits.x : bits.y;
    const Scale scale = ScaleFromAmax<Fp8>(amax, args.scale_rule);
    float* inverses = static_cast<float*>(args.column_scale) + FromLane(block_lane, position);
    if (first_column + column < static_cast<uint32_t>(args.layout.features)) inverses[column] = scale.inverse;
    const uint32_t block_amax = __reduce_max_sync(kFullWarp, amax);
    if (Lane() == block_lane && block_amax >= kTinyBits && block_amax > known_amax) {
      atomicMax(args.amax + chunk.group, block_amax);
    }
#pragma unroll
    for (int j = 0; j < kLaneColumns; ++j) {
      const float column_scale = FromLane(j * kSlotLanes + Lane() % kSlotLanes, scale.scale);
      if (in_block) scales[j] = column_scale;
    }
  }
}

// Quantizes and writes a lane's columns. Rows that do not exist stay zero, because no scale is NaN.
template <typename Fp8, typename T>
__device__ void WriteColumns(const QuantizeArguments& args, const Chunk& chunk, int slots, uint32_t first_column,
                             const Columns<T>& columns, const float (&scales)[kLaneColumns], StagedColumns& staged) {
#pragma unroll
  for (int j = 0; j < kLaneColumns; ++j) {
    const auto value = [&](int row) { return j % 2 == 0 ? columns[j / 2][row].First() : columns[j / 2][row].Second(); };
    const auto two = [&](int row) { return Quantize2<Fp8>(value(row), value(row + 1), scales[j]); };
    const auto four = [&](int row) { return two(row) | two(row + 2) << 16; };
    staged.At(Lane() % kSlotLanes * kLaneColumns + j, Lane() / kSlotLanes) = {four(0), four(4), four(8), four(12)};
  }
  __syncwarp();
  // 8 lanes write the slots of a column.
  constexpr int kAtOnce = 32 / kSlots;
  static_assert(kFp8Alignment % kAtOnce == 0, "these columns exist together");
  const int slot = Lane() % kSlots;
  const int first = Lane() / kSlots;
  const int64_t per_column = FromLane(slot * kSlotLanes, chunk.PerColumn());
  const int64_t data = FromLane(slot * kSlotLanes, ColumnDataChunk(args.layout, chunk, first_column));
  uint4* out = reinterpret_cast<uint4*>(args.column_data) + data + first * per_column;
  const uint32_t existing = static_cast<uint32_t>(args.layout.features) - first_column;
#pragma unroll
  for (uint32_t i = 0; i < kWarpColumns; i += kAtOnce) {
    const uint4 bytes = staged.At(first + i, slot);
    if (slot < slots && i < existing) *out = bytes;
    out += kAtOnce * per_column;
  }
  __syncwarp();
}

// Quantizes a work item. Each warp has a quarter of its columns.
template <typename Fp8, typename Source>
__global__ void __launch_bounds__(32 * kWarps, kResidentBlocks)
    QuantizeGatheredColumns(const __grid_constant__ QuantizeArguments args, const __grid_constant__ Source source) {
  using T = typename Source::Element;
  __shared__ StagedColumns staged[kWarps];
  cudaGridDependencySynchronize();
  const WorkItem work(args, false);
  const auto features = static_cast<uint32_t>(args.layout.features);
  const uint32_t first_column = work.first_column + Warp() * kWarpColumns;
  if (!work.exists || args.Skips(work.element) || first_column >= features) return;
  const Window& window = *WindowAt(args, work.element, work.window);
  // The lanes load the number of passes and where they begin at once.
  const int32_t word = Lane() <= Window::kMostPasses ? window.pass_begins[Lane()] : window.num_passes;
  const int num_passes = FromLane(31, word);
#pragma unroll 1
  for (int pass = work.part; pass < num_passes; pass += Window::kParts) {
    const int begin = FromLane(pass, word);
    const int slots = FromLane(pass + 1, word) - begin;
    // Lanes without a slot or columns repeat others, and write nothing.
    const Chunk chunk = window.chunks[begin + min(Lane() / kSlotLanes, slots - 1)];
    const uint32_t column = min(first_column + Lane() % kSlotLanes * kLaneColumns, features - kLaneColumns);
    // Most values are not the largest, which a read tells without an atomic operation.
    const uint32_t known_amax = args.amax == nullptr ? kFullWarp : __ldcg(args.amax + chunk.group);
    Columns<T> columns;
    LoadRows(source, chunk, column, columns);
    Largest<T> largest;
    FindLargest<T>(columns, largest);
    float scales[kLaneColumns];
    FindScales<Fp8, T>(args, chunk, slots, first_column, known_amax, largest, scales);
    WriteColumns<Fp8, T>(args, chunk, slots, first_column, columns, scales, staged[Warp()]);
  }
}

template <typename Source>
Status LaunchFrom(cudaStream_t stream, const Quantization& args, const Source& source) {
  const bool is_e4m3 = args.output_type == CUDA_R_8F_E4M3;
  const auto kernel = is_e4m3 ? QuantizeGatheredColumns<E4m3, Source> : QuantizeGatheredColumns<E5m2, Source>;
  return LaunchEarly("Launching the quantization of gathered columns", stream, {WorkItem::Blocks(args), 32 * kWarps},
                     kernel, args, source);
}

}  // namespace

bool IsGatheredColumns(const Quantization& args) {
  return args.mode == ScalingMode::kBlock1D && args.row_indices != nullptr && args.row_data == nullptr &&
         args.input_type != CUDA_R_32F && args.dbias == nullptr;
}

Status LaunchGatheredColumns(cudaStream_t stream, const Quantization& args) {
  if (args.x_scale != nullptr) return LaunchFrom(stream, args, MakeScaledSource(args));
  if (args.input_type == CUDA_R_16F) return LaunchFrom(stream, args, MakePlainSource<__half>(args));
  return LaunchFrom(stream, args, MakePlainSource<__nv_bfloat16>(args));
}

}  // namespace jax_grouped
