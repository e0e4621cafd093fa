// Device side of wgrad.h.
//
// A tile of dkernel belongs to a block of threads, and further tiles to the same block: the grid just fills the GPU.
// One warp, the producer, copies the operands of 128 tokens after another to a ring of stages in shared memory. Two
// math groups of 128 threads multiply them, add up the scaled products in registers, and store the sums. While one
// group scales or stores, the other has the tensor cores.
//
// What bounds it on an H200 (counters of 1x128 scales, E8 T32768 K7168 N4096): reading shared memory (operands of the
// products, scales) and, sustained, 700 W, at which the clock falls from 1.98 to 1.4 to 1.65 GHz.

#ifndef JAX_GROUPED_CSRC_HOPPER_WGRAD_KERNEL_CUH_
#define JAX_GROUPED_CSRC_HOPPER_WGRAD_KERNEL_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <library_types.h>

#include <cstddef>
#include <cstdint>

#include "csrc/common/group_layout.cuh"
#include "csrc/hopper/instructions.cuh"

namespace jax_grouped {
namespace hopper {

// Blocks of a cluster have neighbouring tiles of the same rows. Each copies its share of x to all of them.
constexpr int kCluster = 2;
constexpr int kMathGroups = 2;
constexpr int kStages = 3;  // what shared memory has room for

// Products of 64 x 128 that a math group has per tile, one below the other; the rows of each wave lie together, so that
// no group is idle while the other has two.
constexpr int kWaves = 2;
constexpr int kTileRows = Fragment::kRows * kMathGroups * kWaves;
constexpr int kTileColumns = Fragment::kColumns;
constexpr int kStageTokens = kBlock;
constexpr int kThreads = (kMathGroups + 1) * kWarpGroupThreads;
constexpr int kMathWarps = kMathGroups * kWarpGroupThreads / 32;
// Of 64 Ki registers, in units of 8 per thread.
constexpr int kProducerRegisters = 24;
constexpr int kMathRegisters = 240;
// Tiles follow one another down to this many rows of tiles, then to the right: what is at work at once then shares
// most of both operands.
constexpr int kSwath = 16;

// Boxes of dkernel are 64 rows of 128 bytes. There is room for 64 rows of a tile in float32.
constexpr int kBoxRowBytes = 128;
constexpr int kBoxBytes = Fragment::kRows * kBoxRowBytes;
constexpr int kStagingBytes = Fragment::kRows * Fragment::kColumns * static_cast<int>(sizeof(float));

struct alignas(1024) Shared {
  uint8_t x[kStages][kTileRows * kStageTokens];
  uint8_t dy[kStages][kTileColumns * kStageTokens];
  uint8_t staging[kMathGroups][kStagingBytes];
  float x_scale[kStages][kTileRows];
  float dy_scale[kStages][kTileColumns];
  Barrier full[kStages];
  Barrier empty[kStages];
};

// The addresses of these.
struct Addresses {
  uint32_t base;

  __device__ uint32_t X(int stage) const { return base + offsetof(Shared, x) + stage * sizeof(Shared::x[0]); }
  __device__ uint32_t Dy(int stage) const { return base + offsetof(Shared, dy) + stage * sizeof(Shared::dy[0]); }
  __device__ uint32_t Staging(int group) const { return base + offsetof(Shared, staging) + group * kStagingBytes; }
  __device__ uint32_t XScale(int stage) const {
    return base + offsetof(Shared, x_scale) + stage * sizeof(Shared::x_scale[0]);
  }
  __device__ uint32_t DyScale(int stage) const {
    return base + offsetof(Shared, dy_scale) + stage * sizeof(Shared::dy_scale[0]);
  }
  __device__ uint32_t Full(int stage) const { return base + offsetof(Shared, full) + stage * sizeof(Barrier); }
  __device__ uint32_t Empty(int stage) const { return base + offsetof(Shared, empty) + stage * sizeof(Barrier); }
};

// Tensor maps of both operands for every group.
struct GroupMaps {
  CUtensorMap* base;

  __device__ CUtensorMap* X(int32_t group) const { return base + 2 * static_cast<int64_t>(group); }
  __device__ CUtensorMap* Dy(int32_t group) const { return X(group) + 1; }
};

struct Arguments {
  CUtensorMap dkernel;
  GroupMaps maps;
  GroupTable table;  // of the first batch element
  int32_t all_groups;
  const float* x_scale;
  const float* dy_scale;
  int32_t in_features;
  int32_t out_features;
  cudaDataType_t dkernel_type;
  bool accumulate;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

struct Stage {
  int index = 0;
  uint32_t parity = 0;

