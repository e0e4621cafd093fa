// Stores of results of the product kernels: from the registers of a math group to shared memory, and from there by the
// copy engine (TMA) to the result. Boxes of an accumulator, which the copy engine has brought, are added to the
// registers.

#ifndef JAX_GROUPED_CSRC_GEMM_SM90_STAGING_CUH_
#define JAX_GROUPED_CSRC_GEMM_SM90_STAGING_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <library_types.h>

#include <cstdint>

#include "csrc/gemm/sm90/instructions.cuh"
#include "csrc/gemm/sm90/tile_products.cuh"

namespace jax_grouped::sm90 {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Calls each(first, second, index, odd) for every two pairs of float32 numbers of a thread: in the columns of a
// fragment from `first_column` on, and in kBoxes boxes of 32 columns in shared memory. The near pair begins at
// value[index] of the fragment, the far pair at value[index + 8]. `first` is the near pair's address in even rows and
// the far pair's in odd ones, so that the lanes of one access cover all banks; `second` is the other's.
template <int kBoxes, typename Each>
__device__ __forceinline__ void ForBoxes32(const ThreadPosition& position, int first_column, uint32_t boxes,
                                           const Each& each) {
  const bool odd = position.Row() % 2 != 0;
  const int first_byte = (odd ? 64 : 0) + position.Column() * static_cast<int>(sizeof(float));
  const uint32_t first = boxes + position.Row() * kBoxRowBytes + (first_byte ^ (position.Row() % 8 * 16));
#pragma unroll
  for (int box = 0; box < kBoxes; ++box) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t offset = box * kBoxBytes + half * 8 * kBoxRowBytes;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        each((first ^ (32 * j)) + offset, (first ^ (32 * j) ^ 64) + offset,
             4 * (first_column / 8 + 4 * box + j) + 2 * half, odd);
      }
    }
  }
}

// Writes columns of a fragment, from `first_column` on, to shared memory, as kBoxes boxes of 32 columns.
template <int kBoxes>
__device__ __forceinline__ void WriteBoxes32(const Fragment& fragment, const ThreadPosition& position, int first_column,
                                             uint32_t staging) {
  ForBoxes32<kBoxes>(position, first_column, staging, [&](uint32_t first, uint32_t second, int index, bool odd) {
    const float* value = fragment.value + index;
    const float2 near = make_float2(value[0], value[1]);
    const float2 far = make_float2(value[8], value[9]);
    StoreShared(first, odd ? far : near);
    StoreShared(second, odd ? near : far);
  });
}

// Adds boxes, as WriteBoxes32 writes them, to columns of a fragment from `first_column` on.
template <int kBoxes>
__device__ __forceinline__ void AddBoxes32(uint32_t boxes, const ThreadPosition& position, int first_column,
                                           Fragment& fragment) {
  ForBoxes32<kBoxes>(position, first_column, boxes, [&](uint32_t first, uint32_t second, int index, bool odd) {
    const float2 one = LoadSharedPair(first);
    const float2 other = LoadSharedPair(second);
    const float2 near = odd ? other : one;
    const float2 far = odd ? one : other;
    float* value = fragment.value + index;
    value[0] += near.x;
    value[1] += near.y;
    value[8] += far.x;
    value[9] += far.y;
  });
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

// Writes columns of a fragment, from `first_column` on, to shared memory as 16-bit numbers, in kBoxes boxes of 64
// columns.
template <typename T, int kBoxes>
__device__ __forceinline__ void WriteBoxes16(const Fragment& fragment, const ThreadPosition& position, int first_column,
                                             uint32_t staging) {
  const int row = position.warp * 16 + position.lane % 16;
#pragma unroll
  for (int i = 0; i < kBoxes * 8; i += 2) {
    const uint32_t box = staging + i / 8 * kBoxBytes;
    const int byte = (i % 8 + position.lane / 16) * 16;
    const float* value = fragment.value + 4 * (first_column / 8 + i);
    StoreMatrices(box + row * kBoxRowBytes + (byte ^ (row % 8 * 16)), PackPair<T>(value[0], value[1]),
                  PackPair<T>(value[2], value[3]), PackPair<T>(value[4], value[5]), PackPair<T>(value[6], value[7]));
  }
}

// Writes the transpose of 32 columns of a fragment, from `first_column` on, to shared memory, as two boxes of 32 rows
// and 32 columns. The lanes of one store cover all banks.
__device__ __forceinline__ void WriteTransposedBoxes32(const Fragment& fragment, const ThreadPosition& position,
                                                       int first_column, uint32_t staging) {
  const uint32_t box = staging + position.warp / 2 * 32 * kBoxRowBytes;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int column = position.Row() % 32 + 8 * half;
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const int row = position.Column() + odd;
      const uint32_t first = box + row * kBoxRowBytes + ((column / 4 ^ row) * 16) + column % 4 * 4;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        StoreShared(first + i * 8 * kBoxRowBytes, fragment.value[4 * (first_column / 8 + i) + 2 * half + odd]);
      }
    }
  }
}

// Writes the transpose of 64 columns of a fragment, from `first_column` on, to shared memory as 16-bit numbers, as a
// box of 64 rows and 64 columns.
template <typename T>
__device__ __forceinline__ void WriteTransposedBox16(const Fragment& fragment, const ThreadPosition& position,
                                                     int first_column, uint32_t staging) {
  const int row = position.lane / 16 * 8 + position.lane % 8;
  const int chunk = position.warp * 2 + position.lane / 8 % 2;
  const uint32_t first = staging + row * kBoxRowBytes + (chunk ^ row % 8) * 16;
#pragma unroll
  for (int i = 0; i < 8; i += 2) {
    const float* value = fragment.value + 4 * (first_column / 8 + i);
    StoreTransposedMatrices(first + i * 8 * kBoxRowBytes, PackPair<T>(value[0], value[1]),
                            PackPair<T>(value[2], value[3]), PackPair<T>(value[4], value[5]),
                            PackPair<T>(value[6], value[7]));
  }
}

