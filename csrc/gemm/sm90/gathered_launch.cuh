// Host launches of the kernels that use gathered_tiles.cuh.

#ifndef JAX_GROUPED_CSRC_GEMM_SM90_GATHERED_LAUNCH_CUH_
#define JAX_GROUPED_CSRC_GEMM_SM90_GATHERED_LAUNCH_CUH_

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>
#include <library_types.h>

#include <array>
#include <cstdint>

#include "csrc/common/status.h"
#include "csrc/gemm/problem.h"
#include "csrc/gemm/sm90/gathered_tiles.cuh"
#include "csrc/gemm/sm90/launch.cuh"
#include "csrc/gemm/sm90/tensor_map.h"
#include "csrc/groups/layout.h"

namespace jax_grouped {
namespace sm90 {

static_assert(kMostGatheredGroups * (sizeof(CUtensorMap) + (GroupTable::Size(1) + 1) * sizeof(int32_t)) +
                      sizeof(int32_t) <=
                  kWorkspaceBytes,
              "GroupRowsWorkspace::MaxBytes() fits the workspace");

// Returns boxes of 64 16-bit numbers by `box_rows` rows of a stack of matrices. `sizes` are those of the stack, the row
// length first.
inline BoxedTensor Boxes16(cudaDataType_t type, const void* data, const std::array<int64_t, 3>& sizes,
                           int64_t box_rows) {
  BoxedTensor boxes{};
  boxes.base = data;
  boxes.type = ResultMapType(type);
  for (const int64_t size : sizes) boxes.sizes.push_back(static_cast<cuuint64_t>(size));
  const auto row_bytes = static_cast<cuuint64_t>(2 * sizes[0]);
  boxes.strides = {row_bytes, row_bytes * static_cast<cuuint64_t>(sizes[1])};
  boxes.box = {GatheredTile::kDepth, static_cast<cuuint32_t>(box_rows), 1};
  return boxes;
}

// Returns the gathered rows of `data`, an operand whose rows have `columns` numbers.
inline GatheredRows Gathered(const GemmProblem& problem, const GemmBuffers& buffers, const void* data,
                             int64_t columns) {
  GatheredRows rows{};
  rows.base = static_cast<const char*>(data);
  rows.row_bytes = 2 * columns;
  rows.rows = static_cast<int32_t>(problem.gathered_from);
  rows.columns = static_cast<int32_t>(columns);
  rows.indices = buffers.row_indices;
  return rows;
}

// Calls launch(number) with a number of a 16-bit type.
template <typename Launch>
Status WithGatheredTypes(cudaDataType_t type, const Launch& launch) {
  return type == CUDA_R_16BF ? launch(__nv_bfloat16()) : launch(__half());
}

template <typename Arguments>
Status LaunchClusters(const char* what, cudaStream_t stream, int device, int32_t cluster_tiles,
                      void (*kernel)(Arguments), const Arguments& args) {
  ClusterLaunch launch;
  JAX_GROUPED_RETURN_IF_FAILED(
      launch.Configure(reinterpret_cast<const void*>(kernel), sizeof(GatheredShared), stream, device, cluster_tiles));
  return Status::FromCuda(cudaLaunchKernelEx(launch.config(), kernel, args), what);
}

}  // namespace sm90
}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_GEMM_SM90_GATHERED_LAUNCH_CUH_
