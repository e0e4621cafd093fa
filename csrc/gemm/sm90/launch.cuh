// Host launches of the product kernels, and the setup of a product of groups of rows: the group table and, for a
// product that reads or writes the rows of each group by tensor maps, the maps.

#ifndef JAX_GROUPED_CSRC_GEMM_SM90_LAUNCH_CUH_
#define JAX_GROUPED_CSRC_GEMM_SM90_LAUNCH_CUH_

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <library_types.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "csrc/common/device.h"
#include "csrc/common/fp8.cuh"
#include "csrc/common/launch.cuh"
#include "csrc/common/status.h"
#include "csrc/gemm/gemm.h"
#include "csrc/gemm/sm90/instructions.cuh"
#include "csrc/gemm/sm90/tensor_map.h"
#include "csrc/gemm/sm90/tile_products.cuh"
#include "csrc/groups/layout.h"
#include "csrc/groups/table.cuh"

namespace jax_grouped::sm90 {

// Returns the tensor map's name for the type of a result.
inline CUtensorMapDataType ResultMapType(cudaDataType_t type) {
  switch (type) {
    case CUDA_R_32F:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    case CUDA_R_16F:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    default:
      return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  }
}

inline int64_t ResultBytes(cudaDataType_t type) { return type == CUDA_R_32F ? 4 : 2; }

// Returns boxes of the result of a product of tokens: of 128 bytes by the rows of a fragment.
inline BoxedTensor ResultBoxes(const GemmProblem& problem, const void* d, int64_t rows) {
  const auto number_bytes = static_cast<cuuint32_t>(ResultBytes(problem.result_type));
  const auto features = static_cast<cuuint64_t>(ResultFeatures(problem));
  BoxedTensor boxes{};
  boxes.base = d;
  boxes.type = ResultMapType(problem.result_type);
  boxes.sizes = {features, static_cast<cuuint64_t>(rows)};
  boxes.strides = {features * number_bytes};
  boxes.box = {kBoxRowBytes / number_bytes, Fragment::kRows};
  return boxes;
}

// Returns boxes of a weight gradient, of 128 bytes by `box_rows` rows.
inline BoxedTensor WgradBoxes(const GemmProblem& problem, const void* d, int32_t groups, int box_rows) {
  const auto number_bytes = static_cast<cuuint32_t>(ResultBytes(problem.result_type));
  const auto in_features = static_cast<cuuint64_t>(problem.in_features);
  const auto out_features = static_cast<cuuint64_t>(problem.out_features);
  const cuuint64_t row_bytes = out_features * number_bytes;
  BoxedTensor boxes{};
  boxes.base = d;
  boxes.type = ResultMapType(problem.result_type);
  boxes.sizes = {out_features, in_features, static_cast<cuuint64_t>(groups)};
  boxes.strides = {row_bytes, row_bytes * in_features};
  boxes.box = {kBoxRowBytes / number_bytes, static_cast<cuuint32_t>(box_rows), 1};
  return boxes;
}

// Returns boxes of kDepth numbers by `box_rows` rows of FP8 numbers.
inline BoxedTensor Fp8Boxes(const void* data, int64_t row_length, int64_t rows, uint32_t box_rows) {
  BoxedTensor boxes{};
  boxes.base = data;
  boxes.type = CU_TENSOR_MAP_DATA_TYPE_UINT8;
  boxes.sizes = {static_cast<cuuint64_t>(row_length), static_cast<cuuint64_t>(rows)};
  boxes.strides = {static_cast<cuuint64_t>(row_length)};
  boxes.box = {kDepth, box_rows};
  return boxes;
}

// Calls launch(type of a, type of b, scaling mode of a) with a problem's values, passed as types.
template <typename Launch>
Status WithTypes(const GemmProblem& problem, const Launch& launch) {
  const auto with_mode = [&](auto a, auto b) {
    if (problem.a_mode == ScalingMode::kBlock1D) {
      return launch(a, b, std::integral_constant<ScalingMode, ScalingMode::kBlock1D>());
    }
    return launch(a, b, std::integral_constant<ScalingMode, ScalingMode::kTensor>());
  };
  if (problem.a_type == CUDA_R_8F_E5M2) return with_mode(E5m2(), E4m3());
  if (problem.b_type == CUDA_R_8F_E5M2) return with_mode(E4m3(), E5m2());
  return with_mode(E4m3(), E4m3());
}

// Launches a kernel with `shared_bytes` of dynamic shared memory on all SMs, or on fewer if there are fewer cluster
// tiles than clusters. The kernel starts early and waits for its setup in SetUpCluster.
template <typename Arguments>
Status LaunchClusters(const char* what, cudaStream_t stream, int device, int shared_bytes, int32_t tiles,
                      void (*kernel)(Arguments), const Arguments& args) {
  DeviceProperties properties;
  JAX_GROUPED_RETURN_IF_FAILED(GetDeviceProperties(device, &properties));
  JAX_GROUPED_RETURN_IF_FAILED(AllowSharedMemory(reinterpret_cast<const void*>(kernel), shared_bytes));
  const dim3 blocks(std::min(tiles, properties.processors / kCluster) * kCluster);
  return LaunchEarly(what, stream, {blocks, kThreads, shared_bytes}, kernel, args);
}

constexpr int kGroupRowsThreads = 512;

struct GroupRowsSetup {
  CUtensorMap map;    // without any group's rows yet
  CUtensorMap* maps;  // null if the product needs none
  void* data;
  int64_t row_bytes;
  RowBlockCounts element_row_blocks;
  GroupTable table;
  int32_t* order;         // null if the product needs none
  int32_t* tile_counter;  // gets zero
};

// Most groups that are ordered by their rows. With more, one tile is a small part of a block's work.
constexpr int32_t kMostOrderedGroups = 1024;

// Writes the groups of one batch element in the order of their numbers of rows, the largest first, or in their own
// order if there are many. All threads of the block must call it.
__device__ inline void OrderGroups(const GroupTable& table, int32_t* order) {
  __shared__ int32_t rows[kMostOrderedGroups];
  const int32_t num_groups = table.num_groups;
  const bool sorts = num_groups <= kMostOrderedGroups;
  if (sorts) {
    for (int32_t group = threadIdx.x; group < num_groups; group += kGroupRowsThreads) {
      rows[group] = table.FirstRow()[group + 1] - table.FirstRow()[group];
    }
    __syncthreads();
  }
  for (int32_t group = threadIdx.x; group < num_groups; group += kGroupRowsThreads) {
    int32_t before = group;
    if (sorts) {
      before = 0;
#pragma unroll 8
      for (int32_t other = 0; other < num_groups; ++other) {
        before += rows[other] > rows[group] || (rows[other] == rows[group] && other < group) ? 1 : 0;
      }
    }
    order[before] = group;
  }
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Writes `count` tensor maps: copies of `own`, which may differ between threads of odd and even index, after
// change(map, index). All threads of the block must call it.
template <typename Change>
__device__ __forceinline__ void WriteMaps(const CUtensorMap& own, CUtensorMap* to, int32_t count,
                                          const Change& change) {
  constexpr int kMapsAtOnce = 256;
  __shared__ alignas(128) CUtensorMap maps[kMapsAtOnce];
  // Threads that copy maps serialise, because all maps begin at the same shared-memory bank.
  if (threadIdx.x >= min(kMapsAtOnce, count)) return;
  CUtensorMap& map = maps[threadIdx.x];
  map = own;
#pragma unroll 1  // There are seldom more maps than these.
  for (int32_t index = threadIdx.x; index < count; index += kMapsAtOnce) {
    change(&map, index);
    to[index] = map;
  }
  ReleaseTensorMaps();
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

// Sets up a batch element in each row of blocks (blockIdx.y). The first block finds the groups and describes their
// rows. The other blocks, if there are any, zero the rows that belong to no group. Of the table's counts, writes those
// of `Blocks`.
template <typename Blocks>
__global__ void __launch_bounds__(kGroupRowsThreads)
    SetUpGroupRows(Groups batch, const __grid_constant__ GroupRowsSetup args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  cudaTriggerProgrammaticLaunchCompletion();
  const auto element = static_cast<int32_t>(blockIdx.y);
  if (blockIdx.x > 0) {
    return ZeroOtherRows<kGroupRowsThreads>(batch.At(element), element, args.data, args.row_bytes);
  }
  if (element == 0 && threadIdx.x == 0) *args.tile_counter = 0;
  const GroupTable table = args.table.At(element);
  FillGroupTable<kGroupRowsThreads, Blocks>(batch, element, args.element_row_blocks, table);
  if (args.order != nullptr) OrderGroups(table, args.order + element * batch.num_groups);
  if (args.maps == nullptr) return;
  WriteMaps(args.map, args.maps + element * batch.num_groups, batch.num_groups, [&](CUtensorMap* map, int32_t group) {
    const int32_t row = table.FirstRow()[group];
    // Nothing is copied for an empty group, but a map without rows would be invalid.
    const uint32_t rows = max(table.FirstRow()[group + 1] - row, 1);
    ReplaceRows(map, static_cast<char*>(args.data) + row * args.row_bytes, rows);
  });
#endif
}

// The parts of the workspace: a map of each group's rows, or maps of both operands of a weight gradient, the table of
// every batch element, the counter of a TileScheduler and, beside one map, the order of the groups.
struct GroupRowsWorkspace {
  CUtensorMap* maps;
  GroupTable table;
  int32_t* tile_counter;
  int32_t* order;
  int64_t bytes;

  GroupRowsWorkspace(void* base, int64_t batch, int64_t num_groups, int maps_per_group = 1) {
    maps = static_cast<CUtensorMap*>(base);
    table = {reinterpret_cast<int32_t*>(maps + maps_per_group * batch * num_groups), static_cast<int32_t>(num_groups)};
    tile_counter = table.base + batch * GroupTable::Size(num_groups);
    order = tile_counter + 1;
    const int32_t* end = order + (maps_per_group == 1 ? batch * num_groups : 0);
    bytes = reinterpret_cast<const char*>(end) - static_cast<char*>(base);
  }

  // Returns the most bytes that `all_groups` groups in a batch can use.
  static int64_t MaxBytes(int64_t all_groups, int maps_per_group = 1) {
    // Every batch element has a table, whose arrays are padded. Elements of one group each have the most tables.
    return GroupRowsWorkspace(nullptr, all_groups, 1, maps_per_group).bytes;
  }
};

// Launches the setup for an array, whose second dimension is the rows of all groups. Points `whole` to all its rows;
// without it, the groups get no maps either.
template <typename Blocks>
Status LaunchGroupRows(const char* what, cudaStream_t stream, const Groups& groups, const BoxedTensor& array,
                       const RowBlockCounts& element_row_blocks, bool zero_other_rows, bool orders_groups,
                       const GroupRowsWorkspace& workspace, CUtensorMap* whole) {
  GroupRowsSetup setup{};
  if (whole != nullptr) {
    JAX_GROUPED_RETURN_IF_FAILED(EncodeTensorMap(array, whole));
    setup.map = *whole;
    setup.maps = workspace.maps;
  }
  setup.data = const_cast<void*>(array.base);
  setup.row_bytes = static_cast<int64_t>(array.strides[0]);
  setup.element_row_blocks = element_row_blocks;
  setup.table = workspace.table;
  if (orders_groups) setup.order = workspace.order;
  setup.tile_counter = workspace.tile_counter;
  const int zeroing_blocks = zero_other_rows ? ZeroingBlocks(groups.capacity * setup.row_bytes) : 0;
  const dim3 blocks(1 + zeroing_blocks, groups.batch);
  return Launch(what, stream, {blocks, kGroupRowsThreads}, SetUpGroupRows<Blocks>, groups, setup);
}

}  // namespace jax_grouped::sm90

#endif  // JAX_GROUPED_CSRC_GEMM_SM90_LAUNCH_CUH_
