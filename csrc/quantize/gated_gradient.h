// The backward pass of a gated activation, quantized: the gradient of the activation's input in both orientations, and
// the columns of the activation's result.

#ifndef JAX_GROUPED_CSRC_QUANTIZE_GATED_GRADIENT_H_
#define JAX_GROUPED_CSRC_QUANTIZE_GATED_GRADIENT_H_

#include <cuda_runtime_api.h>

#include "csrc/common/status.h"
#include "csrc/quantize/quantize.h"

namespace jax_grouped {

// Tells whether LaunchGatedGradient takes a quantization with `activated_data`: a gated backward form with kBlock1D or
// given scales, 16-bit inputs, a multiple of 128 gates and both orientations, without dbias or skip.
bool IsGatedGradient(const Quantization& args);

// Launches the kernel. The setup must have been launched before.
Status LaunchGatedGradient(cudaStream_t stream, const Quantization& quantization);

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_QUANTIZE_GATED_GRADIENT_H_
