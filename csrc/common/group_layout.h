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

JAX_GROUPED_HOST_DEVICE constexpr int64_t RoundUp(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// The groups of one call, as they are in device memory. `sizes` and `offset` may hold any values.
struct Groups {
  const int32_t* sizes;   // [total], rows per group
  const int32_t* offset;  // [1], index of the first local group
  int32_t total;
  int32_t num_groups;  // local groups: those whose kernels are here
  int64_t capacity;    // rows of the token array
};

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
