// The quantization kernel. A block loads a tile of up to 128 x 128 elements into shared memory and quantizes it from
// there. Every element is thus read once and written in either orientation. Each scaling mode is instantiated in a file
// of its own, so that the modes compile in parallel.

#ifndef JAX_GROUPED_CSRC_QUANTIZE_TILES_CUH_
#define JAX_GROUPED_CSRC_QUANTIZE_TILES_CUH_

#include <cooperative_groups.h>

#include <cstdint>

#include "csrc/common/device.h"
#include "csrc/common/launch.cuh"
#include "csrc/common/warp.cuh"
#include "csrc/groups/table.cuh"
#include "csrc/quantize/activation.cuh"
#include "csrc/quantize/pass.cuh"
#include "csrc/quantize/source.cuh"
#include "csrc/quantize/tile_results.cuh"

namespace jax_grouped {

// Writes the results of groups without rows: their amax is 0, and their scale is the given one or that of zeros. The
// results of other groups are overwritten later. Threads divide the groups of a batch element between them.
template <typename Fp8>
__device__ void InitializeGroups(const QuantizeArguments& args, int32_t element, uint32_t thread, uint32_t threads) {
  for (int64_t i = thread; i < args.groups.num_groups; i += threads) {
    const int64_t group = static_cast<int64_t>(element) * args.groups.num_groups + i;
    if (args.amax != nullptr) args.amax[group] = 0;
    if (args.activated_amax != nullptr) args.activated_amax[group] = 0;
    if (!args.group_scales) continue;
    if (args.activated_scale != nullptr) {
      args.activated_scale[group] = ClampScale(args.given_activated_scale[group]).inverse;
    }
    const Scale scale =
        args.given_scale != nullptr ? ClampScale(args.given_scale[group]) : ScaleFromAmax<Fp8>(0, args.scale_rule);
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
  const auto others = static_cast<int32_t>(args.groups.capacity) - (window->groups_end - window->groups_begin);
  const int32_t per_window = others / args.num_windows + (others % args.num_windows > 0);
  window->other_begin = static_cast<int32_t>(min(static_cast<int64_t>(per_window) * index, int64_t{others}));
  window->other_end = static_cast<int32_t>(min(int64_t{window->other_begin} + per_window, int64_t{others}));
}

// Stores a batch element's table for the sums of dbias. All threads of the block must call it.
__device__ inline void StoreTable(const QuantizeArguments& args, const GroupTable& table, int32_t element) {
  if (args.partial_sums == nullptr) return;
  int32_t* copy = args.table.At(element).base;
  for (int64_t i = threadIdx.x; i < GroupTable::Size(table.num_groups); i += blockDim.x) copy[i] = table.base[i];
}

// Returns the bits of the value that determines the scale of a slot's group: the given scale, or the group's amax.
template <typename State>
__device__ uint32_t LoadGroupValue(const State& state) {
  if (State::kMode != ScalingMode::kTensor || Warp() >= state.count) return 0;
  const int32_t group = state.exchange.pass.chunks[Warp()].group;
  if (state.args.given_scale != nullptr) return __float_as_uint(state.args.given_scale[group]);
  return __ldcg(state.args.amax + group);
}

// Computes the scale of a slot's group. Whole warps must call it. The first block of the group writes the inverse if
// the scale was not given.
template <typename State>
__device__ void FindGroupScale(const State& state, uint32_t group_value) {
  const QuantizeArguments& args = state.args;
  if (Lane() == 0) {
    const Chunk& chunk = state.exchange.pass.chunks[Warp()];
    const bool is_given = args.given_scale != nullptr;
    const Scale scale = is_given ? ClampScale(__uint_as_float(group_value))
                                 : ScaleFromAmax<typename State::Fp8>(group_value, args.scale_rule);
    state.exchange.scales[Warp()] = scale;
    if (!is_given && chunk.row == 0 && state.first_column == 0) {
      if (args.row_scale != nullptr) static_cast<float*>(args.row_scale)[chunk.group] = scale.inverse;
      if (args.column_scale != nullptr) static_cast<float*>(args.column_scale)[chunk.group] = scale.inverse;
    }
  }
  __syncwarp();
}

// Writes the inverse scale of a 128 x 128 block in both orientations, and the zeros that pad the rows of scales.
template <typename State>
__device__ void WriteBlockScales(const State& state, const Chunk& chunk, float inverse) {
  const QuantizeArguments& args = state.args;
  const auto block = static_cast<int32_t>(state.first_column / kBlock);
  if (args.row_scale != nullptr) {
    float* scales = static_cast<float*>(args.row_scale) + RowScalePosition<State::kMode>(args.layout, chunk, 0, 0);
    scales[block] = inverse;
    const auto blocks = static_cast<int32_t>(args.layout.FeatureBlocks());
    if (block == blocks - 1) {
      for (int i = blocks; i < RoundUp(blocks, 4); ++i) scales[i] = 0.0f;
    }
  }
  if (args.column_scale != nullptr) {
    float* scale =
        static_cast<float*>(args.column_scale) + ColumnScalePosition<State::kMode>(args.layout, chunk, block);
    *scale = inverse;
    const int32_t row_block = chunk.row / kBlock;
    const auto row_blocks = static_cast<int32_t>(CeilDiv(chunk.group_rows, kBlock));
    if (row_block == row_blocks - 1) {
      for (int i = row_blocks; i < RoundUp(row_blocks, 4); ++i) scale[i - row_block] = 0.0f;
    }
  }
}

// Loads a pass into the tile and finds the amax of each slot. Returns the slot's LoadGroupValue. All threads of the
// block must call it; they are not synchronized afterwards.
template <typename State, typename Source>
__device__ uint32_t LoadPass(const State& state, const Source& source, const Chunk* chunks, RowQuantizer<State>* rows) {
  WarpExchange& exchange = state.exchange;
  const int slot = Warp();
  if (Uniform(slot) >= state.count) return 0;
  const Chunk& chunk = exchange.pass.chunks[slot];
  if (Lane() == 0) exchange.pass.chunks[slot] = chunks[slot];
  __syncwarp();
  // The load is issued before those of the rows, and its value is needed after them.
  const uint32_t group_value = LoadGroupValue(state);
  source.LoadSlot(state.tile, slot, chunk, state.first_column);
  // If no rows are scaled, the columns find the amax.
  if (State::kSlotScales || state.args.row_data != nullptr) {
    rows->FindAmax();
  } else if (Lane() == 0) {
    exchange.amax[slot] = 0;
  }
  return group_value;
}

// Quantizes a pass that is in the tile. All threads of the block must call it; they are synchronized afterwards.
template <typename State>
__device__ void WritePass(const State& state, uint32_t group_value, RowQuantizer<State>* rows) {
  constexpr ScalingMode kMode = State::kMode;
  const QuantizeArguments& args = state.args;
  const int slot = Warp();
  const bool has_slot = Uniform(slot) < state.count;
  if (kMode == ScalingMode::kTensor && has_slot) FindGroupScale(state, group_value);
  if constexpr (kMode == ScalingMode::kBlock2D) {
    __syncthreads();
    const Pass& pass = state.exchange.pass;
    if (has_slot && Lane() == 0 && slot == pass.FirstOfBlock(slot)) {
      WriteBlockScales(state, pass.chunks[slot], state.SlotScale(slot).inverse);
    }
  }
  if (has_slot && args.row_data != nullptr) rows->Quantize();
  if (args.column_data != nullptr || args.partial_sums != nullptr) {
    __syncthreads();
    ColumnQuantizer<State>(state).Quantize();
  }
  __syncthreads();
}

// Zeros a work item's part of the rows of no group, in a tile's columns, and their inner products.
template <typename Source>
__device__ void ZeroOtherRows(const QuantizeArguments& args, const Source& source, const WorkItem& work,
                              const Window& window) {
  constexpr int kRows = kTileThreads / 8;
  const int64_t column = work.first_column + threadIdx.x % 8 * 16;
  if (column >= args.layout.features) return;
  const int32_t begin = window.other_begin + work.part * kRows + static_cast<int32_t>(threadIdx.x / 8);
  for (int32_t i = begin; i < window.other_end; i += Window::kParts * kRows) {
    const int64_t row = OtherRow(window.first_row, i, window.groups_begin, window.groups_end);
    if (args.row_data != nullptr) {
      *reinterpret_cast<uint4*>(args.row_data + row * args.layout.features + column) = uint4{};
    }
    if (threadIdx.x % 8 == 0) source.ZeroInnerProduct(row, work.first_column);
  }
}

// Blocks of threads that are resident on an SM at once, if there are as many.
constexpr int kBlocksOfSingleLaunch = 3;
template <typename Element>
constexpr int kBlocks = sizeof(Element) == 2 ? 5 : 3;
// Shared memory of that many blocks: tiles, static shared memory, and 1 KiB per block for the system.
constexpr int SharedBytes(int blocks, int tile_bytes, bool single_launch) {
  const auto fixed = static_cast<int>(sizeof(WarpExchange) + (single_launch ? sizeof(Window) : 0));
  return blocks * (tile_bytes + fixed + 1024);
}
constexpr int kSharedBytesOfSm = 228 * 1024;  // on Hopper and Blackwell
static_assert(SharedBytes(kBlocks<__half>, InputTile<__half>::kBytes, false) <= kSharedBytesOfSm);
static_assert(SharedBytes(kBlocks<float>, InputTile<float>::kBytes, false) <= kSharedBytesOfSm);
static_assert(SharedBytes(kBlocksOfSingleLaunch, InputTile<float>::kBytes, true) <= kSharedBytesOfSm);
static_assert(GroupTable::Size(kMostGroupsOfWarp) * sizeof(int32_t) <= InputTile<__half>::kBytes,
              "the table of a single launch lies where the tile comes later");

// Barrier of all blocks of the grid, in a single launch.
class GridBarrier {
 public:
  __device__ GridBarrier() : grid_(cooperative_groups::this_grid()) {}
  __device__ void Arrive() { token_ = grid_.barrier_arrive(); }
  __device__ void Wait() { grid_.barrier_wait(static_cast<Token&&>(token_)); }

 private:
  using Token = cooperative_groups::grid_group::arrival_token;
  cooperative_groups::grid_group grid_;
  Token token_{};
};

// Does the work of the setup kernels in a single launch, which has at most as many groups as a warp counts. Does not
// wait until all blocks have done it.
template <typename Fp8>
__device__ void SetUpHere(const QuantizeArguments& args, const WorkItem& work, int32_t* shared_table, Window* window) {
  const GroupTable table{shared_table, args.groups.num_groups};
  const bool is_first = work.window == 0 && work.part == 0 && work.first_column == 0;
  if (Uniform(Warp()) == 0) {
    FillGroupTableTogether<FirstWarp, AllRowBlocks>(args.groups, work.element, args.element_row_blocks, table);
    __syncwarp();
    FillWindow(args, table, work.element, work.window, window);
  } else if (is_first) {
    InitializeGroups<Fp8>(args, work.element, threadIdx.x - 32, kTileThreads - 32);
  }
  if (!is_first) return;
  __syncthreads();
  StoreTable(args, table, work.element);
}

// Quantizes the tiles of a work item. With kSingleLaunch, it needs no kernel before it. Blocks then wait for each
// other, in a cooperative launch, if they find amaxes.
template <ScalingMode kMode, typename Fp8, typename Source, bool kSingleLaunch>
__global__ void __launch_bounds__(kTileThreads,
                                  kSingleLaunch ? kBlocksOfSingleLaunch : kBlocks<typename Source::Element>)
    QuantizeTiles(const __grid_constant__ QuantizeArguments args, const __grid_constant__ Source source) {
  extern __shared__ uint4 shared[];
  __shared__ WarpExchange exchange;
  if constexpr (!kSingleLaunch) cudaGridDependencySynchronize();
  const WorkItem work(args, kSingleLaunch);
  if (!work.exists || args.Skips(work.element)) return;
  // With current scaling, the amaxes are found before the scales.
  const bool finds_amax = kMode != ScalingMode::kTensor || args.given_scale != nullptr;
  const Window* window = WindowAt(args, work.element, work.window);
  [[maybe_unused]] GridBarrier barrier;
  if constexpr (kSingleLaunch) {
    __shared__ Window own_window;
    SetUpHere<Fp8>(args, work, reinterpret_cast<int32_t*>(shared), &own_window);
    window = &own_window;
    if (args.amax != nullptr) {
      barrier.Arrive();  // of the block first
    } else {
      __syncthreads();
    }
  }
  const InputTile<typename Source::Element> tile{reinterpret_cast<char*>(shared)};
  using State = TileState<kMode, Fp8, typename Source::Element>;
  State state{args, tile, exchange, work.first_column, 0};
  RowQuantizer<State> rows(state);
  // Loads a pass and returns the slot's LoadGroupValue.
  const auto load = [&](int pass) {
    const int first = Uniform(window->pass_begins[pass]);
    state.count = Uniform(window->pass_begins[pass + 1]) - first;
    return LoadPass(state, source, window->chunks + first, &rows);
  };
  const auto record_amax = [&] {
    const auto find_amax = [&](int slot) { return exchange.amax[slot]; };
    RecordAmax(threadIdx.x, exchange.pass.chunks, find_amax, state.count, args.amax);
  };
  bool loaded = false;
  if (kSingleLaunch && !finds_amax) {
    // If the work item has only one pass, the pass stays in the tile.
    loaded = work.part + Window::kParts >= window->num_passes;
    for (int pass = work.part; pass < window->num_passes; pass += Window::kParts) {
      load(pass);
      if (pass == work.part) barrier.Wait();
      __syncthreads();
      record_amax();
      __syncthreads();
    }
    if (work.part >= window->num_passes) barrier.Wait();
    barrier.Arrive();
    barrier.Wait();
  }
#pragma unroll 1
  for (int pass = work.part; pass < window->num_passes; pass += Window::kParts) {
    if (pass > work.part) __syncthreads();
    // Prevents the compiler from computing addresses once for all passes: there are too few registers to keep them.
    asm volatile("" : "+r"(state.first_column));
    const uint32_t group_value = loaded ? LoadGroupValue(state) : load(pass);
    WritePass(state, group_value, &rows);
    if (!finds_amax || args.amax == nullptr) continue;
    if (kSingleLaunch && pass == work.part) barrier.Wait();
    record_amax();
  }
  if ((args.row_data != nullptr || source.HasInnerProducts()) && window->other_begin < window->other_end) {
    ZeroOtherRows(args, source, work, *window);
  }
}

// Calls launch(source) with the source of the input.
template <typename Launch>
Status WithSource(const Quantization& args, const Launch& launch) {
  return WithFloatType(args.input_type, [&](auto number) {
    using T = decltype(number);
    if (args.activation.kind == ActivationKind::kNone) return launch(MakePlainSource<T>(args));
    if (args.activation.kind == ActivationKind::kSwiGlu) return launch(MakeActivatedSource<T, true>(args));
    return launch(MakeActivatedSource<T, false>(args));
  });
}

template <ScalingMode kMode, typename Fp8, typename Source>
Status LaunchTilesFrom(cudaStream_t stream, const QuantizeArguments& args, const Source& source) {
  constexpr int kBytes = InputTile<typename Source::Element>::kBytes;
  const auto kernel =
      args.single_launch ? QuantizeTiles<kMode, Fp8, Source, true> : QuantizeTiles<kMode, Fp8, Source, false>;
  JAX_GROUPED_RETURN_IF_FAILED(
      AllowSharedMemory(reinterpret_cast<const void*>(kernel), kBytes, cudaSharedmemCarveoutMaxShared));
  constexpr char kWhat[] = "Launching the quantization";
  const Grid grid{WorkItem::Blocks(args), kTileThreads, kBytes};
  if (!args.single_launch) return LaunchEarly(kWhat, stream, grid, kernel, args, source);
  return args.amax != nullptr ? LaunchCooperative(kWhat, stream, grid, kernel, args, source)
                              : Launch(kWhat, stream, grid, kernel, args, source);
}

template <ScalingMode kMode>
Status LaunchQuantizeTiles(cudaStream_t stream, const Quantization& args) {
  const auto launch = [&](const auto& source) {
    return args.output_type == CUDA_R_8F_E4M3 ? LaunchTilesFrom<kMode, E4m3>(stream, args, source)
                                              : LaunchTilesFrom<kMode, E5m2>(stream, args, source);
  };
  if constexpr (kMode == ScalingMode::kBlock1D) {
    if (args.x_scale != nullptr) return launch(MakeScaledSource(args));
  }
  return WithSource(args, launch);
}

#define JAX_GROUPED_QUANTIZE_MODE(keyword, mode) \
  keyword template Status LaunchQuantizeTiles<mode>(cudaStream_t, const Quantization&)

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_QUANTIZE_TILES_CUH_
