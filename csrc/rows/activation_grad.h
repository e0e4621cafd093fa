// The gradient of an activation without quantization, with what else a backward pass needs of the same numbers.

#ifndef JAX_GROUPED_CSRC_ROWS_ACTIVATION_GRAD_H_
#define JAX_GROUPED_CSRC_ROWS_ACTIVATION_GRAD_H_

#include <cuda_runtime_api.h>
#include <library_types.h>

#include <cstdint>

#include "csrc/common/activation.h"
#include "csrc/common/status.h"

namespace jax_grouped {

// Device memory. Arrays without a type here are of 16-bit numbers, bfloat16 or float16. Rows are of whole vectors. `a`
// is the activation of the input.
struct ActivationGradBuffers {
  const void* input;      // [rows, features]; [rows, 2 features] for a gated activation, the gate's first
  const void* da;         // [rows, features]: the gradient of the weighted `a` without its weight
  const float* weights;   // [num_weights]
  const int32_t* order;   // [rows]: the index of each row's weight, none of [0, num_weights) for a row that is not
                          // computed and may hold anything in all results; null for the row's own index
  void* dinput;           // as input: its gradient, from that of `a`, weight * da
  void* weighted;         // [rows, features]: weight * a
  float* inner_products;  // [rows]: the sum over the features of a * da, which is the gradient of the weight
};

// Reads both inputs once. Everything is computed in float32 and rounded once, and sums have a fixed order.
Status LaunchActivationGrad(cudaStream_t stream, const ActivationGradBuffers& buffers, const Activation& activation,
                            cudaDataType_t type, int64_t num_weights, int64_t rows, int64_t features);

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_ROWS_ACTIVATION_GRAD_H_
