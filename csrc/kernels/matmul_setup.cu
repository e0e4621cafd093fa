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

// Writes the arguments of group `index` of the batch: `rows` of the tokens, or the matrix of that number.
__device__ void WriteGroup(const Operand& operand, int matrix, int32_t index, RowRange rows, int64_t number,
                           const MatmulScratch& scratch) {
  const bool is_tokens = operand.columns == 0;
  // An empty group may start one past the last row: its pointer is never read, but it stays inside the array.
  const int64_t token = rows.end > rows.begin ? rows.begin : 0;
  const int64_t column = is_tokens ? token : number * operand.columns;
  scratch.Pointers(matrix)[index] = static_cast<char*>(operand.base) + column * operand.rows * operand.element_bytes;
  scratch.Rows(matrix)[index] = operand.rows;
  scratch.Columns(matrix)[index] = is_tokens ? static_cast<int32_t>(rows.end - rows.begin) : operand.columns;
  scratch.LeadingDimensions(matrix)[index] = operand.rows;
}

// Zeros bytes [begin, end), in words of 16, with all blocks but the first.
__device__ void ZeroBytes(void* base, int64_t begin, int64_t end) {
  uint4* words = static_cast<uint4*>(base);
  const int64_t stride = static_cast<int64_t>(gridDim.x - 1) * kThreads;
  for (int64_t i = begin / 16 + (blockIdx.x - 1) * kThreads + threadIdx.x; i < RoundUp(end, 16) / 16; i += stride) {
    words[i] = make_uint4(0, 0, 0, 0);
  }
}

// Every row of blocks has a batch element: block 0 writes its arguments, the others zero its tokens of D outside the
// local groups. Those of the first element also zero the workspace.
__global__ void __launch_bounds__(kThreads)
    MatmulSetup(Groups batch, Operands operands, int32_t elements_per_kernel, float beta, bool zero_rest,
                Region workspace, MatmulScratch scratch) {
  const auto element = static_cast<int32_t>(blockIdx.y);
  if (blockIdx.x > 0) {
    if (element == 0) ZeroBytes(workspace.base, 0, workspace.bytes);
    if (!zero_rest) return;
  }
  const Groups groups = batch.At(element);
  const RowRange local = LocalRows<kThreads>(groups);
  const int64_t first_row = element * groups.capacity;
  if (blockIdx.x > 0) {
    const Operand& d = operands.matrix[2];
    const int64_t row_bytes = static_cast<int64_t>(d.rows) * d.element_bytes;
    ZeroBytes(d.base, first_row * row_bytes, (first_row + local.begin) * row_bytes);
    ZeroBytes(d.base, (first_row + local.end) * row_bytes, (first_row + groups.capacity) * row_bytes);
    return;
  }
  if (element == 0 && threadIdx.x == 0) {
    *scratch.Alpha() = 1.0f;
    *scratch.Beta() = beta;
  }
  const int64_t first_kernel = static_cast<int64_t>(element / elements_per_kernel) * groups.num_groups;
  ForEachGroup<kThreads>(groups, local.begin, [&](int32_t group, RowRange rows) {
    const int32_t index = element * groups.num_groups + group;
    rows = {first_row + rows.begin, first_row + rows.end};
    for (int matrix = 0; matrix < MatmulScratch::kMatrices; ++matrix) {
      WriteGroup(operands.matrix[matrix], matrix, index, rows, first_kernel + group, scratch);
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

Status LaunchMatmulSetup(cudaStream_t stream, const Groups& groups, int32_t elements_per_kernel, const Operand& a,
                         const Operand& b, const Operand& d, float beta, bool zero_rest, const Region& workspace,
                         const MatmulScratch& scratch) {
  const int64_t d_bytes = zero_rest ? groups.capacity * d.rows * d.element_bytes : 0;
  const int blocks = 1 + ZeroingBlocks(workspace.bytes + d_bytes);
  MatmulSetup<<<dim3(blocks, groups.batch), kThreads, 0, stream>>>(groups, Operands{{a, b, d}}, elements_per_kernel,
                                                                   beta, zero_rest, workspace, scratch);
  return Status::FromCuda(cudaGetLastError(), "Launching the setup of a grouped matmul");
}

}  // namespace jax_grouped
