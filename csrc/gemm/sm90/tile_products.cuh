// Common parts of the product kernels on Hopper; those that gather 16-bit rows use the ring and the queue of tiles. A
// block of threads computes 256 x 128 of an FP8 weight gradient, or 128 x 256 of an FP8 product of tokens, from blocks
// of 128 bytes of both operands, one after another.
//
// Each block of threads computes one tile of the result, then further tiles: the grid just fills the GPU. One warp, the
// producer, finds the tiles and copies the operands to a ring of stages in shared memory. Two math groups of 128
// threads multiply the operands, accumulate the scaled products in registers, and store the sums. While one group
// scales or stores, the other uses the tensor cores.
//
// Two things bound the speed on an H200 (counters of E8 T32768 K7168 N4096). The first is the sequence of one math
// group. Its product takes 460 cycles, 256 of them on the tensor cores. Then it accumulates: 64 additions per thread
// take 110 cycles; 128 multiply-adds with 1x128 scales take 310, because the other group's product goes through the
// same registers. The second is power: sustained runs reach 700 W, at which the clock falls from 1.98 GHz to 1.4-1.75
// GHz.
//
// These variants are slower, by 1 to 15 %: math groups that alternate at the tensor cores; math groups that stay half a
// block or a block behind each other; two products of 64 x 64 in flight per group; rows in registers, with one product
// of 64 x 128 or two of 64 x 64 in flight; asking early for the next stage.
//
// Producer and math threads meet at four kinds of barriers, which every block has in shared memory. Phases of a barrier
// alternate between parity 0 and 1. A phase ends with the arrivals below and, for `full`, with all bytes of the copies.
//
//   barrier         waits, for parity p of     arrivals that end a phase
//                   its position in the ring
//   full[stage]     math threads, p            lane 0 of the producer, which announces the bytes; with 1x128 scales
//                                              also each of its 32 lanes, or 128 threads if they gather rows, after
//                                              its copies if there are any
//   empty[stage]    producer, p ^ 1            every math thread of every block of the cluster, because each block
//                                              copies a part of one operand to all of them
//   tile_full[slot]   math threads, p          lane 0 of the producer, which has written the tile
//   tile_empty[slot]  producer, p ^ 1          every math thread of the block
//   next_full         producer, p              lane 0 of the producer, which announces the bytes of the index
//   next_empty        producer of the first    every producer thread of the cluster
//                     block, p ^ 1
//
// A position in a ring starts with parity 0, which flips at each wrap. The first wait for `full` thus waits for the
// first phase. The first wait for `empty` is for parity 1, the phase before the first, which counts as ended: the ring
// starts empty.

#ifndef JAX_GROUPED_CSRC_GEMM_SM90_TILE_PRODUCTS_CUH_
#define JAX_GROUPED_CSRC_GEMM_SM90_TILE_PRODUCTS_CUH_

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "csrc/common/activation.cuh"
#include "csrc/common/warp.cuh"
#include "csrc/gemm/sm90/instructions.cuh"
#include "csrc/groups/layout.h"

