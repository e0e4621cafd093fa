// Source of a tile that computes an activation of the input, or the gradient of the activation's input.

#ifndef JAX_GROUPED_CSRC_QUANTIZE_ACTIVATION_CUH_
#define JAX_GROUPED_CSRC_QUANTIZE_ACTIVATION_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "csrc/common/activation.cuh"
#include "csrc/groups/layout.cuh"
#include "csrc/quantize/quantize.h"
#include "csrc/quantize/source.cuh"

namespace jax_grouped {

// Arguments of an activation or of its backward form.
struct ActivationArrays {
  const void* x;
  const void* activation_input;
  const float* row_weights;  // null for 1
  float* inner_products;     // [rows, tiles of the activation's result], or null
  Activation activation;
  bool backward;
  int64_t features;  // the result's
};

// The kinds of columns of a result. The gradient of a gated activation's input has that of the gate first, then that of
// the factors.
enum class Form { kActivated, kGated, kGradient, kGradientOfGate, kGradientOfFactor };

// Returns one number of a result.
template <Form kForm, typename Functions>
__device__ float ActivatedValue(const Functions& f, float input, float factor, float gradient, float weight) {
  if constexpr (kForm == Form::kGradientOfFactor) {
    return f.FactorGradient(factor, gradient * weight * f.Activate(input));
  }
  if constexpr (kForm == Form::kGradientOfGate) return f.InputGradient(input, gradient * weight * f.Factor(factor));
  if constexpr (kForm == Form::kGradient) return f.InputGradient(input, gradient * weight);
  if constexpr (kForm == Form::kGated) return f.Activate(input) * f.Factor(factor) * weight;
  return f.Activate(input) * weight;
}

// Reader of 8 columns of the result, in every other row of a chunk.
template <typename T, Form kForm, typename Functions>
class ActivatedColumns {
  static constexpr bool kBackward = kForm >= Form::kGradient;
  // The gradient of a factor depends on the factor only if that was clamped.
  static constexpr bool kHasFactors = kForm == Form::kGradientOfFactor ? Functions::kHasNumbers : Functions::kGated;

 public:
  static constexpr ActivationKind kKind = Functions::kKind;
  static constexpr bool kHasInnerProducts = kForm == Form::kGradient || kForm == Form::kGradientOfGate;

  // Starts at row `first` of the chunk.
  __device__ ActivatedColumns(const Functions& functions, const ActivationArrays& arrays, const Chunk& chunk, int first,
                              int64_t column)
      : functions_(functions), rows_(column < arrays.features ? chunk.rows - first : 0) {
    const int64_t row = chunk.first_row + int64_t{first};
    if (arrays.row_weights != nullptr) weights_ = arrays.row_weights + row;
    stride_ = kForm == Form::kGated ? 2 * arrays.features : arrays.features;
    gradient_stride_ = Functions::kGated ? arrays.features / 2 : arrays.features;
    if constexpr (kForm == Form::kGradientOfFactor) column -= gradient_stride_;
    const void* inputs = kBackward ? arrays.activation_input : arrays.x;
    inputs_ = static_cast<const T*>(inputs) + row * stride_ + column;
    if constexpr (kHasFactors) factors_ = inputs_ + stride_ / 2;
    if constexpr (kBackward) gradients_ = static_cast<const T*>(arrays.x) + row * gradient_stride_ + column;
  }

  // Returns true if the next `rows` rows exist, of which every other one is read.
  __device__ bool Has(int rows) const { return rows_ >= rows - 1; }

  __device__ void Skip(int rows) {
    rows_ -= rows;
    inputs_ += rows * stride_;
    if constexpr (kHasFactors) factors_ += rows * stride_;
    if constexpr (kBackward) gradients_ += rows * gradient_stride_;
    if (weights_ != nullptr) weights_ += rows;
  }

