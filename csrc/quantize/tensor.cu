#include "csrc/quantize/tiles.cuh"

namespace jax_grouped {

JAX_GROUPED_QUANTIZE_MODE(, ScalingMode::kTensor);

}  // namespace jax_grouped
