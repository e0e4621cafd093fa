#include "csrc/quantize/quantize.h"

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "csrc/bias_grad/bias_grad.h"
#include "csrc/common/device.h"
#include "csrc/common/launch.cuh"
#include "csrc/groups/table.cuh"
#include "csrc/quantize/activation.cuh"
#include "csrc/quantize/pass.cuh"
#include "csrc/quantize/tiles.cuh"

namespace jax_grouped {

JAX_GROUPED_QUANTIZE_MODE(extern, ScalingMode::kTensor);
JAX_GROUPED_QUANTIZE_MODE(extern, ScalingMode::kBlock1D);
JAX_GROUPED_QUANTIZE_MODE(extern, ScalingMode::kBlock2D);
JAX_GROUPED_QUANTIZE_MODE(extern, ScalingMode::kMx);

namespace {

constexpr int kSetUpThreads = 256;
// Number of groups up to which the setup has kSetUpThreads threads; more groups take kManyGroupsThreads.
constexpr int32_t kFewGroups = 1024;
constexpr int kManyGroupsThreads = 512;
constexpr int kZeroThreads = 512;

// Number of groups up to which every block that fills in windows makes its own table in shared memory. No second kernel
// then has to wait for a table.
constexpr int32_t kMostSharedGroups = 8192;

// Numbers of gathered rows in a slab, if a tile of columns has fewer: 2 MiB of bfloat16. With 16 MiB and more, less of
// the slab stays in the L2 cache, through which the results pass too.
constexpr int64_t kSlabNumbers = 1 << 20;

constexpr char kSettingUp[] = "Launching the setup of a quantization";

// Fills in the windows of a batch element, one per warp.
template <int kThreads>
__device__ void FillWindows(const QuantizeArguments& args, const GroupTable& table, int32_t element) {
  const auto index = static_cast<int32_t>((blockIdx.x * kThreads + threadIdx.x) / 32);
  if (index >= args.num_windows) return;
  FillWindow(args, table, element, index, WindowAt(args, element, index));
}

// Fills in the windows and the table of a batch element, and initialises its groups. blockIdx.y is the batch element.
template <typename Fp8, int kThreads>
__global__ void __launch_bounds__(kThreads) SetUp(const __grid_constant__ QuantizeArguments args) {
  extern __shared__ uint4 shared[];
  cudaTriggerProgrammaticLaunchCompletion();
  const auto element = static_cast<int32_t>(blockIdx.y);
  if (args.Skips(element)) return;
  const GroupTable table{reinterpret_cast<int32_t*>(shared), args.groups.num_groups};
  FillGroupTable<kThreads, AllRowBlocks>(args.groups, element, args.element_row_blocks, table);
  FillWindows<kThreads>(args, table, element);
  if (blockIdx.x == 0) StoreTable(args, table, element);
  InitializeGroups<Fp8>(args, element, blockIdx.x * kThreads + threadIdx.x, gridDim.x * kThreads);
}

// Does the work of SetUp in two steps, if shared memory has no room for the groups. The first step has one block per
// batch element; SetUpWindows is the second.
template <typename Fp8>
__global__ void __launch_bounds__(kManyGroupsThreads) SetUpManyGroups(const __grid_constant__ QuantizeArguments args) {
  const auto element = static_cast<int32_t>(blockIdx.x);
  if (args.Skips(element)) return;
  FillGroupTable<kManyGroupsThreads, AllRowBlocks>(args.groups, element, args.element_row_blocks,
                                                   args.table.At(element));
  InitializeGroups<Fp8>(args, element, threadIdx.x, kManyGroupsThreads);
}

__global__ void __launch_bounds__(kSetUpThreads) SetUpWindows(const __grid_constant__ QuantizeArguments args) {
  cudaTriggerProgrammaticLaunchCompletion();
  const auto element = static_cast<int32_t>(blockIdx.y);
  if (args.Skips(element)) return;
  FillWindows<kSetUpThreads>(args, args.table.At(element), element);
}

dim3 WindowBlocks(const QuantizeArguments& args, int threads) {
  return dim3(static_cast<unsigned>(CeilDiv(int64_t{args.num_windows} * 32, threads)), args.groups.batch);
}

constexpr int TableBytes(int32_t num_groups) {
  return static_cast<int>(GroupTable::Size(num_groups) * sizeof(int32_t));
}

template <typename Fp8, int kThreads, int32_t kMostGroups>
Status LaunchSetUp(cudaStream_t stream, const QuantizeArguments& args) {
  const auto kernel = SetUp<Fp8, kThreads>;
  JAX_GROUPED_RETURN_IF_FAILED(AllowSharedMemory(reinterpret_cast<const void*>(kernel), TableBytes(kMostGroups)));
  return Launch(kSettingUp, stream, {WindowBlocks(args, kThreads), kThreads, TableBytes(args.groups.num_groups)},
                kernel, args);
}

template <typename Fp8>
Status LaunchSetUp(cudaStream_t stream, const QuantizeArguments& args) {
  const int32_t num_groups = args.groups.num_groups;
  if (num_groups <= kFewGroups) return LaunchSetUp<Fp8, kSetUpThreads, kFewGroups>(stream, args);
  if (num_groups <= kMostSharedGroups) return LaunchSetUp<Fp8, kManyGroupsThreads, kMostSharedGroups>(stream, args);
  const dim3 elements(args.groups.batch);
  JAX_GROUPED_RETURN_IF_FAILED(Launch(kSettingUp, stream, {elements, kManyGroupsThreads}, SetUpManyGroups<Fp8>, args));
  return Launch(kSettingUp, stream, {WindowBlocks(args, kSetUpThreads), kSetUpThreads}, SetUpWindows, args);
}

// Zeros the scales of kMx. Tiles of 512 bytes also have scales of rows and features that do not exist, and products
// read whole tiles. `count` is that of one element.
__global__ void __launch_bounds__(kZeroThreads) ZeroScales(uint4* scales, int64_t count, const bool* skip) {
  if (skip != nullptr && skip[blockIdx.y]) return;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kZeroThreads + threadIdx.x;
  if (index < count) scales[blockIdx.y * count + index] = uint4{};
}

Status LaunchZeroScales(cudaStream_t stream, void* scales, int64_t bytes, const QuantizeArguments& args) {
  const int64_t count = bytes / args.groups.batch / static_cast<int64_t>(sizeof(uint4));
  if (scales == nullptr || count == 0) return Status::Ok();
  const dim3 blocks(static_cast<unsigned>(CeilDiv(count, kZeroThreads)), args.groups.batch);
  return Launch("Launching the zeros between scales", stream, {blocks, kZeroThreads}, ZeroScales,
                static_cast<uint4*>(scales), count, args.skip);
}

// Returns the bits of the largest finite absolute value of a chunk in a tile's columns. Whole warps must call it. The
// chunk is passed by value, so that it is not loaded from memory again for every row.
template <typename Source>
__device__ uint32_t FindChunkAmax(const Source& source, Chunk chunk, int64_t first_column) {
  constexpr int kCount = Source::kRowsAtOnce;
  const int lane = threadIdx.x % 32;
  const int64_t column = first_column + lane % 16 * 8;
  uint32_t amax = 0;
#pragma unroll 1
  for (int first = lane / 16; first < kFp8Alignment; first += 2 * kCount) {
    alignas(16) PairOf<typename Source::Element> rows[kCount][4] = {};
    source.LoadRows(chunk, first, column, rows);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      uint2 bits = PairwiseAmax(rows[i]);
      if (max(bits.x, bits.y) >= kInfinityBits) bits = PairwiseFiniteAmax(rows[i]);
      amax = max(amax, max(bits.x, bits.y));
    }
  }
  return __reduce_max_sync(kFullWarp, amax);
}

// Updates the amax of each of a work item's groups. All threads of the block must call it. Each warp takes one slot of
// a pass.
template <typename Source>
__device__ void FindAmax(const QuantizeArguments& args, const Source& source, const WorkItem& work,
                         const Window& window, uint32_t (&slot_amax)[kSlots]) {
  const int slot = threadIdx.x / 32;
#pragma unroll 1
  for (int pass = work.part; pass < window.num_passes; pass += Window::kParts) {
    const Chunk* chunks = window.chunks + window.pass_begins[pass];
    const int count = window.pass_begins[pass + 1] - window.pass_begins[pass];
    if (slot < count) {
      const uint32_t amax = FindChunkAmax(source, chunks[slot], work.first_column);
      if (threadIdx.x % 32 == 0) slot_amax[slot] = amax;
    }
    __syncthreads();
    RecordAmax(threadIdx.x, chunks, [&](int i) { return slot_amax[i]; }, count, args.amax);
    __syncthreads();
  }
}

template <typename Source>
__global__ void __launch_bounds__(kTileThreads)
    FindAmaxKernel(const __grid_constant__ QuantizeArguments args, const __grid_constant__ Source source) {
  __shared__ uint32_t slot_amax[kSlots];
  cudaGridDependencySynchronize();
  const WorkItem work(args, false);
  if (!work.exists || args.Skips(work.element)) return;
  FindAmax(args, source, work, *WindowAt(args, work.element, work.window), slot_amax);
}

Status LaunchFindAmax(cudaStream_t stream, const Quantization& args) {
  return WithSource(args, [&](const auto& source) {
    const auto kernel = FindAmaxKernel<std::decay_t<decltype(source)>>;
    return LaunchEarly("Launching the search for the largest values", stream, {WorkItem::Blocks(args), kTileThreads},
                       kernel, args, source);
  });
}

Status LaunchTiles(cudaStream_t stream, const Quantization& args) {
  switch (args.mode) {
    case ScalingMode::kTensor:
      return LaunchQuantizeTiles<ScalingMode::kTensor>(stream, args);
    case ScalingMode::kBlock1D:
      return LaunchQuantizeTiles<ScalingMode::kBlock1D>(stream, args);
    case ScalingMode::kBlock2D:
      return LaunchQuantizeTiles<ScalingMode::kBlock2D>(stream, args);
    case ScalingMode::kMx:
      return LaunchQuantizeTiles<ScalingMode::kMx>(stream, args);
  }
  return Status::Failed("Quantization has no such scaling mode.");
}

// Chooses a single launch for a small quantization. Its blocks may wait for each other. Separate launches and the gaps
// between them would take most of the time.
Status ChooseSingleLaunch(QuantizeArguments* args) {
  // A gated gradient has a kernel of its own, after the setup.
  if (args->activated_scale != nullptr) return Status::Ok();
  const bool few_groups = args->groups.num_groups <= kMostGroupsOfWarp;
  // Either all blocks leave early or none does, because the blocks of a single launch may wait for each other.
  const bool all_or_none_skip = args->skip == nullptr || args->groups.batch == 1;
  DeviceProperties properties;
  JAX_GROUPED_RETURN_IF_FAILED(GetDeviceProperties(&properties));
  args->single_launch = few_groups && all_or_none_skip &&
                        NumWorkItems(*args) * args->num_column_tiles <= kBlocksOfSingleLaunch * properties.processors;
  return Status::Ok();
}

// Chooses the number of tiles in a slab. With slabs, rows that are gathered several times are read from memory once,
// and from the L2 cache later: on an H200 that takes 9 to 20 % less time.
uint32_t ChooseSlabTiles(const Quantization& args) {
  const bool repeats = args.row_indices != nullptr && args.groups.AllRows() >= 2 * args.x_rows;
  if (!repeats || !WorkItem::CanHaveSlabs(args)) return args.num_column_tiles;
  const int64_t tile_numbers = std::max<int64_t>(args.x_rows / args.groups.batch, 1) * kTileColumns;
  return static_cast<uint32_t>(std::clamp<int64_t>(kSlabNumbers / tile_numbers, 1, args.num_column_tiles));
}

// Launches the kernels that quantize. A single launch may be refused: under MPS, a process can have fewer SMs than its
// device reports, and then not all blocks are resident at once. The separate launches that it replaces work with any
// number of SMs.
Status LaunchPasses(cudaStream_t stream, Quantization* args) {
  if (args->single_launch) {
    Status launched = LaunchTiles(stream, *args);
    if (launched.cuda_error() != cudaErrorCooperativeLaunchTooLarge) return launched;
    args->single_launch = false;
  }
  JAX_GROUPED_RETURN_IF_FAILED(args->output_type == CUDA_R_8F_E4M3 ? LaunchSetUp<E4m3>(stream, *args)
                                                                   : LaunchSetUp<E5m2>(stream, *args));
  if (args->group_scales && args->given_scale == nullptr) JAX_GROUPED_RETURN_IF_FAILED(LaunchFindAmax(stream, *args));
  if (args->activated_data != nullptr) return LaunchGatedGradient(stream, *args);
  return IsGatheredColumns(*args) ? LaunchGatheredColumns(stream, *args) : LaunchTiles(stream, *args);
}

// Makes the results of a backward form, then those of the activation.
Status LaunchBackwardAndActivation(cudaStream_t stream, const Quantization& args) {
  Quantization backward = args;
  backward.activated_data = nullptr;
  backward.activated_amax = nullptr;
  backward.activated_scale = nullptr;
  JAX_GROUPED_RETURN_IF_FAILED(LaunchQuantize(stream, backward));
  Quantization forward{};
  forward.groups = args.groups;
  forward.element_row_blocks = args.element_row_blocks;
  forward.layout = args.layout;
  if (IsGated(args.activation.kind)) forward.layout.features /= 2;
  forward.scale_rule = args.scale_rule;
  forward.given_scale = args.given_activated_scale;
  forward.column_data = args.activated_data;
  forward.column_scale = args.activated_scale;
  forward.column_scale_bytes = args.activated_scale_bytes;
  forward.amax = args.activated_amax;
  forward.mode = args.mode;
  forward.input_type = args.input_type;
  forward.output_type = CUDA_R_8F_E4M3;
  forward.activation = args.activation;
  forward.x = args.activation_input;
  forward.x_rows = args.x_rows;
  forward.row_weights = args.row_weights;
  forward.scratch = args.scratch;
  return LaunchQuantize(stream, forward);
}

}  // namespace

