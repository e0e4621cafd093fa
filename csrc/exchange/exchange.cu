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

__device__ void Tell(uint32_t* word, uint32_t number) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(number) : "memory");
}

// Thread i of a warp tells device i that this device is here, and waits for it.
__device__ void MeetAll(const Peers& peers, uint32_t meeting) {
  if (threadIdx.x < peers.count) {
    Tell(peers.reached[threadIdx.x] + peers.rank, meeting);
    WaitFor(peers.reached[peers.rank] + threadIdx.x, meeting);
  }
  __syncwarp();
}

__global__ void Meet(const __grid_constant__ Peers peers, Meeting which) {
  const uint32_t meeting = *peers.meetings + static_cast<uint32_t>(which);
  MeetAll(peers, meeting);
  if (threadIdx.x == 0 && which == Meeting::kLast) *peers.meetings = meeting;
}

// Copies parts of rows after the first meeting. Blocks wait for it where they are: once other kernels have the
// processors, there may be no room for long. Each device begins with another one, so that no device gets the rows of
// all at once.
__global__ void __launch_bounds__(32 * kWarps)
    PushRows(const __grid_constant__ Peers peers, const __grid_constant__ PeerArrays to, const uint4* __restrict__ rows,
             const uint32_t* __restrict__ wanted, int64_t num_rows, int vectors, int parts) {
  const uint32_t meeting = *peers.meetings + static_cast<uint32_t>(Meeting::kFirst);
  if (blockIdx.x > 0) {
    if (threadIdx.x == 0) WaitFor(peers.entered, meeting);
  } else if (threadIdx.x < 32) {
    MeetAll(peers, meeting);
    if (threadIdx.x == 0) Tell(peers.entered, meeting);
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

Status LaunchMeeting(cudaStream_t stream, const Peers& peers, Meeting which) {
  return LaunchUrgent("Launching a meeting of devices", stream, {dim3(1), dim3(kMostPeers)}, Meet, peers, which);
}

Status LaunchPushRows(cudaStream_t stream, const Peers& peers, const void* rows, const uint32_t* wanted,
                      const PeerArrays& to, int64_t num_rows, int64_t row_bytes) {
  const int64_t vectors = row_bytes / static_cast<int64_t>(sizeof(uint4));
  const int64_t parts = CeilDiv(vectors, kVectorsPerWarp);
  const dim3 blocks(static_cast<unsigned>(std::min(CeilDiv(num_rows * parts, kWarps), kPushBlocks)));
  JAX_GROUPED_RETURN_IF_FAILED(LaunchUrgent("Launching the transfer of rows", stream, {blocks, dim3(32 * kWarps)},
                                            PushRows, peers, to, static_cast<const uint4*>(rows), wanted, num_rows,
                                            static_cast<int>(vectors), static_cast<int>(parts)));
  return LaunchMeeting(stream, peers, Meeting::kLast);
}

}  // namespace jax_grouped
