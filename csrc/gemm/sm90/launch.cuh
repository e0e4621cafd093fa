// Host launches of the kernels in tile_products.cuh.

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
#include "csrc/gemm/problem.h"
#include "csrc/gemm/sm90/tensor_map.h"
#include "csrc/gemm/sm90/tile_products.cuh"

namespace jax_grouped {
namespace sm90 {

// Returns the tensor map's name for the type of a result.
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

// Returns boxes of the result of a product of tokens: of 128 bytes by the rows of a fragment.
inline BoxedTensor ResultBoxes(const GemmProblem& problem, const void* d, int64_t rows) {
  const auto number_bytes = static_cast<cuuint32_t>(ResultBytes(problem.result_type));
  const auto features = static_cast<cuuint64_t>(ResultFeatures(problem));
  BoxedTensor boxes{};
  boxes.base = d;
  boxes.type = ResultMapType(problem.result_type);
  boxes.sizes = {features, static_cast<cuuint64_t>(rows)};
  boxes.strides = {features * number_bytes};
  boxes.box = {kBoxRowBytes / number_bytes, Fragment::kRows};
  return boxes;
}

// Returns boxes of a weight gradient, of 128 bytes by `box_rows` rows.
inline BoxedTensor WgradBoxes(const GemmProblem& problem, const void* d, int32_t groups, int box_rows) {
  const auto number_bytes = static_cast<cuuint32_t>(ResultBytes(problem.result_type));
  const auto in_features = static_cast<cuuint64_t>(problem.in_features);
  const auto out_features = static_cast<cuuint64_t>(problem.out_features);
  const cuuint64_t row_bytes = out_features * number_bytes;
  BoxedTensor boxes{};
  boxes.base = d;
  boxes.type = ResultMapType(problem.result_type);
  boxes.sizes = {out_features, in_features, static_cast<cuuint64_t>(groups)};
  boxes.strides = {row_bytes, row_bytes * in_features};
  boxes.box = {kBoxRowBytes / number_bytes, static_cast<cuuint32_t>(box_rows), 1};
  return boxes;
}

// Returns boxes of kDepth numbers by `box_rows` rows of FP8 numbers.
inline BoxedTensor Fp8Boxes(const void* data, int64_t row_length, int64_t rows, uint32_t box_rows) {
  BoxedTensor boxes{};
  boxes.base = data;
  boxes.type = CU_TENSOR_MAP_DATA_TYPE_UINT8;
  boxes.sizes = {static_cast<cuuint64_t>(row_length), static_cast<cuuint64_t>(rows)};
  boxes.strides = {static_cast<cuuint64_t>(row_length)};
  boxes.box = {kDepth, box_rows};
  return boxes;
}

// Calls launch(type of a, type of b, scaling mode of a) with a problem's values, passed as types.
template <typename Launch>
Status WithTypes(const GemmProblem& problem, const Launch& launch) {
  const auto with_mode = [&](auto a, auto b) {
    if (problem.a_mode == ScalingMode::kBlock1D) {
      return launch(a, b, std::integral_constant<ScalingMode, ScalingMode::kBlock1D>());
    }
    return launch(a, b, std::integral_constant<ScalingMode, ScalingMode::kTensor>());
  };
  if (problem.a_type == CUDA_R_8F_E5M2) return with_mode(E5m2(), E4m3());
  if (problem.b_type == CUDA_R_8F_E5M2) return with_mode(E4m3(), E5m2());
  return with_mode(E4m3(), E4m3());
}

// A launch on all SMs, or on fewer if there are fewer tiles than clusters. The kernel starts early and waits for its
// setup in SetUpBlock.
class ClusterLaunch {
 public:
  // `shared_bytes` is the kernel's dynamic shared memory, and `tiles` the number of cluster tiles.
  Status Configure(const void* kernel, int shared_bytes, cudaStream_t stream, int device, int32_t tiles) {
    DeviceProperties properties;
    JAX_GROUPED_RETURN_IF_FAILED(GetDeviceProperties(device, &properties));
    JAX_GROUPED_RETURN_IF_FAILED(AllowSharedMemory(kernel, shared_bytes));
    config_.gridDim = dim3(std::min(tiles, properties.processors / kCluster) * kCluster);
    config_.blockDim = dim3(kThreads);
    config_.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
    config_.stream = stream;
    attribute_ = EarlyLaunch();
    config_.attrs = &attribute_;
    config_.numAttrs = 1;
    return Status::Ok();
  }

  const cudaLaunchConfig_t* config() const { return &config_; }

 private:
  cudaLaunchConfig_t config_{};
  cudaLaunchAttribute attribute_{};
};

}  // namespace sm90
}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_GEMM_SM90_LAUNCH_CUH_
