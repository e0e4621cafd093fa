// An operand of the FP8 products.

#ifndef JAX_GROUPED_CSRC_GEMM_SM90_OPERAND_H_
#define JAX_GROUPED_CSRC_GEMM_SM90_OPERAND_H_

#include <library_types.h>

namespace jax_grouped {
namespace sm90 {

struct Fp8Operand {
  const void* data;
  const float* scale;   // what to multiply the data by
  cudaDataType_t type;  // CUDA_R_8F_E4M3 or CUDA_R_8F_E5M2, not the latter for both operands
};

}  // namespace sm90
}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_GEMM_SM90_OPERAND_H_