  // Computes the next rows. Rows that do not exist stay unchanged. With kAllExist, all rows must exist. With kProducts,
  // adds the inner products of the activation's result with its gradient to `products`.
  template <bool kAllExist, bool kProducts = false, int kCount>
  __device__ void Compute(PairOf<float> (&rows)[kCount][4], float* products = nullptr) const {
    if (!kAllExist && rows_ <= 0) return;
    // All rows are loaded before any is computed. The first row is loaded in place of one that does not exist.
    Eight inputs[kCount];
    Eight factors[kCount];
    Eight gradients[kCount];
    float weights[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int row = kAllExist || 2 * i < rows_ ? 2 * i : 0;
      inputs[i].Read(inputs_ + row * stride_);
      if constexpr (kHasFactors) factors[i].Read(factors_ + row * stride_);
      if constexpr (kBackward) gradients[i].Read(gradients_ + row * gradient_stride_);
      weights[i] = weights_ == nullptr ? 1.0f : __ldg(weights_ + row);
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (!kAllExist && 2 * i >= rows_) continue;
      const auto value = [&](int j) {
        const float factor = kHasFactors ? factors[i][j] : 1.0f;
        const float gradient = kBackward ? gradients[i][j] : 1.0f;
        if (kProducts) products[i] += functions_.Activate(inputs[i][j]) * functions_.Factor(factor) * gradient;
        return ActivatedValue<kForm>(functions_, inputs[i][j], factor, gradient, weights[i]);
      };
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float low = value(2 * j);
        const float high = value(2 * j + 1);
        rows[i][j].values = {low, high};
      }
    }
  }

 private:
  // 8 numbers as loaded. Converting them only at their use takes half the registers.
  struct Eight {
    alignas(16) PairOf<T> pairs[4];

    // Loads through the read-only cache, so that loads need not keep their order with stores.
    __device__ void Read(const T* from) {
#pragma unroll
      for (int i = 0; i < InputTile<T>::kVectorsPer8; ++i) {
        reinterpret_cast<uint4*>(pairs)[i] = __ldg(reinterpret_cast<const uint4*>(from) + i);
      }
    }
    __device__ float operator[](int i) const { return i % 2 == 0 ? pairs[i / 2].First() : pairs[i / 2].Second(); }
  };

  Functions functions_;
  int rows_;
  const T* inputs_;
  const T* factors_;
  int64_t stride_;  // of both
  const T* gradients_;
  int64_t gradient_stride_;
  const float* weights_ = nullptr;
};

// An activation of the input, or its backward form, in float32.
template <typename T>
struct ActivatedSource : ActivationArrays {
  using Element = float;
  static constexpr int kRowsAtOnce = 2;

  __device__ void LoadSlot(const InputTile<float>& tile, int slot, const Chunk& chunk, int64_t first_column) const {
    const int vector = threadIdx.x % 16;
    const int first = threadIdx.x % 32 / 16;
    WithColumns(chunk, first, first_column + vector * 8, [&](auto columns) {
      if (columns.Has(kFp8Alignment)) {
        // The loads of two rows of SwiGLU are issued before the first use. With 32-bit numbers, or with other
        // activations, registers would be spilled.
        constexpr bool kTwo = sizeof(T) == 2 && decltype(columns)::kKind == ActivationKind::kSwiGlu;
        constexpr int kCount = kTwo ? 2 : 1;
        LoadSlot<true, kCount>(tile, slot, chunk, first_column, columns);
      } else {
        LoadSlot<false, 1>(tile, slot, chunk, first_column, columns);
      }
    });
    __syncwarp();
  }

  __device__ bool HasInnerProducts() const { return inner_products != nullptr; }
  // Writes 0 as a row's inner product in the tile that starts at a column.
  __device__ void ZeroInnerProduct(int64_t row, int64_t first_column) const {
    if (InnerProductColumns(first_column) > 0) *InnerProduct(row, first_column) = 0.0f;
  }

  // Loads 8 columns of every other row of a chunk, starting at row `first`. Elements that do not exist stay unchanged.
  template <int kCount>
  __device__ void LoadRows(const Chunk& chunk, int first, int64_t column, PairOf<float> (&rows)[kCount][4]) const {
    WithColumns(chunk, first, column, [&](const auto& columns) { columns.template Compute<false>(rows); });
  }

 private:
  // Returns the features of a backward form's x.
  __device__ int64_t GradientFeatures() const { return IsGated(activation.kind) ? features / 2 : features; }

