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
  static constexpr bool kHasInnerProducts = kForm == Form::kGradient || kForm == Form::kGradientOfGate;

  __device__ ActivatedColumns(const Functions& functions, const ActivationArrays& arrays, const Chunk& chunk,
                              int64_t column)
      : functions_(functions), rows_(column < arrays.features ? chunk.rows : 0) {
    const int64_t features = kForm == Form::kGated ? 2 * arrays.features : arrays.features;
    const int64_t gradient_features = Functions::kGated ? arrays.features / 2 : arrays.features;
    if constexpr (kForm == Form::kGradientOfFactor) column -= gradient_features;
    const void* inputs = kBackward ? arrays.activation_input : arrays.x;
    inputs_ = static_cast<const T*>(inputs) + chunk.first_row * features + column;
    vectors_ = static_cast<int32_t>(features / 8);
    if constexpr (kHasFactors) factors_ = inputs_ + features / 2;
    if constexpr (kBackward) {
      gradients_ = static_cast<const T*>(arrays.x) + chunk.first_row * gradient_features + column;
      gradient_vectors_ = static_cast<int32_t>(gradient_features / 8);
    }
    if (arrays.row_weights != nullptr) weights_ = arrays.row_weights + chunk.first_row;
  }

  // Returns true if all rows of a chunk exist.
  __device__ bool AllExist() const { return rows_ == kFp8Alignment; }

  // Computes every other row from row `first` of the chunk. Rows that do not exist stay unchanged. With kAllExist, all
  // rows must exist. With kProducts, adds the inner products of the activation's result with its gradient to
  // `products`.
  template <bool kAllExist, bool kProducts = false, int kCount>
  __device__ void Compute(int first, PairOf<float> (&rows)[kCount][4], float* products = nullptr) const {
    if (!kAllExist && first >= rows_) return;
    // All rows are loaded before any is computed. The first row is loaded in place of one that does not exist.
    Eight inputs[kCount];
    Eight factors[kCount];
    Eight gradients[kCount];
    float weights[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int row = kAllExist || first + 2 * i < rows_ ? first + 2 * i : first;
      inputs[i].Read(inputs_, row, vectors_);
      if constexpr (kHasFactors) factors[i].Read(factors_, row, vectors_);
      if constexpr (kBackward) gradients[i].Read(gradients_, row, gradient_vectors_);
      weights[i] = weights_ == nullptr ? 1.0f : __ldg(weights_ + row);
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (!kAllExist && first + 2 * i >= rows_) continue;
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

    // Loads from a row of `vectors` times 8 numbers. The address is written as one instruction, because the compiler
    // would compute addresses of all forms once for all rows, which takes too many registers. Loads through the
    // read-only cache need not keep their order with stores.
    __device__ void Read(const T* rows, int row, int32_t vectors) {
      const int offset = row * static_cast<int>(sizeof(Eight));
      const uint4* from;
      asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(from) : "r"(offset), "r"(vectors), "l"(rows));
#pragma unroll
      for (int i = 0; i < InputTile<T>::kVectorsPer8; ++i) reinterpret_cast<uint4*>(pairs)[i] = __ldg(from + i);
    }
    __device__ float operator[](int i) const { return i % 2 == 0 ? pairs[i / 2].First() : pairs[i / 2].Second(); }
  };

  Functions functions_;
  int rows_;
  const T* inputs_;
  const T* factors_;
  int32_t vectors_;  // of 8 numbers in a row of both
  const T* gradients_;
  int32_t gradient_vectors_;
  const float* weights_ = nullptr;
};

// An activation of the input, or its backward form, in float32: SwiGLU without numbers, or any other activation. SwiGLU
// has kernels of its own, because all activations together take more registers than there are.
template <typename T, bool kSwiGlu>
struct ActivatedSource : ActivationArrays {
  using Element = float;
  static constexpr int kRowsAtOnce = 2;

  __device__ void LoadSlot(const InputTile<float>& tile, int slot, const Chunk& chunk, int64_t first_column) const {
    const int vector = threadIdx.x % 16;
    WithColumns(chunk, first_column + vector * 8, [&](const auto& columns) {
      if (columns.AllExist()) {
        // The loads of two rows of SwiGLU are issued before the first use. With 32-bit numbers, or with other
        // activations, registers would be spilled.
        constexpr int kCount = sizeof(T) == 2 && kSwiGlu ? 2 : 1;
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
    WithColumns(chunk, column, [&](const auto& columns) { columns.template Compute<false>(first, rows); });
  }

 private:
  // Returns the features of a backward form's x.
  __device__ int64_t GradientFeatures() const { return kSwiGlu || IsGated(activation.kind) ? features / 2 : features; }

  // Returns the number of a tile's columns that have inner products: those of the gate, if there is one.
  __device__ int InnerProductColumns(int64_t first_column) const {
    if (inner_products == nullptr) return 0;
    return static_cast<int>(max(min(GradientFeatures() - first_column, int64_t{kTileColumns}), int64_t{0}));
  }

  template <bool kAllExist, int kCount, typename Columns>
  __device__ void LoadSlot(const InputTile<float>& tile, int slot, const Chunk& chunk, int64_t first_column,
                           const Columns& columns) const {
    const int vector = threadIdx.x % 16;
#pragma unroll 1
    for (int row = threadIdx.x % 32 / 16; row < kFp8Alignment; row += 2 * kCount) {
      alignas(16) PairOf<float> rows[kCount][4] = {};
      if (Columns::kHasInnerProducts && inner_products != nullptr) {
        float products[kCount] = {};
        columns.template Compute<kAllExist, Columns::kHasInnerProducts>(row, rows, products);
#pragma unroll
        for (int i = 0; i < kCount; ++i) StoreInnerProduct(chunk, row + 2 * i, first_column, products[i]);
      } else {
        columns.template Compute<kAllExist>(row, rows);
      }
#pragma unroll
      for (int i = 0; i < kCount; ++i) tile.Store8(slot, row + 2 * i, vector, rows[i]);
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
  __device__ void WithColumns(const Chunk& chunk, int64_t column, Visit visit) const {
    const auto visit_gated = [&](auto functions) {
      using Functions = decltype(functions);
      if constexpr ((Functions::kKind == ActivationKind::kSwiGlu) == kSwiGlu) {
        if (!backward) {
          visit(ActivatedColumns<T, Form::kGated, Functions>(functions, *this, chunk, column));
        } else if (column < GradientFeatures()) {
          visit(ActivatedColumns<T, Form::kGradientOfGate, Functions>(functions, *this, chunk, column));
        } else {
          visit(ActivatedColumns<T, Form::kGradientOfFactor, Functions>(functions, *this, chunk, column));
        }
      }
    };
    if constexpr (kSwiGlu) {
      visit_gated(ActivationFunctions<ActivationKind::kSwiGlu>{activation});
    } else if (IsGated(activation.kind)) {
      WithActivation<true>(activation, visit_gated);
    } else {
      WithActivation<false>(activation, [&](auto functions) {
        using Functions = decltype(functions);
        if (backward) {
          visit(ActivatedColumns<T, Form::kGradient, Functions>(functions, *this, chunk, column));
        } else {
          visit(ActivatedColumns<T, Form::kActivated, Functions>(functions, *this, chunk, column));
        }
      });
    }
  }
};

template <typename T, bool kSwiGlu>
ActivatedSource<T, kSwiGlu> MakeActivatedSource(const Quantization& args) {
  ActivatedSource<T, kSwiGlu> source;
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
