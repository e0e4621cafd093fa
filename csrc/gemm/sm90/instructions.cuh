// Instructions of Hopper (sm_90a): barriers that count bytes (mbarrier), the tensor memory accelerator (TMA), and
// matrix products of a warp group (WGMMA). cuda::ptx has most of them. The others are written in PTX: those that it
// lacks, loads and stores of shared memory by address, and the wait for a barrier, whose loop stays out of the
// compiler's sight. Names and rules are those of the PTX ISA, chapters 9.7.13 (mbarrier), 9.7.9 (cp.async.bulk,
// tensormap) and 9.7.15 (wgmma).

#ifndef JAX_GROUPED_CSRC_GEMM_SM90_INSTRUCTIONS_CUH_
#define JAX_GROUPED_CSRC_GEMM_SM90_INSTRUCTIONS_CUH_

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cuda/ptx>
#include <type_traits>

#include "csrc/common/fp8.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900 && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "sm_90 has no warp-group matmuls, and the kernels for Hopper would be empty: compile for sm_90a (90a-real)."
#endif

namespace jax_grouped::sm90 {

namespace ptx = cuda::ptx;

constexpr int kWarpGroupThreads = 128;

__device__ inline uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Returns a pointer to shared memory, as cuda::ptx takes it.
template <typename T>
__device__ T* SharedPointer(uint32_t address) {
  return static_cast<T*>(__cvta_shared_to_generic(address));
}

// A barrier. Functions take its address in shared memory. Its phases alternate between two parities.
using Barrier = uint64_t;

__device__ inline void InitBarrier(uint32_t barrier, int arrivals) {
  ptx::mbarrier_init(SharedPointer<Barrier>(barrier), arrivals);
}

__device__ inline void Arrive(uint32_t barrier) { (void)ptx::mbarrier_arrive(SharedPointer<Barrier>(barrier)); }

// Arrives, and makes the phase wait for `bytes` bytes of asynchronous copies.
__device__ inline void ArriveExpecting(uint32_t barrier, uint32_t bytes) {
  (void)ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared,
                                       SharedPointer<Barrier>(barrier), bytes);
}

// Arrives at the same barrier of another block of the cluster. May overtake loads of this thread that have not ended.
__device__ inline void ArriveAt(uint32_t barrier, uint32_t block) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
      "}" ::"r"(barrier),
      "r"(block)
      : "memory");
}

// Stores a number in a block of the cluster, at the same address of shared memory. That block's barrier counts the 4
// bytes.
__device__ inline void StoreIn(uint32_t block, uint32_t address, int32_t value, uint32_t barrier) {
  asm volatile(
      "{\n"
      ".reg .b32 remote_address, remote_barrier;\n"
      "mapa.shared::cluster.u32 remote_address, %0, %3;\n"
      "mapa.shared::cluster.u32 remote_barrier, %2, %3;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.s32 [remote_address], %1, [remote_barrier];\n"
      "}" ::"r"(address),
      "r"(value), "r"(barrier), "r"(block)
      : "memory");
}

// Waits until a phase of the given parity has ended.
__device__ inline void WaitForPhase(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\n"
      "bra again;\n"
      "finished:\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Makes initialised barriers visible to copies and to the cluster.
__device__ inline void FenceBarrierInit() { ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster); }

// Orders this thread's ordinary accesses to shared memory relative to accesses by the TMA and by matrix products.
// Covers those that this thread starts, and those that a thread starts which waits for this one.
__device__ inline void FenceShared() { ptx::fence_proxy_async(ptx::space_shared); }

__device__ inline uint32_t RankInCluster() { return ptx::get_sreg_cluster_ctarank(); }

// Waits for all threads of the cluster.
__device__ inline void SynchronizeCluster() {
  asm volatile(
      "barrier.cluster.arrive.aligned;\n"
      "barrier.cluster.wait.aligned;" ::
          : "memory");
}

// Waits for all threads of one warp group. Each warp group has its own hardware barrier.
__device__ inline void SynchronizeWarpGroup(int group) {
  asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(kWarpGroupThreads) : "memory");
}

// One warp group waits until the other has signalled, by a hardware barrier of their own.
constexpr int kSignalBarrier = 3;
__device__ inline void SignalWarpGroup() {
  asm volatile("bar.arrive %0, %1;" ::"n"(kSignalBarrier), "n"(2 * kWarpGroupThreads) : "memory");
}
__device__ inline void WaitForWarpGroup() {
  asm volatile("bar.sync %0, %1;" ::"n"(kSignalBarrier), "n"(2 * kWarpGroupThreads) : "memory");
}

