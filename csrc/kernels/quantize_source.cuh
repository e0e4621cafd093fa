// What the quantization kernels read: a tile of the input in shared memory, and the ways to fill it.

#ifndef JAX_GROUPED_CSRC_KERNELS_QUANTIZE_SOURCE_CUH_
#define JAX_GROUPED_CSRC_KERNELS_QUANTIZE_SOURCE_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

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
// same banks if slots were not set apart by as much as 4 lanes read in one.
template <typename T>
struct Tile {
  using Element = T;
  using Pair = PairOf<T>;
  static constexpr int kRowBytes = kTileColumns * sizeof(T);
  static constexpr int kSlotBytes = kFp8Alignment * kRowBytes + 4 * static_cast<int>(sizeof(Pair));
  static constexpr int kBytes = kSlots * kSlotBytes;
  static constexpr int kUnitsPer8 = 8 * sizeof(T) / sizeof(uint4);

  char* base;

  __device__ char* Row(int slot, int row) const { return base + slot * kSlotBytes + row * kRowBytes; }

  // 8 elements of a row, the `vector`-th such.
  __device__ void Store8(int slot, int row, int vector, const Pair (&pairs)[4]) const {
    auto* units = reinterpret_cast<uint4*>(Row(slot, row)) + vector * kUnitsPer8;
#pragma unroll
    for (int i = 0; i < kUnitsPer8; ++i) units[i] = reinterpret_cast<const uint4*>(pairs)[i];
  }
  __device__ void Load8(int slot, int row, int vector, Pair (&pairs)[4]) const {
    const auto* units = reinterpret_cast<const uint4*>(Row(slot, row)) + vector * kUnitsPer8;
#pragma unroll
    for (int i = 0; i < kUnitsPer8; ++i) reinterpret_cast<uint4*>(pairs)[i] = units[i];
  }

  // A pair of columns over rows of a slot.
  template <int kRows>
  __device__ void LoadColumns(int slot, int first_row, int pair, Pair (&pairs)[kRows]) const {
    const auto* first = reinterpret_cast<const Pair*>(Row(slot, first_row)) + pair;
#pragma unroll
    for (int row = 0; row < kRows; ++row) pairs[row] = first[row * (kTileColumns / 2)];
  }
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
    char* to = tile.Row(slot, first) + unit * 16;
#pragma unroll
    for (int row = 0; row < kFp8Alignment; row += kRows) {
      const bool exists = row + first < rows;
      CopyAsync(to + row * Tile<T>::kRowBytes, exists ? from : x, exists);
      from += kRows * features;
    }
    WaitForCopies();
    __syncwarp();
  }

  // 8 elements of a row.
  __device__ void Load8(int64_t row, int64_t column, PairOf<T> (&pairs)[4]) const {
    const auto* source = reinterpret_cast<const uint4*>(x + row * features + column);
#pragma unroll
    for (int i = 0; i < Tile<T>::kUnitsPer8; ++i) reinterpret_cast<uint4*>(pairs)[i] = __ldcs(source + i);
  }
};

__device__ inline float Sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// jax.nn.gelu's approximation, and its derivative.
constexpr float kGeluInner = 0.7978845608028654f;  // sqrt(2 / pi)
constexpr float kGeluCubic = 0.044715f;
__device__ inline float GeluTanh(float x) { return tanhf(kGeluInner * (x + kGeluCubic * x * x * x)); }

__device__ inline float Activate(Activation activation, float x) {
  switch (activation) {
    case Activation::kSilu:
    case Activation::kSiluMul:
      return x * Sigmoid(x);
    case Activation::kGelu:
      return x * (0.5f * (1.0f + GeluTanh(x)));
    case Activation::kRelu:
      return x > 0.0f || isnan(x) ? x : 0.0f;
    case Activation::kNone:
      break;
  }
  return x;
}