  // Returns the number of a tile's columns that have inner products: those of the gate, if there is one.
  __device__ int InnerProductColumns(int64_t first_column) const {
    if (inner_products == nullptr) return 0;
    return static_cast<int>(max(min(GradientFeatures() - first_column, int64_t{kTileColumns}), int64_t{0}));
  }

  template <bool kAllExist, int kCount, typename Columns>
  __device__ void LoadSlot(const InputTile<float>& tile, int slot, const Chunk& chunk, int64_t first_column,
                           Columns columns) const {
    const int vector = threadIdx.x % 16;
#pragma unroll 1
    for (int row = threadIdx.x % 32 / 16; row < kFp8Alignment; row += 2 * kCount) {
      alignas(16) PairOf<float> rows[kCount][4] = {};
      if (Columns::kHasInnerProducts && inner_products != nullptr) {
        float products[kCount] = {};
        columns.template Compute<kAllExist, Columns::kHasInnerProducts>(rows, products);
#pragma unroll
        for (int i = 0; i < kCount; ++i) StoreInnerProduct(chunk, row + 2 * i, first_column, products[i]);
      } else {
        columns.template Compute<kAllExist>(rows);
      }
#pragma unroll
      for (int i = 0; i < kCount; ++i) tile.Store8(slot, row + 2 * i, vector, rows[i]);
      columns.Skip(2 * kCount);
    }
  }

  // Adds up the inner products of the lanes of a row, which each have 8 columns, and writes the sum. All lanes of the
  // row that have columns with inner products must call it.
  __device__ void StoreInnerProduct(const Chunk& chunk, int row, int64_t first_column, float product) const {
    const int lane = threadIdx.x % 16;
    const int lanes = InnerProductColumns(first_column) / 8;
    if (lane >= lanes) return;
    const uint32_t mask = (kFullWarp >> (32 - lanes)) << (threadIdx.x % 32 - lane);
#pragma unroll
    for (int distance = 8; distance > 0; distance /= 2) {
      const float other = __shfl_down_sync(mask, product, distance, 16);
      if (lane + distance < lanes) product += other;
    }
    if (lane == 0 && row < chunk.rows) *InnerProduct(chunk.first_row + int64_t{row}, first_column) = product;
  }

  __device__ float* InnerProduct(int64_t row, int64_t first_column) const {
    return inner_products + row * CeilDiv(GradientFeatures(), kTileColumns) + first_column / kTileColumns;
  }

  // Calls `visit` with the ActivatedColumns of the problem.
  template <typename Visit>
  __device__ void WithColumns(const Chunk& chunk, int first, int64_t column, Visit visit) const {
    if (IsGated(activation.kind)) {
      WithActivation<true>(activation, [&](auto functions) {
        using Functions = decltype(functions);
        if (!backward) {
          visit(ActivatedColumns<T, Form::kGated, Functions>(functions, *this, chunk, first, column));
        } else if (column < GradientFeatures()) {
          visit(ActivatedColumns<T, Form::kGradientOfGate, Functions>(functions, *this, chunk, first, column));
        } else {
          visit(ActivatedColumns<T, Form::kGradientOfFactor, Functions>(functions, *this, chunk, first, column));
        }
      });
    } else {
      WithActivation<false>(activation, [&](auto functions) {
        using Functions = decltype(functions);
        if (backward) {
          visit(ActivatedColumns<T, Form::kGradient, Functions>(functions, *this, chunk, first, column));
        } else {
          visit(ActivatedColumns<T, Form::kActivated, Functions>(functions, *this, chunk, first, column));
        }
      });
    }
  }
};

template <typename T>
ActivatedSource<T> MakeActivatedSource(const Quantization& args) {
  ActivatedSource<T> source;
  source.x = args.x;
  source.activation_input = args.activation_input;
  source.row_weights = args.row_weights;
  source.inner_products = args.inner_products;
  source.activation = args.activation;
  source.backward = args.backward;
  source.features = args.layout.features;
  return source;
}

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_QUANTIZE_ACTIVATION_CUH_
