// FP8 weight gradients. Rows are features of x, columns are features of dy, and a stage is 128 tokens.

#include "csrc/gemm/sm90/products.h"

#include <library_types.h>

#include <cstdint>

#include "csrc/common/warp.cuh"
#include "csrc/gemm/sm90/instructions.cuh"
#include "csrc/gemm/sm90/launch.cuh"
#include "csrc/gemm/sm90/staging.cuh"
#include "csrc/gemm/sm90/tensor_map.h"
#include "csrc/gemm/sm90/tile_products.cuh"
#include "csrc/groups/layout.h"
#include "csrc/groups/table.cuh"

namespace jax_grouped::sm90 {

// Tensor maps of both operands, for every group.
struct GroupMaps {
  CUtensorMap* base;

  __device__ CUtensorMap* X(int32_t group) const { return base + 2 * static_cast<int64_t>(group); }
  __device__ CUtensorMap* Dy(int32_t group) const { return X(group) + 1; }
};

struct WgradArguments {
  CUtensorMap dweight;
  GroupMaps maps;
  GroupTable table;       // the first batch element's
  int32_t cluster_tiles;  // of all groups
  int32_t* tile_counter;  // of TileScheduler
  const float* x_scale;
  const float* dy_scale;
  int32_t in_features;
  int32_t out_features;
  cudaDataType_t dweight_type;
  bool accumulate;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// The tiles of a block, one per cluster tile.
template <ScalingMode kMode>
class WgradTiles {
 public:
  __device__ explicit WgradTiles(const WgradArguments& args)
      : args_(args),
        high_(static_cast<int32_t>(CeilDiv(args.in_features, kTileRows))),
        wide_(static_cast<int32_t>(CeilDiv(args.out_features, kCluster * kTileColumns))) {}

  __device__ const OutputTile& At(int32_t index) {
    if (const int32_t group = index / (high_ * wide_); group != tile_.group) Enter(group);
    SetTilePosition<kTileRows, kCluster * kTileColumns>(index % (high_ * wide_), high_, wide_, &tile_);
    tile_.column += static_cast<int32_t>(RankInCluster()) * kTileColumns;
    tile_.rows = args_.in_features - tile_.row;
    return tile_;
  }

  // Returns the tile that At found last.
  __device__ const OutputTile& Last() const { return tile_; }

  // Returns the first block of the last tile's tokens, counted through all groups.
  __device__ int32_t FirstBlock() const { return first_block_; }

 private:
  __device__ void Enter(int32_t group) {
    const GroupTable& table = args_.table;
    const int32_t* first = table.At(group / table.num_groups).BlocksBefore(RowBlock::k128) + group % table.num_groups;
    first_block_ = Uniform(first[0]);
    tile_.group = group;
    tile_.stages = Uniform(first[1]) - first_block_;
    if constexpr (kMode == ScalingMode::kTensor) {
      tile_.scale = MultiplyScales(args_.x_scale[group], args_.dy_scale[group]);
    }
  }

