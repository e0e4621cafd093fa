// Inputs of the quantization kernels: a tile in shared memory, and the sources that fill it with the input unchanged,
// or with an FP8 input times its scales.

#ifndef JAX_GROUPED_CSRC_QUANTIZE_SOURCE_CUH_
#define JAX_GROUPED_CSRC_QUANTIZE_SOURCE_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "csrc/common/fp8.cuh"
#include "csrc/common/warp.cuh"
#include "csrc/groups/layout.cuh"
#include "csrc/quantize/quantize.h"

namespace jax_grouped {

constexpr int kTileColumns = kBlock;
// Slots of 16 rows in a tile. A tile has the chunks of whole row blocks: 8 chunks at most.
constexpr int kSlots = kBlock / kFp8Alignment;

// Two adjacent values. Their largest absolute values are kept as a pair, too, in one `Largest`.
template <typename Element>
struct PairOf;

template <>
struct PairOf<__nv_bfloat16> {
  using Largest = __nv_bfloat162;
  __nv_bfloat162 values;
  __device__ float First() const { return __uint_as_float(Bits() << 16); }
  __device__ float Second() const { return __uint_as_float(Bits() & 0xffff0000); }
  // Returns NaN if one of the values is NaN.
  __device__ static Largest AbsMax(Largest largest, PairOf pair) { return __hmax2_nan(largest, __habs2(pair.values)); }
  __device__ static Largest Max(Largest a, Largest b) { return __hmax2_nan(a, b); }
  __device__ static uint2 ToFloatBits(Largest largest) {
    const PairOf pair{largest};
    return {__float_as_uint(pair.First()), __float_as_uint(pair.Second())};
  }
  __device__ static Largest FromFloatBits(uint2 bits) {
    return __floats2bfloat162_rn(__uint_as_float(bits.x), __uint_as_float(bits.y));
  }

