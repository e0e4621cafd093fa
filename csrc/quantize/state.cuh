// State that the warps of a block share about the pass and the tile that they quantize.

#ifndef JAX_GROUPED_CSRC_QUANTIZE_STATE_CUH_
#define JAX_GROUPED_CSRC_QUANTIZE_STATE_CUH_

#include <cstdint>

#include "csrc/quantize/pass.cuh"

namespace jax_grouped {

// Shared memory in which the warps exchange values about their slots.
struct WarpExchange {
  Pass pass;
  Scale scales[kSlots];
  uint32_t amax[kSlots];  // bits
};

template <ScalingMode kScalingMode, typename Fp8Type, typename T>
struct TileState {
  static constexpr ScalingMode kMode = kScalingMode;
  using Fp8 = Fp8Type;
  using Element = T;
  // True if all rows of a slot have one scale in a tile.
  static constexpr bool kSlotScales = kMode == ScalingMode::kTensor || kMode == ScalingMode::kBlock2D;

  const QuantizeArguments& args;
  const InputTile<Element>& tile;
  WarpExchange& exchange;
  uint32_t first_column;
  int count;  // chunks in the pass

  // Returns the scale of the slot's group, or of its 128 x 128 block.
  __device__ Scale SlotScale(int slot) const {
    if constexpr (kMode == ScalingMode::kTensor) return exchange.scales[slot];
    uint32_t amax = 0;
    for (int i = exchange.pass.FirstOfBlock(slot); i <= exchange.pass.LastOfBlock(slot); ++i) {
      amax = max(amax, exchange.amax[i]);
    }
    return ScaleFromAmax<Fp8>(amax, args.amax_epsilon, args.pow2_scales);
  }
};

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_QUANTIZE_STATE_CUH_
