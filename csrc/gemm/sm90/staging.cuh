// Stores of results of the product kernels: from the registers of a math group to shared memory, and from there by the
// copy engine (TMA) to the result.

#ifndef JAX_GROUPED_CSRC_GEMM_SM90_STAGING_CUH_
#define JAX_GROUPED_CSRC_GEMM_SM90_STAGING_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <library_types.h>

#include <cstdint>

#include "csrc/gemm/sm90/instructions.cuh"
#include "csrc/gemm/sm90/tile_products.cuh"

namespace jax_grouped {
namespace sm90 {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Writes 64 columns of a fragment to shared memory, as boxes of 32 columns. Odd rows exchange columns that lie 64 bytes
// apart, so that the lanes of one store cover all banks.
template <int kFirstColumn>
__device__ __forceinline__ void WriteBoxes32(const Fragment& fragment, const ThreadPosition& position,
                                             uint32_t staging) {
  const bool odd = position.Row() % 2 != 0;
  const int first_byte = (odd ? 64 : 0) + position.Column() * static_cast<int>(sizeof(float));
  const uint32_t first = staging + position.Row() * kBoxRowBytes + (first_byte ^ (position.Row() % 8 * 16));
#pragma unroll
  for (int box = 0; box < kStagedBoxes; ++box) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t offset = box * kBoxBytes + half * 8 * kBoxRowBytes;
      const auto columns = [&](int block) {
        const float* value = fragment.value + 4 * (kFirstColumn / 8 + 4 * box + block) + 2 * half;
        return make_float2(value[0], value[1]);
      };
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float2 near = columns(j);
        const float2 far = columns(j + 2);
        StoreShared((first ^ (32 * j)) + offset, odd ? far : near);
        StoreShared((first ^ (32 * j) ^ 64) + offset, odd ? near : far);
      }
    }
  }
}

template <typename T>
__device__ uint32_t PackPair(float low, float high);

template <>
__device__ uint32_t PackPair<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

template <>
__device__ uint32_t PackPair<__half>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

// Writes all columns of a fragment to shared memory as 16-bit numbers, in boxes of 64 columns.
template <typename T>
__device__ __forceinline__ void WriteBoxes16(const Fragment& fragment, const ThreadPosition& position,
                                             uint32_t staging) {
  const int row = position.warp * 16 + position.lane % 16;
#pragma unroll
  for (int i = 0; i < Fragment::kColumns / 8; i += 2) {
    const uint32_t box = staging + i / 8 * kBoxBytes;
    const int byte = (i % 8 + position.lane / 16) * 16;
    const float* value = fragment.value + 4 * i;
    StoreMatrices(box + row * kBoxRowBytes + (byte ^ (row % 8 * 16)), PackPair<T>(value[0], value[1]),
                  PackPair<T>(value[2], value[3]), PackPair<T>(value[4], value[5]), PackPair<T>(value[6], value[7]));
  }
}

// Writes the transpose of 64 columns of a fragment to shared memory, as boxes of 64 rows and 32 columns. The lanes of
// one store cover all banks.
template <int kFirstColumn>
__device__ __forceinline__ void WriteTransposedBoxes32(const Fragment& fragment, const ThreadPosition& position,
                                                       uint32_t staging) {
  const uint32_t box = staging + position.warp / 2 * kBoxBytes;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int column = position.Row() % 32 + 8 * half;
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const int row = position.Column() + odd;
      const uint32_t first = box + row * kBoxRowBytes + ((column / 4 ^ row) * 16) + column % 4 * 4;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        StoreShared(first + i * 8 * kBoxRowBytes, fragment.value[4 * (kFirstColumn / 8 + i) + 2 * half + odd]);
      }
    }
  }
}

// Writes the transpose of all columns of a fragment to shared memory as 16-bit numbers, in boxes of 64 rows.
template <typename T>
__device__ __forceinline__ void WriteTransposedBoxes16(const Fragment& fragment, const ThreadPosition& position,
                                                       uint32_t staging) {
  const int row = position.lane / 16 * 8 + position.lane % 8;
  const int chunk = position.warp * 2 + position.lane / 8 % 2;
  const uint32_t first = staging + row * kBoxRowBytes + (chunk ^ row % 8) * 16;
#pragma unroll
  for (int i = 0; i < Fragment::kColumns / 8; i += 2) {
    const float* value = fragment.value + 4 * i;
    StoreTransposedMatrices(first + i * 8 * kBoxRowBytes, PackPair<T>(value[0], value[1]),
                            PackPair<T>(value[2], value[3]), PackPair<T>(value[4], value[5]),
                            PackPair<T>(value[6], value[7]));
  }
}
static_assert(kBoxBytes == Fragment::kRows * kBoxRowBytes, "the boxes of 64 rows form one column");

