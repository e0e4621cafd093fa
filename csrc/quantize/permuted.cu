#include "csrc/quantize/quantize.h"

#include <cstdint>

#include "csrc/common/launch.cuh"
#include "csrc/common/warp.cuh"
#include "csrc/groups/table.cuh"
#include "csrc/quantize/source.cuh"

namespace jax_grouped {
namespace {

constexpr int kSetUpThreads = 512;
constexpr int kWarps = 8;

// Most tokens of a quantization without a setup kernel. An H200 then has all blocks that find the groups at once: those
// of the tokens and those that write zeros.
constexpr int64_t kMostTokensWithoutSetup = 1024;

// Columns of a lane in one step, lanes of a scaling block, and columns of a warp in one step.
constexpr int kLaneColumns = 8;
constexpr int kBlockLanes = kBlock / kLaneColumns;
constexpr int kStepColumns = 32 * kLaneColumns;

struct PermutedArguments : PermutedQuantization {
  ScaledRows scaled;       // the tokens, if they have scales
  GroupTable group_table;  // the first batch element's
  int64_t element_tokens;
  int32_t feature_blocks;
};

// Writes the inverse of each group's given scale, and zeros its amax. Threads divide the groups of a batch element
// between them.
__device__ void WriteInverseScales(const PermutedArguments& args, int32_t element) {
  for (int64_t i = threadIdx.x; i < args.groups.num_groups; i += kSetUpThreads) {
    const int64_t group = static_cast<int64_t>(element) * args.groups.num_groups + i;
    args.amax[group] = 0;
    args.scale[group] = ClampScale(args.given_scale[group]).inverse;
  }
}

// Zeros the scales that pad each group's rows to a multiple of 4. `threads` threads divide the groups between them.
__device__ void ZeroScalePadding(const PermutedArguments& args, const GroupTable& table, uint32_t thread,
                                 uint32_t threads) {
  const int64_t scale_rows = int64_t{args.groups.num_groups} * args.feature_blocks;
  for (int64_t i = thread; i < scale_rows; i += threads) {
    const auto group = static_cast<int32_t>(i / args.feature_blocks);
    const int32_t rows = table.FirstRow()[group + 1] - table.FirstRow()[group];
    float* scales = args.scale + RowBlockScalePosition(args.feature_blocks, table.BlocksBefore(RowBlock::k4)[group],
                                                       i % args.feature_blocks, rows, 0);
    for (int64_t row = rows; row < ScaleRows(rows); ++row) scales[row] = 0.0f;
  }
}

// Sets up a batch element in each row of blocks (blockIdx.y). The first block finds the groups. It also prepares the
// results of given scales, or zeros the scales that pad each group's rows to a multiple of 4. The other blocks zero the
// rows that belong to no group.
__global__ void __launch_bounds__(kSetUpThreads) SetUpPermuted(const __grid_constant__ PermutedArguments args) {
  cudaTriggerProgrammaticLaunchCompletion();
  const auto element = static_cast<int32_t>(blockIdx.y);
  if (blockIdx.x > 0) {
    return ZeroOtherRows<kSetUpThreads>(args.groups.At(element), element, args.data, args.features);
  }
  const GroupTable table = args.group_table.At(element);
  FillGroupTable<kSetUpThreads, Counts<RowBlock::k4>>(args.groups, element, args.element_row_blocks, table);
  if (args.given_scale != nullptr) return WriteInverseScales(args, element);
  ZeroScalePadding(args, table, threadIdx.x, kSetUpThreads);
}

// The row of one choice, and where its scales are.
struct Destination {
  int32_t row = -1;          // counted in the array; -1 for none
  int64_t scale = 0;         // position of its first scale; with given scales, the group's index in the batch
  int32_t scale_step = 0;    // from one scale to the next
  float given_scale = 1.0f;  // if there is one
};

__device__ Destination FindDestination(const PermutedArguments& args, const GroupTable& tables, int64_t token,
                                       int choice) {
  Destination found;
  if (choice >= args.choices) return found;
  const auto element = static_cast<int32_t>(token / args.element_tokens);
  const int32_t in_element = args.inverse[token * args.choices + choice];
  if (in_element < 0 || in_element >= args.groups.capacity) return found;
  const GroupTable table = tables.At(element);
  const int32_t* first_rows = table.FirstRow();
  const auto row = static_cast<int32_t>(element * args.groups.capacity + in_element);
  if (row < first_rows[0] || row >= first_rows[table.num_groups]) return found;
  const int32_t group = FindGroup(first_rows, 0, table.num_groups, row);
  found.row = row;
  if (args.given_scale != nullptr) {
    found.scale = static_cast<int64_t>(element) * table.num_groups + group;
    found.given_scale = ClampScale(args.given_scale[found.scale]).scale;
    return found;
  }
  const int64_t blocks = int64_t{args.feature_blocks} * table.BlocksBefore(RowBlock::k4)[group];
  found.scale = 4 * blocks + row - first_rows[group];
  found.scale_step = static_cast<int32_t>(RoundUp(first_rows[group + 1] - first_rows[group], 4));
  return found;
}

// 8 columns of a lane in each of several steps.
template <typename T>
struct Columns {
  using Pair = PairOf<T>;
  // As many as the registers have room for.
  static constexpr int kSteps = sizeof(T) == 2 ? 8 : 4;
  // Lanes of a scaling block that get the scale of one step from ReduceSteps.
  static constexpr int kOwners = kBlockLanes / kSteps;