namespace jax_grouped::sm90 {

// Blocks of a cluster. Their tiles of a weight gradient have the same rows, those of a product of tokens the same
// weights. Each block copies its part of these to all blocks, which reduces reads of the L2 cache. Clusters of four,
// and of two by two, are 2 to 6 % slower.
constexpr int kCluster = 2;
constexpr int kMathGroups = 2;
constexpr int kStages = 3;

// Products of 64 x 128 that a math group computes per stage: one below the other in a weight gradient, whose rows of
// each wave are adjacent, so that no group is idle while the other has two products; side by side for tokens.
constexpr int kWaves = 2;
constexpr int kTileRows = Fragment::kRows * kMathGroups * kWaves;
constexpr int kTileColumns = Fragment::kColumns;
constexpr int kDepth = kBlock;  // numbers of a row, and of a column, in a stage
constexpr int kMathThreads = kMathGroups * kWarpGroupThreads;
constexpr int kThreads = kMathThreads + kWarpGroupThreads;

// Registers per thread. setmaxnreg divides those that a block has from its launch: the same number for each thread.
struct Registers {
  int producer;
  int math;
};
constexpr bool CanBeDivided(const Registers& registers) {
  constexpr int kOfLaunch = 64 * 1024 / kThreads / 8 * 8;
  return registers.producer % 8 == 0 && registers.math % 8 == 0 &&
         kWarpGroupThreads * registers.producer + kMathThreads * registers.math <= kThreads * kOfLaunch;
}
constexpr Registers kRegisters{24, 240};
static_assert(CanBeDivided(kRegisters));

// Rows of tiles in a swath. Tiles follow one another down the rows of a swath, then to the right. The tiles in progress
// then share most of both operands.
constexpr int kSwath = 16;

// Boxes of the result have 64 rows of 128 bytes. A math group writes kStagedBoxes boxes at once and has room for twice
// as many.
constexpr int kBoxRowBytes = 128;
constexpr int kBoxBytes = Fragment::kRows * kBoxRowBytes;
constexpr int kStagedBoxes = 2;
constexpr int kStagingBytes = 2 * kStagedBoxes * kBoxBytes;

// Tiles that the producer may have found and the math groups have not begun.
constexpr int kTilesAhead = 2;

// A tile, as the producer passes it to the math groups.
struct alignas(16) OutputTile {
  int32_t group = -1;       // index in the batch; -1 after the last tile
  int32_t group_row = 0;    // first row of the group in a result that all groups share
  int32_t row = 0;          // first row, counted in the group's result
  int32_t column = 0;       // first column; may lie right of the result
  int32_t rows = 0;         // rows of the result from `row` on; may exceed the tile's, or be 0 or less
  int32_t stages = 0;       // number of stages to sum over, each of kDepth, or of the depth of a gathering product
  float scale = 1.0f;       // factor of all products, with one scale per tensor
  int32_t scale_block = 0;  // blocks of 4 rows before the group's 1x128 scales in a quantized result
};

static_assert(kDepth == 128, "rows of a stage are as long as the swizzled rows of 128 bytes");
static_assert(kTileRows / kCluster <= 256 && kTileColumns <= 256, "a box of the TMA has at most 256 rows");
static_assert((kTileRows + kTileColumns) * kDepth < 1 << 20, "a barrier counts fewer than 2^20 bytes");

// The queue of tiles, and the barriers. The last three are those of TileScheduler, which not every kernel uses.
template <int kRingStages>
struct Ring {
  OutputTile tiles[kTilesAhead];
  Barrier full[kRingStages];
  Barrier empty[kRingStages];
  Barrier tile_full[kTilesAhead];
  Barrier tile_empty[kTilesAhead];
  Barrier next_full;
  Barrier next_empty;
  int32_t next_tile;
};

struct alignas(1024) Shared {
  uint8_t rows[kStages][kTileRows * kDepth];
  uint8_t columns[kStages][kTileColumns * kDepth];
  uint8_t staging[kMathGroups][kStagingBytes];
  float row_scale[kStages][kTileRows];
  float column_scale[kStages][kTileColumns];
  Ring<kStages> ring;
};

constexpr int kMostSharedBytes = 227 * 1024;  // of one block on Hopper
static_assert(sizeof(Shared) <= kMostSharedBytes);
static_assert(sizeof(Shared) + sizeof(Shared::rows[0]) + sizeof(Shared::columns[0]) > kMostSharedBytes,
              "there is room for another stage");
// A swizzle pattern repeats after 8 rows of 128 bytes, and is a function of the address.
static_assert(offsetof(Shared, rows) % 1024 == 0 && sizeof(Shared::rows[0]) % 1024 == 0);
static_assert(offsetof(Shared, columns) % 1024 == 0 && sizeof(Shared::columns[0]) % 1024 == 0);
static_assert(offsetof(Shared, staging) % 1024 == 0 && kBoxBytes % 1024 == 0);

// Addresses in the ring that all kernels have in shared memory.
template <typename Memory>
struct RingAddresses {
  uint32_t base;

  __device__ OutputTile* TileSlot(int slot) const {
    return static_cast<OutputTile*>(__cvta_shared_to_generic(base + offsetof(Memory, ring.tiles))) + slot;
  }
  __device__ uint32_t Full(int stage) const { return base + offsetof(Memory, ring.full) + stage * sizeof(Barrier); }
  __device__ uint32_t Empty(int stage) const { return base + offsetof(Memory, ring.empty) + stage * sizeof(Barrier); }
  __device__ uint32_t TileFull(int slot) const {
    return base + offsetof(Memory, ring.tile_full) + slot * sizeof(Barrier);
  }
  __device__ uint32_t TileEmpty(int slot) const {
    return base + offsetof(Memory, ring.tile_empty) + slot * sizeof(Barrier);
  }
  __device__ uint32_t NextFull() const { return base + offsetof(Memory, ring.next_full); }
  __device__ uint32_t NextEmpty() const { return base + offsetof(Memory, ring.next_empty); }
  __device__ uint32_t NextTile() const { return base + offsetof(Memory, ring.next_tile); }
};

// Addresses of the members of Shared.
struct Addresses : RingAddresses<Shared> {
  __device__ uint32_t Rows(int stage) const { return base + offsetof(Shared, rows) + stage * sizeof(Shared::rows[0]); }
  __device__ uint32_t Columns(int stage) const {
    return base + offsetof(Shared, columns) + stage * sizeof(Shared::columns[0]);
  }
  __device__ uint32_t Staging(int group) const { return base + offsetof(Shared, staging) + group * kStagingBytes; }
  __device__ uint32_t RowScale(int stage) const {
    return base + offsetof(Shared, row_scale) + stage * sizeof(Shared::row_scale[0]);
  }
  __device__ uint32_t ColumnScale(int stage) const {
    return base + offsetof(Shared, column_scale) + stage * sizeof(Shared::column_scale[0]);
  }
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// A position in a ring, and the parity of its barriers' current phases.
template <int kSlots>
struct RingSlot {
  int index = 0;
  uint32_t parity = 0;

