#include "csrc/gemm/cublaslt/products.h"

#include <cstdint>
#include <type_traits>

#include "csrc/common/launch.cuh"
#include "csrc/groups/layout.cuh"
#include "csrc/groups/table.cuh"

namespace jax_grouped {
namespace {

constexpr int kThreads = 512;

// Writes the arguments of group `index` of the batch. The group's part of the operand is `rows` of the tokens, or
// matrix `number`.
__device__ void WriteGroup(const Operand& operand, int matrix, int32_t index, RowRange rows, int64_t number,
                           const GemmScratch& scratch) {
  const bool is_tokens = operand.columns == 0;
  // An empty group may start one past the last row. Its pointer is never read, but must stay inside the array.
  const int64_t token = rows.end > rows.begin ? rows.begin : 0;
  const int64_t column = is_tokens ? token : number * operand.columns;
  scratch.Pointers(matrix)[index] = static_cast<char*>(operand.base) + column * operand.rows * operand.element_bytes;
  scratch.Rows(matrix)[index] = operand.rows;
  scratch.Columns(matrix)[index] = is_tokens ? static_cast<int32_t>(rows.end - rows.begin) : operand.columns;
  scratch.LeadingDimensions(matrix)[index] = operand.rows;
}

// Writes zeros, in all blocks but the first: to the workspace, for the first batch element, and with `zero_other_rows`
// to the element's rows of D of no group.
__device__ void ZeroInOtherBlocks(const Groups& groups, int32_t element, const Operand& d, bool zero_other_rows,
                                  const Region& workspace) {
  if (element == 0) ZeroBytes<kThreads>(workspace.base, 0, workspace.bytes, blockIdx.x - 1, gridDim.x - 1);
  if (zero_other_rows) ZeroOtherRows<kThreads>(groups, element, d.base, static_cast<int64_t>(d.rows) * d.element_bytes);
}

__device__ void WriteScalars(float beta, const GemmScratch& scratch) {
  if (blockIdx.y > 0 || threadIdx.x > 0) return;
  *scratch.Alpha() = 1.0f;
  *scratch.Beta() = beta;
}

// Writes the pointer and size of a group of columnwise data, whose rows are the group's tokens.
__device__ void WritePackedGroup(const Operand& operand, int matrix, const Chunk& first, const GemmScratch& scratch) {
  const ScaleLayout layout{operand.columns};
  const int64_t chunk = first.group_rows == 0 ? 0 : ColumnDataChunk(layout, first, 0);
  const auto rows = static_cast<int32_t>(RoundUp(first.group_rows, kFp8Alignment));
  const int32_t index = first.group;
  scratch.Pointers(matrix)[index] = static_cast<char*>(operand.base) + chunk * kFp8Alignment * operand.element_bytes;
  scratch.Rows(matrix)[index] = rows;
  scratch.Columns(matrix)[index] = operand.columns;
  scratch.LeadingDimensions(matrix)[index] = max(rows, kFp8Alignment);
}

template <ScalingMode kMode>
__device__ int64_t FirstScale(const OperandScales& scales, bool columnwise, const Chunk& first) {
  const ScaleLayout layout{scales.features};
  return columnwise ? ColumnScalePosition<kMode>(layout, first, 0) : RowScalePosition<kMode>(layout, first, 0, 0);
}

// Returns the index of a group's first scale. The index stays inside the array also for groups without rows.
__device__ int64_t ScalesBefore(const OperandScales& scales, bool columnwise, const Chunk& first, int64_t weight) {
  if (scales.weight_stride > 0) return weight * scales.weight_stride;
  if (scales.mode == ScalingMode::kTensor) return first.group;
  if (first.group_rows == 0) return 0;
  return scales.mode == ScalingMode::kMx ? FirstScale<ScalingMode::kMx>(scales, columnwise, first)
                                         : FirstScale<ScalingMode::kBlock1D>(scales, columnwise, first);
}

// Writes the arguments of a batch element's groups in the first block of each row of blocks. The other blocks write
// zeros. blockIdx.y is the batch element.
template <bool kScaled>
__global__ void __launch_bounds__(kThreads)
    SetUpGemm(Groups batch, const __grid_constant__ GemmSetup setup, GemmScratch scratch) {
  const auto element = static_cast<int32_t>(blockIdx.y);
  if (blockIdx.x > 0) {
    return ZeroInOtherBlocks(batch.At(element), element, setup.matrices[2], setup.zero_other_rows, setup.workspace);
  }
  WriteScalars(setup.beta, scratch);
  // Without scales, LoadChunk needs two arrays of the table: the groups' first rows, and the counts of blocks of 16
  // rows. The other counts are then not written, and nothing uses them.
  using Blocks = std::conditional_t<kScaled, AllRowBlocks, Counts<RowBlock::k16>>;
  const GroupTable table = scratch.Table().At(element);
  FillGroupTable<kThreads, Blocks>(batch, element, setup.element_row_blocks, table);
  const int64_t first_weight = static_cast<int64_t>(element / setup.elements_per_weight) * batch.num_groups;
  for (int32_t group = threadIdx.x; group < batch.num_groups; group += kThreads) {
    const Chunk first = LoadChunk(table, element, group, table.BlocksBefore(RowBlock::k16)[group]);
    const RowRange rows{first.first_row, int64_t{first.first_row} + first.group_rows};
    const int64_t weight = first_weight + group;
    for (int matrix = 0; matrix < GemmScratch::kMatrices; ++matrix) {
      const Operand& operand = setup.matrices[matrix];
      if (kScaled && operand.rows == 0) {
        WritePackedGroup(operand, matrix, first, scratch);
      } else {
        WriteGroup(operand, matrix, first.group, rows, weight, scratch);
      }
    }
    if constexpr (kScaled) {
      for (int matrix = 0; matrix < 2; ++matrix) {
        const OperandScales& scales = setup.scales[matrix];
        const bool columnwise = setup.matrices[matrix].rows == 0;
        const int64_t scale_bytes = scales.mode == ScalingMode::kMx ? 1 : sizeof(float);
        scratch.ScalePointers(matrix)[first.group] =
            static_cast<const char*>(scales.base) + scale_bytes * ScalesBefore(scales, columnwise, first, weight);
      }
    }
  }
}

}  // namespace

Status LaunchGemmSetup(cudaStream_t stream, const Groups& groups, const GemmSetup& setup, const GemmScratch& scratch) {
  const Operand& d = setup.matrices[2];
  const int64_t d_bytes = setup.zero_other_rows ? groups.capacity * d.rows * d.element_bytes : 0;
  const dim3 blocks(1 + ZeroingBlocks(setup.workspace.bytes + d_bytes), groups.batch);
  return Launch("Launching the setup of a grouped product", stream, {blocks, kThreads},
                setup.scaled ? SetUpGemm<true> : SetUpGemm<false>, groups, setup, scratch);
}

}  // namespace jax_grouped
