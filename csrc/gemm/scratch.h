// Scratch memory of one grouped product on the device, apart from its workspace.

#ifndef JAX_GROUPED_CSRC_GEMM_SCRATCH_H_
#define JAX_GROUPED_CSRC_GEMM_SCRATCH_H_

#include <cstddef>
#include <cstdint>

#include "csrc/groups/layout.h"

namespace jax_grouped {

// The arrays that cuBLASLt reads. Each group has its matrices A, B and D; scaled operands also have the scales of A and
// B. All groups share the scalars. The group tables of a batch follow. Each array starts on a 16-byte boundary.
class GemmScratch {
 public:
  static constexpr int kMatrices = 3;

  GemmScratch(void* base, int64_t batch, int64_t num_groups)
      : base_(static_cast<char*>(base)), all_groups_(batch * num_groups), num_groups_(num_groups) {}

  static constexpr size_t Bytes(int64_t batch, int64_t num_groups) {
    return TableOffset(batch * num_groups) + batch * GroupTable::Size(num_groups) * sizeof(int32_t);
  }

  JAX_GROUPED_HOST_DEVICE void** Pointers(int matrix) const {
    return reinterpret_cast<void**>(base_ + matrix * PointerBytes(all_groups_));
  }
  JAX_GROUPED_HOST_DEVICE int32_t* Rows(int matrix) const { return Sizes(3 * matrix); }
  JAX_GROUPED_HOST_DEVICE int32_t* Columns(int matrix) const { return Sizes(3 * matrix + 1); }
  JAX_GROUPED_HOST_DEVICE int32_t* LeadingDimensions(int matrix) const { return Sizes(3 * matrix + 2); }
  JAX_GROUPED_HOST_DEVICE float* Alpha() const { return reinterpret_cast<float*>(Sizes(3 * kMatrices)); }
  JAX_GROUPED_HOST_DEVICE float* Beta() const { return Alpha() + 1; }
  // Returns the scale pointers of matrix A (0) or B (1).
  JAX_GROUPED_HOST_DEVICE const void** ScalePointers(int matrix) const {
    return reinterpret_cast<const void**>(base_ + ScaleOffset(all_groups_) + matrix * PointerBytes(all_groups_));
  }
  JAX_GROUPED_HOST_DEVICE GroupTable Table() const {
    return {reinterpret_cast<int32_t*>(base_ + TableOffset(all_groups_)), static_cast<int32_t>(num_groups_)};
  }

 private:
  JAX_GROUPED_HOST_DEVICE static constexpr int64_t PointerBytes(int64_t groups) { return RoundUp(8 * groups, 16); }
  JAX_GROUPED_HOST_DEVICE static constexpr int64_t SizeBytes(int64_t groups) { return RoundUp(4 * groups, 16); }
  JAX_GROUPED_HOST_DEVICE static constexpr int64_t ScaleOffset(int64_t groups) {
    return kMatrices * (PointerBytes(groups) + 3 * SizeBytes(groups)) + 16;
  }
  JAX_GROUPED_HOST_DEVICE static constexpr int64_t TableOffset(int64_t groups) {
    return ScaleOffset(groups) + 2 * PointerBytes(groups);
  }
  JAX_GROUPED_HOST_DEVICE int32_t* Sizes(int index) const {
    return reinterpret_cast<int32_t*>(base_ + kMatrices * PointerBytes(all_groups_) + index * SizeBytes(all_groups_));
  }

  char* base_;
  int64_t all_groups_;
  int64_t num_groups_;
};

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_GEMM_SCRATCH_H_