 private:
  __device__ uint32_t Bits() const { return reinterpret_cast<const uint32_t&>(values); }
};

template <>
struct PairOf<__half> {
  using Largest = __half2;
  __half2 values;
  __device__ float First() const { return __low2float(values); }
  __device__ float Second() const { return __high2float(values); }
  __device__ static Largest AbsMax(Largest largest, PairOf pair) { return __hmax2_nan(largest, __habs2(pair.values)); }
  __device__ static Largest Max(Largest a, Largest b) { return __hmax2_nan(a, b); }
  __device__ static uint2 ToFloatBits(Largest largest) {
    return {__float_as_uint(__low2float(largest)), __float_as_uint(__high2float(largest))};
  }
  __device__ static Largest FromFloatBits(uint2 bits) {
    return __floats2half2_rn(__uint_as_float(bits.x), __uint_as_float(bits.y));
  }
};

template <>
struct PairOf<float> {
  using Largest = float2;
  float2 values;
  __device__ float First() const { return values.x; }
  __device__ float Second() const { return values.y; }
  __device__ static Largest Absolute(PairOf pair) { return {fabsf(pair.values.x), fabsf(pair.values.y)}; }
  __device__ static Largest AbsMax(Largest largest, PairOf pair) { return Max(largest, Absolute(pair)); }
  __device__ static Largest Max(Largest a, Largest b) { return {MaxOrNan(a.x, b.x), MaxOrNan(a.y, b.y)}; }
  __device__ static uint2 ToFloatBits(Largest largest) {
    return {__float_as_uint(largest.x), __float_as_uint(largest.y)};
  }
  __device__ static Largest FromFloatBits(uint2 bits) { return {__uint_as_float(bits.x), __uint_as_float(bits.y)}; }
};

// Returns the largest absolute values of the first and of the second elements: infinity or NaN if one is not finite.
template <typename Pair, int kCount>
__device__ typename Pair::Largest PairwiseLargest(const Pair (&pairs)[kCount]) {
  typename Pair::Largest largest = Pair::AbsMax({}, pairs[0]);
#pragma unroll
  for (int i = 1; i < kCount; ++i) largest = Pair::AbsMax(largest, pairs[i]);
  return largest;
}

// Returns the result of PairwiseLargest as bits of float32.
template <typename Pair, int kCount>
__device__ uint2 PairwiseAmax(const Pair (&pairs)[kCount]) {
  return Pair::ToFloatBits(PairwiseLargest(pairs));
}

// Returns the bits of the largest absolute values of the elements that are finite.
template <typename Pair, int kCount>
__device__ uint2 PairwiseFiniteAmax(const Pair (&pairs)[kCount]) {
  uint2 amax{};
#pragma unroll
  for (const Pair& pair : pairs) {
    amax.x = max(amax.x, FiniteBits(pair.First()));
    amax.y = max(amax.y, FiniteBits(pair.Second()));
  }
  return amax;
}

// Quantizes 8 values. With kHideInfinity, those that are not finite become NaN; otherwise there must be none.
template <typename Fp8, bool kHideInfinity, typename Pair>
__device__ uint2 Quantize8(const Pair (&pairs)[4], float scale) {
  const auto quantize = [scale](const Pair& pair) {
    if constexpr (kHideInfinity) {
      return Quantize2<Fp8>(HideInfinity(pair.First()), HideInfinity(pair.Second()), scale);
    }
    return Quantize2<Fp8>(pair.First(), pair.Second(), scale);
  };
  return {quantize(pairs[0]) | quantize(pairs[1]) << 16, quantize(pairs[2]) | quantize(pairs[3]) << 16};
}

// A tile of 128 x 128 elements in shared memory, row after row. Its layout avoids two bank conflicts. First, slots are
// padded by the bytes that 4 lanes read in one slot; otherwise lanes that read one pair of columns in 8 slots would
// access the same banks. Second, half of the vectors of eight 32-bit elements have their two 16-byte halves swapped;
// otherwise 8 lanes that access one such vector each would access the same banks.
template <typename T>
struct InputTile {
  using Element = T;
  using Pair = PairOf<T>;
  static constexpr int kRowBytes = kTileColumns * sizeof(T);
  static constexpr int kSlotBytes = kFp8Alignment * kRowBytes + 4 * static_cast<int>(sizeof(Pair));
  static constexpr int kBytes = kSlots * kSlotBytes;
  static constexpr int kVectorsPer8 = 8 * sizeof(T) / sizeof(uint4);

  char* base;

  // Returns the address of the `vector`-th 16 bytes of a row.
  __device__ uint4* Vector(int slot, int row, int vector) const {
    return reinterpret_cast<uint4*>(base + slot * kSlotBytes + row * kRowBytes) + Swizzled(vector);
  }

  // Store and load the `vector`-th 8 elements of a row.
  __device__ void Store8(int slot, int row, int vector, const Pair (&pairs)[4]) const {
#pragma unroll
    for (int i = 0; i < kVectorsPer8; ++i) {
      *Vector(slot, row, vector * kVectorsPer8 + i) = reinterpret_cast<const uint4*>(pairs)[i];
    }
  }
  __device__ void Load8(int slot, int row, int vector, Pair (&pairs)[4]) const {
#pragma unroll
    for (int i = 0; i < kVectorsPer8; ++i) {
      reinterpret_cast<uint4*>(pairs)[i] = *Vector(slot, row, vector * kVectorsPer8 + i);
    }
  }

  // Loads a pair of columns in several rows of a slot.
  template <int kRows>
  __device__ void LoadColumns(int slot, int first_row, int pair, Pair (&pairs)[kRows]) const {
    constexpr int kPairsPerVector = sizeof(uint4) / sizeof(Pair);
    const auto* first =
        reinterpret_cast<const Pair*>(Vector(slot, first_row, pair / kPairsPerVector)) + pair % kPairsPerVector;
#pragma unroll
    for (int row = 0; row < kRows; ++row) pairs[row] = first[row * (kTileColumns / 2)];
  }

