#include "csrc/bias_grad/bias_grad.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "csrc/common/launch.cuh"
#include "csrc/groups/layout.cuh"

namespace jax_grouped {
namespace {

constexpr int kScanThreads = 512;
constexpr int kColumnThreads = 32;
constexpr int kLanes = 8;
constexpr int kSumThreads = 128;

// First rows and first tiles of each batch element's local groups. Each array has one more entry: the end of the last
// group.
struct Starts {
  int32_t* base;  // [batch, 2, num_groups + 1]
  int32_t num_groups;

  __device__ int32_t* Row(int32_t element) const { return base + element * Stride(); }
  __device__ int32_t* Tile(int32_t element) const { return Row(element) + num_groups + 1; }
  JAX_GROUPED_HOST_DEVICE int64_t Stride() const { return 2 * (static_cast<int64_t>(num_groups) + 1); }
};

// Writes the starts of a batch's groups. Each block handles one batch element.
__global__ void __launch_bounds__(kScanThreads) FindTiles(Groups batch, Starts starts) {
  using Scan = cub::BlockScan<int32_t, kScanThreads>;
  __shared__ typename Scan::TempStorage storage;
  const auto element = static_cast<int32_t>(blockIdx.x);
  const Groups groups = batch.At(element);
  const int64_t first_row = element * groups.capacity;
  int32_t* row_starts = starts.Row(element);
  int32_t* tile_starts = starts.Tile(element);
  const RowRange local = LocalRows<kScanThreads>(groups);
  ForEachGroup<kScanThreads>(groups, local.begin, [&](int32_t group, RowRange rows) {
    row_starts[group] = static_cast<int32_t>(first_row + rows.begin);
    if (group == groups.num_groups - 1) row_starts[group + 1] = static_cast<int32_t>(first_row + rows.end);
  });
  __syncthreads();

  auto running = static_cast<int32_t>(element * BiasGradTiles(groups.capacity, groups.num_groups));
  for (int32_t chunk = 0; chunk <= groups.num_groups; chunk += kScanThreads) {
    const int32_t group = chunk + static_cast<int32_t>(threadIdx.x);
    int32_t tiles = 0;
    if (group < groups.num_groups) {
      tiles = (row_starts[group + 1] - row_starts[group] + kBiasGradRows - 1) / kBiasGradRows;
    }
    int32_t start;
    int32_t total;
    Scan(storage).ExclusiveSum(tiles, start, total);
    if (group <= groups.num_groups) tile_starts[group] = running + start;
    running += total;
    __syncthreads();
  }
}

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
    SumTiles(const T* __restrict__ dy, int64_t features, uint32_t column_blocks, Starts starts,
             float* __restrict__ partial_sums) {
  __shared__ float lane_sums[kLanes][kColumnThreads][kVector];
  const int32_t* row_starts = starts.Row(static_cast<int32_t>(blockIdx.y));
  const int32_t* tile_starts = starts.Tile(static_cast<int32_t>(blockIdx.y));
  const int32_t tile = tile_starts[0] + static_cast<int32_t>(blockIdx.x / column_blocks);
  const int64_t first_column = static_cast<int64_t>(blockIdx.x % column_blocks) * kColumnThreads * kVector;
  if (tile >= tile_starts[starts.num_groups]) return;

  const int32_t group = FindGroup(tile_starts, 0, starts.num_groups, tile);
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
    AddTiles(const float* __restrict__ partial_sums, int64_t features, uint32_t column_blocks,
             const int32_t* __restrict__ tile_starts, int64_t element_stride, int32_t num_groups,
             float* __restrict__ dbias) {
  const int64_t index = blockIdx.x / column_blocks;
  const int64_t group = index % num_groups;
  tile_starts += index / num_groups * element_stride;
  const int64_t column = static_cast<int64_t>(blockIdx.x % column_blocks) * kSumThreads + threadIdx.x;
  if (column >= features) return;
  float sum = 0.0f;
#pragma unroll 8
  for (int32_t tile = tile_starts[group]; tile < tile_starts[group + 1]; ++tile) {
    sum += partial_sums[tile * features + column];
  }
  dbias[index * features + column] = sum;
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
Status LaunchSumTiles(cudaStream_t stream, const Groups& groups, const void* dy, int64_t features, const Starts& starts,
                      float* partial_sums) {
  const int64_t column_blocks = CeilDiv(features, kColumnThreads * kVector);
  unsigned blocks = 0;
  JAX_GROUPED_RETURN_IF_FAILED(CountBlocks(BiasGradTiles(groups.capacity, groups.num_groups), column_blocks, &blocks));
  return Launch("Launching the sums of tiles of a bias gradient", stream,
                {dim3(blocks, groups.batch), dim3(kColumnThreads, kLanes)}, SumTiles<T, kVector>,
                static_cast<const T*>(dy), features, static_cast<uint32_t>(column_blocks), starts, partial_sums);
}

// Launches SumTiles with loads of 16 bytes if every row starts on a 16-byte boundary, otherwise with loads of single
// elements.
template <typename T>
Status LaunchSumTiles(cudaStream_t stream, const Groups& groups, const void* dy, int64_t features, const Starts& starts,
                      float* partial_sums) {
  constexpr int kVector = 16 / sizeof(T);
  return features % kVector == 0 ? LaunchSumTiles<T, kVector>(stream, groups, dy, features, starts, partial_sums)
                                 : LaunchSumTiles<T, 1>(stream, groups, dy, features, starts, partial_sums);
}

Status LaunchSumTiles(cudaStream_t stream, const Groups& groups, const void* dy, cudaDataType_t type, int64_t features,
                      const Starts& starts, float* partial_sums) {
  switch (type) {
    case CUDA_R_16BF:
      return LaunchSumTiles<__nv_bfloat16>(stream, groups, dy, features, starts, partial_sums);
    case CUDA_R_16F:
      return LaunchSumTiles<__half>(stream, groups, dy, features, starts, partial_sums);
    case CUDA_R_32F:
      return LaunchSumTiles<float>(stream, groups, dy, features, starts, partial_sums);
    default:
      return Status::Failed("The bias gradient takes bfloat16, float16 or float32.");
  }
}

}  // namespace

Status LaunchAddTiles(cudaStream_t stream, const float* partial_sums, int64_t features, const Groups& groups,
                      const int32_t* tile_starts, int64_t element_stride, float* dbias) {
  const int64_t column_blocks = CeilDiv(features, kSumThreads);
  unsigned blocks = 0;
  JAX_GROUPED_RETURN_IF_FAILED(CountBlocks(groups.AllGroups(), column_blocks, &blocks));
  return Launch("Launching the sums of a bias gradient", stream, {dim3(blocks), kSumThreads}, AddTiles, partial_sums,
                features, static_cast<uint32_t>(column_blocks), tile_starts, element_stride, groups.num_groups, dbias);
}

Status LaunchBiasGrad(cudaStream_t stream, const Groups& groups, const void* dy, cudaDataType_t type, int64_t features,
                      float* partial_sums, int32_t* starts, float* dbias) {
  const Starts found{starts, groups.num_groups};
  const dim3 elements(groups.batch);
  JAX_GROUPED_RETURN_IF_FAILED(
      Launch("Launching the setup of a bias gradient", stream, {elements, kScanThreads}, FindTiles, groups, found));
  JAX_GROUPED_RETURN_IF_FAILED(LaunchSumTiles(stream, groups, dy, type, features, found, partial_sums));
  const int32_t* tile_starts = starts + groups.num_groups + 1;
  return LaunchAddTiles(stream, partial_sums, features, groups, tile_starts, found.Stride(), dbias);
}

}  // namespace jax_grouped
