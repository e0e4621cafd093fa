#include "csrc/gemm/sm90/tensor_map.h"

#include <cuda_runtime_api.h>

#include <string>

namespace jax_grouped {
namespace sm90 {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

// Finds the driver's function through the runtime. Linking the driver would make the module fail to load on a machine
// without one.
Encode FindEncode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  constexpr unsigned int kFirstVersion = 12000;
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, kFirstVersion, cudaEnableDefault, &found);
  return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(function) : nullptr;
}

}  // namespace

Status EncodeTensorMap(const BoxedTensor& tensor, CUtensorMap* map) {
  static const Encode encode = FindEncode();
  if (encode == nullptr) return Status::Failed("The GPU driver has no tensor maps; CUDA 13 needs driver 580 or newer.");
  const std::vector<cuuint32_t> steps(tensor.sizes.size(), 1);
  const CUresult result =
      encode(map, tensor.type, static_cast<cuuint32_t>(tensor.sizes.size()), const_cast<void*>(tensor.base),
             tensor.sizes.data(), tensor.strides.data(), tensor.box.data(), steps.data(), CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return Status::Ok();
  return Status::Failed("Describing an array to the copy engine failed with CUresult " +
                        std::to_string(static_cast<int>(result)) + ".");
}

}  // namespace sm90
}  // namespace jax_grouped
