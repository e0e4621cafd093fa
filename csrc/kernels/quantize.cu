#include "csrc/kernels/quantize.h"

#include <cstdint>

#include "csrc/kernels/bias_grad.h"
#include "csrc/kernels/quantize_launch.cuh"

namespace jax_grouped {

JAX_GROUPED_QUANTIZE_MODE(extern, ScalingMode::kTensor);
JAX_GROUPED_QUANTIZE_MODE(extern, ScalingMode::kBlock1D);
JAX_GROUPED_QUANTIZE_MODE(extern, ScalingMode::kBlock2D);
JAX_GROUPED_QUANTIZE_MODE(extern, ScalingMode::kMx);

namespace {

constexpr int kSetUpThreads = 256;
// With more groups than this, more threads share them out.
constexpr int64_t kFewGroups = 1024;
constexpr int kManyGroupsThreads = 512;
constexpr int kZeroThreads = 512;

// Up to so many groups, every block that fills in windows makes itself a table in shared memory: no second kernel has
// to wait for one.
constexpr int64_t kMostSharedGroups = 8192;

// What groups without rows leave as it is here: their amax is 0, and so their scale is the one that was given or that
// of zeros. `group_scales` says whether there is one scale for each group.
template <typename Fp8, int kThreads>
__device__ void InitializeGroups(const QuantizeArguments& args, bool group_scales) {
  for (int32_t group = threadIdx.x; group < args.table.num_groups; group += kThreads) {
    args.amax[group] = 0;
    if (!group_scales) continue;
    const Scale scale =
        args.given_scale ? ClampScale(args.scale[group]) : ScaleFromAmax<Fp8>(0, args.amax_epsilon, args.pow2_scales);
    if (args.row_scale != nullptr) static_cast<float*>(args.row_scale)[group] = scale.inverse;
    if (args.column_scale != nullptr) static_cast<float*>(args.column_scale)[group] = scale.inverse;
  }
}

// Fills in the windows, a thread for every slot, from a table that need not be the one in args.
template <int kThreads>
__device__ void FillWindows(const QuantizeArguments& args, const GroupTable& table, Window* windows) {
  const auto index = static_cast<int32_t>((blockIdx.x * kThreads + threadIdx.x) / kSlots);
  const auto num_windows = static_cast<int32_t>(args.num_windows);
  if (index >= num_windows) return;
  FillWindow(table, args.tokens, num_windows, index, static_cast<int>(threadIdx.x % kSlots), windows + index);
}

template <typename Fp8, int kThreads>
__global__ void __launch_bounds__(kThreads)
    SetUp(Groups groups, const __grid_constant__ QuantizeArguments args, Window* windows, bool group_scales) {
  extern __shared__ int32_t shared_table[];
  if (args.Skips()) return;
  const GroupTable table{shared_table, groups.num_groups};
  FillGroupTable<kThreads>(groups, table);
  FillWindows<kThreads>(args, table, windows);
  if (blockIdx.x > 0) return;
  for (int64_t i = threadIdx.x; i < GroupTable::Size(groups.num_groups); i += kThreads) {
    args.table.base[i] = shared_table[i];
  }
  InitializeGroups<Fp8, kThreads>(args, group_scales);
}

// The same in two steps, for more groups than shared memory has room for.
template <typename Fp8>
__global__ void __launch_bounds__(kManyGroupsThreads)
    SetUpManyGroups(Groups groups, const __grid_constant__ QuantizeArguments args, bool group_scales) {
  if (args.Skips()) return;
  FillGroupTable<kManyGroupsThreads>(groups, args.table);
  InitializeGroups<Fp8, kManyGroupsThreads>(args, group_scales);
}

__global__ void __launch_bounds__(kSetUpThreads)
    SetUpWindows(const __grid_constant__ QuantizeArguments args, Window* windows) {
  if (args.Skips()) return;
  FillWindows<kSetUpThreads>(args, args.table, windows);
}

template <typename Fp8, int kThreads>
Status LaunchSetUp(cudaStream_t stream, const Groups& groups, const QuantizeArguments& args, Window* windows,
                   bool group_scales) {
  const auto kernel = SetUp<Fp8, kThreads>;
  const auto blocks = static_cast<unsigned>(CeilDiv(int64_t{args.num_windows} * kSlots, kThreads));
  const int bytes = static_cast<int>(GroupTable::Size(groups.num_groups) * sizeof(int32_t));
  JAX_GROUPED_RETURN_IF_FAILED(Status::FromCuda(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "Reserving shared memory"));
  kernel<<<blocks, kThreads, bytes, stream>>>(groups, args, windows, group_scales);
  return Status::Ok();
}

template <typename Fp8>
Status LaunchSetUp(cudaStream_t stream, const Groups& groups, const QuantizeArguments& args, Window* windows,
                   bool group_scales) {
  if (groups.num_groups <= kFewGroups) {
    return LaunchSetUp<Fp8, kSetUpThreads>(stream, groups, args, windows, group_scales);
  }
  if (groups.num_groups <= kMostSharedGroups) {
    return LaunchSetUp<Fp8, kManyGroupsThreads>(stream, groups, args, windows, group_scales);
  }
  const auto blocks = static_cast<unsigned>(CeilDiv(int64_t{args.num_windows} * kSlots, kSetUpThreads));
  SetUpManyGroups<Fp8><<<1, kManyGroupsThreads, 0, stream>>>(groups, args, group_scales);
  SetUpWindows<<<blocks, kSetUpThreads, 0, stream>>>(args, windows);
  return Status::Ok();
}

// Zeroes scales in whose layout some belong to no block. Regions are multiples of 512 bytes.
__global__ void __launch_bounds__(kZeroThreads) ZeroScales(uint4* scales, int64_t count, const bool* skip) {
  if (skip != nullptr && *skip) return;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kZeroThreads + threadIdx.x;
  if (index < count) scales[index] = uint4{};
}

void LaunchZeroScales(cudaStream_t stream, void* scales, int64_t bytes, const bool* skip) {
  const int64_t count = bytes / static_cast<int64_t>(sizeof(uint4));
  if (scales == nullptr || count == 0) return;
  ZeroScales<<<static_cast<unsigned>(CeilDiv(count, kZeroThreads)), kZeroThreads, 0, stream>>>(
      static_cast<uint4*>(scales), count, skip);
}

// The largest values of groups. Warps take the slots of windows.
template <typename Source>
__global__ void __launch_bounds__(kTileThreads)
    FindAmax(const __grid_constant__ QuantizeArguments args, const __grid_constant__ Source source) {
  constexpr int kSteps = kFp8Alignment / 2;
  // All loads of a batch come before the first use.
  constexpr int kBatch = sizeof(typename Source::Element) == 2 ? kSteps : 1;
  __shared__ uint32_t slot_amax[kSlots];
  if (args.Skips()) return;
  const Window& window = args.windows[blockIdx.x / args.num_column_tiles];
  const int slot = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int64_t column = args.FirstColumn(blockIdx.x % args.num_column_tiles) + lane % 16 * 8;
  const bool column_exists = column < args.layout.features;
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    const int count = window.counts[i];
    if (slot < count) {
      const Chunk chunk = window.passes[i].chunks[slot];
      uint32_t amax = 0;
#pragma unroll 1
      for (int batch = 0; batch < kSteps; batch += kBatch) {
        alignas(16) PairOf<typename Source::Element> rows[kBatch][4] = {};
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
          const int row = 2 * (batch + j) + lane / 16;
          if (column_exists && row < chunk.rows) {
            source.Load8(chunk.first_row + static_cast<int64_t>(row), column, rows[j]);
          }
        }
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
          uint2 bits = PairwiseAmax(rows[j]);
          if (max(bits.x, bits.y) >= kInfinityBits) bits = PairwiseFiniteAmax(rows[j]);
          amax = max(amax, max(bits.x, bits.y));
        }
      }
      amax = __reduce_max_sync(kFullWarp, amax);
      if (lane == 0) slot_amax[slot] = amax;
    }
    __syncthreads();
    RecordAmax(window.passes[i], slot_amax, count, args.amax);
    if (window.counts[1] == 0) return;
    __syncthreads();
  }
}

