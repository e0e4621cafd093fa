// Quantization along the rows of a tile. Each warp has one slot.

#ifndef JAX_GROUPED_CSRC_QUANTIZE_ROWS_CUH_
#define JAX_GROUPED_CSRC_QUANTIZE_ROWS_CUH_

#include <cstdint>

#include "csrc/common/warp.cuh"
#include "csrc/quantize/state.cuh"

namespace jax_grouped {

template <typename State>
class RowQuantizer {
  static constexpr ScalingMode kMode = State::kMode;
  using Fp8 = typename State::Fp8;
  using Pair = PairOf<typename State::Element>;

  // Steps per slot. 16 lanes hold 8 columns each of a row, so a warp processes two rows per step and a slot in 8 steps.
  static constexpr int kSteps = kFp8Alignment / 2;
  static constexpr int kRowLanes = 16;
  // Lanes of a row that share a scale.
  static constexpr int kScaleLanes = kMode == ScalingMode::kMx ? kMxBlock / 8 : kRowLanes;

 public:
  __device__ explicit RowQuantizer(const State& state) : state_(state) {}

  // Finds the slot's largest finite absolute value and stores it in the exchange. Must precede Quantize.
  __device__ void FindAmax() {
    uint32_t largest = 0;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      alignas(16) Pair row[4];
      state_.tile.Load8(Warp(), RowOfStep(step), Lane() % kRowLanes, row);
      const uint2 bits = PairwiseAmax(row);
      amax_[step] = max(bits.x, bits.y);
      largest = max(largest, amax_[step]);
    }
    largest = __reduce_max_sync(kFullWarp, largest);
    finite_ = largest < kInfinityBits;
    if (!finite_) {
      largest = 0;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        __syncwarp();  // One step at a time needs fewer registers.
        alignas(16) Pair row[4];
        state_.tile.Load8(Warp(), RowOfStep(step), Lane() % kRowLanes, row);
        const uint2 bits = PairwiseFiniteAmax(row);
        amax_[step] = max(bits.x, bits.y);
        largest = max(largest, amax_[step]);
      }
      largest = __reduce_max_sync(kFullWarp, largest);
    }
    if (Lane() == 0) state_.exchange.amax[Warp()] = largest;
  }

  __device__ void Quantize() {
    float scales[kSteps];
    if constexpr (State::kSlotScales) {
      const float scale = state_.SlotScale(Warp()).scale;
#pragma unroll
      for (float& step_scale : scales) step_scale = scale;
    } else {
      FindScales(scales);
    }
    if (RowColumn() >= state_.args.layout.features) return;
    if (finite_) {
      Write<false>(scales);
    } else {
      Write<true>(scales);
    }
  }

 private:
  __device__ static int RowOfStep(int step) { return step * 2 + Lane() / kRowLanes; }
  __device__ uint32_t RowColumn() const { return state_.first_column + Lane() % kRowLanes * 8; }
  __device__ const Chunk& SlotChunk() const { return state_.exchange.pass.chunks[Warp()]; }

  template <bool kHideInfinity>
  __device__ void Write(const float (&scales)[kSteps]) const {
    const Chunk& chunk = SlotChunk();
    const int64_t first_row = chunk.first_row + static_cast<int64_t>(RowOfStep(0));
    uint8_t* out = state_.args.row_data + first_row * state_.args.layout.features + RowColumn();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      alignas(16) Pair row[4];
      state_.tile.Load8(Warp(), RowOfStep(step), Lane() % kRowLanes, row);
      const uint2 data = Quantize8<kHideInfinity>(row, scales[step]);
      if (RowOfStep(step) < chunk.rows) *reinterpret_cast<uint2*>(out) = data;
      out += 2 * state_.args.layout.features;
    }
  }

  template <bool kHideInfinity>
  __device__ static uint2 Quantize8(const Pair (&pairs)[4], float scale) {
    const auto quantize = [scale](const Pair& pair) {
      if constexpr (kHideInfinity) {
        return Quantize2<Fp8>(HideInfinity(pair.First()), HideInfinity(pair.Second()), scale);
      }
      return Quantize2<Fp8>(pair.First(), pair.Second(), scale);
    };
    return {quantize(pairs[0]) | quantize(pairs[1]) << 16, quantize(pairs[2]) | quantize(pairs[3]) << 16};
  }

  // Computes the scales of the blocks that contain the lane's parts of rows, from their amaxes. Writes the inverses.
  //
  // Lanes that share scales divide the rows between them: each gets the complete amaxes of one step or a few, computes
  // their scales once, and passes them to the others.
  __device__ void FindScales(float (&scales)[kSteps]) {
    constexpr int kOwned = kScaleLanes < kSteps ? kSteps / kScaleLanes : 1;
    const auto larger = [](uint32_t a, uint32_t b) { return max(a, b); };
    const int first_step = ReduceSteps<kScaleLanes>(amax_, larger);
    float owned[kOwned];
#pragma unroll
    for (int i = 0; i < kOwned; ++i) owned[i] = WriteScale(RowOfStep(first_step + i), amax_[i]);
    // The exchange is inverted here: each step's scale comes from the lane that holds the step.
    constexpr int kLanesPerStep = kScaleLanes * kOwned / kSteps;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int source = Lane() / kScaleLanes * kScaleLanes + step / kOwned * kLanesPerStep;
      scales[step] = __shfl_sync(kFullWarp, owned[step % kOwned], source);
    }
  }

  // Returns the scale of a row's block from its amax. Writes the inverse. Inverses are written for rows in groups of 4,
  // or of 16 with kMx; they are zero for rows that do not exist.
  __device__ float WriteScale(int row, uint32_t amax) const {
    const Chunk& chunk = SlotChunk();
    const bool exists = row < chunk.rows;
    const auto block = static_cast<int32_t>(state_.first_column / (kScaleLanes * 8)) + Lane() % kRowLanes / kScaleLanes;
    if constexpr (kMode == ScalingMode::kMx) {
      const uint32_t exponent = MxExponent<Fp8>(amax, state_.args.amax_epsilon);
      // If any columns of a block exist, its first columns do.
      if (state_.first_column + Lane() % kRowLanes / kScaleLanes * kMxBlock < state_.args.layout.features) {
        static_cast<uint8_t*>(state_.args.row_scale)[RowScalePosition<kMode>(state_.args.layout, chunk, row, block)] =
            exists ? exponent : 0;
      }
      return MxScale(exponent);
    } else {
      const Scale scale = ScaleFromAmax<Fp8>(amax, state_.args.amax_epsilon, state_.args.pow2_scales);
      if (Lane() % 2 == 0 && row < RoundUp(chunk.rows, 4)) {
        static_cast<float*>(state_.args.row_scale)[RowScalePosition<kMode>(state_.args.layout, chunk, row, block)] =
            exists ? scale.inverse : 0.0f;
      }
      return scale.scale;
    }
  }

  const State& state_;
  uint32_t amax_[kSteps];
  bool finite_ = true;
};

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_QUANTIZE_ROWS_CUH_
