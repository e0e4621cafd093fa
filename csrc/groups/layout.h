// Group layout: row ranges from group sizes, and the layout of buffers that depend on groups.
//
// Every rule of clamping, capacity and alignment on the C++ side lives here and, for the device, in layout.cuh and
// table.cuh. The counterparts in Python are jax_grouped/core/groups.py and jax_grouped/fp8/layout.py.

#ifndef JAX_GROUPED_CSRC_GROUPS_LAYOUT_H_
#define JAX_GROUPED_CSRC_GROUPS_LAYOUT_H_

#include <cstddef>
#include <cstdint>

#include "csrc/common/host_device.h"

namespace jax_grouped {

// Alignment of arrays and their rows. cuBLASLt is told this alignment and does not check it.
constexpr uint32_t kAlignmentBytes = 16;

// Divisor of the feature sizes of 16-bit products. It gives their rows the alignment above.
constexpr int64_t kFeatureAlignment = kAlignmentBytes / 2;

// Rows that one partial sum of the bias gradient covers.
constexpr int kBiasGradRows = 128;

// Divisor of the feature sizes of quantized arrays, and of the padded rows of columnwise data.
constexpr int kFp8Alignment = 16;

// Elements along each side of a scaling block, and along a scaling block of the MX format.
constexpr int kBlock = 128;
constexpr int kMxBlock = 32;

JAX_GROUPED_HOST_DEVICE constexpr int64_t CeilDiv(int64_t value, int64_t divisor) {
  return (value + divisor - 1) / divisor;
}

JAX_GROUPED_HOST_DEVICE constexpr int64_t RoundUp(int64_t value, int64_t multiple) {
  return CeilDiv(value, multiple) * multiple;
}

// The groups of one call, in device memory. `sizes` and `offset` may hold any values. A batch of calls is one call: its
// arrays hold the arrays of its elements one after another.
struct Groups {
  const int32_t* sizes;   // [batch, total], rows per group
  const int32_t* offset;  // [batch], index of the first local group
  int32_t total;
  int32_t num_groups;  // local groups of an element: those whose weights are here
  int64_t capacity;    // rows of an element's token array
  int32_t batch;
  int32_t stack_rows = 0;  // size of every group, for which arrays have room, whatever `sizes` holds; 0 without one

  // Return the numbers of all local groups and of all rows in the batch.
  JAX_GROUPED_HOST_DEVICE int32_t AllGroups() const { return batch * num_groups; }
  JAX_GROUPED_HOST_DEVICE int64_t AllRows() const { return batch * capacity; }
  // Returns the groups of one element.
  JAX_GROUPED_HOST_DEVICE Groups At(int32_t element) const {
    const int64_t before = element;
    return {sizes + before * total, offset + before, total, num_groups, capacity, 1, stack_rows};
  }
};

// Blocks of 4 to 512 rows of one group. The position of a group's scales, or of its product tiles, follows from the
// number of row blocks before the group. The last row block of a group may be shorter.
enum class RowBlock : int { k4, k16, k128, k256, k512 };
constexpr int kNumRowBlocks = 5;

JAX_GROUPED_HOST_DEVICE constexpr int RowsOf(RowBlock block) {
  constexpr int kRows[kNumRowBlocks] = {4, 16, 128, 256, 512};
  return kRows[static_cast<int>(block)];
}

struct RowBlockCounts {
  int32_t count[kNumRowBlocks];
};

// Returns the largest number of row blocks that any sizes of `num_groups` groups can need. A row block has `height`
// rows and does not cross a group.
JAX_GROUPED_HOST_DEVICE constexpr int64_t MaxRowBlocks(int64_t rows, int64_t num_groups, int64_t height) {
  const int64_t groups = num_groups < rows ? num_groups : rows;
  return groups == 0 ? 0 : groups + (rows - groups) / height;
}

// Table of the starts of a batch element's groups and of their regions, in device memory. It has an array of first
// rows, then one array of counts per kind of row block. Each array has an entry per local group, and one more for the
// end of the last group. Arrays start on 16-byte boundaries.
struct GroupTable {
  int32_t* base;
  int32_t num_groups;