  __device__ void Advance() {
    if (++index < kSlots) return;
    index = 0;
    parity ^= 1;
  }
};
using Stage = RingSlot<kStages>;

// Sets the position of a cluster tile of kRows rows and kColumns columns from its index in the group, which has `high`
// rows and `wide` columns of these.
template <int kRows, int kColumns>
__device__ __forceinline__ void SetTilePosition(int32_t index_in_group, int32_t high, int32_t wide, OutputTile* tile) {
  const int32_t swath = index_in_group / (kSwath * wide);
  const int32_t in_swath = index_in_group % (kSwath * wide);
  const int32_t swath_rows = min(kSwath, high - swath * kSwath);
  tile->row = (swath * kSwath + in_swath % swath_rows) * kRows;
  tile->column = in_swath / swath_rows * kColumns;
}

// The blocks of a cluster compute a cluster tile at once. Cluster c of n begins with the cluster tile c. It then takes
// c + n, c + 2 n, ..., or what TileScheduler gives it.
__device__ inline int32_t FirstTileIndex() { return static_cast<int32_t>(blockIdx.x) / kCluster; }
__device__ inline int32_t Clusters() { return static_cast<int32_t>(gridDim.x) / kCluster; }

// Queue of tiles from the producer to the math groups of its block. Finding a tile takes divisions and reads of global
// memory. The tensor cores would wait for these if the math groups did them.
//
// If the end of a loop comes from shared memory, the compiler cannot prove that all lanes leave the loop together, and
// starting a product in it takes twice as long. The math groups therefore count cluster tiles themselves, or with a
// TileScheduler leave the loop by Uniform(tile.group) < 0.
template <typename SharedAddresses>
class TileQueue {
 public:
  __device__ explicit TileQueue(const SharedAddresses& shared) : shared_(shared) {}

  // Posts a tile. All lanes of one warp of the producer must call it, and no other warp.
  __device__ void Post(const OutputTile& tile) {
    WaitForPhase(shared_.TileEmpty(slot_.index), slot_.parity ^ 1);
    if (Lane() == 0) {
      // A copy of the whole struct would be made byte by byte.
      OutputTile* slot = shared_.TileSlot(slot_.index);
      slot->group = tile.group;
      slot->group_row = tile.group_row;
      slot->row = tile.row;
      slot->column = tile.column;
      slot->rows = tile.rows;
      slot->stages = tile.stages;
      slot->scale = tile.scale;
      slot->scale_block = tile.scale_block;
      Arrive(shared_.TileFull(slot_.index));
    }
    __syncwarp();
    slot_.Advance();
  }

  // Takes the next tile. Whole warps of the math groups must call it.
  __device__ OutputTile Take() {
    WaitForPhase(shared_.TileFull(slot_.index), slot_.parity);
    const OutputTile tile = *shared_.TileSlot(slot_.index);
    Arrive(shared_.TileEmpty(slot_.index));
    slot_.Advance();
    return tile;
  }

 private:
  SharedAddresses shared_;
  RingSlot<kTilesAhead> slot_;
};

// Gives each cluster its next cluster tile when it needs one, from a counter in global memory. A cluster that starts
// late, because another kernel such as NCCL's holds its SMs, then computes fewer tiles, and no other cluster waits for
// it at the end.
//
// For each tile, every block requests the next one. The first block of the cluster publishes its index to all blocks.
template <typename SharedAddresses>
class TileScheduler {
 public:
  __device__ TileScheduler(const SharedAddresses& shared, int32_t* counter) : shared_(shared), counter_(counter) {}

