// Kernels that write rows into the memory of other GPUs of one NVLink domain, and one that waits for these GPUs.

#ifndef JAX_GROUPED_CSRC_EXCHANGE_EXCHANGE_H_
#define JAX_GROUPED_CSRC_EXCHANGE_EXCHANGE_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "csrc/common/status.h"

namespace jax_grouped {

constexpr int kMostPeers = 32;

// The devices of an exchange, by rank.
struct Peers {
  int32_t rank;  // of this device
  int32_t count;
  // Arrays of one device each, in memory that all of them can write: element i counts the barriers device i reached.
  uint32_t* signals[kMostPeers];
  // Words of this device: how many barriers it has passed, and how many its blocks may pass.
  uint32_t* barriers;
  uint32_t* released;
};

// Addresses of this device's part of a result, in the memory of each device.
struct PeerArrays {
  void* of[kMostPeers];
};

// A push has two barriers of all devices. After the first, no device reads the old contents of the results. After the
// second, all parts have arrived. A device that waits for another one for ten minutes ends the program with an error.
enum class Barrier : uint32_t { kBeforeWrites = 1, kAfterWrites = 2 };
Status LaunchBarrier(cudaStream_t stream, const Peers& peers, Barrier which);

// Copies rows of `row_bytes`, a multiple of 16, to the devices that want them, between both barriers. Bit i of a row's
// `wanted` is that of the device of rank i.
Status LaunchPushRows(cudaStream_t stream, const Peers& peers, const void* rows, const uint32_t* wanted,
                      const PeerArrays& to, int64_t num_rows, int64_t row_bytes);

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_EXCHANGE_EXCHANGE_H_