  __device__ void Advance() {
    if (++index < kStages) return;
    index = 0;
    parity ^= 1;
  }
};

struct Tile {
  int32_t group = -1;
  int32_t row;
  int32_t column;
  // The group's tokens, in blocks of 128; the first is counted through all groups.
  int32_t first_block;
  int32_t blocks;
};

// The tiles of this block, in order. Clusters take turns at runs of kCluster neighbours.
class Tiles {
 public:
  __device__ explicit Tiles(const Arguments& args)
      : table_(args.table),
        high_((args.in_features + kTileRows - 1) / kTileRows),
        wide_((args.out_features + kCluster * kTileColumns - 1) / (kCluster * kTileColumns)),
        end_(args.all_groups * high_ * wide_),
        next_(static_cast<int32_t>(blockIdx.x) / kCluster) {}

  // Replaces a tile, at first an empty one, by the next, which may lie right of dkernel.
  __device__ bool Next(Tile* tile) {
    if (next_ >= end_) return false;
    const int32_t in_group = next_ % (high_ * wide_);
    const int32_t swath = in_group / (kSwath * wide_);
    const int32_t in_swath = in_group % (kSwath * wide_);
    const int32_t swath_rows = min(kSwath, high_ - swath * kSwath);
    Enter(next_ / (high_ * wide_), tile);
    tile->row = (swath * kSwath + in_swath % swath_rows) * kTileRows;
    tile->column = (in_swath / swath_rows * kCluster + RankInCluster()) * kTileColumns;
    next_ += gridDim.x / kCluster;
    return true;
  }

 private:
  __device__ void Enter(int32_t group, Tile* tile) const {
    if (tile->group == group) return;
    tile->group = group;
    const int32_t* first = table_.At(group / table_.num_groups).UnitsBefore(Unit::k128) + group % table_.num_groups;
    tile->first_block = Uniform(first[0]);
    tile->blocks = Uniform(first[1]) - tile->first_block;
  }

  GroupTable table_;
  int32_t high_;
  int32_t wide_;
  int32_t end_;
  int32_t next_;
};

// Bytes of the scales of a tile side of `count` features, of which so many are left.
__device__ inline uint32_t ScaleBytes(int32_t left, int32_t count) {
  return static_cast<uint32_t>(max(min(left, count), 0)) * sizeof(float);
}

template <ScalingMode kMode>
__device__ void Produce(const Arguments& args, const Addresses& shared) {
  constexpr int kShareRows = kTileRows / kCluster;
  const int32_t share = RankInCluster() * kShareRows;
  Tiles tiles(args);
  Tile tile;
  Stage stage;
  int32_t group = -1;
  while (tiles.Next(&tile)) {
    if (tile.group != group) {
      group = tile.group;
      AcquireTensorMap(args.maps.X(group));
      AcquireTensorMap(args.maps.Dy(group));
    }
    uint32_t bytes = sizeof(Shared::x[0]) + sizeof(Shared::dy[0]);
    uint32_t x_scale_bytes = 0;
    uint32_t dy_scale_bytes = 0;
    if constexpr (kMode == ScalingMode::kBlock1D) {
      x_scale_bytes = ScaleBytes(args.in_features - tile.row, kTileRows);
      dy_scale_bytes = ScaleBytes(args.out_features - tile.column, kTileColumns);
      bytes += x_scale_bytes + dy_scale_bytes;
    }
    for (int32_t block = 0; block < tile.blocks; ++block, stage.Advance()) {
      const int s = stage.index;
      WaitForPhase(shared.Empty(s), stage.parity ^ 1);
      if (threadIdx.x % 32 == 0) {
        const uint32_t full = shared.Full(s);
        const int32_t token = block * kStageTokens;
        ArriveExpecting(full, bytes);
        LoadBox<kCluster>(shared.X(s) + share * kStageTokens, args.maps.X(group), token, tile.row + share, full);
        LoadBox<1>(shared.Dy(s), args.maps.Dy(group), token, tile.column, full);
        if constexpr (kMode == ScalingMode::kBlock1D) {
          const int64_t scale_row = tile.first_block + block;
          LoadBytes(shared.XScale(s), args.x_scale + scale_row * args.in_features + tile.row, x_scale_bytes, full);
          if (dy_scale_bytes > 0) {
            LoadBytes(shared.DyScale(s), args.dy_scale + scale_row * args.out_features + tile.column, dy_scale_bytes,
                      full);
          }
        }
      }
      __syncwarp();
    }
  }
}

// The first row in a tile of a math group's product in each wave.
__device__ inline int FirstRow(int group, int wave) { return (wave * kMathGroups + group) * Fragment::kRows; }

// Where a thread of a math group stands in the products of its group.
struct Place {
  int group;
  int warp;
  int lane;