// Shared memory from which a math group's results are copied. It has one or two halves of kStagedBoxes boxes. The group
// writes one half while the other, if there is one, is copied.
template <int kHalves>
class Staging {
 public:
  __device__ Staging(uint32_t memory, const ThreadPosition& position, cudaDataType_t type)
      : position_(position), type_(type), memory_(memory) {}

  // Writes 64 rows of a tile, of which `columns` columns lie in the result. Calls store(box, column) for each box of
  // them, with `column` counted in the tile.
  template <typename Store>
  __device__ __forceinline__ void StoreRows(const Fragment& sum, int columns, const Store& store) {
    // Copies boxes of the columns from `column` to `end_column`, which lie side by side.
    const auto store_boxes = [&](uint32_t memory, int column, int end_column) {
      const int box_columns = kBoxRowBytes / (type_ == CUDA_R_32F ? 4 : 2);
#pragma unroll
      for (int box = 0; box < kStagedBoxes; ++box, memory += kBoxBytes, column += box_columns) {
        if (column < end_column) store(memory, column);
      }
    };
    if (type_ == CUDA_R_32F) {
      constexpr int kHalf = Fragment::kColumns / 2;
      Pass([&](uint32_t memory) { WriteBoxes32<0>(sum, position_, memory); },
           [&](uint32_t memory) { store_boxes(memory, 0, min(columns, kHalf)); });
      Pass([&](uint32_t memory) { WriteBoxes32<kHalf>(sum, position_, memory); },
           [&](uint32_t memory) { store_boxes(memory, kHalf, columns); });
    } else if (type_ == CUDA_R_16BF) {
      Pass([&](uint32_t memory) { WriteBoxes16<__nv_bfloat16>(sum, position_, memory); },
           [&](uint32_t memory) { store_boxes(memory, 0, columns); });
    } else {
      Pass([&](uint32_t memory) { WriteBoxes16<__half>(sum, position_, memory); },
           [&](uint32_t memory) { store_boxes(memory, 0, columns); });
    }
  }

  // Writes 64 rows of a tile, which are columns of the result. Calls store(box, row, column) for each box of them, with
  // the box's first row and column in the result counted from the first that the fragment has.
  template <typename Store>
  __device__ __forceinline__ void StoreTransposed(const Fragment& sum, const Store& store) {
    if (type_ == CUDA_R_32F) {
      const auto store_boxes = [&](uint32_t memory, int row) {
#pragma unroll
        for (int box = 0; box < kStagedBoxes; ++box) store(memory + box * kBoxBytes, row, box * kBoxRowBytes / 4);
      };
      constexpr int kHalf = Fragment::kColumns / 2;
      Pass([&](uint32_t memory) { WriteTransposedBoxes32<0>(sum, position_, memory); },
           [&](uint32_t memory) { store_boxes(memory, 0); });
      Pass([&](uint32_t memory) { WriteTransposedBoxes32<kHalf>(sum, position_, memory); },
           [&](uint32_t memory) { store_boxes(memory, kHalf); });
      return;
    }
    const auto store_boxes = [&](uint32_t memory) {
#pragma unroll
      for (int box = 0; box < kStagedBoxes; ++box) store(memory + box * kBoxBytes, box * Fragment::kRows, 0);
    };
    if (type_ == CUDA_R_16BF) {
      Pass([&](uint32_t memory) { WriteTransposedBoxes16<__nv_bfloat16>(sum, position_, memory); }, store_boxes);
    } else {
      Pass([&](uint32_t memory) { WriteTransposedBoxes16<__half>(sum, position_, memory); }, store_boxes);
    }
  }

 private:
  // Calls write(memory) with all threads, and then store(memory) with one.
  template <typename Write, typename Store>
  __device__ __forceinline__ void Pass(const Write& write, const Store& store) {
    const bool leads = position_.warp == 0 && position_.lane == 0;
    if (leads) WaitForReads<kHalves - 1>();
    SynchronizeWarpGroup(position_.group);
    const uint32_t memory = memory_ + (second_half_ ? kStagedBoxes * kBoxBytes : 0);
    second_half_ = kHalves == 2 && !second_half_;
    write(memory);
    FenceShared();
    SynchronizeWarpGroup(position_.group);
    if (!leads) return;
    store(memory);
    CommitStores();
  }

  ThreadPosition position_;
  cudaDataType_t type_;
  uint32_t memory_;
  bool second_half_ = false;
};

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace sm90
}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_GEMM_SM90_STAGING_CUH_
