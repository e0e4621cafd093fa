#include "csrc/quantize/tiles.cuh"

namespace jax_grouped {

JAX_GROUPED_QUANTIZE_MODE(, ScalingMode::kBlock2D);

}  // namespace jax_grouped
