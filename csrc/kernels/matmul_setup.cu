#include "csrc/kernels/matmul_setup.h"

#include <algorithm>
#include <cstdint>

#include "csrc/common/group_layout.cuh"

namespace jax_grouped {
namespace {

constexpr int kThreads = 512;

struct Operands {
  Operand matrix[MatmulScratch::kMatrices];
};

__device__ void WriteGroup(const Operand& operand, int matrix, int32_t group, RowRange rows,
                           const MatmulScratch& scratch) {
  const bool is_tokens = operand.columns == 0;
  // An empty group may start one past the last row: its pointer is never read, but it stays inside the array.
  const int64_t token = rows.end > rows.begin ? rows.begin : 0;
  const int64_t column = is_tokens ? token : static_cast<int64_t>(group) * operand.columns;
  scratch.Pointers(matrix)[group] = static_cast<char*>(operand.base) + column * operand.rows * operand.element_bytes;
  scratch.Rows(matrix)[group] = operand.rows;
  scratch.Columns(matrix)[group] = is_tokens ? static_cast<int32_t>(rows.end - rows.begin) : operand.columns;
  scratch.LeadingDimensions(matrix)[group] = operand.rows;
}

// Zeros bytes [begin, end), in words of 16, with all blocks but the first.
__device__ void ZeroBytes(void* base, int64_t begin, int64_t end) {
  uint4* words = static_cast<uint4*>(base);
  const int64_t stride = static_cast<int64_t>(gridDim.x - 1) * kThreads;
  for (int64_t i = begin / 16 + (blockIdx.x - 1) * kThreads + threadIdx.x; i < RoundUp(end, 16) / 16; i += stride) {
    words[i] = make_uint4(0, 0, 0, 0);
  }
}

// Block 0 writes the arguments; the others zero the workspace and the tokens of D outside the local groups.
__global__ void __launch_bounds__(kThreads)
    MatmulSetup(Groups groups, Operands operands, float beta, bool zero_rest, Region workspace, MatmulScratch scratch) {
  if (blockIdx.x > 0) {
    ZeroBytes(workspace.base, 0, workspace.bytes);
    if (!zero_rest) return;
  }
  const RowRange local = LocalRows<kThreads>(groups);
  if (blockIdx.x > 0) {
    const Operand& d = operands.matrix[2];
    const int64_t row_bytes = static_cast<int64_t>(d.rows) * d.element_bytes;
    ZeroBytes(d.base, 0, local.begin * row_bytes);
    ZeroBytes(d.base, local.end * row_bytes, groups.capacity * row_bytes);
    return;
  }
  if (threadIdx.x == 0) {
    *scratch.Alpha() = 1.0f;
    *scratch.Beta() = beta;
  }
  ForEachGroup<kThreads>(groups, local.begin, [&](int32_t group, RowRange rows) {
    for (int matrix = 0; matrix < MatmulScratch::kMatrices; ++matrix) {
      WriteGroup(operands.matrix[matrix], matrix, group, rows, scratch);
    }
  });
}

// Enough blocks to write at memory speed when all of D must be zeroed, few enough to cost nothing when none must.
int ZeroingBlocks(int64_t bytes) {
  constexpr int64_t kBytesPerBlock = 16 * 1024;
  constexpr int64_t kMostBlocks = 264;
  return static_cast<int>(std::clamp<int64_t>(bytes / kBytesPerBlock, 1, kMostBlocks));
}

}  // namespace

Status LaunchMatmulSetup(cudaStream_t stream, const Groups& groups, const Operand& a, const Operand& b,
                         const Operand& d, float beta, bool zero_rest, const Region& workspace,
                         const MatmulScratch& scratch) {
  const int64_t d_bytes = zero_rest ? groups.capacity * d.rows * d.element_bytes : 0;
  const int blocks = 1 + ZeroingBlocks(workspace.bytes + d_bytes);
  MatmulSetup<<<blocks, kThreads, 0, stream>>>(groups, Operands{{a, b, d}}, beta, zero_rest, workspace, scratch);
  return Status::FromCuda(cudaGetLastError(), "Launching the setup of a grouped matmul");
}

}  // namespace jax_grouped
