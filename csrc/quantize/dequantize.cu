#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "csrc/common/fp8.cuh"
#include "csrc/common/launch.cuh"
#include "csrc/groups/layout.cuh"
#include "csrc/groups/table.cuh"
#include "csrc/quantize/quantize.h"

namespace jax_grouped {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
// Columns per warp. Rowwise data has 16 columns per lane, with 8 lanes to a row. Columnwise data has one column per
// lane.
template <bool kColumnwise>
constexpr int kColumns = kColumnwise ? 32 : 8 * 16;

struct DequantizeArguments {
  GroupTable table;  // the first batch element's
  int64_t tokens;    // per element
  ScaleLayout layout;
  const uint8_t* data;
  const void* scale_inv;
};

template <typename Fp8>
__device__ float ToFloat(uint8_t bits) {
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(bits, Fp8::kType)));
}

__device__ void Store(float value, float* out) { *out = value; }
__device__ void Store(float value, __half* out) { *out = __float2half_rn(value); }
__device__ void Store(float value, __nv_bfloat16* out) { *out = __float2bfloat16_rn(value); }

template <ScalingMode kMode>
__device__ float LoadScale(const void* scale_inv, int64_t position) {
  if (kMode == ScalingMode::kMx) return MxScaleInverse(static_cast<const uint8_t*>(scale_inv)[position]);
  return static_cast<const float*>(scale_inv)[position];
}

template <ScalingMode kMode, typename Fp8, typename Out>
__device__ void DequantizeRows(const DequantizeArguments& args, const Chunk& chunk, int64_t first_column, Out* out) {
  constexpr int kScaled = kMode == ScalingMode::kMx ? kMxBlock : kBlock;
  const int lane = threadIdx.x % 32;
  const int64_t column = first_column + lane % 8 * 16;
  if (column >= args.layout.features) return;
#pragma unroll
  for (int step = 0; step < kFp8Alignment / 4; ++step) {
    const int row = 4 * step + lane / 8;
    if (row >= chunk.rows) break;
    const int64_t scale = RowScalePosition<kMode>(args.layout, chunk, row, static_cast<int32_t>(column / kScaled));
    const float scale_inv = LoadScale<kMode>(args.scale_inv, scale);
    const int64_t position = (chunk.first_row + static_cast<int64_t>(row)) * args.layout.features + column;
    alignas(16) uint8_t bytes[16];
    *reinterpret_cast<uint4*>(bytes) = *reinterpret_cast<const uint4*>(args.data + position);
    alignas(16) Out values[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) Store(MultiplyFlushed(ToFloat<Fp8>(bytes[i]), scale_inv), values + i);
#pragma unroll
    for (unsigned i = 0; i < sizeof(Out); ++i) {
      reinterpret_cast<uint4*>(out + position)[i] = reinterpret_cast<const uint4*>(values)[i];
    }
  }
}

template <ScalingMode kMode, typename Fp8, typename Out>
__device__ void DequantizeColumns(const DequantizeArguments& args, const Chunk& chunk, int64_t first_column, Out* out) {
  const int64_t column = first_column + threadIdx.x % 32;
  if (column >= args.layout.features) return;
  const int64_t chunk_index = ColumnDataChunk(args.layout, chunk, column);
  const int64_t feature = kMode == ScalingMode::kBlock2D ? column / kBlock : column;
  const float scale = LoadScale<kMode>(args.scale_inv, ColumnScalePosition<kMode>(args.layout, chunk, feature));
  alignas(16) uint8_t bytes[kFp8Alignment];
  *reinterpret_cast<uint4*>(bytes) = reinterpret_cast<const uint4*>(args.data)[chunk_index];
#pragma unroll
  for (int row = 0; row < kFp8Alignment; ++row) {
    if (row >= chunk.rows) break;
    const int64_t position = (chunk.first_row + static_cast<int64_t>(row)) * args.layout.features + column;
    Store(MultiplyFlushed(ToFloat<Fp8>(bytes[row]), scale), out + position);
  }
}

// Zeros every `count`-th of the batch element's rows of no group, in the warp's columns.
template <int kWidth, typename Out>
__device__ void ZeroOtherRows(const DequantizeArguments& args, int64_t first_row, const GroupTable& table,
                              int64_t index, int64_t count, int64_t first_column, Out* out) {
  const int64_t begin = table.FirstRow()[0];
  const int64_t end = table.FirstRow()[table.num_groups];
  const int64_t others = args.tokens - (end - begin);
  const int64_t last_column = min(first_column + kWidth, args.layout.features);
  for (int64_t i = index; i < others; i += count) {
    const int64_t row = OtherRow(first_row, i, begin, end);
    for (int64_t column = first_column + threadIdx.x % 32; column < last_column; column += 32) {
      Store(0.0f, out + row * args.layout.features + column);
    }
  }
}