Status LaunchQuantize(cudaStream_t stream, Quantization args) {
  if (args.activated_data != nullptr && !IsGatedGradient(args)) return LaunchBackwardAndActivation(stream, args);
  const Groups& groups = args.groups;
  args.num_windows = static_cast<int32_t>(NumWindows(groups.capacity, groups.num_groups));
  args.windows = static_cast<Window*>(args.scratch);
  args.table = {reinterpret_cast<int32_t*>(args.windows + static_cast<int64_t>(groups.batch) * args.num_windows),
                groups.num_groups};
  args.num_column_tiles = static_cast<uint32_t>(CeilDiv(args.layout.features, kTileColumns));
  args.interleave_halves = args.backward && IsGated(args.activation.kind);
  args.group_scales = args.mode == ScalingMode::kTensor;
  if (args.dbias == nullptr) args.partial_sums = nullptr;
  JAX_GROUPED_RETURN_IF_FAILED(ChooseSingleLaunch(&args));
  args.slab_tiles = ChooseSlabTiles(args);

  if (args.mode == ScalingMode::kMx) {
    JAX_GROUPED_RETURN_IF_FAILED(LaunchZeroScales(stream, args.row_scale, args.row_scale_bytes, args));
    JAX_GROUPED_RETURN_IF_FAILED(LaunchZeroScales(stream, args.column_scale, args.column_scale_bytes, args));
  }
  JAX_GROUPED_RETURN_IF_FAILED(LaunchPasses(stream, &args));
  if (args.dbias == nullptr) return Status::Ok();
  return LaunchAddTiles(stream, args.partial_sums, args.layout.features, groups, args.table, args.dbias);
}

}  // namespace jax_grouped
