#include "csrc/gemm/sm90/small_group_product.h"

#include <algorithm>

#include "csrc/common/device.h"
#include "csrc/common/launch.cuh"
#include "csrc/common/shared_memory.h"
#include "csrc/gemm/sm90/group_rows.cuh"
#include "csrc/gemm/sm90/launch.cuh"
#include "csrc/gemm/sm90/small_group_product_kernel.cuh"
#include "csrc/groups/table.cuh"

namespace jax_grouped {
namespace sm90 {

Status LaunchSmallGroupProduct(cudaStream_t stream, int device, const GemmProblem& problem, const Groups& groups,
                               const GemmBuffers& buffers) {
  const GroupRowsWorkspace workspace(buffers.workspace, groups.batch, groups.num_groups);
  SmallGroupArguments args{};
  using RowBlocks = Counts<RowBlock::k4, SmallGroupTile::kRowBlock>;
  JAX_GROUPED_RETURN_IF_FAILED(LaunchGroupRows<RowBlocks>(
      "Launching the setup of a grouped product", stream, groups, ResultBoxes(problem, buffers.d, groups.AllRows()),
      LayoutOfA(problem, groups).ElementRowBlocks(), buffers.zero_other_rows, false, workspace, nullptr));
  args.result = buffers.d;
  args.result_type = problem.result_type;
  JAX_GROUPED_RETURN_IF_FAILED(
      DescribeOperands<SmallGroupTile>(problem, groups, buffers, workspace.table, &args.operands));
  DeviceProperties properties;
  JAX_GROUPED_RETURN_IF_FAILED(GetDeviceProperties(device, &properties));
  return WithTypes(problem, [&](auto tokens, auto weights, auto mode) {
    const auto kernel = SmallGroupProduct<decltype(tokens), decltype(weights), decltype(mode)::value>;
    constexpr int kSharedBytes = sizeof(SmallGroupShared);
    JAX_GROUPED_RETURN_IF_FAILED(AllowSharedMemory(reinterpret_cast<const void*>(kernel), kSharedBytes));
    const Grid grid{std::min(args.operands.cluster_tiles, properties.processors), kSmallGroupThreads, kSharedBytes};
    return LaunchEarly("Launching a grouped product", stream, grid, kernel, args);
  });
}

}  // namespace sm90
}  // namespace jax_grouped
