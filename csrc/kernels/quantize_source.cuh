// What the quantization kernels read: a tile of the input in shared memory, and the ways to fill it.

#ifndef JAX_GROUPED_CSRC_KERNELS_QUANTIZE_SOURCE_CUH_
#define JAX_GROUPED_CSRC_KERNELS_QUANTIZE_SOURCE_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "csrc/common/fp8.cuh"
#include "csrc/common/group_layout.cuh"
#include "csrc/kernels/quantize.h"

namespace jax_grouped {

constexpr int kTileColumns = kBlock;
// A tile has the chunks of whole row blocks: 8 chunks at most, in slots of 16 rows.
constexpr int kSlots = kBlock / kFp8Alignment;

// Two values side by side. Their largest absolute values are kept side by side too, as one `Largest`.
template <typename Element>
struct PairOf;

template <>
struct PairOf<__nv_bfloat16> {
  using Largest = __nv_bfloat162;
  __nv_bfloat162 values;
  __device__ float First() const { return __uint_as_float(Bits() << 16); }
  __device__ float Second() const { return __uint_as_float(Bits() & 0xffff0000); }
  // NaN if there is one.
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
  using Largest = uint2;  // bits: of absolute values, they have the same order, and NaN comes last
  float2 values;
  __device__ float First() const { return values.x; }
  __device__ float Second() const { return values.y; }
  __device__ static Largest AbsMax(Largest largest, PairOf pair) {
    return Max(largest, {__float_as_uint(pair.values.x) & 0x7fffffff, __float_as_uint(pair.values.y) & 0x7fffffff});
  }
  __device__ static Largest Max(Largest a, Largest b) { return {max(a.x, b.x), max(a.y, b.y)}; }
  __device__ static uint2 ToFloatBits(Largest largest) { return largest; }
  __device__ static Largest FromFloatBits(uint2 bits) { return bits; }
};

// Bits of the absolute value, 0 if it is not finite.
__device__ inline uint32_t FiniteBits(float x) {
  const uint32_t bits = __float_as_uint(x) & 0x7fffffff;
  return bits < kInfinityBits ? bits : 0;
}

// The largest absolute values of the first and of the second elements: infinity or NaN if one is not finite.
template <typename Pair, int kCount>
__device__ typename Pair::Largest PairwiseLargest(const Pair (&pairs)[kCount]) {
  typename Pair::Largest largest = Pair::AbsMax({}, pairs[0]);
#pragma unroll
  for (int i = 1; i < kCount; ++i) largest = Pair::AbsMax(largest, pairs[i]);
  return largest;
}

// The same as bits of float32.
template <typename Pair, int kCount>
__device__ uint2 PairwiseAmax(const Pair (&pairs)[kCount]) {
  return Pair::ToFloatBits(PairwiseLargest(pairs));
}

// The same of those elements that are finite.
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

// 128 x 128 elements in shared memory, row after row. Lanes that read one pair of columns in 8 slots would meet in the
// same banks if slots were not set apart by as much as 4 lanes read in one; and so would 8 lanes with 8 elements each
// of 32 bits, if half of them did not have their two units of 16 bytes the other way round.
template <typename T>
struct Tile {
  using Element = T;
  using Pair = PairOf<T>;
  static constexpr int kRowBytes = kTileColumns * sizeof(T);
  static constexpr int kSlotBytes = kFp8Alignment * kRowBytes + 4 * static_cast<int>(sizeof(Pair));
  static constexpr int kBytes = kSlots * kSlotBytes;
  static constexpr int kUnitsPer8 = 8 * sizeof(T) / sizeof(uint4);

  char* base;

  // Where the `unit`-th 16 bytes of a row are.
  __device__ uint4* Unit(int slot, int row, int unit) const {
    return reinterpret_cast<uint4*>(base + slot * kSlotBytes + row * kRowBytes) + Place(unit);
  }

  // 8 elements of a row, the `vector`-th such.
  __device__ void Store8(int slot, int row, int vector, const Pair (&pairs)[4]) const {
#pragma unroll
    for (int i = 0; i < kUnitsPer8; ++i) {
      *Unit(slot, row, vector * kUnitsPer8 + i) = reinterpret_cast<const uint4*>(pairs)[i];
    }
  }
  __device__ void Load8(int slot, int row, int vector, Pair (&pairs)[4]) const {
#pragma unroll
    for (int i = 0; i < kUnitsPer8; ++i) {
      reinterpret_cast<uint4*>(pairs)[i] = *Unit(slot, row, vector * kUnitsPer8 + i);
    }
  }