template <typename Source>
void LaunchFindAmax(cudaStream_t stream, const QuantizeArguments& args, const Source& source) {
  FindAmax<<<args.num_windows * args.num_column_tiles, kTileThreads, 0, stream>>>(args, source);
}

void LaunchFindAmax(cudaStream_t stream, const QuantizeProblem& problem, const QuantizeBuffers& buffers,
                    const QuantizeArguments& args) {
  if (problem.activation != Activation::kNone) {
    LaunchFindAmax(stream, args, MakeActivatedSource(problem, buffers));
  } else if (problem.input_type == CUDA_R_16BF) {
    LaunchFindAmax(stream, args, MakePlainSource<__nv_bfloat16>(problem, buffers));
  } else if (problem.input_type == CUDA_R_16F) {
    LaunchFindAmax(stream, args, MakePlainSource<__half>(problem, buffers));
  } else {
    LaunchFindAmax(stream, args, MakePlainSource<float>(problem, buffers));
  }
}

Status LaunchTiles(cudaStream_t stream, const QuantizeProblem& problem, const QuantizeBuffers& buffers,
                   const QuantizeArguments& args) {
  switch (problem.mode) {
    case ScalingMode::kTensor:
      return LaunchQuantizeTiles<ScalingMode::kTensor>(stream, problem, buffers, args);
    case ScalingMode::kBlock1D:
      return LaunchQuantizeTiles<ScalingMode::kBlock1D>(stream, problem, buffers, args);
    case ScalingMode::kBlock2D:
      return LaunchQuantizeTiles<ScalingMode::kBlock2D>(stream, problem, buffers, args);
    case ScalingMode::kMx:
      return LaunchQuantizeTiles<ScalingMode::kMx>(stream, problem, buffers, args);
  }
  return Status::Failed("Quantization has no such scaling mode.");
}

}  // namespace