  // Its first row of a fragment; the other is 8 further.
  __device__ int Row() const { return warp * 16 + lane / 4; }
  // The first of its two columns of each 8.
  __device__ int Column() const { return lane % 4 * 2; }
};

// A thread's scales of the columns of a tile. Those of the first half stay in registers for all waves; there is no room
// for more, and reading each of them once per wave takes a third of shared memory's time.
struct ColumnScales {
  static constexpr int kKept = Fragment::kColumns / 8 / 2;
  uint32_t address;
  float2 kept[kKept];

  __device__ __forceinline__ void Load() {
#pragma unroll
    for (int i = 0; i < kKept; ++i) kept[i] = LoadSharedPair(address + 8 * i * sizeof(float));
  }
  __device__ __forceinline__ float2 Get(int i) const {
    return i < kKept ? kept[i % kKept] : LoadSharedPair(address + 8 * i * sizeof(float));
  }
};

// Adds a product times the scales of its two rows and of its columns.
__device__ __forceinline__ void AddScaled(const Fragment& product, const float (&row_scale)[2],
                                          const ColumnScales& column_scales, Fragment& sum) {
#pragma unroll
  for (int i = 0; i < Fragment::kColumns / 8; ++i) {
    const float2 column_scale = column_scales.Get(i);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int j = 4 * i + 2 * half;
      sum.value[j] += product.value[j] * (row_scale[half] * column_scale.x);
      sum.value[j + 1] += product.value[j + 1] * (row_scale[half] * column_scale.y);
    }
  }
}

// Writes a fragment to shared memory as boxes of 32 columns. Odd rows exchange columns that lie 64 bytes apart, so that
// the lanes which write at once have all banks between them.
__device__ __forceinline__ void WriteBoxes32(const Fragment& fragment, const Place& place, uint32_t staging) {
  const bool odd = place.Row() % 2 != 0;
  const int first_byte = (odd ? 64 : 0) + place.Column() * static_cast<int>(sizeof(float));
  const uint32_t first = staging + place.Row() * kBoxRowBytes + (first_byte ^ (place.Row() % 8 * 16));
#pragma unroll
  for (int i = 0; i < Fragment::kColumns / 8; i += 4) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t offset = i / 4 * kBoxBytes + half * 8 * kBoxRowBytes;
      const auto columns = [&](int block) {
        const float* value = fragment.value + 4 * (i + block) + 2 * half;
        return make_float2(value[0], value[1]);
      };
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float2 near = columns(j);
        const float2 far = columns(j + 2);
        StoreShared((first ^ (32 * j)) + offset, odd ? far : near);
        StoreShared((first ^ (32 * j) ^ 64) + offset, odd ? near : far);
      }
    }
  }
}

template <typename T>
__device__ uint32_t PackPair(float low, float high);

template <>
__device__ uint32_t PackPair<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

template <>
__device__ uint32_t PackPair<__half>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

// The same with 16-bit numbers and boxes of 64 columns.
template <typename T>
__device__ __forceinline__ void WriteBoxes16(const Fragment& fragment, const Place& place, uint32_t staging) {
  const int row = place.warp * 16 + place.lane % 16;
#pragma unroll
  for (int i = 0; i < Fragment::kColumns / 8; i += 2) {
    const uint32_t box = staging + i / 8 * kBoxBytes;
    const int byte = (i % 8 + place.lane / 16) * 16;
    const float* value = fragment.value + 4 * i;
    StoreMatrices(box + row * kBoxRowBytes + (byte ^ (row % 8 * 16)), PackPair<T>(value[0], value[1]),
                  PackPair<T>(value[2], value[3]), PackPair<T>(value[4], value[5]), PackPair<T>(value[6], value[7]));
  }
}

// Stores 64 rows of a tile, from `row` on, which are staged.
__device__ void StoreStaged(const Arguments& args, const Tile& tile, int32_t row, uint32_t staging) {
  const int box_columns = kBoxRowBytes / (args.dkernel_type == CUDA_R_32F ? 4 : 2);
  const int32_t end = min(args.out_features, tile.column + kTileColumns);
  for (int32_t column = tile.column; column < end; column += box_columns, staging += kBoxBytes) {
    if (args.accumulate) {
      AddBox(&args.dkernel, staging, column, row, tile.group);
    } else {
      StoreBox(&args.dkernel, staging, column, row, tile.group);
    }
  }
  CommitStores();
}

// Stores 64 rows of a tile, through memory that the last store of this math group may still be reading.
__device__ __forceinline__ void Store(const Arguments& args, const Tile& tile, int32_t row, const Place& place,
                                      uint32_t staging, const Fragment& sum) {
  const bool leads = place.warp == 0 && place.lane == 0;
  if (leads) WaitForReads();
  SynchronizeWarpGroup(place.group);
  if (args.dkernel_type == CUDA_R_32F) {
    WriteBoxes32(sum, place, staging);
  } else if (args.dkernel_type == CUDA_R_16BF) {
    WriteBoxes16<__nv_bfloat16>(sum, place, staging);
  } else {
    WriteBoxes16<__half>(sum, place, staging);
  }
  FenceSharedStores();
  SynchronizeWarpGroup(place.group);
  if (leads) StoreStaged(args, tile, row, staging);
}

