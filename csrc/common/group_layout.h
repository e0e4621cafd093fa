// Where each group lies: row ranges from group sizes, and the layout of buffers that depend on groups.
//
// Every rule of clamping, capacity and alignment on the C++ side lives here and in group_layout.cuh; their counterpart
// in Python is jax_grouped/group_layout.py.

#ifndef JAX_GROUPED_CSRC_COMMON_GROUP_LAYOUT_H_
#define JAX_GROUPED_CSRC_COMMON_GROUP_LAYOUT_H_

#include <cstddef>
#include <cstdint>

#ifdef __CUDACC__
#define JAX_GROUPED_HOST_DEVICE __host__ __device__
#else
#define JAX_GROUPED_HOST_DEVICE
#endif

namespace jax_grouped {

// Arrays and their rows start on such a boundary; cuBLASLt is told so, and checks nothing.
constexpr uint32_t kAlignmentBytes = 16;

// Feature sizes of the 16-bit products are multiples of this, which gives their rows that alignment.
constexpr int64_t kFeatureAlignment = kAlignmentBytes / 2;

// Rows that one partial sum of the bias gradient covers.
constexpr int kBiasGradRows = 128;

// Feature sizes of quantized arrays are multiples of this, and so are the padded rows of columnwise data.
constexpr int kFp8Alignment = 16;

// Elements along each side of a scaling block, and of one of the MX format.
constexpr int kBlock = 128;
constexpr int kMxBlock = 32;

JAX_GROUPED_HOST_DEVICE constexpr int64_t CeilDiv(int64_t value, int64_t divisor) {
  return (value + divisor - 1) / divisor;
}

JAX_GROUPED_HOST_DEVICE constexpr int64_t RoundUp(int64_t value, int64_t multiple) {
  return CeilDiv(value, multiple) * multiple;
}

// The groups of one call, as they are in device memory. `sizes` and `offset` may hold any values.
struct Groups {
  const int32_t* sizes;   // [total], rows per group
  const int32_t* offset;  // [1], index of the first local group
  int32_t total;
  int32_t num_groups;  // local groups: those whose kernels are here
  int64_t capacity;    // rows of the token array
};

// A scale is found from how many units of so many rows lie before its group; the last unit of a group may be shorter.
enum class Unit : int { k4, k16, k32, k128, k512 };
constexpr int kNumUnits = 5;

JAX_GROUPED_HOST_DEVICE constexpr int UnitRows(Unit unit) {
  switch (unit) {
    case Unit::k4:
      return 4;
    case Unit::k16:
      return 16;
    case Unit::k32:
      return 32;
    case Unit::k128:
      return 128;
    case Unit::k512:
      return 512;
  }
  return 0;
}

// Where the groups of one call and their regions begin, in device memory: an array of first rows, then one of counts
// per unit, each with an entry per local group and one more for the end of the last.
struct GroupTable {
  int32_t* base;
  int32_t num_groups;

  JAX_GROUPED_HOST_DEVICE static constexpr int64_t Size(int64_t num_groups) {
    return (1 + kNumUnits) * (num_groups + 1);
  }

  JAX_GROUPED_HOST_DEVICE int32_t* FirstRow() const { return base; }
  JAX_GROUPED_HOST_DEVICE int32_t* UnitsBefore(Unit unit) const {
    return base + (1 + static_cast<int64_t>(unit)) * (num_groups + 1);
  }
};

enum class ScalingMode { kTensor, kBlock1D, kBlock2D, kMx };

// Where the data and scales of one quantized array lie; jax_grouped/group_layout.py describes the layouts.
struct QuantizedLayout {
  ScalingMode mode;
  bool columnwise;
  bool swizzled_scales;
  int64_t tokens;
  int64_t features;
  int64_t num_groups;
  int64_t stack_rows;  // rows of every group of a stack, 0 if only the device knows the sizes

