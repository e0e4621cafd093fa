// Launching the kernels of tile_products.cuh.

#ifndef JAX_GROUPED_CSRC_GEMM_SM90_LAUNCH_CUH_
#define JAX_GROUPED_CSRC_GEMM_SM90_LAUNCH_CUH_

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <library_types.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "csrc/common/device.h"
#include "csrc/common/fp8.cuh"
#include "csrc/common/launch.cuh"
#include "csrc/common/shared_memory.h"
#include "csrc/common/status.h"
#include "csrc/gemm/sm90/operand.h"
#include "csrc/gemm/sm90/tensor_map.h"
#include "csrc/gemm/sm90/tile_products.cuh"

namespace jax_grouped {
namespace sm90 {

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

// Calls launch(row type, column type, scaling mode) with those of a product, as types.
template <typename Launch>
Status WithTypes(const Fp8Operand& rows, const Fp8Operand& columns, ScalingMode mode, const Launch& launch) {
  const auto with_mode = [&](auto row_type, auto column_type) {
    if (mode == ScalingMode::kBlock1D) {
      return launch(row_type, column_type, std::integral_constant<ScalingMode, ScalingMode::kBlock1D>());
    }
    return launch(row_type, column_type, std::integral_constant<ScalingMode, ScalingMode::kTensor>());
  };
  if (rows.type == CUDA_R_8F_E5M2) return with_mode(E5m2(), E4m3());
  if (columns.type == CUDA_R_8F_E5M2) return with_mode(E4m3(), E5m2());
  return with_mode(E4m3(), E4m3());
}

// Launches a kernel on all processors, or on fewer if clusters have no turns. It starts early, and waits for its setup
// in RunBlock.
template <typename Args>
Status LaunchClusters(void (*kernel)(Args), cudaStream_t stream, int device, const Args& args) {
  DeviceProperties properties;
  JAX_GROUPED_RETURN_IF_FAILED(GetDeviceProperties(device, &properties));
  JAX_GROUPED_RETURN_IF_FAILED(AllowSharedMemory(reinterpret_cast<const void*>(kernel), sizeof(Shared)));
  const int clusters = std::min(args.turns, properties.processors / kCluster);
  const Grid grid{dim3(clusters * kCluster), kThreads, sizeof(Shared)};
  return LaunchEarly("Launching a grouped product", stream, grid, kernel, args);
}

}  // namespace sm90
}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_GEMM_SM90_LAUNCH_CUH_
