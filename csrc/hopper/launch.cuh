// Launching the kernels of tile_products.cuh.

#ifndef JAX_GROUPED_CSRC_HOPPER_LAUNCH_CUH_
#define JAX_GROUPED_CSRC_HOPPER_LAUNCH_CUH_

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <library_types.h>

#include <algorithm>
#include <cstdint>

#include "csrc/common/device.h"
#include "csrc/common/fp8.cuh"
#include "csrc/common/status.h"
#include "csrc/hopper/tensor_map.h"
#include "csrc/hopper/tile_products.cuh"

namespace jax_grouped {
namespace hopper {

// How a tensor map calls numbers of a result.
inline CUtensorMapDataType ResultMapType(cudaDataType_t type) {
  switch (type) {
    case CUDA_R_32F:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    case CUDA_R_16F:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    default:
      return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  }
}

inline int64_t ResultBytes(cudaDataType_t type) { return type == CUDA_R_32F ? 4 : 2; }

// Boxes of kDepth numbers from so many rows of FP8 numbers.
inline BoxedTensor Fp8Boxes(const void* data, int64_t row_length, int64_t rows, uint32_t box_rows) {
  return {data,
          CU_TENSOR_MAP_DATA_TYPE_UINT8,
          {static_cast<cuuint64_t>(row_length), static_cast<cuuint64_t>(rows)},
          {static_cast<cuuint64_t>(row_length)},
          {kDepth, box_rows}};
}

// Calls launch(row type, column type) with the FP8 types of a product.
template <typename Launch>
Status WithFp8Types(cudaDataType_t row_type, cudaDataType_t column_type, const Launch& launch) {
  if (row_type == CUDA_R_8F_E5M2) return launch(E5m2(), E4m3());
  if (column_type == CUDA_R_8F_E5M2) return launch(E4m3(), E5m2());
  return launch(E4m3(), E4m3());
}

// Launches a kernel on all processors, or on fewer if clusters have no turns. It may start while the kernel before it,
// its setup, still runs, and waits for that in RunBlock.
template <typename Args>
Status LaunchClusters(void (*kernel)(Args), cudaStream_t stream, int device, const Args& args) {
  DeviceProperties properties;
  JAX_GROUPED_RETURN_IF_FAILED(GetDeviceProperties(device, &properties));
  JAX_GROUPED_RETURN_IF_FAILED(
      Status::FromCuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared)),
                       "Asking for shared memory"));
  const auto clusters = static_cast<uint32_t>(std::min(args.turns, properties.processors / kCluster));
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {kCluster, 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(clusters * kCluster);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = sizeof(Shared);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 2;
  return Status::FromCuda(cudaLaunchKernelEx(&config, kernel, args), "Launching a grouped product");
}

}  // namespace hopper
}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_HOPPER_LAUNCH_CUH_