  // Requests the next index. All lanes of one warp of each producer must call it, and Publish some time later: the
  // answer takes a microsecond.
  __device__ void Request() {
    if (Lane() == 0) {
      ArriveExpecting(shared_.NextFull(), sizeof(int32_t));
      if (RankInCluster() == 0) next_ = Clusters() + atomicAdd(counter_, 1);
    }
    __syncwarp();
  }

  __device__ void Publish() const {
    if (RankInCluster() == 0) {
      WaitForPhase(shared_.NextEmpty(), parity_ ^ 1);
      const int32_t next = Uniform(next_);
      if (const int block = Lane(); block < kCluster) {
        StoreIn(block, shared_.NextTile(), next, shared_.NextFull());
      }
    }
    __syncwarp();
  }

  // Returns the index that was published. All threads of the producer must call it.
  __device__ int32_t Next() {
    WaitForPhase(shared_.NextFull(), parity_);
    const int32_t next = LoadSharedInteger(shared_.NextTile());
    // The first block overwrites the index after this arrival. The block's number, 0, is computed from the index, which
    // is not negative, so that the arrival waits for the load.
    ArriveAt(shared_.NextEmpty(), next >> 31);
    parity_ ^= 1;
    return Uniform(next);
  }

 private:
  SharedAddresses shared_;
  int32_t* counter_;
  int32_t next_ = 0;
  uint32_t parity_ = 0;
};

// Returns the first row, within a tile, of a math group's product in a wave.
__device__ inline int FirstRow(int group, int wave) { return (wave * kMathGroups + group) * Fragment::kRows; }

// Position of a thread of a math group within its group's products.
struct ThreadPosition {
  int group;
  int warp;
  int lane;

  // Returns the thread's first row of a fragment. Its other row is 8 further.
  __device__ int Row() const { return warp * 16 + lane / 4; }
  // Returns the first of the thread's two columns in each 8 columns.
  __device__ int Column() const { return lane % 4 * 2; }
};

// Scales of the two rows that a thread holds in a wave's product.
struct RowScales {
  float rows[2];

