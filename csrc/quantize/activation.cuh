// Source of a tile that computes an activation of the input, or the gradient of the activation's input.

#ifndef JAX_GROUPED_CSRC_QUANTIZE_ACTIVATION_CUH_
#define JAX_GROUPED_CSRC_QUANTIZE_ACTIVATION_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "csrc/common/activation.cuh"
#include "csrc/groups/layout.cuh"
#include "csrc/quantize/quantize.h"
#include "csrc/quantize/register_tile.cuh"
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

// Reader of 8 columns of the result, in the rows of a chunk.
template <typename T, Form kForm, Activation kActivation>
class ActivatedColumns {
  static constexpr bool kBackward = kForm >= Form::kGradient;
  // The gradient of a factor depends on the factor if that was clamped.
  static constexpr bool kHasFactors =
      kForm == Form::kGradientOfFactor ? kActivation == Activation::kClampedSiluMul : IsGated(kActivation);

 public:
  static constexpr bool kHasInnerProducts = kForm == Form::kGradient || kForm == Form::kGradientOfGate;

  __device__ ActivatedColumns(const ActivationArrays& arrays, const Chunk& chunk, int64_t column)
      : last_row_(chunk.rows - 1) {
    const int64_t row = chunk.first_row;
    if (arrays.row_weights != nullptr) weights_ = arrays.row_weights + row;
    stride_ = kForm == Form::kGated ? 2 * arrays.features : arrays.features;
    gradient_stride_ = IsGated(kActivation) ? arrays.features / 2 : arrays.features;
    if constexpr (kForm == Form::kGradientOfFactor) column -= gradient_stride_;
    const void* inputs = kBackward ? arrays.activation_input : arrays.x;
    inputs_ = static_cast<const T*>(inputs) + row * stride_ + column;
    if constexpr (kHasFactors) factors_ = inputs_ + stride_ / 2;
    if constexpr (kBackward) gradients_ = static_cast<const T*>(arrays.x) + row * gradient_stride_ + column;
  }