  // A pair of columns over rows of a slot.
  template <int kRows>
  __device__ void LoadColumns(int slot, int first_row, int pair, Pair (&pairs)[kRows]) const {
    constexpr int kPairsPerUnit = sizeof(uint4) / sizeof(Pair);
    const auto* first =
        reinterpret_cast<const Pair*>(Unit(slot, first_row, pair / kPairsPerUnit)) + pair % kPairsPerUnit;
#pragma unroll
    for (int row = 0; row < kRows; ++row) pairs[row] = first[row * (kTileColumns / 2)];
  }

 private:
  __device__ static int Place(int unit) { return sizeof(T) == 4 ? unit ^ (unit / 8 % 2) : unit; }
};

// Has 16 bytes copied from global to shared memory, or zeros written, without waiting.
__device__ inline void CopyAsync(void* shared, const void* global, bool exists) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(global), "r"(exists ? 16 : 0)
               : "memory");
}
__device__ inline void WaitForCopies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// The input as it is.
template <typename T>
struct PlainSource {
  using Element = T;
  // All loads come before the first use.
  static constexpr int kRowsAtOnce = sizeof(T) == 2 ? kFp8Alignment / 2 : 1;
  const T* x;
  int64_t features;

  // Brings a chunk's rows into a slot, 128 columns from the first; what does not exist becomes zero. For a whole warp.
  __device__ void LoadSlot(const Tile<T>& tile, int slot, const Chunk& chunk, int64_t first_column) const {
    constexpr int kUnits = Tile<T>::kRowBytes / 16;
    constexpr int kRows = 32 / kUnits;
    const int unit = threadIdx.x % kUnits;
    const int first = threadIdx.x % 32 / kUnits;
    const int64_t column = first_column + unit * static_cast<int>(16 / sizeof(T));
    const int rows = column < features ? chunk.rows : 0;
    const T* from = x + (chunk.first_row + static_cast<int64_t>(first)) * features + column;
    uint4* to = tile.Unit(slot, first, unit);
#pragma unroll
    for (int row = 0; row < kFp8Alignment; row += kRows) {
      const bool exists = row + first < rows;
      CopyAsync(to + row * kUnits, exists ? from : x, exists);
      from += kRows * features;
    }
    WaitForCopies();
    __syncwarp();
  }

  // 8 columns of rows of a chunk, of every other from the first; what does not exist stays.
  template <int kCount>
  __device__ void LoadRows(const Chunk& chunk, int first, int64_t column, PairOf<T> (&rows)[kCount][4]) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int row = first + 2 * i;
      if (row >= chunk.rows || column >= features) continue;
      const auto* from = reinterpret_cast<const uint4*>(x + (chunk.first_row + int64_t{row}) * features + column);
#pragma unroll
      for (int unit = 0; unit < Tile<T>::kUnitsPer8; ++unit) {
        reinterpret_cast<uint4*>(rows[i])[unit] = __ldcs(from + unit);
      }
    }
  }
};

// By the hardware's own exponential and reciprocal, whose errors of 1e-6 are far below those of FP8. Activations bound
// their kernels by instructions, of which this takes 4.
__device__ inline float Sigmoid(float x) {
  constexpr float kMinusLog2E = -1.4426950408889634f;
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * kMinusLog2E));
  float sigmoid;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(sigmoid) : "f"(1.0f + power));
  return sigmoid;
}

// Twice what the hyperbolic tangent is taken of in jax.nn.gelu's approximation, and the derivative of that:
// (1 + tanh(y)) / 2 is Sigmoid(2 y).
constexpr float kGeluInner = 2 * 0.7978845608028654f;  // 2 sqrt(2 / pi)
constexpr float kGeluCubic = 0.044715f;
__device__ inline float GeluInner(float x) { return kGeluInner * (x + kGeluCubic * x * x * x); }
__device__ inline float GeluInnerGradient(float x) { return kGeluInner * (1.0f + 3.0f * kGeluCubic * x * x); }

template <Activation kActivation>
__device__ float Activate(float x) {
  if constexpr (kActivation == Activation::kGelu) return x * Sigmoid(GeluInner(x));
  if constexpr (kActivation == Activation::kRelu) return x > 0.0f || isnan(x) ? x : 0.0f;
  return x * Sigmoid(x);
}