// Shared memory from which a math group's results are copied. It has two halves of kBoxes boxes. The group writes one
// half while the other half is copied.
template <int kBoxes>
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
      for (int box = 0; box < kBoxes; ++box, memory += kBoxBytes, column += box_columns) {
        if (column < end_column) store(memory, column);
      }
    };
    if (type_ == CUDA_R_32F) {
      constexpr int kStep = kBoxes * 32;
      ForColumns<kStep>([&](int column) {
        const int next = column + kStep;
        Pass([&](uint32_t memory) { WriteBoxes32<kBoxes>(sum, position_, column, memory); },
             [&](uint32_t memory) {
               store_boxes(memory, column, next < Fragment::kColumns ? min(columns, next) : columns);
             });
      });
    } else if (type_ == CUDA_R_16BF) {
      ForColumns<kBoxes * 64>([&](int column) {
        Pass([&](uint32_t memory) { WriteBoxes16<__nv_bfloat16, kBoxes>(sum, position_, column, memory); },
             [&](uint32_t memory) { store_boxes(memory, column, columns); });
      });
    } else {
      ForColumns<kBoxes * 64>([&](int column) {
        Pass([&](uint32_t memory) { WriteBoxes16<__half, kBoxes>(sum, position_, column, memory); },
             [&](uint32_t memory) { store_boxes(memory, column, columns); });
      });
    }
  }

  // Calls write(memory), which writes a box of rows, with all threads. They copy the first `rows` of these to `to`,
  // where they are `stride` bytes apart. Unlike the copy engine, threads need no map for the last rows of a group.
  template <typename Write>
  __device__ __forceinline__ void CopyRows(const Write& write, int32_t rows, int64_t stride, uint8_t* to) {
    const uint32_t memory = NextHalf();
    write(memory);
    SynchronizeWarpGroup(position_.group);
    constexpr int kChunks = kBoxRowBytes / 16;
    const int thread = position_.warp * 32 + position_.lane;
    const int byte = thread % kChunks * 16;
#pragma unroll
    for (int row = thread / kChunks; row < Fragment::kRows; row += kWarpGroupThreads / kChunks) {
      const uint4 data = LoadSharedVector(memory + row * kBoxRowBytes + (byte ^ (row % 8 * 16)));
      if (row < rows) *reinterpret_cast<uint4*>(to + row * stride + byte) = data;
    }
    // WaitForReads<1> counts passes: commit an empty one, or the next pass would not wait for the half that it writes.
    if (Leads()) CommitStores();
  }

  // Writes 64 rows of a tile, which are columns of the result. Calls store(box, row, column) for each box of them, of
  // 32 rows of the result for float32 and 64 rows for 16-bit numbers. The box's first row and column in the result are
  // counted from the first that the fragment has.
  template <typename Store>
  __device__ __forceinline__ void StoreTransposed(const Fragment& sum, const Store& store) {
    static_assert(kBoxes == 1);
    if (type_ == CUDA_R_32F) {
      ForColumns<32>([&](int row) {
        Pass([&](uint32_t memory) { WriteTransposedBoxes32(sum, position_, row, memory); },
             [&](uint32_t memory) {
               store(memory, row, 0);
               store(memory + 32 * kBoxRowBytes, row, 32);
             });
      });
      return;
    }
    ForColumns<64>([&](int row) {
      const auto store_box = [&](uint32_t memory) { store(memory, row, 0); };
      if (type_ == CUDA_R_16BF) {
        Pass([&](uint32_t memory) { WriteTransposedBox16<__nv_bfloat16>(sum, position_, row, memory); }, store_box);
      } else {
        Pass([&](uint32_t memory) { WriteTransposedBox16<__half>(sum, position_, row, memory); }, store_box);
      }
    });
  }

 private:
  // Calls each(column) for every kStep columns of a fragment. After a loop in its place, nvcc gives the accumulators of
  // the whole kernel other registers.
  template <int kStep, int kColumn = 0, typename Each>
  __device__ __forceinline__ static void ForColumns(const Each& each) {
    each(kColumn);
    if constexpr (kColumn + kStep < Fragment::kColumns) ForColumns<kStep, kColumn + kStep>(each);
  }

  __device__ __forceinline__ bool Leads() const { return position_.warp == 0 && position_.lane == 0; }

  // Returns the half to write, once the copies that read it are done.
  __device__ __forceinline__ uint32_t NextHalf() {
    if (Leads()) WaitForReads<1>();
    SynchronizeWarpGroup(position_.group);
    const uint32_t memory = memory_ + (second_half_ ? kBoxes * kBoxBytes : 0);
    second_half_ = !second_half_;
    return memory;
  }

  // Calls write(memory) with all threads, and then store(memory) with one.
  template <typename Write, typename Store>
  __device__ __forceinline__ void Pass(const Write& write, const Store& store) {
    const uint32_t memory = NextHalf();
    write(memory);
    FenceShared();
    SynchronizeWarpGroup(position_.group);
    if (!Leads()) return;
    store(memory);
    CommitStores();
  }

  ThreadPosition position_;
  cudaDataType_t type_;
  uint32_t memory_;
  bool second_half_ = false;
};

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace jax_grouped::sm90

#endif  // JAX_GROUPED_CSRC_GEMM_SM90_STAGING_CUH_