  alignas(16) Pair pairs[kSteps][kLaneColumns / 2];

  // Loads the columns from `first` on. Columns that do not exist become zero.
  __device__ void Load(const T* token, int32_t first, int32_t features) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      auto* to = reinterpret_cast<uint4*>(pairs[step]);
      const int32_t column = first + step * kStepColumns;
#pragma unroll
      for (int i = 0; i < InputTile<T>::kVectorsPer8; ++i) {
        to[i] = column < features ? __ldg(reinterpret_cast<const uint4*>(token + column) + i) : uint4{};
      }
    }
  }

  // Loads the same columns of tokens that have scales.
  __device__ void Load(const ScaledRows& tokens, int64_t token, int32_t first) {
    uint2 bytes[kSteps];
    float scales[kSteps];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int32_t column = first + step * kStepColumns;
      const bool exists = column < tokens.features;
      bytes[step] = exists ? tokens.Load8(token, column) : uint2{};
      scales[step] = exists ? tokens.LoadScale(static_cast<uint32_t>(token), column) : 0.0f;
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) tokens.Convert8(bytes[step], scales[step], pairs[step]);
  }

  // Finds the largest finite absolute value of the lane's columns in each step. Returns false if a value is not finite.
  __device__ bool FindAmax(uint32_t (&amax)[kSteps]) const {
    bool finite = true;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint2 bits = PairwiseAmax(pairs[step]);
      if (max(bits.x, bits.y) >= kInfinityBits) {
        finite = false;
        bits = PairwiseFiniteAmax(pairs[step]);
      }
      amax[step] = max(bits.x, bits.y);
    }
    return finite;
  }

  // Quantizes the columns of each step with the scale scale_at(step).
  template <typename Fp8, typename ScaleAt>
  __device__ void Quantize(bool finite, const ScaleAt& scale_at, uint2 (&data)[kSteps]) const {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const float scale = scale_at(step);
      data[step] = finite ? Quantize8<Fp8, false>(pairs[step], scale) : Quantize8<Fp8, true>(pairs[step], scale);
    }
  }
};

// Stores the lane's columns of a row, from `first` on.
template <int kSteps>
__device__ void StoreRow(const PermutedArguments& args, int32_t row, int32_t first, const uint2 (&data)[kSteps]) {
  uint8_t* to = args.data + int64_t{row} * args.features;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int32_t column = first + step * kStepColumns;
    if (column < args.features) *reinterpret_cast<uint2*>(to + column) = data[step];
  }
}

