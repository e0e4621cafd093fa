#include "csrc/gemm/sm90/tensor_map.h"

#include <cuda_runtime_api.h>

#include <atomic>

namespace jax_grouped::sm90 {

Status EncodeTensorMap(const BoxedTensor& tensor, CUtensorMap* map) {
  // The driver's function is found through the runtime, once, but again after a failure. Linking the driver would make
  // the module fail to load on a machine without one.
  static std::atomic<void*> known{nullptr};
  void* function = known.load();
  if (function == nullptr) {
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    constexpr unsigned int kFirstVersion = 12000;
    JAX_GROUPED_RETURN_IF_FAILED(Status::FromCuda(
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, kFirstVersion, cudaEnableDefault, &found),
        "Looking for cuTensorMapEncodeTiled"));
    if (found != cudaDriverEntryPointSuccess) {
      return Status::Failed("The GPU driver has no tensor maps; CUDA 13 needs driver 580 or newer.");
    }
    known.store(function);
  }
  const auto encode = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  const std::vector<cuuint32_t> steps(tensor.sizes.size(), 1);
  const CUresult result =
      encode(map, tensor.type, static_cast<cuuint32_t>(tensor.sizes.size()), const_cast<void*>(tensor.base),
             tensor.sizes.data(), tensor.strides.data(), tensor.box.data(), steps.data(), CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  // The runtime's error codes have the numbers of the driver's, and texts.
  return Status::FromCuda(static_cast<cudaError_t>(result), "Describing an array to the copy engine");
}

}  // namespace jax_grouped::sm90
