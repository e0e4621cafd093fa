#include "csrc/gemm/sm90/token_product.h"

#include <cstdint>

#include "csrc/gemm/sm90/instructions.cuh"
#include "csrc/gemm/sm90/launch.cuh"
#include "csrc/gemm/sm90/tensor_map.h"
#include "csrc/gemm/sm90/token_product_kernel.cuh"
#include "csrc/groups/table.cuh"
#include "csrc/groups/zero_rows.cuh"

namespace jax_grouped {
namespace sm90 {
namespace {

constexpr int kSetupThreads = 512;
static_assert(kTileTokens == kTileRows && kTileFeatures == kTileColumns, "the header tells the tiles of the kernel");

struct TokenSetup {
  CUtensorMap result;  // without any group's rows yet
  CUtensorMap* results;
  void* result_data;
  int64_t result_row_bytes;
  RowBlockCounts element_row_blocks;
  GroupTable table;
};

// Sets up a batch element in each row of blocks (blockIdx.y). The first block finds the groups and describes their
// results. The other blocks zero the rows that belong to no group.
__global__ void __launch_bounds__(kSetupThreads)
    SetUpTokenProduct(Groups batch, const __grid_constant__ TokenSetup args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr int kMapsAtOnce = 256;
  __shared__ alignas(128) CUtensorMap maps[kMapsAtOnce];
  cudaTriggerProgrammaticLaunchCompletion();
  const auto element = static_cast<int32_t>(blockIdx.y);
  if (blockIdx.x > 0) {
    return ZeroOtherRows<kSetupThreads>(batch.At(element), element, args.result_data, args.result_row_bytes);
  }
  const GroupTable table = args.table.At(element);
  FillGroupTable<kSetupThreads, Counts<RowBlock::k4, kTileRowBlock>>(batch, element, args.element_row_blocks, table);
  // Threads that copy maps serialise, because all maps begin at the same shared-memory bank.
  if (threadIdx.x >= min(kMapsAtOnce, batch.num_groups)) return;
  CUtensorMap& map = maps[threadIdx.x];
  map = args.result;
#pragma unroll 1  // There are seldom more groups than maps.
  for (int32_t group = threadIdx.x; group < batch.num_groups; group += kMapsAtOnce) {
    const int32_t row = table.FirstRow()[group];
    // Nothing is stored for an empty group, but a map without rows would be invalid.
    const uint32_t rows = max(table.FirstRow()[group + 1] - row, 1);
    ReplaceRows(&map, static_cast<char*>(args.result_data) + row * args.result_row_bytes, rows);
    args.results[element * batch.num_groups + group] = map;
  }
  ReleaseTensorMaps();
#endif
}

struct Workspace {
  CUtensorMap* results;
  GroupTable table;
  int64_t bytes;

  Workspace(void* base, int64_t batch, int64_t num_groups) {
    results = static_cast<CUtensorMap*>(base);
    table = {reinterpret_cast<int32_t*>(results + batch * num_groups), static_cast<int32_t>(num_groups)};
    const int32_t* end = table.base + batch * GroupTable::Size(num_groups);
    bytes = reinterpret_cast<const char*>(end) - static_cast<char*>(base);
  }
};

}  // namespace

int64_t MaxTokenProductWorkspaceBytes(int64_t all_groups) {
  // Every batch element has a table, whose arrays are padded. Elements of one group each have the most tables.
  return Workspace(nullptr, all_groups, 1).bytes;
}

Status LaunchTokenProduct(cudaStream_t stream, int device, const GemmProblem& problem, const Groups& groups,
                          const GemmBuffers& buffers) {
  const Workspace workspace(buffers.workspace, groups.batch, groups.num_groups);
  const RowBlockCounts element_row_blocks = LayoutOfA(problem, groups).ElementRowBlocks();
  const int64_t depth = Depth(problem);
  const int64_t features = ResultFeatures(problem);
  const int64_t row_bytes = features * ResultBytes(problem.result_type);
  TokenSetup setup{};
  setup.results = workspace.results;
  setup.result_data = buffers.d;
  setup.result_row_bytes = row_bytes;
  setup.element_row_blocks = element_row_blocks;
  setup.table = workspace.table;
  BoxedTensor result{};
  result.base = buffers.d;
  result.type = ResultMapType(problem.result_type);
  result.sizes = {static_cast<cuuint64_t>(features), static_cast<cuuint64_t>(groups.AllRows())};
  result.strides = {static_cast<cuuint64_t>(row_bytes)};
  result.box = {static_cast<cuuint32_t>(kBoxRowBytes / ResultBytes(problem.result_type)), Fragment::kRows};
  JAX_GROUPED_RETURN_IF_FAILED(EncodeTensorMap(result, &setup.result));
  const dim3 blocks(1 + ZeroingBlocks(groups.capacity * row_bytes), groups.batch);
  JAX_GROUPED_RETURN_IF_FAILED(Launch("Launching the setup of a grouped product", stream, {blocks, kSetupThreads},
                                      SetUpTokenProduct, groups, setup));

  const int32_t row_tiles = element_row_blocks.count[static_cast<int>(kTileRowBlock)];
  const auto element_cluster_tiles = static_cast<int32_t>(row_tiles * CeilDiv(features, kCluster * kTileColumns));
  TokenArguments args{};
  args.all_results = setup.result;
  args.results = workspace.results;
  args.table = workspace.table;
  args.element_cluster_tiles = element_cluster_tiles;
  args.cluster_tiles = groups.batch * element_cluster_tiles;
  args.token_scale = static_cast<const float*>(buffers.a_scale);
  args.weight_scale = static_cast<const float*>(buffers.b_scale);
  args.weight_scales = buffers.weight_scales;
  args.depth = static_cast<int32_t>(depth);
  args.features = static_cast<int32_t>(features);
  args.elements_per_weight = problem.elements_per_weight;
  args.result_type = problem.result_type;
  JAX_GROUPED_RETURN_IF_FAILED(
      EncodeTensorMap(Fp8Boxes(buffers.a, depth, groups.AllRows(), kTileRows / kCluster), &args.tokens));
  JAX_GROUPED_RETURN_IF_FAILED(
      EncodeTensorMap(Fp8Boxes(buffers.b, depth, NumWeights(problem) * features, kTileColumns), &args.weights));
  return WithTypes(problem, [&](auto tokens, auto weights, auto mode) {
    const auto kernel = GroupedTokenProduct<decltype(tokens), decltype(weights), decltype(mode)::value>;
    ClusterLaunch launch;
    JAX_GROUPED_RETURN_IF_FAILED(
        launch.Configure(reinterpret_cast<const void*>(kernel), stream, device, args.cluster_tiles));
    return Status::FromCuda(cudaLaunchKernelEx(launch.config(), kernel, args), "Launching a grouped product");
  });
}

}  // namespace sm90
}  // namespace jax_grouped