// Quantizes columns of a token for each of its choices, with the scale of the choice's group.
template <typename Fp8, typename T>
__device__ void WriteGroupScaled(const PermutedArguments& args, const Columns<T>& columns, bool finite,
                                 const Destination& own, int choices, int32_t first) {
  for (int choice = 0; choice < choices; ++choice) {
    const int32_t row = FromLane(choice, own.row);
    const float scale = FromLane(choice, own.given_scale);
    if (row < 0) continue;
    uint2 data[Columns<T>::kSteps];
    columns.template Quantize<Fp8>(finite, [&](int) { return scale; }, data);
    StoreRow(args, row, first, data);
  }
}

// Quantizes columns of a token, from `begin` on, in blocks, and writes them and their scales for each choice.
template <typename Fp8, typename T>
__device__ void WriteBlockScaled(const PermutedArguments& args, const Columns<T>& columns, bool finite,
                                 uint32_t (&amax)[Columns<T>::kSteps], const Destination& own, int choices,
                                 int32_t begin) {
  constexpr int kOwners = Columns<T>::kOwners;
  const int own_step = ReduceSteps<kBlockLanes>(amax, [](uint32_t a, uint32_t b) { return max(a, b); });
  const Scale scale = ScaleFromAmax<Fp8>(amax[0], args.scale_rule);
  // The lanes that have one step's scale divide the choices between them.
  const int32_t own_block = (begin + own_step * kStepColumns) / kBlock + Lane() / kBlockLanes;
  for (int choice = 0; choice < choices; ++choice) {
    const int32_t row = FromLane(choice, own.row);
    const int64_t position = FromLane(choice, own.scale) + int64_t{own_block} * FromLane(choice, own.scale_step);
    if (row >= 0 && choice % kOwners == Lane() % kOwners && own_block < args.feature_blocks) {
      args.scale[position] = scale.inverse;
    }
  }
  const auto scale_at = [&](int step) {
    return __shfl_sync(kFullWarp, scale.scale, Lane() / kBlockLanes * kBlockLanes + step * kOwners);
  };
  uint2 data[Columns<T>::kSteps];
  columns.template Quantize<Fp8>(finite, scale_at, data);
  for (int choice = 0; choice < choices; ++choice) {
    const int32_t row = FromLane(choice, own.row);
    if (row >= 0) StoreRow(args, row, begin + Lane() * kLaneColumns, data);
  }
}

// Raises the amax of the group of each lane's choice. Most values are not the largest, which a read tells without an
// atomic operation.
__device__ void RecordTokenAmax(const PermutedArguments& args, const Destination& own, uint32_t amax) {
  if (own.row < 0 || amax < kTinyBits) return;
  uint32_t* group_amax = args.amax + own.scale;
  if (__ldcg(group_amax) < amax) atomicMax(group_amax, amax);
}