template <ScalingMode kMode, bool kColumnwise, typename Fp8, typename Out>
__global__ void __launch_bounds__(kThreads)
    Dequantize(const __grid_constant__ DequantizeArguments args, Out* __restrict__ out, uint32_t column_tiles) {
  const auto element = static_cast<int32_t>(blockIdx.y);
  const GroupTable table = args.table.At(element);
  // Warps of a block have adjacent chunks of one strip of columns.
  const uint32_t strip = blockIdx.x % column_tiles;
  const int64_t index = static_cast<int64_t>(blockIdx.x / column_tiles) * kWarps + threadIdx.x / 32;
  const int64_t count = static_cast<int64_t>(gridDim.x / column_tiles) * kWarps;
  const int64_t column = static_cast<int64_t>(strip) * kColumns<kColumnwise>;
  const int32_t* starts = table.BlocksBefore(RowBlock::k16);
  if (starts[0] + index < starts[table.num_groups]) {
    const int32_t chunk_index = starts[0] + static_cast<int32_t>(index);
    const Chunk chunk = LoadChunk(table, element, FindGroup(starts, 0, table.num_groups, chunk_index), chunk_index);
    if constexpr (kColumnwise) {
      DequantizeColumns<kMode, Fp8>(args, chunk, column, out);
    } else {
      DequantizeRows<kMode, Fp8>(args, chunk, column, out);
    }
  }
  ZeroOtherRows<kColumns<kColumnwise>>(args, element * args.tokens, table, index, count, column, out);
}

template <ScalingMode kMode, bool kColumnwise>
Status LaunchKernel(cudaStream_t stream, const QuantizedLayout& layout, const DequantizeArguments& args,
                    cudaDataType_t input_type, void* out, cudaDataType_t output_type) {
  const int64_t chunks = CeilDiv(layout.ElementRowBlocks(kFp8Alignment), kWarps);
  const int64_t column_tiles = CeilDiv(layout.features, kColumns<kColumnwise>);
  const dim3 blocks(static_cast<unsigned>(chunks * column_tiles), static_cast<unsigned>(layout.batch));
  return WithFloatType(output_type, [&](auto number) {
    using Out = decltype(number);
    const auto kernel = input_type == CUDA_R_8F_E4M3 ? Dequantize<kMode, kColumnwise, E4m3, Out>
                                                     : Dequantize<kMode, kColumnwise, E5m2, Out>;
    return Launch("Launching the dequantization", stream, {blocks, kThreads}, kernel, args, static_cast<Out*>(out),
                  static_cast<uint32_t>(column_tiles));
  });
}

template <ScalingMode kMode>
Status LaunchKernel(cudaStream_t stream, const QuantizedLayout& layout, const DequantizeArguments& args,
                    cudaDataType_t input_type, void* out, cudaDataType_t output_type) {
  return layout.columnwise ? LaunchKernel<kMode, true>(stream, layout, args, input_type, out, output_type)
                           : LaunchKernel<kMode, false>(stream, layout, args, input_type, out, output_type);
}

}  // namespace

Status LaunchDequantize(cudaStream_t stream, const Groups& groups, const QuantizedLayout& layout, const void* data,
                        cudaDataType_t input_type, const void* scale_inv, void* out, cudaDataType_t output_type,
                        int32_t* table) {
  const DequantizeArguments args{
      {table, groups.num_groups}, layout.tokens, {layout.features}, static_cast<const uint8_t*>(data), scale_inv};
  JAX_GROUPED_RETURN_IF_FAILED(LaunchTables<AllRowBlocks>("Launching the setup of a dequantization", stream, groups,
                                                          layout.ElementRowBlocks(), args.table));
  switch (layout.mode) {
    case ScalingMode::kTensor:
      return LaunchKernel<ScalingMode::kTensor>(stream, layout, args, input_type, out, output_type);
    case ScalingMode::kBlock1D:
      return LaunchKernel<ScalingMode::kBlock1D>(stream, layout, args, input_type, out, output_type);
    case ScalingMode::kBlock2D:
      return LaunchKernel<ScalingMode::kBlock2D>(stream, layout, args, input_type, out, output_type);
    case ScalingMode::kMx:
      return LaunchKernel<ScalingMode::kMx>(stream, layout, args, input_type, out, output_type);
  }
  return Status::Failed("Dequantization has no such scaling mode.");
}

}  // namespace jax_grouped
