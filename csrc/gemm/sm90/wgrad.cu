#include "csrc/gemm/sm90/wgrad.h"

#include <cstdint>

#include "csrc/gemm/sm90/instructions.cuh"
#include "csrc/gemm/sm90/launch.cuh"
#include "csrc/gemm/sm90/tensor_map.h"
#include "csrc/gemm/sm90/wgrad_kernel.cuh"
#include "csrc/groups/table.cuh"

namespace jax_grouped {
namespace sm90 {
namespace {

constexpr int kSetupThreads = 512;

struct WgradSetup {
  CUtensorMap maps[2];  // without any group's sizes yet
  const uint8_t* data[2];
  int32_t features[2];
  RowBlockCounts element_row_blocks;
  GroupTable table;
  GroupMaps group_maps;
  int32_t* tile_counter;  // gets zero
};

// Finds the groups of a batch element in each block and describes their operands.
__global__ void __launch_bounds__(kSetupThreads) SetUpWgrad(Groups batch, const __grid_constant__ WgradSetup args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr int kMapsAtOnce = 256;
  __shared__ alignas(128) CUtensorMap maps[kMapsAtOnce];
  cudaTriggerProgrammaticLaunchCompletion();
  const auto element = static_cast<int32_t>(blockIdx.x);
  if (element == 0 && threadIdx.x == 0) *args.tile_counter = 0;
  const GroupTable table = args.table.At(element);
  FillGroupTable<kSetupThreads, Counts<RowBlock::k16, RowBlock::k128>>(batch, element, args.element_row_blocks, table);
  // Threads that copy maps serialise, because all maps begin at the same shared-memory bank.
  if (threadIdx.x >= min(kMapsAtOnce, 2 * batch.num_groups)) return;
  CUtensorMap& map = maps[threadIdx.x];
  const int operand = threadIdx.x % 2;
  map = args.maps[operand];
#pragma unroll 1  // There are seldom more groups than maps.
  for (int32_t group = threadIdx.x / 2; group < batch.num_groups; group += kMapsAtOnce / 2) {
    const int32_t chunk = table.BlocksBefore(RowBlock::k16)[group];
    const int32_t chunks = table.BlocksBefore(RowBlock::k16)[group + 1] - chunk;
    // Nothing is read for an empty group, but a map without columns would be invalid.
    const uint32_t tokens = max(chunks, 1) * kFp8Alignment;
    const int64_t first = static_cast<int64_t>(args.features[operand]) * chunk * kFp8Alignment;
    ReplaceMatrix(&map, args.data[operand] + first, tokens, tokens);
    const int32_t index = element * batch.num_groups + group;
    *(operand == 0 ? args.group_maps.X(index) : args.group_maps.Dy(index)) = map;
  }
  ReleaseTensorMaps();
#endif
}

struct Workspace {
  GroupMaps maps;
  GroupTable table;
  int32_t* tile_counter;
  int64_t bytes;

  Workspace(void* base, int64_t batch, int64_t num_groups) {
    maps = {static_cast<CUtensorMap*>(base)};
    table = {reinterpret_cast<int32_t*>(maps.base + 2 * batch * num_groups), static_cast<int32_t>(num_groups)};
    tile_counter = table.base + batch * GroupTable::Size(num_groups);
    bytes = reinterpret_cast<const char*>(tile_counter + 1) - static_cast<char*>(base);
  }
};

}  // namespace

int64_t MaxWgradWorkspaceBytes(int64_t all_groups) {
  // Every batch element has a table, whose arrays are padded. Elements of one group each have the most tables.
  return Workspace(nullptr, all_groups, 1).bytes;
}

Status LaunchWgrad(cudaStream_t stream, int device, const GemmProblem& problem, const Groups& groups,
                   const GemmBuffers& buffers) {
  const Workspace workspace(buffers.workspace, groups.batch, groups.num_groups);
  const auto in_features = static_cast<int32_t>(problem.in_features);
  const auto out_features = static_cast<int32_t>(problem.out_features);
  WgradSetup setup{};
  setup.data[0] = static_cast<const uint8_t*>(buffers.a);
  setup.data[1] = static_cast<const uint8_t*>(buffers.b);
  setup.features[0] = in_features;
  setup.features[1] = out_features;
  setup.element_row_blocks = LayoutOfA(problem, groups).ElementRowBlocks();
  setup.table = workspace.table;
  setup.group_maps = workspace.maps;
  setup.tile_counter = workspace.tile_counter;
  // The maps have the smallest number of tokens until the groups are known.
  JAX_GROUPED_RETURN_IF_FAILED(
      EncodeTensorMap(Fp8Boxes(buffers.a, kFp8Alignment, in_features, kTileRows / kCluster), &setup.maps[0]));
  JAX_GROUPED_RETURN_IF_FAILED(
      EncodeTensorMap(Fp8Boxes(buffers.b, kFp8Alignment, out_features, kTileColumns), &setup.maps[1]));
  const dim3 elements(groups.batch);
  JAX_GROUPED_RETURN_IF_FAILED(
      Launch("Launching the setup of a weight gradient", stream, {elements, kSetupThreads}, SetUpWgrad, groups, setup));

  const int64_t group_tiles = CeilDiv(in_features, kTileRows) * CeilDiv(out_features, kCluster * kTileColumns);
  WgradArguments args{};
  args.maps = workspace.maps;
  args.table = workspace.table;
  args.cluster_tiles = groups.AllGroups() * static_cast<int32_t>(group_tiles);
  args.tile_counter = workspace.tile_counter;
  args.x_scale = static_cast<const float*>(buffers.a_scale);
  args.dy_scale = static_cast<const float*>(buffers.b_scale);
  args.in_features = in_features;
  args.out_features = out_features;
  args.dweight_type = problem.result_type;
  args.accumulate = problem.accumulate;
  JAX_GROUPED_RETURN_IF_FAILED(
      EncodeTensorMap(WgradBoxes(problem, buffers.d, groups.AllGroups(), Fragment::kRows), &args.dweight));
  return WithTypes(problem, [&](auto x, auto dy, auto mode) {
    const auto kernel = GroupedWgrad<decltype(x), decltype(dy), decltype(mode)::value>;
    ClusterLaunch launch;
    JAX_GROUPED_RETURN_IF_FAILED(
        launch.Configure(reinterpret_cast<const void*>(kernel), sizeof(Shared), stream, device, args.cluster_tiles));
    return Status::FromCuda(cudaLaunchKernelEx(launch.config(), kernel, args), "Launching a weight gradient");
  });
}

}  // namespace sm90
}  // namespace jax_grouped