  __device__ __forceinline__ void Load(const Addresses& shared, int stage, const ThreadPosition& position, int wave) {
    const uint32_t first = shared.RowScale(stage) + (FirstRow(position.group, wave) + position.Row()) * sizeof(float);
    rows[0] = LoadShared(first);
    rows[1] = LoadShared(first + 8 * sizeof(float));
  }
};

__device__ __forceinline__ void Clear(Fragment (&sums)[kWaves]) {
#pragma unroll
  for (Fragment& sum : sums) {
#pragma unroll
    for (float& value : sum.value) value = 0.0f;
  }
}

__device__ __forceinline__ void Add(const Fragment& product, Fragment& sum) {
#pragma unroll
  for (int i = 0; i < Fragment::kValues; ++i) sum.value[i] += product.value[i];
}

// Returns the product of two inverse scales, rounded towards zero. An overflow then gives the largest number instead of
// infinity; infinity times a sum of 0 would be NaN.
__device__ __forceinline__ float MultiplyScales(float a, float b) { return __fmul_rz(a, b); }

__device__ __forceinline__ void Scale(float factor, Fragment& sum) {
#pragma unroll
  for (float& value : sum.value) value *= factor;
}

// Replaces the gate by SwiGLU. Rounds both inputs to T first, so that the result is that of a pass over the stored
// product. Rounds two at once: for one number of bfloat16, nvcc uses the slow unit that computes exponentials.
template <typename T>
__device__ __forceinline__ void ApplySwiGlu(const Fragment& factor, Fragment& gate) {
  const ActivationFunctions<ActivationKind::kSwiGlu> swiglu{};
  const auto round = [](const float* pair) {
    if constexpr (std::is_same_v<T, __half>) return __half22float2(__floats2half2_rn(pair[0], pair[1]));
    return __bfloat1622float2(__floats2bfloat162_rn(pair[0], pair[1]));
  };
#pragma unroll
  for (int i = 0; i < Fragment::kValues; i += 2) {
    const float2 gates = round(gate.value + i);
    const float2 factors = round(factor.value + i);
    gate.value[i] = swiglu.Activate(gates.x) * factors.x;
    gate.value[i + 1] = swiglu.Activate(gates.y) * factors.y;
  }
}

template <typename RowType, typename ColumnType>
__device__ __forceinline__ void StartProduct(uint32_t rows, uint32_t columns, Fragment& product) {
  const uint64_t a = SwizzledOperand(rows);
  const uint64_t b = SwizzledOperand(columns);
  Pin(product);
  BeginProducts();
#pragma unroll
  for (int i = 0; i < kDepth / 32; ++i) {
    Multiply<RowType, ColumnType>(a + i * (32 >> 4), b + i * (32 >> 4), i > 0, product);
  }
  CommitProducts();
  Pin(product);
}

// Releases a stage after this thread has read it. Arrives in every block of the cluster, because all of them fill the
// stage.
__device__ __forceinline__ void Release(uint32_t empty) {
#pragma unroll
  for (int block = 0; block < kCluster; ++block) ArriveAt(empty, block);
}

// Copies `count` floats: a multiple of 4, of which at most kMost are copied. All lanes of the producer must call it.
template <int kMost>
__device__ __forceinline__ void CopyFloats(uint32_t destination, const float* source, int32_t count) {
#pragma unroll
  for (int first = 0; first < kMost; first += 32 * 4) {
    const int i = first + Lane() * 4;
    if (i < count) CopyChunk(destination + i * sizeof(float), source + i);
  }
}

// Initialises the barriers of the stages, with these arrivals per phase, and of the tiles. One thread must call it.
template <int kRingStages, typename SharedAddresses>
__device__ __forceinline__ void InitRings(const SharedAddresses& shared, int full_arrivals, int empty_arrivals) {
  for (int i = 0; i < kRingStages; ++i) {
    InitBarrier(shared.Full(i), full_arrivals);
    InitBarrier(shared.Empty(i), empty_arrivals);
  }
  for (int i = 0; i < kTilesAhead; ++i) {
    InitBarrier(shared.TileFull(i), 1);
    InitBarrier(shared.TileEmpty(i), kMathThreads);
  }
}

// Sets up the barriers of a cluster and waits for the setup kernel. The arrivals are those of InitRings;
// `producer_threads` of every block wait for the next tile. Whole clusters of kThreads must call it.
template <int kRingStages, typename SharedAddresses>
__device__ __forceinline__ void SetUpCluster(const SharedAddresses& shared, int full_arrivals, int empty_arrivals,
                                             int producer_threads) {
  if (threadIdx.x == 0) {
    InitRings<kRingStages>(shared, full_arrivals, empty_arrivals);
    InitBarrier(shared.NextFull(), 1);
    InitBarrier(shared.NextEmpty(), producer_threads * kCluster);
    FenceBarrierInit();
  }
  SynchronizeCluster();
  cudaGridDependencySynchronize();
}

// Arrivals of FP8 products that end a phase of `full` and of `empty`. The producer is one warp, or four if it gathers
// rows. One of its lanes starts the copies of operands to a stage, and with 1x128 scales each of its 32 lanes copies
// some of the stage's scales. Each math thread arrives when it has read the stage. One lane could arrive for its warp
// after __syncwarp(), but compute-sanitizer does not see that the other lanes' reads come first.
template <ScalingMode kMode>
constexpr int kFullArrivals = kMode == ScalingMode::kBlock1D ? 1 + 32 : 1;
constexpr int kEmptyArrivals = kMathThreads * kCluster;

// Returns true in the warp of the producer that finds tiles and uses the TMA.
__device__ __forceinline__ bool LeadsProducer() { return Uniform(Warp()) == kMathThreads / 32; }

// Returns a math thread's position in a tile.
__device__ __forceinline__ ThreadPosition MathThreadPosition() {
  return ThreadPosition{Uniform(threadIdx.x / kWarpGroupThreads), Uniform(threadIdx.x % kWarpGroupThreads / 32),
                        static_cast<int>(threadIdx.x) % 32};
}

// Runs a block whose barriers are set up: calls `produce` in the warps that do not multiply, which release registers,
// and `multiply` in those of the math groups, with their position. Whole clusters of kThreads must call it.
template <const Registers& registers, typename Produce, typename Multiply>
__device__ __forceinline__ void RunBlock(const Produce& produce, const Multiply& multiply) {
  if (threadIdx.x >= kMathThreads) {
    ReleaseRegisters<registers.producer>();
    produce();
  } else {
    AcquireRegisters<registers.math>();
    multiply(MathThreadPosition());
    // The block's shared memory must outlive the copies that read it. The end of the kernel guarantees that they
    // arrive.
    WaitForReads<0>();
  }
  // No block may end while another block of its cluster still copies to it or arrives at its barriers.
  __syncwarp();
  SynchronizeCluster();
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace jax_grouped::sm90

#endif  // JAX_GROUPED_CSRC_GEMM_SM90_TILE_PRODUCTS_CUH_