  const WgradArguments& args_;
  int32_t high_;
  int32_t wide_;
  OutputTile tile_;
  int32_t first_block_ = 0;
};

// A tile of the accumulator follows the tile's operands through the ring, in kAccumulatorStages stages. It has four
// parts of kAccumulatorBoxes boxes, one for each math group and wave. Each of the first three fills `rows` of a stage,
// and the halves of the last one fill `columns` of the first kColumnStages stages. The L2 cache could add the result to
// the accumulator instead, but only at 0.3e12 numbers per second.
constexpr int kAccumulatorStages = 3;
constexpr int kColumnStages = 2;
constexpr int kAccumulatorBoxColumns = kBoxRowBytes / sizeof(float);
constexpr int kAccumulatorBoxes = kTileColumns / kAccumulatorBoxColumns;
static_assert(kWaves * kMathGroups == kAccumulatorStages + 1);
static_assert(kAccumulatorBoxes * kBoxBytes == sizeof(Shared::rows[0]));
static_assert(kAccumulatorBoxes / kColumnStages * kBoxBytes == sizeof(Shared::columns[0]));

// Copies a tile of the accumulator. The math groups add it last, so that the products hide the copies.
template <ScalingMode kMode>
__device__ void LoadAccumulator(const WgradArguments& args, const Addresses& shared, const OutputTile& tile,
                                Stage& stage) {
  const auto load = [&](uint32_t boxes, int part, int first_box, int count, uint32_t full) {
    for (int box = 0; box < count; ++box) {
      const int32_t column = tile.column + (first_box + box) * kAccumulatorBoxColumns;
      LoadBox<1>(boxes + box * kBoxBytes, &args.dweight, {column, tile.row + part * Fragment::kRows, tile.group}, full);
    }
  };
#pragma unroll 1
  for (int i = 0; i < kAccumulatorStages; ++i, stage.Advance()) {
    const int s = stage.index;
    const bool has_columns = i < kColumnStages;
    WaitForPhase(shared.Empty(s), stage.parity ^ 1);
    if (Lane() == 0) {
      const uint32_t full = shared.Full(s);
      ArriveExpecting(full, sizeof(Shared::rows[0]) + (has_columns ? sizeof(Shared::columns[0]) : 0));
      load(shared.Rows(s), i, 0, kAccumulatorBoxes, full);
      if (has_columns) {
        constexpr int kCount = kAccumulatorBoxes / kColumnStages;
        load(shared.Columns(s), kAccumulatorStages, i * kCount, kCount, full);
      }
    }
    // The barrier counts every lane with 1x128 scales, which these stages do not have.
    if constexpr (kMode == ScalingMode::kBlock1D) Arrive(shared.Full(s));
    __syncwarp();
  }
}

template <ScalingMode kMode>
__device__ void ProduceWgrad(const WgradArguments& args, const Addresses& shared) {
  // Each block of the cluster copies one slice of the tile's rows to all blocks.
  constexpr int kSliceRows = kTileRows / kCluster;
  const int32_t first_in_slice = RankInCluster() * kSliceRows;
  WgradTiles<kMode> tiles(args);
  TileScheduler scheduler(shared, args.tile_counter);
  TileQueue queue(shared);
  Stage stage;
  int32_t group = -1;
  // Finds a tile and tells the math groups. Returns false after the last one.
  const auto begin = [&](int32_t index) {
    if (index >= args.cluster_tiles) return false;
    const OutputTile& tile = tiles.At(index);
    scheduler.Request();
    queue.Post(tile);
    if (tile.group != group) {
      group = tile.group;
      AcquireTensorMap(args.maps.X(group));
      AcquireTensorMap(args.maps.Dy(group));
    }
    return true;
  };
  bool more = begin(FirstTileIndex());
  while (more) {
    const OutputTile tile = tiles.Last();
    constexpr uint32_t kBytes = sizeof(Shared::rows[0]) + sizeof(Shared::columns[0]);
    for (int32_t block = 0; block < tile.stages; ++block, stage.Advance()) {
      if (block == tile.stages / 2) scheduler.Publish();
      const int s = stage.index;
      WaitForPhase(shared.Empty(s), stage.parity ^ 1);
      if (Lane() == 0) {
        const uint32_t full = shared.Full(s);
        const int32_t token = block * kDepth;
        ArriveExpecting(full, kBytes);
        LoadBox<kCluster>(shared.Rows(s) + first_in_slice * kDepth, args.maps.X(group),
                          {token, tile.row + first_in_slice}, full);
        LoadBox<1>(shared.Columns(s), args.maps.Dy(group), {token, tile.column}, full);
      }
      if constexpr (kMode == ScalingMode::kBlock1D) {
        const int64_t scale_row = tiles.FirstBlock() + block;
        CopyFloats<kTileRows>(shared.RowScale(s), args.x_scale + scale_row * args.in_features + tile.row,
                              args.in_features - tile.row);
        CopyFloats<kTileColumns>(shared.ColumnScale(s), args.dy_scale + scale_row * args.out_features + tile.column,
                                 args.out_features - tile.column);
        ArriveAfterCopies(shared.Full(s));
      }
      __syncwarp();
    }
    if (tile.stages == 0) scheduler.Publish();
    // Finds the next tile first: the stages of the accumulator wait for products.
    more = begin(scheduler.Next());
    if (args.accumulate && tile.stages > 0) LoadAccumulator<kMode>(args, shared, tile, stage);
  }
  queue.Post(OutputTile());
}

// Scales of a thread's columns of a tile: two scales in each 8 columns, read from `first` on.
struct ColumnScales {
  float2 pairs[Fragment::kColumns / 8];

