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
  // Of each device, in memory that all of them can write: how many meetings device i has reached, at i.
  uint32_t* reached[kMostPeers];
  // Words of this device: the number of meetings that it has had, and of the last one that let blocks in.
  uint32_t* meetings;
  uint32_t* entered;
};

// Where this device's part of a result begins, in the memory of each device.
struct PeerArrays {
  void* of[kMostPeers];
};

// Nanoseconds that a device waits for another one. Then the program ends with an error.
constexpr uint64_t kLongestWait = uint64_t{600} * 1000 * 1000 * 1000;

// Devices write into each other's memory between two meetings of all: after the first, what they have read before may
// be overwritten, and after the last, all that they have written is there. These kernels are meetings alone.
enum class Meeting : uint32_t { kFirst = 1, kLast = 2 };
Status LaunchMeeting(cudaStream_t stream, const Peers& peers, Meeting which);

// Copies rows of `row_bytes`, a multiple of 16, to the devices that want them, with both meetings. Bit i of a row's
// `wanted` is that of device i.
Status LaunchPushRows(cudaStream_t stream, const Peers& peers, const void* rows, const uint32_t* wanted,
                      const PeerArrays& to, int64_t num_rows, int64_t row_bytes);

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_EXCHANGE_EXCHANGE_H_
