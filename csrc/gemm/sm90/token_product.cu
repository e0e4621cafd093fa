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
  CUtensorMap result;  // with the rows of no group yet
  CUtensorMap* results;
  void* result_data;
  int64_t result_row_bytes;
  UnitCounts element_units;
  GroupTable table;
};

// Every row of blocks has a batch element: its first block finds the groups and describes their results, the others
// zero the rows of no group.
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
  FillGroupTable<kSetupThreads, Counts<Unit::k4, kTileUnit>>(batch, element, args.element_units, table);
  // Threads that copy maps wait for each other, as all maps begin at the same bank.
  if (threadIdx.x >= min(kMapsAtOnce, batch.num_groups)) return;
  CUtensorMap& map = maps[threadIdx.x];
  map = args.result;
#pragma unroll 1  // There are seldom as many groups as maps.
  for (int32_t group = threadIdx.x; group < batch.num_groups; group += kMapsAtOnce) {
    const int32_t row = table.FirstRow()[group];
    // Nothing is stored for an empty group, but a map of no rows would not be valid.
    const uint32_t rows = max(table.FirstRow()[group + 1] - row, 1);
    ReplaceRows(&map, static_cast<char*>(args.result_data) + row * args.result_row_bytes, rows);
    args.results[element * batch.num_groups + group] = map;
  }
  ReleaseTensorMaps();
#endif
}

struct Scratch {
  CUtensorMap* results;
  GroupTable table;
  int64_t bytes;

  Scratch(void* base, int64_t batch, int64_t num_groups) {
    results = static_cast<CUtensorMap*>(base);
    table = {reinterpret_cast<int32_t*>(results + batch * num_groups), static_cast<int32_t>(num_groups)};
    const int32_t* end = table.base + batch * GroupTable::Size(num_groups);
    bytes = reinterpret_cast<const char*>(end) - static_cast<char*>(base);
  }
};

}  // namespace

int64_t TokenProductScratchBytes(int64_t batch, int64_t num_groups) {
  return Scratch(nullptr, batch, num_groups).bytes;
}

Status LaunchTokenProduct(cudaStream_t stream, int device, const TokenProduct& product, const Groups& groups,
                          void* memory) {
  const Scratch scratch(memory, groups.batch, groups.num_groups);
  const int64_t row_bytes = product.features * ResultBytes(product.result_type);
  TokenSetup setup{{}, scratch.results, product.result, row_bytes, product.element_units, scratch.table};
  const BoxedTensor result{product.result,
                           ResultMapType(product.result_type),
                           {static_cast<cuuint64_t>(product.features), static_cast<cuuint64_t>(groups.AllRows())},
                           {static_cast<cuuint64_t>(row_bytes)},
                           {static_cast<cuuint32_t>(kBoxRowBytes / ResultBytes(product.result_type)), Fragment::kRows}};
  JAX_GROUPED_RETURN_IF_FAILED(EncodeTensorMap(result, &setup.result));
  const dim3 blocks(1 + ZeroingBlocks(groups.capacity * row_bytes), groups.batch);
  JAX_GROUPED_RETURN_IF_FAILED(Launch("Launching the setup of a grouped product", stream, {blocks, kSetupThreads},
                                      SetUpTokenProduct, groups, setup));

  const int32_t row_tiles = product.element_units.count[static_cast<int>(kTileUnit)];
  const auto element_turns = static_cast<int32_t>(row_tiles * CeilDiv(product.features, kCluster * kTileColumns));
  TokenArguments args{{},
                      {},
                      setup.result,
                      scratch.results,
                      scratch.table,
                      element_turns,
                      groups.batch * element_turns,
                      product.tokens.scale,
                      product.weights.scale,
                      product.weight_scales,
                      static_cast<int32_t>(product.depth),
                      static_cast<int32_t>(product.features),
                      product.elements_per_weight,
                      product.result_type};
  JAX_GROUPED_RETURN_IF_FAILED(EncodeTensorMap(
      Fp8Boxes(product.tokens.data, product.depth, groups.AllRows(), kTileRows / kCluster), &args.tokens));
  JAX_GROUPED_RETURN_IF_FAILED(EncodeTensorMap(
      Fp8Boxes(product.weights.data, product.depth, product.num_weights * product.features, kTileColumns),
      &args.weights));
  return WithTypes(product.tokens, product.weights, product.mode, [&](auto tokens, auto weights, auto mode) {
    const auto kernel = GroupedTokenProduct<decltype(tokens), decltype(weights), decltype(mode)::value>;
    return LaunchClusters(kernel, stream, device, args);
  });
}

}  // namespace sm90
}  // namespace jax_grouped