// The gradient of an activation's input `x`, from that of its result.
template <Activation kActivation>
__device__ float ActivationGradient(float x, float gradient) {
  if constexpr (kActivation == Activation::kGelu) {
    const float sigmoid = Sigmoid(GeluInner(x));
    return gradient * (sigmoid + x * (sigmoid * (1.0f - sigmoid)) * GeluInnerGradient(x));
  }
  if constexpr (kActivation == Activation::kRelu) {
    return x >= __uint_as_float(kTinyBits) ? gradient : 0.0f;  // Subnormal numbers count as zero.
  }
  const float sigmoid = Sigmoid(x);
  return gradient * (sigmoid * (1.0f + x * (1.0f - sigmoid)));
}

// What an activation, or its backward form, is computed from.
struct ActivationArrays {
  const void* x;
  const void* activation_input;
  cudaDataType_t type;
  Activation activation;
  bool backward;
  int64_t features;  // of the result
};

// 8 columns of the result, in every other row of a chunk.
template <typename T, bool kGated, bool kBackward>
class ActivatedColumns {
 public:
  using Number = T;

  // Starts with the `first` row of the chunk.
  __device__ ActivatedColumns(const ActivationArrays& arrays, const Chunk& chunk, int first, int64_t column)
      : activation_(arrays.activation), rows_(column < arrays.features ? chunk.rows - first : 0) {
    const int64_t row = chunk.first_row + int64_t{first};
    const int64_t features = arrays.features;
    if constexpr (kBackward) {
      // With a gate, the first half of the result is its gradient, the second that of the factors.
      const int64_t half = kGated ? features / 2 : features;
      is_gate_ = column < half;
      if (!is_gate_) column -= half;
      stride_ = features;
      inputs_ = static_cast<const T*>(arrays.activation_input) + row * features + column;
      factors_ = is_gate_ ? inputs_ + half : inputs_;
      gradient_stride_ = half;
      gradients_ = static_cast<const T*>(arrays.x) + row * half + column;
    } else {
      stride_ = kGated ? 2 * features : features;
      inputs_ = static_cast<const T*>(arrays.x) + row * stride_ + column;
      factors_ = inputs_ + features;
    }
  }

  // Whether so many rows from here on, of which every other is wanted, exist.
  __device__ bool Has(int rows) const { return rows_ >= rows - 1; }

  __device__ void Skip(int rows) {
    rows_ -= rows;
    inputs_ += rows * stride_;
    factors_ += rows * stride_;
    if constexpr (kBackward) gradients_ += rows * gradient_stride_;
  }

  // The next rows; what does not exist stays, unless everything does.
  template <bool kAllExist, int kCount>
  __device__ void Compute(PairOf<float> (&rows)[kCount][4]) const {
    if (!kAllExist && rows_ <= 0) return;
    // All rows are read before any is computed, the first in place of one that does not exist.
    Eight inputs[kCount];
    Eight factors[kCount];
    Eight gradients[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int row = kAllExist || 2 * i < rows_ ? 2 * i : 0;
      inputs[i].Read(inputs_ + row * stride_);
      if constexpr (kGated) factors[i].Read(factors_ + row * stride_);
      if constexpr (kBackward) gradients[i].Read(gradients_ + row * gradient_stride_);
    }
    float values[kCount][8];
    WithActivation([&](auto constant) {
      constexpr Activation kActivation = decltype(constant)::kValue;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const float factor = kGated ? factors[i][j] : 1.0f;
          if constexpr (kBackward) {
            const float of_gate = ActivationGradient<kActivation>(inputs[i][j], gradients[i][j] * factor);
            values[i][j] = !kGated || is_gate_ ? of_gate : gradients[i][j] * Activate<kActivation>(inputs[i][j]);
          } else {
            values[i][j] = Activate<kActivation>(inputs[i][j]) * factor;
          }
        }
      }
    });
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (!kAllExist && 2 * i >= rows_) continue;
#pragma unroll
      for (int j = 0; j < 4; ++j) rows[i][j].values = {values[i][2 * j], values[i][2 * j + 1]};
    }
  }

 private:
  // 8 numbers as they were read: converted only when they are used, they take half the registers.
  struct Eight {
    alignas(16) PairOf<T> pairs[4];

    // Through the read-only cache, so that it need not keep its order with what is stored.
    __device__ void Read(const T* from) {
#pragma unroll
      for (int i = 0; i < Tile<T>::kUnitsPer8; ++i) {
        reinterpret_cast<uint4*>(pairs)[i] = __ldg(reinterpret_cast<const uint4*>(from) + i);
      }
    }
    __device__ float operator[](int i) const { return i % 2 == 0 ? pairs[i / 2].First() : pairs[i / 2].Second(); }
  };

  template <Activation kActivation>
  struct Constant {
    static constexpr Activation kValue = kActivation;
  };

  template <typename Visit>
  __device__ void WithActivation(Visit visit) const {
    if constexpr (kGated) {
      visit(Constant<Activation::kSiluMul>());
    } else if (activation_ == Activation::kGelu) {
      visit(Constant<Activation::kGelu>());
    } else if (activation_ == Activation::kRelu) {
      visit(Constant<Activation::kRelu>());
    } else {
      visit(Constant<Activation::kSilu>());
    }
  }

  Activation activation_;
  int rows_;
  const T* inputs_;
  const T* factors_;  // of the activation's result; in the second half of a gradient, any
  int64_t stride_;
  const T* gradients_;
  int64_t gradient_stride_;
  bool is_gate_;  // or there is none
};