Status LaunchQuantize(cudaStream_t stream, const Groups& groups, const QuantizeProblem& problem,
                      const QuantizeBuffers& buffers) {
  QuantizeArguments args{};
  args.num_windows = static_cast<uint32_t>(NumWindows(groups.capacity, groups.num_groups));
  auto* windows = static_cast<Window*>(buffers.scratch);
  args.windows = windows;
  args.table = {reinterpret_cast<int32_t*>(windows + args.num_windows), groups.num_groups};
  args.tokens = groups.capacity;
  args.layout = {problem.features, problem.swizzled_scales};
  args.num_column_tiles = static_cast<uint32_t>(CeilDiv(problem.features, kTileColumns));
  args.pow2_scales = problem.pow2_scales;
  args.given_scale = buffers.scale != nullptr;
  args.interleave_halves = problem.backward && problem.activation == Activation::kSiluMul;
  args.amax_epsilon = problem.amax_epsilon;
  args.scale = buffers.scale;
  args.skip = buffers.skip;
  args.row_data = static_cast<uint8_t*>(buffers.row_data);
  args.row_scale = buffers.row_scale;
  args.column_data = static_cast<uint8_t*>(buffers.column_data);
  args.column_scale = buffers.column_scale;
  args.amax = reinterpret_cast<uint32_t*>(buffers.amax);
  args.partial_sums = buffers.dbias != nullptr ? buffers.partial_sums : nullptr;

  const bool group_scales = problem.mode == ScalingMode::kTensor;
  JAX_GROUPED_RETURN_IF_FAILED(problem.output_type == CUDA_R_8F_E4M3
                                   ? LaunchSetUp<E4m3>(stream, groups, args, windows, group_scales)
                                   : LaunchSetUp<E5m2>(stream, groups, args, windows, group_scales));
  if (problem.swizzled_scales) {
    LaunchZeroScales(stream, buffers.row_scale, buffers.row_scale_bytes, buffers.skip);
    LaunchZeroScales(stream, buffers.column_scale, buffers.column_scale_bytes, buffers.skip);
  }
  if (group_scales && !args.given_scale) LaunchFindAmax(stream, problem, buffers, args);
  JAX_GROUPED_RETURN_IF_FAILED(LaunchTiles(stream, problem, buffers, args));
  if (buffers.dbias != nullptr) {
    LaunchAddTiles(stream, buffers.partial_sums, problem.features, args.table.UnitsBefore(Unit::k128),
                   groups.num_groups, buffers.dbias);
  }
  return Status::FromCuda(cudaGetLastError(), "Launching the quantization");
}

}  // namespace jax_grouped