  __device__ __forceinline__ void Load(uint32_t first) {
#pragma unroll
    for (int i = 0; i < Fragment::kColumns / 8; ++i) pairs[i] = LoadSharedPair(first + 8 * i * sizeof(float));
  }
};

// Adds a product times the scales of its rows and columns. fmaf(a, b, 0) computes a * b with another instruction: FMUL
// for all of these products, one after another, would make the whole kernel 11 % slower.
__device__ __forceinline__ void AddScaled(const Fragment& product, const RowScales& row_scales,
                                          const ColumnScales& column_scales, Fragment& sum) {
#pragma unroll
  for (int i = 0; i < Fragment::kColumns / 8; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float row_scale = row_scales.rows[half];
      const int j = 4 * i + 2 * half;
      sum.value[j] += fmaf(product.value[j], row_scale, 0.0f) * column_scales.pairs[i].x;
      sum.value[j + 1] += fmaf(product.value[j + 1], row_scale, 0.0f) * column_scales.pairs[i].y;
    }
  }
}

// Adds the boxes of a stage of LoadAccumulator to the sums of the math group that they are for. Both groups must wait
// for every stage and release it.
template <int kStage>
__device__ __forceinline__ void AddAccumulator(const Addresses& shared, const ThreadPosition& position, Stage& stage,
                                               Fragment (&sums)[kWaves]) {
  const int s = stage.index;
  WaitForPhase(shared.Full(s), stage.parity);
  if (kStage % kMathGroups == position.group) {
    AddBoxes32<kAccumulatorBoxes>(shared.Rows(s), position, 0, sums[kStage / kMathGroups]);
  }
  if (kStage < kColumnStages && position.group == kMathGroups - 1) {
    constexpr int kFirstColumn = kStage * kTileColumns / kColumnStages;
    AddBoxes32<kAccumulatorBoxes / kColumnStages>(shared.Columns(s), position, kFirstColumn, sums[kWaves - 1]);
  }
  // Copies of boxes will overwrite what this thread has read.
  FenceShared();
  Release(shared.Empty(s));
  stage.Advance();
}

template <typename XType, typename DyType, ScalingMode kMode>
__device__ void MultiplyWgrad(const WgradArguments& args, const Addresses& shared, const ThreadPosition& position) {
  TileQueue queue(shared);
  Staging<kStagedBoxes> staging(shared.Staging(position.group), position, args.dweight_type);
  Stage stage;
  for (;;) {
    const OutputTile tile = queue.Take();
    if (Uniform(tile.group) < 0) break;
    Fragment sums[kWaves];
    Clear(sums);
    for (int32_t block = 0; block < tile.stages; ++block, stage.Advance()) {
      const int s = stage.index;
      ColumnScales column_scales;
      RowScales row_scales[kWaves];
      WaitForPhase(shared.Full(s), stage.parity);
#pragma unroll
      for (int wave = 0; wave < kWaves; ++wave) {
        Fragment product;
        StartProduct<XType, DyType>(shared.Rows(s) + FirstRow(position.group, wave) * kDepth, shared.Columns(s),
                                    product);
        // All scales are read during the first product. Shared memory takes hundreds of cycles to answer, because the
        // tensor cores read it, too.
        if constexpr (kMode == ScalingMode::kBlock1D) {
          if (wave == 0) {
            column_scales.Load(shared.ColumnScale(s) + position.Column() * sizeof(float));
#pragma unroll
            for (int i = 0; i < kWaves; ++i) row_scales[i].Load(shared, s, position, i);
          }
        }
        WaitForProducts();
        Pin(product);
        if constexpr (kMode == ScalingMode::kBlock1D) {
          AddScaled(product, row_scales[wave], column_scales, sums[wave]);
        } else {
          Add(product, sums[wave]);
        }
      }
      Release(shared.Empty(s));
    }
    if constexpr (kMode == ScalingMode::kTensor) {
#pragma unroll
      for (Fragment& sum : sums) Scale(tile.scale, sum);
    }
    if (args.accumulate && tile.stages == 0) continue;
#pragma unroll
    for (int wave = 0; wave < kWaves; ++wave) {
      // The last stage has what the first group adds to its second wave. The first wave is stored before it arrives.
      if (args.accumulate) {
        if (wave == 0) {
          AddAccumulator<0>(shared, position, stage, sums);
          AddAccumulator<1>(shared, position, stage, sums);
        } else {
          AddAccumulator<2>(shared, position, stage, sums);
        }
      }
      const int first_row = FirstRow(position.group, wave);
      if (tile.column >= args.out_features || first_row >= tile.rows) continue;
      staging.StoreRows(sums[wave], args.out_features - tile.column, [&](uint32_t box, int column) {
        StoreBox(&args.dweight, {tile.column + column, tile.row + first_row, tile.group}, box);
      });
    }
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

template <typename XType, typename DyType, ScalingMode kMode>
__global__ void __cluster_dims__(kCluster) __launch_bounds__(kThreads, 1)
    Fp8Wgrad(const __grid_constant__ WgradArguments args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t memory[];
  const Addresses shared{SharedAddress(memory)};
  SetUpCluster<kStages>(shared, kFullArrivals<kMode>, kEmptyArrivals, 32);
  const auto produce = [&] {
    if (LeadsProducer()) ProduceWgrad<kMode>(args, shared);
  };
  RunBlock<kRegisters>(
      produce, [&](const ThreadPosition& position) { MultiplyWgrad<XType, DyType, kMode>(args, shared, position); });
#endif
}

namespace {

constexpr int kSetupThreads = 512;

struct WgradSetup {
  CUtensorMap maps[2];  // without any group's sizes yet
  const uint8_t* data[2];
  int32_t features[2];
  RowBlockCounts element_row_blocks;
  GroupTable table;
  GroupMaps group_maps;
  int32_t* tile_counter;  // gets zero
};

// Finds the groups of a batch element in each block and describes their operands.
__global__ void __launch_bounds__(kSetupThreads) SetUpFp8Wgrad(Groups batch, const __grid_constant__ WgradSetup args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  cudaTriggerProgrammaticLaunchCompletion();
  const auto element = static_cast<int32_t>(blockIdx.x);
  if (element == 0 && threadIdx.x == 0) *args.tile_counter = 0;
  const GroupTable table = args.table.At(element);
  FillGroupTable<kSetupThreads, Counts<RowBlock::k16, RowBlock::k128>>(batch, element, args.element_row_blocks, table);
  const int operand = threadIdx.x % 2;
  WriteMaps(args.maps[operand], args.group_maps.X(element * batch.num_groups), 2 * batch.num_groups,
            [&](CUtensorMap* map, int32_t index) {
              const int32_t group = index / 2;
              const int32_t chunk = table.BlocksBefore(RowBlock::k16)[group];
              const int32_t chunks = table.BlocksBefore(RowBlock::k16)[group + 1] - chunk;
              // Nothing is read for an empty group, but a map without columns would be invalid.
              const uint32_t tokens = max(chunks, 1) * kFp8Alignment;
              const int64_t first = static_cast<int64_t>(args.features[operand]) * chunk * kFp8Alignment;
              ReplaceMatrix(map, args.data[operand] + first, tokens, tokens);
            });
#endif
}

}  // namespace

int64_t MaxFp8WgradWorkspaceBytes(int64_t all_groups) { return GroupRowsWorkspace::MaxBytes(all_groups, 2); }

Status LaunchFp8Wgrad(cudaStream_t stream, int device, const GemmProblem& problem, const Groups& groups,
                      const GemmBuffers& buffers) {
  const GroupRowsWorkspace workspace(buffers.workspace, groups.batch, groups.num_groups, 2);
  const auto in_features = static_cast<int32_t>(problem.in_features);
  const auto out_features = static_cast<int32_t>(problem.out_features);
  WgradSetup setup{};
  setup.data[0] = static_cast<const uint8_t*>(buffers.a);
  setup.data[1] = static_cast<const uint8_t*>(buffers.b);
  setup.features[0] = in_features;
  setup.features[1] = out_features;
  setup.element_row_blocks = LayoutOfA(problem, groups).ElementRowBlocks();
  setup.table = workspace.table;
  setup.group_maps = {workspace.maps};
  setup.tile_counter = workspace.tile_counter;
  // The maps have the smallest number of tokens until the groups are known.
  JAX_GROUPED_RETURN_IF_FAILED(
      EncodeTensorMap(Fp8Boxes(buffers.a, kFp8Alignment, in_features, kTileRows / kCluster), &setup.maps[0]));
  JAX_GROUPED_RETURN_IF_FAILED(
      EncodeTensorMap(Fp8Boxes(buffers.b, kFp8Alignment, out_features, kTileColumns), &setup.maps[1]));
  const dim3 elements(groups.batch);
  JAX_GROUPED_RETURN_IF_FAILED(Launch("Launching the setup of a weight gradient", stream, {elements, kSetupThreads},
                                      SetUpFp8Wgrad, groups, setup));

  const int64_t group_tiles = CeilDiv(in_features, kTileRows) * CeilDiv(out_features, kCluster * kTileColumns);
  WgradArguments args{};
  args.maps = {workspace.maps};
  args.table = workspace.table;
  args.cluster_tiles = groups.AllGroups() * static_cast<int32_t>(group_tiles);
  args.tile_counter = workspace.tile_counter;
  args.x_scale = static_cast<const float*>(buffers.a_scale);
  args.dy_scale = static_cast<const float*>(buffers.b_scale);
  args.in_features = in_features;
  args.out_features = out_features;
  args.dweight_type = problem.result_type;
  args.accumulate = problem.accumulate;
  JAX_GROUPED_RETURN_IF_FAILED(
      EncodeTensorMap(WgradBoxes(problem, buffers.d, groups.AllGroups(), Fragment::kRows), &args.dweight));
  return WithTypes(problem, [&](auto x, auto dy, auto mode) {
    const auto kernel = Fp8Wgrad<decltype(x), decltype(dy), decltype(mode)::value>;
    return LaunchClusters("Launching a weight gradient", stream, device, sizeof(Shared), args.cluster_tiles, kernel,
                          args);
  });
}

}  // namespace jax_grouped::sm90