template <int kRegisters>
__device__ void ReleaseRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ void AcquireRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Starts to load a tensor map that is an argument of the kernel, so that the first copy through it does not wait.
__device__ inline void PrefetchTensorMap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Acquires a tensor map that a kernel has written to global memory. Must precede the first copy through the map.
__device__ inline void AcquireTensorMap(const CUtensorMap* map) {
  ptx::fence_proxy_tensormap_generic(ptx::sem_acquire, ptx::scope_gpu, map, ptx::n32_t<sizeof(CUtensorMap)>());
}

// Releases the tensor maps that this thread has written to global memory. Must follow the writes.
__device__ inline void ReleaseTensorMaps() { ptx::fence_proxy_tensormap_generic(ptx::sem_release, ptx::scope_gpu); }

// Sets the address, row length and row stride of a tensor map in shared memory to those of another matrix with the same
// number of rows.
__device__ inline void ReplaceMatrix(CUtensorMap* map, const void* base, uint32_t row_length, uint64_t row_bytes) {
  ptx::tensormap_replace_global_address(ptx::space_shared, map, base);
  ptx::tensormap_replace_global_dim(ptx::space_shared, map, ptx::n32_t<0>(), row_length);
  ptx::tensormap_replace_global_stride(ptx::space_shared, map, ptx::n32_t<0>(), row_bytes);
}

// Sets the address and number of rows of a tensor map in shared memory to those of another matrix with the same row
// length.
__device__ inline void ReplaceRows(CUtensorMap* map, const void* base, uint32_t rows) {
  ptx::tensormap_replace_global_address(ptx::space_shared, map, base);
  ptx::tensormap_replace_global_dim(ptx::space_shared, map, ptx::n32_t<1>(), rows);
}

// Copies a box to shared memory, to the same address in each of the first `kBlocks` blocks of the cluster. Its position
// is {column, row} of a matrix, or {column, row, matrix} of a stack. The barrier of each of these blocks counts the
// bytes. Elements outside the matrix become zero.
template <int kBlocks, int kAxes>
__device__ void LoadBox(uint32_t box, const CUtensorMap* map, const int32_t (&position)[kAxes], uint32_t barrier) {
  auto* const destination = SharedPointer<void>(box);
  auto* const copied = SharedPointer<Barrier>(barrier);
  if constexpr (kBlocks == 1) {
    ptx::cp_async_bulk_tensor(ptx::space_cluster, ptx::space_global, destination, map, position, copied);
  } else {
    constexpr uint16_t kMask = (1 << kBlocks) - 1;
    ptx::cp_async_bulk_tensor(ptx::space_cluster, ptx::space_global, destination, map, position, copied, kMask);
  }
}

// Copies 16 bytes asynchronously. This thread's next ArriveAfterCopies waits for them. Unlike a box, they may overwrite
// memory that threads have read without a fence.
__device__ inline void CopyChunk(uint32_t destination, const void* source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(destination), "l"(source) : "memory");
}

// Copies 16 bytes in the same way, or writes zeros and does not read the source. Threads that start products of them
// fence after their wait (FenceShared), because these copies write as ordinary stores do.
__device__ inline void CopyChunkOrZeros(uint32_t destination, const void* source, bool copies) {
  const int bytes = copies ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(destination), "l"(source), "r"(bytes)
               : "memory");
}

// Copies 4 bytes in the same way, or writes zero.
__device__ inline void CopyFloatOrZero(uint32_t destination, const float* source, bool copies) {
  const int bytes = copies ? 4 : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(destination), "l"(source), "r"(bytes) : "memory");
}

// Arrives once the chunks that this thread has begun to copy have landed. The barrier's count includes this arrival
// like any other.
__device__ inline void ArriveAfterCopies(uint32_t barrier) {
  ptx::cp_async_mbarrier_arrive_noinc(SharedPointer<Barrier>(barrier));
}

// Copies a box from shared memory to such a position. Elements outside the matrix are not written.
template <int kAxes>
__device__ void StoreBox(const CUtensorMap* map, const int32_t (&position)[kAxes], uint32_t box) {
  ptx::cp_async_bulk_tensor(ptx::space_global, ptx::space_shared, map, position, SharedPointer<void>(box));
}

__device__ inline void CommitStores() { ptx::cp_async_bulk_commit_group(); }

