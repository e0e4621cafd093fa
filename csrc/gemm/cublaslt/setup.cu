#include "csrc/gemm/cublaslt/setup.h"

#include <cstdint>

#include "csrc/common/launch.cuh"
#include "csrc/groups/layout.cuh"
#include "csrc/groups/table.cuh"
#include "csrc/groups/zero_rows.cuh"

namespace jax_grouped {
namespace {

constexpr int kThreads = 512;

struct Operands {
  Operand matrix[GemmScratch::kMatrices];
};

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

// Writes zeros, in all blocks but the first: to the workspace, for the first batch element, and with `zero_rest` to the
// element's tokens of D outside the local groups.
__device__ void ZeroRest(const Groups& groups, int32_t element, const Operand& d, bool zero_rest,
                         const Region& workspace) {
  if (element == 0) ZeroBytes<kThreads>(workspace.base, 0, workspace.bytes);
  if (zero_rest) ZeroOtherRows<kThreads>(groups, element, d.base, static_cast<int64_t>(d.rows) * d.element_bytes);
}

__device__ void WriteScalars(float beta, const GemmScratch& scratch) {
  if (blockIdx.y > 0 || threadIdx.x > 0) return;
  *scratch.Alpha() = 1.0f;
  *scratch.Beta() = beta;
}

// Writes the arguments of each batch element's groups in block 0 of its row of blocks; the other blocks write zeros.
// blockIdx.y is the batch element.
__global__ void __launch_bounds__(kThreads)
    GemmSetup(Groups batch, Operands operands, int32_t elements_per_weight, float beta, bool zero_rest,
              Region workspace, GemmScratch scratch) {
  const auto element = static_cast<int32_t>(blockIdx.y);
  const Groups groups = batch.At(element);
  if (blockIdx.x > 0) return ZeroRest(groups, element, operands.matrix[2], zero_rest, workspace);
  WriteScalars(beta, scratch);
  const RowRange local = LocalRows<kThreads>(groups);
  const int64_t first_row = element * groups.capacity;
  const int64_t first_weight = static_cast<int64_t>(element / elements_per_weight) * groups.num_groups;
  ForEachGroup<kThreads>(groups, local.begin, [&](int32_t group, RowRange rows) {
    const int32_t index = element * groups.num_groups + group;
    rows = {first_row + rows.begin, first_row + rows.end};
    for (int matrix = 0; matrix < GemmScratch::kMatrices; ++matrix) {
      WriteGroup(operands.matrix[matrix], matrix, index, rows, first_weight + group, scratch);
    }
  });
}

struct ScaledArguments {
  Operands operands;
  OperandScales scales[2];
  const void** scale_pointers[2];
  UnitCounts element_units;
  GroupTable table;  // the first batch element's
  int32_t elements_per_weight;
  float beta;
  bool zero_rest;
  Region workspace;
  GemmScratch scratch;
};

// Writes the pointer and size of a group of columnwise data, whose rows are the group's tokens.
__device__ void WritePackedGroup(const Operand& operand, int matrix, const Chunk& first, const GemmScratch& scratch) {
  const ScaleLayout layout{operand.columns, false};
  const int64_t unit = first.group_rows == 0 ? 0 : ColumnDataUnit(layout, first, 0);
  const auto rows = static_cast<int32_t>(RoundUp(first.group_rows, kFp8Alignment));
  const int32_t index = first.group;
  scratch.Pointers(matrix)[index] = static_cast<char*>(operand.base) + unit * kFp8Alignment * operand.element_bytes;
  scratch.Rows(matrix)[index] = rows;
  scratch.Columns(matrix)[index] = operand.columns;
  scratch.LeadingDimensions(matrix)[index] = max(rows, kFp8Alignment);
}

template <ScalingMode kMode>
__device__ int64_t FirstScale(const OperandScales& scales, bool columnwise, const Chunk& first) {
  const ScaleLayout layout{scales.features, kMode == ScalingMode::kMx};
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

__global__ void __launch_bounds__(kThreads)
    ScaledGemmSetup(Groups batch, const __grid_constant__ ScaledArguments args) {
  const auto element = static_cast<int32_t>(blockIdx.y);
  if (blockIdx.x > 0) {
    return ZeroRest(batch.At(element), element, args.operands.matrix[2], args.zero_rest, args.workspace);
  }
  WriteScalars(args.beta, args.scratch);
  const GroupTable table = args.table.At(element);
  FillGroupTable<kThreads, AllUnits>(batch, element, args.element_units, table);
  const int64_t first_weight = static_cast<int64_t>(element / args.elements_per_weight) * batch.num_groups;
  for (int32_t group = threadIdx.x; group < batch.num_groups; group += kThreads) {
    const Chunk first = LoadChunk(table, element, group, table.UnitsBefore(Unit::k16)[group]);
    const RowRange rows{first.first_row, int64_t{first.first_row} + first.group_rows};
    const int64_t weight = first_weight + group;
    for (int matrix = 0; matrix < GemmScratch::kMatrices; ++matrix) {
      const Operand& operand = args.operands.matrix[matrix];
      if (operand.rows == 0) {
        WritePackedGroup(operand, matrix, first, args.scratch);
      } else {
        WriteGroup(operand, matrix, first.group, rows, weight, args.scratch);
      }
    }
    for (int matrix = 0; matrix < 2; ++matrix) {
      const OperandScales& scales = args.scales[matrix];
      const bool columnwise = args.operands.matrix[matrix].rows == 0;
      const int64_t scale_bytes = scales.mode == ScalingMode::kMx ? 1 : sizeof(float);
      args.scale_pointers[matrix][first.group] =
          static_cast<const char*>(scales.base) + scale_bytes * ScalesBefore(scales, columnwise, first, weight);
    }
  }
}

dim3 SetupBlocks(const Groups& groups, const Operand& d, bool zero_rest, const Region& workspace) {
  const int64_t d_bytes = zero_rest ? groups.capacity * d.rows * d.element_bytes : 0;
  return dim3(1 + ZeroingBlocks(workspace.bytes + d_bytes), groups.batch);
}

}  // namespace

Status LaunchGemmSetup(cudaStream_t stream, const Groups& groups, int32_t elements_per_weight, const Operand& a,
                       const Operand& b, const Operand& d, float beta, bool zero_rest, const Region& workspace,
                       const GemmScratch& scratch) {
  return Launch("Launching the setup of a grouped matmul", stream,
                {SetupBlocks(groups, d, zero_rest, workspace), kThreads}, GemmSetup, groups, Operands{{a, b, d}},
                elements_per_weight, beta, zero_rest, workspace, scratch);
}

Status LaunchScaledGemmSetup(cudaStream_t stream, const Groups& groups, const UnitCounts& element_units,
                             int32_t elements_per_weight, const Operand& a, const OperandScales& a_scales,
                             const Operand& b, const OperandScales& b_scales, const Operand& d, float beta,
                             bool zero_rest, const Region& workspace, const GemmScratch& scratch) {
  const ScaledArguments args{{{a, b, d}},
                             {a_scales, b_scales},
                             {scratch.ScalePointers(0), scratch.ScalePointers(1)},
                             element_units,
                             scratch.Table(),
                             elements_per_weight,
                             beta,
                             zero_rest,
                             workspace,
                             scratch};
  return Launch("Launching the setup of a grouped matmul of scaled operands", stream,
                {SetupBlocks(groups, d, zero_rest, workspace), kThreads}, ScaledGemmSetup, groups, args);
}

}  // namespace jax_grouped
