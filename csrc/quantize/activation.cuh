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

// 8 numbers as loaded. Converting them only at their use takes half the registers.
template <typename T>
struct Eight {
  static constexpr int kVectors = InputTile<T>::kVectorsPer8;
  alignas(16) PairOf<T> pairs[4];

  __device__ float operator[](int i) const { return i % 2 == 0 ? pairs[i / 2].First() : pairs[i / 2].Second(); }
};

// The numbers of a row from which 8 columns of the result follow.
template <typename T>
struct RowInputs {
  Eight<T> inputs;     // of the activation; the gate, if there is one
  Eight<T> factors;    // what the gate's activation is multiplied by
  Eight<T> gradients;  // of the result, for a backward form
  float weight;
};

// Computes 8 columns of the result.
template <typename T, Form kForm, Activation kActivation>
struct Computation {
  static constexpr bool kHasInnerProducts = kForm == Form::kGradient || kForm == Form::kGradientOfGate;

  // With kProducts, adds the inner product of the activation's result with its gradient to `product`.
  template <bool kProducts>
  __device__ static void Compute(const RowInputs<T>& row, PairOf<float> (&results)[4], float* product) {
    const auto value = [&](int i) {
      const float input = row.inputs[i];
      const float factor = row.factors[i];
      const float gradient = row.gradients[i];
      if (kProducts) *product += Activate<kActivation>(input) * Factor<kActivation>(factor) * gradient;
      if constexpr (kForm == Form::kGradientOfFactor) {
        return FactorGradient<kActivation>(factor, gradient * row.weight * Activate<kActivation>(input));
      }
      if constexpr (kForm == Form::kGradientOfGate) {
        return ActivationGradient<kActivation>(input, gradient * row.weight * Factor<kActivation>(factor));
      }
      if constexpr (kForm == Form::kGradient) return ActivationGradient<kActivation>(input, gradient * row.weight);
      if constexpr (kForm == Form::kGated) {
        return Activate<kActivation>(input) * Factor<kActivation>(factor) * row.weight;
      }
      return Activate<kActivation>(input) * row.weight;
    };
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float low = value(2 * i);
      const float high = value(2 * i + 1);
      results[i].values = {low, high};
    }
  }
};

// An activation of the input, or its backward form, in float32.
template <typename T>
struct ActivatedSource : ActivationArrays {
  using Tile = RegisterTile;
  static constexpr int kRowsAtOnce = 2;

  // Fills the rows of the warp's slot, 128 columns from `first_column` on. Rows and columns that do not exist become
  // zero, as activations of zeros and their gradients are. Whole warps must call it.
  __device__ void LoadSlot(RegisterTile& tile, int slot, const Chunk& chunk, int64_t first_column) const {
    const int64_t column = first_column + threadIdx.x % 16 * 8;
    const Columns columns(*this, chunk, column);
    float products[RegisterTile::kLaneRows] = {};
    if (row_weights != nullptr) StageWeights(tile, slot, chunk);
#pragma unroll
    for (int first = 0; first < RegisterTile::kLaneRows; first += kStagedRows) {
      StageRows(tile, columns, column < features ? chunk.rows - RegisterTile::FirstRow() - first : 0, first);
      WaitForCopies();
      __syncwarp();
      WithComputation(column, [&](auto computation) {
        using Of = decltype(computation);
        if (Of::kHasInnerProducts && inner_products != nullptr) {
          Fill<Of, Of::kHasInnerProducts>(tile, slot, first, products);
        } else {
          Fill<Of, false>(tile, slot, first, products);
        }
      });
    }
    if (InnerProductColumns(first_column) > 0) StoreInnerProducts(chunk, first_column, products);
  }

  __device__ bool HasInnerProducts() const { return inner_products != nullptr; }
  // Writes 0 as a row's inner product in the tile that starts at a column.
  __device__ void ZeroInnerProduct(int64_t row, int64_t first_column) const {
    if (InnerProductColumns(first_column) > 0) *InnerProduct(row, first_column) = 0.0f;
  }