// Waits until this thread's stores, except those of the last kLeft groups, have read shared memory.
template <int kLeft>
__device__ void WaitForReads() {
  ptx::cp_async_bulk_wait_group_read(ptx::n32_t<kLeft>());
}

__device__ inline float LoadShared(uint32_t address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address));
  return value;
}

__device__ inline int32_t LoadSharedInteger(uint32_t address) {
  int32_t value;
  asm volatile("ld.shared.s32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}

__device__ inline float2 LoadSharedPair(uint32_t address) {
  float2 value;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(value.x), "=f"(value.y) : "r"(address));
  return value;
}

__device__ inline uint4 LoadSharedVector(uint32_t address) {
  uint4 value;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(address));
  return value;
}

// Stores the lower 16 bits.
__device__ inline void StoreShared16(uint32_t address, uint32_t value) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(static_cast<uint16_t>(value)) : "memory");
}

__device__ inline void StoreShared(uint32_t address, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}

__device__ inline void StoreShared(uint32_t address, float2 value) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(value.x), "f"(value.y) : "memory");
}

// Stores four 8 x 8 matrices of 16-bit numbers. Every lane passes the address of one row of one matrix.
__device__ inline void StoreMatrices(uint32_t row, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}

// Stores the transposes of four 8 x 8 matrices of 16-bit numbers. Every lane passes the address of one row of one
// transpose.
__device__ inline void StoreTransposedMatrices(uint32_t row, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}

// Returns the descriptor of an operand of a warp group's product, whose parts lie in memory that is swizzled by 128
// bytes and start on a 1024-byte boundary. `leading_bytes` and `stride_bytes` are offsets between parts.
__device__ inline uint64_t OperandDescriptor(uint32_t start, uint32_t leading_bytes, uint32_t stride_bytes) {
  // Fields of the matrix descriptor, by their first bit. Addresses and offsets are multiples of 16 bytes.
  constexpr int kStartAddress = 0;
  constexpr int kLeadingOffset = 16;
  constexpr int kStrideOffset = 32;
  constexpr int kSwizzle = 62;
  constexpr uint64_t kSwizzle128Bytes = 1;
  const uint64_t address = start & 0x3ffff;
  return kSwizzle128Bytes << kSwizzle | uint64_t{stride_bytes / 16} << kStrideOffset |
         uint64_t{leading_bytes / 16} << kLeadingOffset | address / 16 << kStartAddress;
}

// Returns the descriptor of an operand whose rows are 128 bytes along the contraction axis.
__device__ inline uint64_t SwizzledOperand(uint32_t rows) {
  constexpr uint32_t kNotUsed = 16;  // with swizzled rows of 128 bytes
  constexpr uint32_t kEightRowsBytes = 8 * 128;
  return OperandDescriptor(rows, kNotUsed, kEightRowsBytes);
}

// Returns the descriptor of an operand of 16-bit numbers that is contiguous along its own axis. It consists of boxes of
// 64 numbers along that axis by `depth` along the contraction axis, one box after another.
__device__ inline uint64_t TransposedOperand(uint32_t boxes, uint32_t depth) {
  constexpr uint32_t kRowBytes = 128;
  return OperandDescriptor(boxes, depth * kRowBytes, 8 * kRowBytes);
}

// The values of a 64 x 128 product that one thread of a warp group holds. They lie in rows r and r + 8 and, for every
// i, in columns c and c + 1, with
//   r = 16 * warp + lane / 4
//   c = 8 * i + lane % 4 * 2
//   value[4 * i + 2 * (row is r + 8) + (column is c + 1)].
struct Fragment {
  static constexpr int kRows = 64;
  static constexpr int kColumns = 128;
  static constexpr int kValues = kRows * kColumns / kWarpGroupThreads;
  float value[kValues];
};

// The values of a 64 x 256 product: its left and its right half.
struct WideFragment {
  static constexpr int kColumns = 2 * Fragment::kColumns;
  Fragment halves[2];
};

__device__ inline void BeginProducts() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void CommitProducts() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until this warp group's products, except those of the last kLeft commits, have been computed.
template <int kLeft = 0>
__device__ void WaitForProducts() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}

#define JAX_GROUPED_EIGHT(v, i)                                                                               \
  "+f"(v[i]), "+f"(v[i + 1]), "+f"(v[i + 2]), "+f"(v[i + 3]), "+f"(v[i + 4]), "+f"(v[i + 5]), "+f"(v[i + 6]), \
      "+f"(v[i + 7])