  // Computes successive rows of the chunk, from `first` on; in place of rows that do not exist, its last row. With
  // kProducts, adds the inner products of the activation's result with its gradient to `products`.
  template <bool kProducts = false, int kCount>
  __device__ void Compute(int first, PairOf<float> (&rows)[kCount][4], float* products = nullptr) const {
    // All rows are loaded before any is computed.
    Eight inputs[kCount];
    Eight factors[kCount];
    Eight gradients[kCount];
    float weights[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int64_t row = min(first + i, last_row_);
      inputs[i].Read(inputs_ + row * stride_);
      if constexpr (kHasFactors) factors[i].Read(factors_ + row * stride_);
      if constexpr (kBackward) gradients[i].Read(gradients_ + row * gradient_stride_);
      weights[i] = weights_ == nullptr ? 1.0f : __ldg(weights_ + row);
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const auto value = [&](int j) {
        const float factor = kHasFactors ? factors[i][j] : 1.0f;
        const float gradient = kBackward ? gradients[i][j] : 1.0f;
        if (kProducts) products[i] += Activate<kActivation>(inputs[i][j]) * Factor<kActivation>(factor) * gradient;
        return Value(inputs[i][j], factor, gradient, weights[i]);
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

  // Returns the result in one column of a row.
  __device__ static float Value(float input, float factor, float gradient, float weight) {
    if constexpr (kForm == Form::kGradientOfFactor) {
      return FactorGradient<kActivation>(factor, gradient * weight * Activate<kActivation>(input));
    }
    if constexpr (kForm == Form::kGradientOfGate) {
      return ActivationGradient<kActivation>(input, gradient * weight * Factor<kActivation>(factor));
    }
    if constexpr (kForm == Form::kGradient) return ActivationGradient<kActivation>(input, gradient * weight);
    if constexpr (kForm == Form::kGated) return Activate<kActivation>(input) * Factor<kActivation>(factor) * weight;
    return Activate<kActivation>(input) * weight;
  }

  int last_row_;
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
  using Tile = RegisterTile;
  static constexpr int kRowsAtOnce = 2;

  // Fills the rows of the warp's slot, 128 columns from `first_column` on. Rows and columns that do not exist repeat
  // others of the slot. Whole warps must call it.
  __device__ void LoadSlot(RegisterTile& tile, int, const Chunk& chunk, int64_t first_column) const {
    float products[RegisterTile::kLaneRows] = {};
    WithColumns(chunk, first_column + threadIdx.x % 16 * 8, [&](auto columns) {
      using Columns = decltype(columns);
      if (Columns::kHasInnerProducts && inner_products != nullptr) {
        Fill<Columns::kHasInnerProducts>(columns, tile.rows, products);
      } else {
        Fill<false>(columns, tile.rows, products);
      }
    });
    if (InnerProductColumns(first_column) > 0) StoreInnerProducts(chunk, first_column, products);
  }

  __device__ bool HasInnerProducts() const { return inner_products != nullptr; }
  // Writes 0 as a row's inner product in the tile that starts at a column.
  __device__ void ZeroInnerProduct(int64_t row, int64_t first_column) const {
    if (InnerProductColumns(first_column) > 0) *InnerProduct(row, first_column) = 0.0f;
  }

  // Loads 8 columns of successive rows of a chunk, starting at row `first`. Those that do not exist repeat others.
  template <int kCount>
  __device__ void LoadRows(const Chunk& chunk, int first, int64_t column, PairOf<float> (&rows)[kCount][4]) const {
    WithColumns(chunk, column, [&](const auto& columns) { columns.Compute(first, rows); });
  }

 private:
  // Returns the features of a backward form's x.
  __device__ int64_t GradientFeatures() const { return IsGated(activation) ? features / 2 : features; }

  // Returns the number of a tile's columns that have inner products: those of the gate, if there is one.
  __device__ int InnerProductColumns(int64_t first_column) const {
    if (inner_products == nullptr) return 0;
    return static_cast<int>(max(min(GradientFeatures() - first_column, int64_t{kTileColumns}), int64_t{0}));
  }

  template <bool kProducts, typename Columns>
  __device__ static void Fill(const Columns& columns, PairOf<float> (&rows)[RegisterTile::kLaneRows][4],
                              float* products) {
    // Rows whose loads are all issued before the first use: as many as the registers have room for.
    constexpr int kCount = sizeof(T) == 2 ? 4 : 2;
#pragma unroll
    for (int row = 0; row < RegisterTile::kLaneRows; row += kCount) {
      PairOf<float> loaded[kCount][4];
      columns.template Compute<kProducts>(RegisterTile::FirstRow() + row, loaded, products + row);
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) rows[row + i][j] = loaded[i][j];
      }
    }
  }

  // Adds up the inner products of the lanes of a row, and writes the sums.
  __device__ void StoreInnerProducts(const Chunk& chunk, int64_t first_column,
                                     float (&products)[RegisterTile::kLaneRows]) const {
    // Other lanes have columns of factors, or repeat those of a lane.
    if (threadIdx.x % 16 * 8 >= InnerProductColumns(first_column)) {
#pragma unroll
      for (float& product : products) product = 0.0f;
    }
    const int row = RegisterTile::RowOfStep(ReduceSteps<16>(products, [](float a, float b) { return a + b; }));
    if (threadIdx.x % 2 == 0 && row < chunk.rows) {
      *InnerProduct(chunk.first_row + int64_t{row}, first_column) = products[0];
    }
  }

  __device__ float* InnerProduct(int64_t row, int64_t first_column) const {
    return inner_products + row * CeilDiv(GradientFeatures(), kTileColumns) + first_column / kTileColumns;
  }

  // Calls `visit` with the ActivatedColumns of the problem, or of the last 8 columns if the given ones do not exist.
  template <typename Visit>
  __device__ void WithColumns(const Chunk& chunk, int64_t column, Visit visit) const {
    column = min(column, features - 8);
    if (IsGated(activation)) {
      WithActivation<true>(activation, [&](auto constant) {
        constexpr Activation kActivation = decltype(constant)::value;
        if (!backward) {
          visit(ActivatedColumns<T, Form::kGated, kActivation>(*this, chunk, column));
        } else if (column < GradientFeatures()) {
          visit(ActivatedColumns<T, Form::kGradientOfGate, kActivation>(*this, chunk, column));
        } else {
          visit(ActivatedColumns<T, Form::kGradientOfFactor, kActivation>(*this, chunk, column));
        }
      });
    } else {
      WithActivation<false>(activation, [&](auto constant) {
        constexpr Activation kActivation = decltype(constant)::value;
        if (backward) {
          visit(ActivatedColumns<T, Form::kGradient, kActivation>(*this, chunk, column));
        } else {
          visit(ActivatedColumns<T, Form::kActivated, kActivation>(*this, chunk, column));
        }
      });
    }
  }
};

template <typename T>
ActivatedSource<T> MakeActivatedSource(const QuantizeProblem& problem, const QuantizeBuffers& buffers) {
  ActivatedSource<T> source;
  source.x = buffers.x;
  source.activation_input = buffers.activation_input;
  source.row_weights = buffers.row_weights;
  source.inner_products = buffers.inner_products;
  source.activation = problem.activation;
  source.backward = problem.backward;
  source.features = problem.features;
  return source;
}

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_QUANTIZE_ACTIVATION_CUH_