// An activation of the input, or its backward form, in float32.
struct ActivatedSource : ActivationArrays {
  using Element = float;
  static constexpr int kRowsAtOnce = 2;

  __device__ void LoadSlot(const Tile<float>& tile, int slot, const Chunk& chunk, int64_t first_column) const {
    const int vector = threadIdx.x % 16;
    const int first = threadIdx.x % 32 / 16;
    WithColumns(chunk, first, first_column + vector * 8, [&](auto columns) {
      if (columns.Has(kFp8Alignment)) {
        // There are no registers for more rows of 32 bits.
        constexpr int kCount = sizeof(typename decltype(columns)::Number) == 2 ? kRowsAtOnce : 1;
        LoadSlot<true, kCount>(tile, slot, first, vector, columns);
      } else {
        LoadSlot<false, 1>(tile, slot, first, vector, columns);
      }
    });
    __syncwarp();
  }

  // 8 columns of every other row of a chunk from the first; what does not exist stays.
  template <int kCount>
  __device__ void LoadRows(const Chunk& chunk, int first, int64_t column, PairOf<float> (&rows)[kCount][4]) const {
    WithColumns(chunk, first, column, [&](const auto& columns) { columns.template Compute<false>(rows); });
  }

 private:
  template <bool kAllExist, int kCount, typename Columns>
  __device__ static void LoadSlot(const Tile<float>& tile, int slot, int first, int vector, Columns columns) {
#pragma unroll 1
    for (int row = first; row < kFp8Alignment; row += 2 * kCount) {
      alignas(16) PairOf<float> rows[kCount][4] = {};
      columns.template Compute<kAllExist>(rows);
#pragma unroll
      for (int i = 0; i < kCount; ++i) tile.Store8(slot, row + 2 * i, vector, rows[i]);
      columns.Skip(2 * kCount);
    }
  }

  // Calls visit with ActivatedColumns.
  template <typename Visit>
  __device__ void WithColumns(const Chunk& chunk, int first, int64_t column, Visit visit) const {
    if (type == CUDA_R_16BF) {
      WithColumnsOf<__nv_bfloat16>(chunk, first, column, visit);
    } else if (type == CUDA_R_16F) {
      WithColumnsOf<__half>(chunk, first, column, visit);
    } else {
      WithColumnsOf<float>(chunk, first, column, visit);
    }
  }

  template <typename T, typename Visit>
  __device__ void WithColumnsOf(const Chunk& chunk, int first, int64_t column, Visit visit) const {
    if (activation == Activation::kSiluMul) {
      if (backward) {
        visit(ActivatedColumns<T, true, true>(*this, chunk, first, column));
      } else {
        visit(ActivatedColumns<T, true, false>(*this, chunk, first, column));
      }
    } else if (backward) {
      visit(ActivatedColumns<T, false, true>(*this, chunk, first, column));
    } else {
      visit(ActivatedColumns<T, false, false>(*this, chunk, first, column));
    }
  }
};

template <typename T>
PlainSource<T> MakePlainSource(const QuantizeProblem& problem, const QuantizeBuffers& buffers) {
  return {static_cast<const T*>(buffers.x), problem.features};
}

inline ActivatedSource MakeActivatedSource(const QuantizeProblem& problem, const QuantizeBuffers& buffers) {
  ActivatedSource source;
  source.x = buffers.x;
  source.activation_input = buffers.activation_input;
  source.type = problem.input_type;
  source.activation = problem.activation;
  source.backward = problem.backward;
  source.features = problem.features;
  return source;
}

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_KERNELS_QUANTIZE_SOURCE_CUH_