#define JAX_GROUPED_ALL(v)                                                                              \
  JAX_GROUPED_EIGHT(v, 0), JAX_GROUPED_EIGHT(v, 8), JAX_GROUPED_EIGHT(v, 16), JAX_GROUPED_EIGHT(v, 24), \
      JAX_GROUPED_EIGHT(v, 32), JAX_GROUPED_EIGHT(v, 40), JAX_GROUPED_EIGHT(v, 48), JAX_GROUPED_EIGHT(v, 56)
#define JAX_GROUPED_MULTIPLY(types)                                                       \
  asm volatile(                                                                           \
      "{\n"                                                                               \
      ".reg .pred add;\n"                                                                 \
      "setp.ne.b32 add, %66, 0;\n"                                                        \
      "wgmma.mma_async.sync.aligned.m64n128k32.f32." types                                \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"           \
      " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,"  \
      " %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47,"  \
      " %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}," \
      " %64, %65, add, 1, 1;\n"                                                           \
      "}"                                                                                 \
      : JAX_GROUPED_ALL(v)                                                                \
      : "l"(a), "l"(b), "r"(static_cast<int>(add)))

// Starts a product over 32 numbers of both operands. With `add`, the product is added to the fragment; otherwise it
// replaces the fragment.
template <typename AType, typename BType>
__device__ __forceinline__ void Multiply(uint64_t a, uint64_t b, bool add, Fragment& fragment) {
  constexpr bool kAIsE4m3 = AType::kType == __NV_E4M3;
  constexpr bool kBIsE4m3 = BType::kType == __NV_E4M3;
  static_assert(kAIsE4m3 || kBIsE4m3, "there is no product of two arrays of e5m2");
  auto& v = fragment.value;
  if constexpr (kAIsE4m3 && kBIsE4m3) JAX_GROUPED_MULTIPLY("e4m3.e4m3");
  if constexpr (kAIsE4m3 && !kBIsE4m3) JAX_GROUPED_MULTIPLY("e4m3.e5m2");
  if constexpr (!kAIsE4m3) JAX_GROUPED_MULTIPLY("e5m2.e4m3");
}

#define JAX_GROUPED_MULTIPLY_WIDE(types)                                                                  \
  asm volatile(                                                                                           \
      "{ .reg .pred add; setp.ne.b32 add, 1, 0;"                                                          \
      " wgmma.mma_async.sync.aligned.m64n256k16.f32." types                                               \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"                           \
      " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,"                  \
      " %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47,"                  \
      " %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63,"                  \
      " %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79,"                  \
      " %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95,"                  \
      " %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111,"      \
      " %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}," \
      " %128, %129, add, 1, 1, %130, %131; }"                                                             \
      : JAX_GROUPED_ALL(v), JAX_GROUPED_ALL(w)                                                            \
      : "l"(a), "l"(b), "n"(kATransposed), "n"(kBTransposed))

// Starts a product over 16 numbers of both operands of type __nv_bfloat16 or __half, and adds it to the fragment.
// Transposed operands are those of TransposedOperand.
template <typename T, bool kATransposed, bool kBTransposed>
__device__ __forceinline__ void MultiplyWide(uint64_t a, uint64_t b, WideFragment& fragment) {
  auto& v = fragment.halves[0].value;
  auto& w = fragment.halves[1].value;
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    JAX_GROUPED_MULTIPLY_WIDE("bf16.bf16");
  } else {
    JAX_GROUPED_MULTIPLY_WIDE("f16.f16");
  }
}

// Prevents the compiler from moving accesses to the fragment's registers across this call.
__device__ __forceinline__ void Pin(Fragment& fragment) {
  auto& v = fragment.value;
  asm volatile("" : JAX_GROUPED_ALL(v)::"memory");
}

__device__ __forceinline__ void Pin(WideFragment& fragment) {
  auto& v = fragment.halves[0].value;
  auto& w = fragment.halves[1].value;
  asm volatile("" : JAX_GROUPED_ALL(v), JAX_GROUPED_ALL(w)::"memory");
}
#undef JAX_GROUPED_MULTIPLY_WIDE
#undef JAX_GROUPED_MULTIPLY
#undef JAX_GROUPED_ALL
#undef JAX_GROUPED_EIGHT

}  // namespace jax_grouped::sm90

#endif  // JAX_GROUPED_CSRC_GEMM_SM90_INSTRUCTIONS_CUH_