// Quantizes one token per warp. Tokens that have scales are read as bfloat16. With kGivenScales, there is one per
// group; the copies of a token then differ. With kFindsGroups, there is no setup kernel, and the blocks after those of
// the tokens write the zeros.
template <typename T, typename Fp8, bool kScaled, bool kGivenScales, bool kFindsGroups>
__global__ void __launch_bounds__(32 * kWarps, 3) QuantizePermuted(const __grid_constant__ PermutedArguments args) {
  using Columns = Columns<T>;
  constexpr int kSteps = Columns::kSteps;
  cudaGridDependencySynchronize();
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kWarps + Warp();
  const bool has_token = token < args.tokens;
  const auto load = [&](int32_t first, Columns* columns) {
    if constexpr (kScaled) {
      columns->Load(args.scaled, token, first);
    } else {
      columns->Load(static_cast<const T*>(args.x) + token * args.features, first, args.features);
    }
  };
  // The first columns of a token are loaded before its rows are found.
  Columns columns;
  GroupTable tables = args.group_table;
  if constexpr (kFindsGroups) {
    __shared__ int32_t table[kSharedTableSize];
    if (has_token) load(Lane() * kLaneColumns, &columns);
    tables = FindGroups<Counts<RowBlock::k4>>(args.groups, table);
    const auto token_blocks = static_cast<uint32_t>(CeilDiv(args.tokens, kWarps));
    if (blockIdx.x >= token_blocks) {
      const uint32_t block = blockIdx.x - token_blocks;
      const uint32_t blocks = gridDim.x - token_blocks;
      ZeroRowsAround<32 * kWarps>({tables.FirstRow()[0], tables.FirstRow()[tables.num_groups]}, args.groups.capacity,
                                  args.data, args.features, block, blocks);
      return ZeroScalePadding(args, tables, block * 32 * kWarps + threadIdx.x, blocks * 32 * kWarps);
    }
  }
  if (!has_token) return;
  for (int first_choice = 0; first_choice < args.choices; first_choice += 32) {
    if (!kFindsGroups || first_choice > 0) load(Lane() * kLaneColumns, &columns);
    const Destination own = FindDestination(args, tables, token, first_choice + Lane());
    const int choices = min(args.choices - first_choice, 32);
    uint32_t largest = 0;
    for (int32_t begin = 0; begin < args.features; begin += kSteps * kStepColumns) {
      const int32_t first = begin + Lane() * kLaneColumns;
      if (begin > 0) load(first, &columns);
      uint32_t amax[kSteps];
      const bool finite = columns.FindAmax(amax);
      if constexpr (kGivenScales) {
        for (const uint32_t step_amax : amax) largest = max(largest, step_amax);
        WriteGroupScaled<Fp8>(args, columns, finite, own, choices, first);
      } else {
        WriteBlockScaled<Fp8>(args, columns, finite, amax, own, choices, begin);
      }
    }
    if constexpr (kGivenScales) RecordTokenAmax(args, own, __reduce_max_sync(kFullWarp, largest));
  }
}

// Launches the quantization after a setup kernel, or without one.
template <typename T, bool kScaled, bool kGivenScales>
Status LaunchOfType(cudaStream_t stream, const PermutedArguments& args) {
  constexpr char kWhat[] = "Launching the quantization of tokens";
  const auto token_blocks = static_cast<unsigned>(CeilDiv(args.tokens, kWarps));
  const auto zeroing_blocks = static_cast<unsigned>(ZeroingBlocks(args.groups.capacity * args.features));
  const bool is_e4m3 = args.output_type == CUDA_R_8F_E4M3;
  if constexpr (!kGivenScales) {
    if (BlocksFindGroups(args.groups) && args.tokens <= kMostTokensWithoutSetup) {
      const auto kernel =
          is_e4m3 ? QuantizePermuted<T, E4m3, kScaled, false, true> : QuantizePermuted<T, E5m2, kScaled, false, true>;
      return Launch(kWhat, stream, {dim3(token_blocks + zeroing_blocks), 32 * kWarps}, kernel, args);
    }
  }
  const dim3 setup_blocks(1 + zeroing_blocks, args.groups.batch);
  JAX_GROUPED_RETURN_IF_FAILED(
      Launch("Launching the setup of a quantization", stream, {setup_blocks, kSetUpThreads}, SetUpPermuted, args));
  const auto kernel = is_e4m3 ? QuantizePermuted<T, E4m3, kScaled, kGivenScales, false>
                              : QuantizePermuted<T, E5m2, kScaled, kGivenScales, false>;
  return LaunchEarly(kWhat, stream, {dim3(token_blocks), 32 * kWarps}, kernel, args);
}

}  // namespace

Status LaunchQuantizePermuted(cudaStream_t stream, const PermutedQuantization& quantization) {
  const Groups& groups = quantization.groups;
  const PermutedArguments args{quantization,
                               MakeScaledRows(quantization.x, quantization.x_scale, quantization.input_type,
                                              quantization.tokens, quantization.features, quantization.x_group_rows),
                               {quantization.table, groups.num_groups},
                               quantization.tokens / groups.batch,
                               static_cast<int32_t>(CeilDiv(quantization.features, kBlock))};
  if (args.x_scale != nullptr) return LaunchOfType<__nv_bfloat16, true, false>(stream, args);
  return WithFloatType(args.input_type, [&](auto number) {
    using T = decltype(number);
    return args.given_scale != nullptr ? LaunchOfType<T, false, true>(stream, args)
                                       : LaunchOfType<T, false, false>(stream, args);
  });
}

}  // namespace jax_grouped
