#include "csrc/bias_grad/bias_grad.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "csrc/common/launch.cuh"
#include "csrc/groups/layout.cuh"
#include "csrc/groups/table.cuh"

namespace jax_grouped {
namespace {

constexpr int kColumnThreads = 32;
constexpr int kLanes = 8;
constexpr int kSumThreads = 128;

// The row blocks of the group table that are tiles.
constexpr RowBlock kTileRowBlock = RowBlock::k128;
static_assert(RowsOf(kTileRowBlock) == kBiasGradRows);

__device__ float ToFloat(float x) { return x; }
__device__ float ToFloat(__half x) { return __half2float(x); }
__device__ float ToFloat(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T, int kVector>
struct alignas(sizeof(T) * kVector) Vector {
  T element[kVector];
};

// The x axis of these grids counts column blocks together with tiles or groups. The other axes end at 65535, which many
// features would exceed.

// Sums one tile's rows over kColumnThreads * kVector columns per block. blockIdx.y is the batch element.
template <typename T, int kVector>
__global__ void __launch_bounds__(kColumnThreads* kLanes)
    SumTiles(const T* __restrict__ dy, int64_t features, uint32_t column_blocks, GroupTable batch_table,
             float* __restrict__ partial_sums) {
  __shared__ float lane_sums[kLanes][kColumnThreads][kVector];
  const GroupTable table = batch_table.At(static_cast<int32_t>(blockIdx.y));
  const int32_t* row_starts = table.FirstRow();
  const int32_t* tile_starts = table.BlocksBefore(kTileRowBlock);
  const int32_t tile = tile_starts[0] + static_cast<int32_t>(blockIdx.x / column_blocks);
  const int64_t first_column = static_cast<int64_t>(blockIdx.x % column_blocks) * kColumnThreads * kVector;
  if (tile >= tile_starts[table.num_groups]) return;

  const int32_t group = FindGroup(tile_starts, 0, table.num_groups, tile);
  const int64_t begin = row_starts[group] + static_cast<int64_t>(tile - tile_starts[group]) * kBiasGradRows;
  const int64_t end = min(begin + kBiasGradRows, static_cast<int64_t>(row_starts[group + 1]));
  const int64_t column = first_column + threadIdx.x * kVector;

  float sum[kVector] = {};
  if (column < features) {
#pragma unroll 4
    for (int64_t row = begin + threadIdx.y; row < end; row += kLanes) {
      const auto values = *reinterpret_cast<const Vector<T, kVector>*>(dy + row * features + column);
#pragma unroll
      for (int i = 0; i < kVector; ++i) sum[i] += ToFloat(values.element[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < kVector; ++i) lane_sums[threadIdx.y][threadIdx.x][i] = sum[i];
  __syncthreads();

  // Adjacent threads now take adjacent columns.
  const int thread = static_cast<int>(threadIdx.y) * kColumnThreads + static_cast<int>(threadIdx.x);
  for (int i = thread; i < kColumnThreads * kVector && first_column + i < features; i += kColumnThreads * kLanes) {
    float total = 0.0f;
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) total += lane_sums[lane][i / kVector][i % kVector];
    partial_sums[tile * features + first_column + i] = total;
  }
}

__global__ void __launch_bounds__(kSumThreads)
    AddTiles(const float* __restrict__ partial_sums, int64_t features, uint32_t column_blocks, GroupTable table,
             float* __restrict__ dbias) {
  const auto index = static_cast<int32_t>(blockIdx.x / column_blocks);
  const int32_t group = index % table.num_groups;
  const int32_t* __restrict__ tile_starts = table.At(index / table.num_groups).BlocksBefore(kTileRowBlock);
  const int64_t column = static_cast<int64_t>(blockIdx.x % column_blocks) * kSumThreads + threadIdx.x;
  if (column >= features) return;
  float sum = 0.0f;
#pragma unroll 8
  for (int32_t tile = tile_starts[group]; tile < tile_starts[group + 1]; ++tile) {
    sum += partial_sums[tile * features + column];
  }
  dbias[static_cast<int64_t>(index) * features + column] = sum;
}

// Counts the blocks of a launch that has `column_blocks` blocks for each of `rows`. Fails if one axis cannot hold them.
Status CountBlocks(int64_t rows, int64_t column_blocks, unsigned* blocks) {
  constexpr int64_t kMost = INT32_MAX;
  if (column_blocks > kMost || rows * column_blocks > kMost) {
    return Status::Failed("The bias gradient needs more than 2^31 - 1 blocks of threads.");
  }
  *blocks = static_cast<unsigned>(rows * column_blocks);
  return Status::Ok();
}

template <typename T, int kVector>
Status LaunchSumTiles(cudaStream_t stream, const Groups& groups, const void* dy, int64_t features,
                      const GroupTable& table, float* partial_sums) {
  const int64_t column_blocks = CeilDiv(features, kColumnThreads * kVector);
  unsigned blocks = 0;
  JAX_GROUPED_RETURN_IF_FAILED(CountBlocks(BiasGradTiles(groups.capacity, groups.num_groups), column_blocks, &blocks));
  return Launch("Launching the sums of tiles of a bias gradient", stream,
                {dim3(blocks, groups.batch), dim3(kColumnThreads, kLanes)}, SumTiles<T, kVector>,
                static_cast<const T*>(dy), features, static_cast<uint32_t>(column_blocks), table, partial_sums);
}

}  // namespace

Status LaunchAddTiles(cudaStream_t stream, const float* partial_sums, int64_t features, const Groups& groups,
                      const GroupTable& table, float* dbias) {
  const int64_t column_blocks = CeilDiv(features, kSumThreads);
  unsigned blocks = 0;
  JAX_GROUPED_RETURN_IF_FAILED(CountBlocks(groups.AllGroups(), column_blocks, &blocks));
  return Launch("Launching the sums of a bias gradient", stream, {dim3(blocks), kSumThreads}, AddTiles, partial_sums,
                features, static_cast<uint32_t>(column_blocks), table, dbias);
}

Status LaunchBiasGrad(cudaStream_t stream, const Groups& groups, const void* dy, cudaDataType_t type, int64_t features,
                      float* partial_sums, int32_t* tables, float* dbias) {
  const GroupTable table{tables, groups.num_groups};
  RowBlockCounts element_row_blocks{};
  element_row_blocks.count[static_cast<int>(kTileRowBlock)] =
      static_cast<int32_t>(BiasGradTiles(groups.capacity, groups.num_groups));
  JAX_GROUPED_RETURN_IF_FAILED(LaunchTables<Counts<kTileRowBlock>>("Launching the setup of a bias gradient", stream,
                                                                   groups, element_row_blocks, table));
  JAX_GROUPED_RETURN_IF_FAILED(WithFloatType(type, [&](auto number) {
    // Loads of 16 bytes if every row starts on a 16-byte boundary, otherwise of single elements.
    using T = decltype(number);
    constexpr int kVector = 16 / sizeof(T);
    return features % kVector == 0 ? LaunchSumTiles<T, kVector>(stream, groups, dy, features, table, partial_sums)
                                   : LaunchSumTiles<T, 1>(stream, groups, dy, features, table, partial_sums);
  }));
  return LaunchAddTiles(stream, partial_sums, features, groups, table, dbias);
}

}  // namespace jax_grouped
