// Input that is quantized already: FP8 numbers that have traveled between devices and are quantized again.

#ifndef JAX_GROUPED_CSRC_QUANTIZE_SCALED_SOURCE_CUH_
#define JAX_GROUPED_CSRC_QUANTIZE_SCALED_SOURCE_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "csrc/common/fp8.cuh"
#include "csrc/common/warp.cuh"
#include "csrc/groups/layout.cuh"
#include "csrc/quantize/quantize.h"
#include "csrc/quantize/source.cuh"

namespace jax_grouped {

// Rows of FP8 numbers, which are read as bfloat16. Their scales are those of kBlock1D for a stack of equal groups.
struct ScaledRows {
  using Pair = PairOf<__nv_bfloat16>;

  const uint8_t* data;     // [rows, features]
  const float* scale_inv;  // [groups, blocks of features, RoundUp(group_rows, 4)]
  int64_t rows;
  int64_t features;
  uint32_t group_rows;
  __nv_fp8_interpretation_t type;

  // Load8 and Load16 return that many numbers from a column on; LoadScale returns their inverse scale.
  __device__ uint2 Load8(int64_t row, int64_t column) const {
    return __ldg(reinterpret_cast<const uint2*>(data + row * features + column));
  }
  __device__ uint4 Load16(int64_t row, int64_t column) const {
    return __ldg(reinterpret_cast<const uint4*>(data + row * features + column));
  }
  __device__ float LoadScale(uint32_t row, int64_t column) const {
    const uint32_t group = row / group_rows;
    const int64_t block = group * CeilDiv(features, kBlock) + column / kBlock;
    return __ldg(scale_inv + block * RoundUp(group_rows, 4u) + row % group_rows);
  }

  __device__ void Convert8(uint2 bytes, float scale, Pair (&pairs)[4]) const {
    const uint32_t halves[] = {bytes.x, bytes.x >> 16, bytes.y, bytes.y >> 16};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const auto two = static_cast<__nv_fp8x2_storage_t>(halves[i]);
      const float2 values = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(two, type)));
      pairs[i].values = __floats2bfloat162_rn(MultiplyFlushed(values.x, scale), MultiplyFlushed(values.y, scale));
    }
  }
};

// Returns the rows of an FP8 input.
inline ScaledRows MakeScaledRows(const void* data, const float* scale_inv, cudaDataType_t type, int64_t rows,
                                 int64_t features, int64_t group_rows) {
  return {static_cast<const uint8_t*>(data),
          scale_inv,
          rows,
          features,
          static_cast<uint32_t>(group_rows),
          type == CUDA_R_8F_E5M2 ? __NV_E5M2 : __NV_E4M3};
}

// Such an input, whose rows may be gathered.
struct ScaledSource {
  using Element = __nv_bfloat16;

  ScaledRows x;
  const int32_t* row_indices;  // null if the rows are in order

  // As PlainSource::LoadSlot.
  __device__ void LoadSlot(const InputTile<Element>& tile, int slot, const Chunk& chunk, int64_t first_column) const {
    constexpr int kVectors = kTileColumns / 16;
    constexpr int kRows = 32 / kVectors;
    constexpr int kLoads = kFp8Alignment / kRows;
    const int vector = Lane() % kVectors;
    const int first = Lane() / kVectors;
    const int64_t column = first_column + vector * 16;
    // Each lane loads the scale of one row, and others get it by a shuffle: LoadScale divides, so it runs once a row.
    static_assert(kTileColumns == kBlock, "a row of a tile has one scale");
    static_assert(kFp8Alignment % 16 == 0, "Load16 reads 16 features, of which a row has a multiple");
    int32_t index = -1;
    float scale = 0.0f;
    if (Lane() < chunk.rows) {
      const int64_t row = chunk.first_row + int64_t{Lane()};
      index = row_indices != nullptr ? row_indices[row] : static_cast<int32_t>(row);
      if (0 <= index && index < x.rows) scale = x.LoadScale(index, first_column);
    }
    uint4 bytes[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int32_t row = __shfl_sync(kFullWarp, index, i * kRows + first);
      const bool exists = column < x.features && 0 <= row && row < x.rows;
      bytes[i] = exists ? x.Load16(row, column) : uint4{};
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const float row_scale = __shfl_sync(kFullWarp, scale, i * kRows + first);
      const uint2 halves[] = {{bytes[i].x, bytes[i].y}, {bytes[i].z, bytes[i].w}};
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        // Half of the lanes begin with their second half: otherwise pairs of lanes would access the same banks.
        const int half = j ^ (vector / (kVectors / 2));
        ScaledRows::Pair pairs[4];
        x.Convert8(half == 0 ? halves[0] : halves[1], row_scale, pairs);
        tile.Store8(slot, i * kRows + first, 2 * vector + half, pairs);
      }
    }
    __syncwarp();
  }

  __device__ static constexpr bool HasInnerProducts() { return false; }
  __device__ void ZeroInnerProduct(int64_t, int64_t) const {}
};

inline ScaledSource MakeScaledSource(const Quantization& args) {
  return {MakeScaledRows(args.x, args.x_scale, args.input_type, args.x_rows, args.layout.features, args.x_group_rows),
          args.row_indices};
}

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_QUANTIZE_SCALED_SOURCE_CUH_