 private:
  __device__ static int Swizzled(int vector) { return sizeof(T) == 4 ? vector ^ (vector / 8 % 2) : vector; }
};

// Starts to copy 16 bytes from global to shared memory, or to write zeros there. Does not wait.
__device__ inline void CopyAsync(void* shared, const void* global, bool exists) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(global), "r"(exists ? 16 : 0)
               : "memory");
}
__device__ inline void WaitForCopies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// The input without an activation, whose rows may be gathered.
template <typename T>
struct PlainSource {
  using Element = T;
  // Rows per lane whose loads are all issued before the first use.
  static constexpr int kRowsAtOnce = sizeof(T) == 2 ? kFp8Alignment / 2 : 1;
  const T* x;
  int64_t features;
  const int32_t* row_indices;  // null if the rows are in order
  int64_t rows;                // of x

  // Loads a chunk's rows into a slot, 128 columns from `first_column` on. Elements that do not exist become zero. Whole
  // warps must call it.
  __device__ void LoadSlot(const InputTile<T>& tile, int slot, const Chunk& chunk, int64_t first_column) const {
    constexpr int kVectors = InputTile<T>::kRowBytes / 16;
    constexpr int kRows = 32 / kVectors;
    const int vector = threadIdx.x % kVectors;
    const int first = threadIdx.x % 32 / kVectors;
    const int64_t column = first_column + vector * static_cast<int>(16 / sizeof(T));
    const int rows_here = column < features ? chunk.rows : 0;
    uint4* to = tile.Vector(slot, first, vector);
    if (row_indices != nullptr) {
      // Each lane finds the index of one row, or -1 for none.
      int32_t index = Lane() < chunk.rows ? row_indices[chunk.first_row + Lane()] : -1;
      if (!IsRow(index)) index = -1;
      const bool has_column = column < features;
      const T* from = has_column ? x + column : x;
#pragma unroll
      for (int row = 0; row < kFp8Alignment; row += kRows) {
        const int32_t from_row = __shfl_sync(kFullWarp, index, row + first);
        // The product of two unsigned factors of 32 bits is one instruction; that of 64 bits takes several.
        const auto distance = uint64_t{static_cast<uint32_t>(max(from_row, 0))} * static_cast<uint32_t>(features);
        CopyAsync(to + row * kVectors, from + distance, has_column && from_row >= 0);
      }
    } else {
      const T* from = x + (chunk.first_row + static_cast<int64_t>(first)) * features + column;
#pragma unroll
      for (int row = 0; row < kFp8Alignment; row += kRows) {
        const bool exists = row + first < rows_here;
        CopyAsync(to + row * kVectors, exists ? from : x, exists);
        from += kRows * features;
      }
    }
    WaitForCopies();
    __syncwarp();
  }

  __device__ static constexpr bool HasInnerProducts() { return false; }
  __device__ void ZeroInnerProduct(int64_t, int64_t) const {}

  // Loads 8 columns of every other row of a chunk, starting at row `first`. Elements that do not exist stay unchanged.
  template <int kCount>
  __device__ void LoadRows(const Chunk& chunk, int first, int64_t column, PairOf<T> (&loaded)[kCount][4]) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int row = first + 2 * i;
      if (row >= chunk.rows || column >= features) continue;
      int64_t from_row = chunk.first_row + int64_t{row};
      if (row_indices != nullptr) {
        from_row = row_indices[from_row];
        if (!IsRow(from_row)) continue;
      }
      const auto* from = reinterpret_cast<const uint4*>(x + from_row * features + column);
#pragma unroll
      for (int vector = 0; vector < InputTile<T>::kVectorsPer8; ++vector) {
        // Gathered rows may be read again soon.
        reinterpret_cast<uint4*>(loaded[i])[vector] =
            row_indices != nullptr ? __ldg(from + vector) : __ldcs(from + vector);
      }
    }
  }

 private:
  __device__ bool IsRow(int64_t index) const { return 0 <= index && index < rows; }
};

template <typename T>
PlainSource<T> MakePlainSource(const Quantization& args) {
  return {static_cast<const T*>(args.x), args.layout.features, args.row_indices, args.x_rows};
}

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

#endif  // JAX_GROUPED_CSRC_QUANTIZE_SOURCE_CUH_
