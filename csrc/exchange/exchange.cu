#include "csrc/exchange/exchange.h"

#include <algorithm>
#include <cstdint>

#include "csrc/common/launch.cuh"
#include "csrc/common/warp.cuh"
#include "csrc/groups/layout.h"

namespace jax_grouped {
namespace {

constexpr int kWarps = 16;
// Blocks that push rows: NVLink needs no more, and other kernels find processors beside them.
constexpr int64_t kPushBlocks = 64;
// Vectors of a thread, which it loads before it stores the first. A warp copies this many bytes of one row.
constexpr int kLoads = 4;
constexpr int kVectorsPerWarp = 32 * kLoads;

// Nanoseconds that a device waits for another one.
constexpr uint64_t kLongestWait = uint64_t{600} * 1000 * 1000 * 1000;

__device__ uint64_t Nanoseconds() {
  uint64_t time;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
  return time;
}

// Waits until a word has at least this number. Numbers wrap around.
__device__ void WaitFor(const uint32_t* word, uint32_t number) {
  const uint64_t start = Nanoseconds();
  uint32_t found;
  do {
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(found) : "l"(word) : "memory");
    if (Nanoseconds() - start > kLongestWait) __trap();
  } while (static_cast<int32_t>(found - number) < 0);
}

__device__ void Signal(uint32_t* word, uint32_t number) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(number) : "memory");
}

// Thread i of a warp tells device i that this device is here, and waits for it.
__device__ void ArriveAndWait(const Peers& peers, uint32_t barrier) {
  if (threadIdx.x < peers.count) {
    Signal(peers.signals[threadIdx.x] + peers.rank, barrier);
    WaitFor(peers.signals[peers.rank] + threadIdx.x, barrier);
  }
  __syncwarp();
}

__global__ void PeerBarrier(const __grid_constant__ Peers peers, Barrier which) {
  const uint32_t barrier = *peers.barriers + static_cast<uint32_t>(which);
  ArriveAndWait(peers, barrier);
  if (threadIdx.x == 0 && which == Barrier::kAfterWrites) *peers.barriers = barrier;
}

// Copies parts of rows. Block 0 waits for the other devices, its siblings for block 0. They wait on their SMs: behind a
// kernel that waits they would have to queue for SMs that other streams have taken. Each device writes to its successor
// first, so that none receives from all at once.
__global__ void __launch_bounds__(32 * kWarps)
    PushRows(const __grid_constant__ Peers peers, const __grid_constant__ PeerArrays to, const uint4* __restrict__ rows,
             const uint32_t* __restrict__ wanted, int64_t num_rows, int vectors, int parts) {
  const uint32_t barrier = *peers.barriers + static_cast<uint32_t>(Barrier::kBeforeWrites);
  if (blockIdx.x > 0) {
    if (threadIdx.x == 0) WaitFor(peers.released, barrier);
  } else if (threadIdx.x < 32) {
    ArriveAndWait(peers, barrier);
    if (threadIdx.x == 0) Signal(peers.released, barrier);
  }
  __syncthreads();

  const int64_t warps = static_cast<int64_t>(gridDim.x) * kWarps;
  for (int64_t part = static_cast<int64_t>(blockIdx.x) * kWarps + Warp(); part < num_rows * parts; part += warps) {
    const int64_t row = part / parts;
    const int first = static_cast<int>(part % parts) * kVectorsPerWarp + Lane();
    const uint32_t devices = wanted[row];
    uint4 loaded[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int vector = first + 32 * i;
      if (vector < vectors) loaded[i] = __ldg(rows + row * vectors + vector);
    }
    for (int turn = 1; turn <= peers.count; ++turn) {
      const int device = (peers.rank + turn) % peers.count;
      if ((devices >> device & 1) == 0) continue;
      uint4* out = static_cast<uint4*>(to.of[device]) + row * vectors;
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int vector = first + 32 * i;
        if (vector < vectors) out[vector] = loaded[i];
      }
    }
  }
}

}  // namespace

Status LaunchBarrier(cudaStream_t stream, const Peers& peers, Barrier which) {
  return LaunchUrgent("Launching a barrier of devices", stream, {dim3(1), dim3(kMostPeers)}, PeerBarrier, peers, which);
}

Status LaunchPushRows(cudaStream_t stream, const Peers& peers, const void* rows, const uint32_t* wanted,
                      const PeerArrays& to, int64_t num_rows, int64_t row_bytes) {
  const int64_t vectors = row_bytes / static_cast<int64_t>(sizeof(uint4));
  const int64_t parts = CeilDiv(vectors, kVectorsPerWarp);
  const dim3 blocks(static_cast<unsigned>(std::min(CeilDiv(num_rows * parts, kWarps), kPushBlocks)));
  JAX_GROUPED_RETURN_IF_FAILED(LaunchUrgent("Launching the transfer of rows", stream, {blocks, dim3(32 * kWarps)},
                                            PushRows, peers, to, static_cast<const uint4*>(rows), wanted, num_rows,
                                            static_cast<int>(vectors), static_cast<int>(parts)));
  return LaunchBarrier(stream, peers, Barrier::kAfterWrites);
}

}  // namespace jax_grouped