  // How many units of `unit` rows, none of which crosses a group, any group sizes can need.
  constexpr int64_t Units(int64_t unit) const {
    if (stack_rows > 0) return num_groups * CeilDiv(stack_rows, unit);
    const int64_t groups = num_groups < tokens ? num_groups : tokens;
    return groups == 0 ? 0 : groups + (tokens - groups) / unit;
  }
  constexpr int64_t DataElements() const {
    return features * (columnwise ? kFp8Alignment * Units(kFp8Alignment) : tokens);
  }
  constexpr int64_t ScaleElements() const {
    const int64_t feature_blocks = CeilDiv(features, kBlock);
    switch (mode) {
      case ScalingMode::kTensor:
        return num_groups;
      case ScalingMode::kBlock1D:
        return columnwise ? features * Units(kBlock) : feature_blocks * 4 * Units(4);
      case ScalingMode::kBlock2D:
        return columnwise ? feature_blocks * 4 * Units(4 * kBlock) : RoundUp(feature_blocks, 4) * Units(kBlock);
      case ScalingMode::kMx:
        if (swizzled_scales) return 512 * feature_blocks * Units(kBlock);
        return columnwise ? features * Units(kMxBlock) : CeilDiv(features, kMxBlock) * 16 * Units(16);
    }
    return 0;
  }
};

// Device memory of one quantization: windows of 8 chunks, as many as cover the chunks of any group sizes, and the
// table.
constexpr int64_t kChunksPerWindow = 8;
constexpr int64_t kWindowBytes = 32 + 2 * kChunksPerWindow * 48;

constexpr int64_t NumWindows(int64_t tokens, int64_t num_groups) {
  const QuantizedLayout layout{ScalingMode::kTensor, false, false, tokens, 0, num_groups, 0};
  return CeilDiv(layout.Units(kFp8Alignment), kChunksPerWindow);
}

constexpr int64_t QuantizeScratchBytes(int64_t tokens, int64_t num_groups) {
  return NumWindows(tokens, num_groups) * kWindowBytes + GroupTable::Size(num_groups) * sizeof(int32_t);
}

// How many row tiles of kBiasGradRows rows, none of which crosses a group, any group sizes can need.
constexpr int64_t BiasGradTiles(int64_t capacity, int64_t num_groups) { return capacity / kBiasGradRows + num_groups; }

// Device memory of one grouped matmul: what cuBLASLt reads of each group's matrices A, B and D, and its scalars.
// Each array starts on a 16-byte boundary.
class MatmulScratch {
 public:
  static constexpr int kMatrices = 3;

  MatmulScratch(void* base, int64_t num_groups) : base_(static_cast<char*>(base)), num_groups_(num_groups) {}

  static constexpr size_t Bytes(int64_t num_groups) {
    return kMatrices * (PointerBytes(num_groups) + 3 * SizeBytes(num_groups)) + 16;
  }

  JAX_GROUPED_HOST_DEVICE void** Pointers(int matrix) const {
    return reinterpret_cast<void**>(base_ + matrix * PointerBytes(num_groups_));
  }
  JAX_GROUPED_HOST_DEVICE int32_t* Rows(int matrix) const { return Sizes(3 * matrix); }
  JAX_GROUPED_HOST_DEVICE int32_t* Columns(int matrix) const { return Sizes(3 * matrix + 1); }
  JAX_GROUPED_HOST_DEVICE int32_t* LeadingDimensions(int matrix) const { return Sizes(3 * matrix + 2); }
  JAX_GROUPED_HOST_DEVICE float* Alpha() const { return reinterpret_cast<float*>(Sizes(3 * kMatrices)); }
  JAX_GROUPED_HOST_DEVICE float* Beta() const { return Alpha() + 1; }

 private:
  JAX_GROUPED_HOST_DEVICE static constexpr int64_t PointerBytes(int64_t num_groups) {
    return RoundUp(8 * num_groups, 16);
  }
  JAX_GROUPED_HOST_DEVICE static constexpr int64_t SizeBytes(int64_t num_groups) { return RoundUp(4 * num_groups, 16); }
  JAX_GROUPED_HOST_DEVICE int32_t* Sizes(int index) const {
    return reinterpret_cast<int32_t*>(base_ + kMatrices * PointerBytes(num_groups_) + index * SizeBytes(num_groups_));
  }

  char* base_;
  int64_t num_groups_;
};

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_COMMON_GROUP_LAYOUT_H_