// The gradient of an activation's input `x`, from that of its result.
__device__ inline float ActivationGradient(Activation activation, float x, float gradient) {
  switch (activation) {
    case Activation::kSilu:
    case Activation::kSiluMul: {
      const float sigmoid = Sigmoid(x);
      return gradient * (sigmoid * (1.0f + x * (1.0f - sigmoid)));
    }
    case Activation::kGelu: {
      const float t = GeluTanh(x);
      const float inner = kGeluInner * (1.0f + 3.0f * kGeluCubic * x * x);
      return gradient * (0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * inner);
    }
    case Activation::kRelu:
      return x >= __uint_as_float(kTinyBits) ? gradient : 0.0f;  // Subnormal numbers count as zero.
    case Activation::kNone:
      break;
  }
  return gradient;
}

// An activation of the input, or its backward form, in float32.
struct ActivatedSource {
  using Element = float;
  const void* x;
  const void* activation_input;
  cudaDataType_t type;
  Activation activation;
  bool backward;
  int64_t features;  // of the result

  __device__ void LoadSlot(const Tile<float>& tile, int slot, const Chunk& chunk, int64_t first_column) const {
    const int vector = threadIdx.x % 16;
    const int64_t column = first_column + vector * 8;
#pragma unroll 1
    for (int row = threadIdx.x % 32 / 16; row < kFp8Alignment; row += 2) {
      alignas(16) PairOf<float> pairs[4] = {};
      if (row < chunk.rows && column < features) Load8(chunk.first_row + static_cast<int64_t>(row), column, pairs);
      tile.Store8(slot, row, vector, pairs);
    }
    __syncwarp();
  }

  // 8 elements of the result.
  __device__ void Load8(int64_t row, int64_t column, PairOf<float> (&pairs)[4]) const {
    float values[8];
    Compute8(row, column, values);
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i].values = {values[2 * i], values[2 * i + 1]};
  }

 private:
  __device__ void Compute8(int64_t row, int64_t column, float (&values)[8]) const {
    const bool gated = activation == Activation::kSiluMul;
    if (!backward) {
      Read8(x, row * (gated ? 2 * features : features) + column, values);
#pragma unroll
      for (float& value : values) value = Activate(activation, value);
      if (gated) {
        float up[8];
        Read8(x, row * 2 * features + features + column, up);
#pragma unroll
        for (int i = 0; i < 8; ++i) values[i] *= up[i];
      }
      return;
    }
    if (!gated) {
      float inputs[8];
      Read8(x, row * features + column, values);
      Read8(activation_input, row * features + column, inputs);
#pragma unroll
      for (int i = 0; i < 8; ++i) values[i] = ActivationGradient(activation, inputs[i], values[i]);
      return;
    }
    // The first half of the result is the gate's gradient, the second that of what it multiplies.
    const int64_t half = features / 2;
    const bool is_gate = column < half;
    const int64_t in_half = is_gate ? column : column - half;
    float gate[8];
    Read8(x, row * half + in_half, values);
    Read8(activation_input, row * features + in_half, gate);
    if (is_gate) {
      float up[8];
      Read8(activation_input, row * features + half + in_half, up);
#pragma unroll
      for (int i = 0; i < 8; ++i) values[i] = ActivationGradient(activation, gate[i], values[i] * up[i]);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) values[i] *= Activate(activation, gate[i]);
    }
  }

  template <typename T>
  __device__ static void Read8As(const void* array, int64_t index, float (&values)[8]) {
    alignas(16) PairOf<T> pairs[4];
#pragma unroll
    for (int i = 0; i < Tile<T>::kUnitsPer8; ++i) {
      reinterpret_cast<uint4*>(pairs)[i] = reinterpret_cast<const uint4*>(static_cast<const T*>(array) + index)[i];
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      values[2 * i] = pairs[i].First();
      values[2 * i + 1] = pairs[i].Second();
    }
  }

  __device__ void Read8(const void* array, int64_t index, float (&values)[8]) const {
    if (type == CUDA_R_16BF) {
      Read8As<__nv_bfloat16>(array, index, values);
    } else if (type == CUDA_R_16F) {
      Read8As<__half>(array, index, values);
    } else {
      Read8As<float>(array, index, values);
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