  JAX_GROUPED_HOST_DEVICE static constexpr int64_t Stride(int64_t num_groups) { return RoundUp(num_groups + 1, 4); }
  JAX_GROUPED_HOST_DEVICE static constexpr int64_t Size(int64_t num_groups) {
    return (1 + kNumRowBlocks) * Stride(num_groups);
  }
  // Returns the table of one element. The tables of a batch lie one after another.
  JAX_GROUPED_HOST_DEVICE GroupTable At(int32_t element) const {
    return {base + element * Size(num_groups), num_groups};
  }

  JAX_GROUPED_HOST_DEVICE int32_t* FirstRow() const { return base; }
  JAX_GROUPED_HOST_DEVICE int32_t* BlocksBefore(RowBlock block) const {
    return base + (1 + static_cast<int64_t>(block)) * Stride(num_groups);
  }
};

enum class ScalingMode : int32_t { kTensor, kBlock1D, kBlock2D, kMx };

// Layout of the data and scales of one quantized array. Those of a batch's elements lie one after another.
// jax_grouped/fp8/layout.py describes the layouts.
struct QuantizedLayout {
  ScalingMode mode;
  bool columnwise;
  int64_t batch;
  int64_t tokens;  // per element, as are the groups
  int64_t features;
  int64_t num_groups;
  int64_t stack_rows;  // rows of every group of a stack; 0 if only the device knows the sizes

  // Returns the number of row blocks of `height` rows for which an element's arrays have room.
  constexpr int64_t ElementRowBlocks(int64_t height) const {
    return stack_rows > 0 ? num_groups * CeilDiv(stack_rows, height) : MaxRowBlocks(tokens, num_groups, height);
  }
  constexpr int64_t RowBlocks(int64_t height) const { return batch * ElementRowBlocks(height); }
  RowBlockCounts ElementRowBlocks() const {
    RowBlockCounts counts{};
    for (int i = 0; i < kNumRowBlocks; ++i) {
      counts.count[i] = static_cast<int32_t>(ElementRowBlocks(RowsOf(static_cast<RowBlock>(i))));
    }
    return counts;
  }
  constexpr int64_t DataElements() const {
    return features * (columnwise ? kFp8Alignment * RowBlocks(kFp8Alignment) : batch * tokens);
  }
  constexpr int64_t ScaleElements() const {
    const int64_t feature_blocks = CeilDiv(features, kBlock);
    switch (mode) {
      case ScalingMode::kTensor:
        return batch * num_groups;
      case ScalingMode::kBlock1D:
        return columnwise ? features * RowBlocks(kBlock) : feature_blocks * 4 * RowBlocks(4);
      case ScalingMode::kBlock2D:
        return columnwise ? feature_blocks * 4 * RowBlocks(4 * kBlock) : RoundUp(feature_blocks, 4) * RowBlocks(kBlock);
      case ScalingMode::kMx:
        return 512 * feature_blocks * RowBlocks(kBlock);
    }
    return 0;
  }
};

// The number of features, on which positions of scales depend.
struct ScaleLayout {
  int64_t features;

  JAX_GROUPED_HOST_DEVICE int64_t FeatureBlocks() const { return CeilDiv(features, kBlock); }
};

// Device memory of one quantization. First come the windows of every batch element, enough for any group sizes. A
// window is made for kChunksPerWindow chunks of 16 rows, and has room for the 8 that may follow. Then comes the table
// of every element.
constexpr int64_t kChunksPerWindow = 32;
constexpr int64_t kWindowBytes = 64 + 40 * 48;

// Returns the number of windows of one element.
constexpr int64_t NumWindows(int64_t tokens, int64_t num_groups) {
  return CeilDiv(MaxRowBlocks(tokens, num_groups, kFp8Alignment), kChunksPerWindow);
}

constexpr int64_t QuantizeScratchBytes(int64_t batch, int64_t tokens, int64_t num_groups) {
  return batch * (NumWindows(tokens, num_groups) * kWindowBytes + GroupTable::Size(num_groups) * sizeof(int32_t));
}

// Returns the number of row tiles for which an element's partial sums have room.
constexpr int64_t BiasGradTiles(int64_t capacity, int64_t num_groups) {
  return MaxRowBlocks(capacity, num_groups, kBiasGradRows);
}

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_GROUPS_LAYOUT_H_