template <typename XType, typename DyType>
__device__ __forceinline__ void StartProduct(uint32_t x, uint32_t dy, Fragment& product) {
  const uint64_t a = SwizzledOperand(x);
  const uint64_t b = SwizzledOperand(dy);
  Pin(product);
  BeginProducts();
#pragma unroll
  for (int i = 0; i < kStageTokens / 32; ++i) {
    Multiply<XType, DyType>(a + i * (32 >> 4), b + i * (32 >> 4), i > 0, product);
  }
  CommitProducts();
  Pin(product);
}

// A warp has read a stage, which blocks of the whole cluster fill.
__device__ __forceinline__ void Release(uint32_t empty, int lane) {
  __syncwarp();
  if (lane < kCluster) ArriveAt(empty, lane);
}

template <typename XType, typename DyType, ScalingMode kMode>
__device__ void Multiply(const Arguments& args, const Addresses& shared) {
  const Place place{Uniform(threadIdx.x / kWarpGroupThreads), Uniform(threadIdx.x % kWarpGroupThreads / 32),
                    static_cast<int>(threadIdx.x) % 32};
  Tiles tiles(args);
  Tile tile;
  Stage stage;
  while (tiles.Next(&tile)) {
    Fragment sums[kWaves];
#pragma unroll
    for (Fragment& sum : sums) {
#pragma unroll
      for (float& value : sum.value) value = 0.0f;
    }
    for (int32_t block = 0; block < tile.blocks; ++block, stage.Advance()) {
      const int s = stage.index;
      ColumnScales column_scales{static_cast<uint32_t>(shared.DyScale(s) + place.Column() * sizeof(float)), {}};
      WaitForPhase(shared.Full(s), stage.parity);
#pragma unroll
      for (int wave = 0; wave < kWaves; ++wave) {
        Fragment product;
        StartProduct<XType, DyType>(shared.X(s) + FirstRow(place.group, wave) * kStageTokens, shared.Dy(s), product);
        const uint32_t x_scale = shared.XScale(s) + (FirstRow(place.group, wave) + place.Row()) * sizeof(float);
        if (kMode == ScalingMode::kBlock1D && wave == 0) column_scales.Load();
        WaitForProducts();
        Pin(product);
        if constexpr (kMode == ScalingMode::kBlock1D) {
          AddScaled(product, {LoadShared(x_scale), LoadShared(x_scale + 8 * sizeof(float))}, column_scales, sums[wave]);
        } else {
#pragma unroll
          for (int i = 0; i < Fragment::kValues; ++i) sums[wave].value[i] += product.value[i];
        }
      }
      Release(shared.Empty(s), place.lane);
    }
    if (tile.column >= args.out_features || (args.accumulate && tile.blocks == 0)) continue;
    const float scale = kMode == ScalingMode::kTensor ? args.x_scale[tile.group] * args.dy_scale[tile.group] : 1.0f;
#pragma unroll
    for (int wave = 0; wave < kWaves; ++wave) {
      const int32_t row = tile.row + FirstRow(place.group, wave);
      if (row >= args.in_features) continue;
      if constexpr (kMode == ScalingMode::kTensor) {
#pragma unroll
        for (float& value : sums[wave].value) value *= scale;
      }
      Store(args, tile, row, place, shared.Staging(place.group), sums[wave]);
    }
  }
  WaitForStores();
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

template <typename XType, typename DyType, ScalingMode kMode>
__global__ void __launch_bounds__(kThreads, 1) GroupedWgrad(const __grid_constant__ Arguments args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t memory[];
  const Addresses shared{SharedAddress(memory)};
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      InitBarrier(shared.Full(i), 1);
      InitBarrier(shared.Empty(i), kMathWarps * kCluster);
    }
    FenceBarrierInit();
  }
  SynchronizeCluster();
  if (threadIdx.x >= kMathGroups * kWarpGroupThreads) {
    ReleaseRegisters<kProducerRegisters>();
    if (Uniform(threadIdx.x / 32) == kMathWarps) Produce<kMode>(args, shared);
  } else {
    AcquireRegisters<kMathRegisters>();
    Multiply<XType, DyType, kMode>(args, shared);
  }
  // No block may end while another of its cluster still copies to it or arrives at its barriers.
  __syncwarp();
  SynchronizeCluster();
#endif
}

}  // namespace hopper
}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_HOPPER_WGRAD_KERNEL_CUH_