  // Loads 8 columns of successive rows of a chunk, starting at row `first`. Elements that do not exist stay unchanged.
  template <int kCount>
  __device__ void LoadRows(const Chunk& chunk, int first, int64_t column, PairOf<float> (&rows)[kCount][4]) const {
    if (column >= features) return;
    const Columns columns(*this, chunk, column);
    WithComputation(column, [&](auto computation) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const int row = first + i;
        if (row >= chunk.rows) continue;
        RowInputs<T> loaded{};
#pragma unroll
        for (int vector = 0; vector < Eight<T>::kVectors; ++vector) {
          const auto load = [&](Eight<T>& to, const T* from, int64_t stride) {
            if (from == nullptr) return;
            reinterpret_cast<uint4*>(to.pairs)[vector] =
                __ldg(reinterpret_cast<const uint4*>(from + row * stride) + vector);
          };
          load(loaded.inputs, columns.inputs, columns.stride);
          load(loaded.factors, columns.factors, columns.stride);
          load(loaded.gradients, columns.gradients, columns.gradient_stride);
        }
        loaded.weight = row_weights == nullptr ? 1.0f : __ldg(row_weights + chunk.first_row + row);
        decltype(computation)::template Compute<false>(loaded, rows[i], nullptr);
      }
    });
  }

 private:
  // Rows that a lane stages at once.
  static constexpr int kStagedRows = RegisterTile::kStagedVectors / Eight<T>::kVectors;

  // The 8 columns of each array from which 8 columns of the result follow, in the first row of a chunk. Those that the
  // result does not need are null.
  struct Columns {
    const T* inputs;
    const T* factors = nullptr;
    const T* gradients = nullptr;
    int64_t stride;  // of inputs and factors
    int64_t gradient_stride;

    __device__ Columns(const ActivatedSource& source, const Chunk& chunk, int64_t column) {
      const bool gated = IsGated(source.activation);
      const int64_t half = source.features / 2;
      const bool of_factor = gated && source.backward && column >= half;
      const int64_t first_row = chunk.first_row;
      stride = gated && !source.backward ? 2 * source.features : source.features;
      gradient_stride = gated ? half : source.features;
      if (of_factor) column -= half;
      inputs =
          static_cast<const T*>(source.backward ? source.activation_input : source.x) + first_row * stride + column;
      // The gradient of a factor depends on the factor only if that was clamped.
      if (gated && (!of_factor || source.activation == Activation::kClampedSiluMul)) factors = inputs + stride / 2;
      if (source.backward) gradients = static_cast<const T*>(source.x) + first_row * gradient_stride + column;
    }
  };

  // Starts to copy the lane's next rows, of which `rows` exist.
  __device__ void StageRows(const RegisterTile& tile, const Columns& columns, int rows, int first) const {
    const auto stage = [&](int array, const T* from, int64_t stride) {
      if (from == nullptr) return;
      from += (RegisterTile::FirstRow() + first) * stride;
      uint4* to = &tile.exchange->staged[array][0][threadIdx.x];
#pragma unroll
      for (int row = 0; row < kStagedRows; ++row) {
#pragma unroll
        for (int vector = 0; vector < Eight<T>::kVectors; ++vector) {
          CopyAsync(to, from + vector * (16 / sizeof(T)), row < rows);
          to += 32 * kSlots;
        }
        from += stride;
      }
    };
    stage(0, columns.inputs, columns.stride);
    stage(1, columns.factors, columns.stride);
    stage(2, columns.gradients, columns.gradient_stride);
  }

  // Starts to copy the weights of the slot's rows.
  __device__ void StageWeights(const RegisterTile& tile, int slot, const Chunk& chunk) const {
    const int row = threadIdx.x % 32;
    if (row >= kFp8Alignment) return;
    CopyFloatAsync(&tile.exchange->weights[slot][row], row_weights + chunk.first_row + row, row < chunk.rows);
  }

  // Computes the lane's staged rows, from `first` on.
  template <typename Computation, bool kProducts>
  __device__ void Fill(RegisterTile& tile, int slot, int first, float (&products)[RegisterTile::kLaneRows]) const {
#pragma unroll
    for (int i = 0; i < kStagedRows; ++i) {
      RowInputs<T> row;
      const auto load = [&](Eight<T>& to, int array) {
#pragma unroll
        for (int vector = 0; vector < Eight<T>::kVectors; ++vector) {
          reinterpret_cast<uint4*>(to.pairs)[vector] =
              tile.exchange->staged[array][i * Eight<T>::kVectors + vector][threadIdx.x];
        }
      };
      load(row.inputs, 0);
      load(row.factors, 1);
      load(row.gradients, 2);
      const int row_of_slot = RegisterTile::FirstRow() + first + i;
      row.weight = row_weights == nullptr ? 1.0f : tile.exchange->weights[slot][row_of_slot];
      Computation::template Compute<kProducts>(row, tile.rows[first + i], &products[first + i]);
    }
  }

  // Returns the features of a backward form's x.
  __device__ int64_t GradientFeatures() const { return IsGated(activation) ? features / 2 : features; }

  // Returns the number of a tile's columns that have inner products: those of the gate, if there is one.
  __device__ int InnerProductColumns(int64_t first_column) const {
    if (inner_products == nullptr) return 0;
    return static_cast<int>(max(min(GradientFeatures() - first_column, int64_t{kTileColumns}), int64_t{0}));
  }

  // Adds up the inner products of the lanes of a row, and writes the sums. Those of lanes without columns of a gate are
  // zero.
  __device__ void StoreInnerProducts(const Chunk& chunk, int64_t first_column,
                                     float (&products)[RegisterTile::kLaneRows]) const {
    const int row = RegisterTile::RowOfStep(ReduceSteps<16>(products, [](float a, float b) { return a + b; }));
    if (threadIdx.x % 2 == 0 && row < chunk.rows) {
      *InnerProduct(chunk.first_row + int64_t{row}, first_column) = products[0];
    }
  }

  __device__ float* InnerProduct(int64_t row, int64_t first_column) const {
    return inner_products + row * CeilDiv(GradientFeatures(), kTileColumns) + first_column / kTileColumns;
  }

  // Calls `visit` with the Computation of the problem in the columns from `column` on.
  template <typename Visit>
  __device__ void WithComputation(int64_t column, const Visit& visit) const {
    if (IsGated(activation)) {
      WithActivation<true>(activation, [&](auto constant) {
        constexpr Activation kActivation = decltype(constant)::value;
        if (!backward) {
          visit(Computation<T, Form::kGated, kActivation>());
        } else if (column < GradientFeatures()) {
          visit(Computation<T, Form::kGradientOfGate, kActivation>());
        } else {
          visit(Computation<T, Form::kGradientOfFactor, kActivation>());
        }
      });
    } else {
      WithActivation<false>(activation, [&](auto constant) {
        constexpr Activation kActivation = decltype(constant)::value;
        if (backward) {
          visit(Computation<T, Form::kGradient, kActivation>());
        } else {
          visit(Computation<T, Form::kActivated, kActivation>());
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
