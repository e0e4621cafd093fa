// The backward pass of a gated activation, quantized: the gradient of the activation's input in both orientations, and
// the columns of the activation's result. Each SM has one block, which takes one tile of up to 128 rows and 128 gates
// after the other. All three results of a tile are computed from one copy of the inputs and are quantized from
// registers, while the inputs of the next tile are copied to shared memory. Warps arrive at a barrier, do other work,
// and only then wait for the others, so that loads, arithmetic and stores of different warps overlap. Two kernels, one
// for the gradient and one for the activation's result, took about 1.6 times as long on an H200.

#include "csrc/quantize/pass.cuh"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cuda/ptx>

#include "csrc/common/activation.cuh"
#include "csrc/common/device.h"
#include "csrc/common/fp8.cuh"
#include "csrc/common/launch.cuh"
#include "csrc/common/warp.cuh"
#include "csrc/groups/layout.cuh"
#include "csrc/quantize/activation.cuh"
#include "csrc/quantize/source.cuh"

namespace jax_grouped {

// A pass in 128 columns.
struct PassTile {
  const Chunk* chunks;  // null after the last tile
  int count;
  uint32_t first_column;
};

// Iterator over the tiles of a block, in shared memory. One thread at a time uses it. Blocks take work items as they
// become free, because some items have more passes than others. The next item is taken while an item is looked up, so
// that the thread waits for memory once per item.
class TileIterator {
 public:
  __device__ void Start(const QuantizeArguments& args, uint32_t column_tiles) {
    column_tiles_ = column_tiles;
    count_ = WorkItem::Count(args, column_tiles);
    index_ = Take(args);
    LookUp(args);
  }

  // Returns the next tile.
  __device__ PassTile Next(const QuantizeArguments& args) {
    while (item_.chunks != nullptr && turn_ == item_.passes) LookUp(args);
    if (item_.chunks == nullptr) return {};
    const int begin = item_.begins[turn_];
    const int count = item_.ends[turn_] - begin;
    ++turn_;
    return {item_.chunks + begin, count, item_.first_column};
  }

 private:
  static constexpr int kMostPasses = Window::kMostPasses / Window::kParts;
  static_assert(kMostPasses * Window::kParts == Window::kMostPasses);

  // The passes of a work item.
  struct Item {
    const Chunk* chunks;  // the window's; null after the last item
    int passes;
    int begins[kMostPasses];
    int ends[kMostPasses];
    uint32_t first_column;
  };

  __device__ static uint32_t Take(const QuantizeArguments& args) { return atomicAdd(&args.windows->taken, 1u); }

  __device__ void LookUp(const QuantizeArguments& args) {
    turn_ = 0;
    if (index_ >= count_) {
      item_ = {};
      return;
    }
    const uint32_t next = Take(args);
    const WorkItem work(args, index_, column_tiles_);
    const Window& window = work.exists ? *WindowAt(args, work.element, work.window) : *args.windows;
    const auto passes = static_cast<int>(CeilDiv(window.num_passes - work.part, Window::kParts));
    Item item{window.chunks, work.exists ? max(passes, 0) : 0, {}, {}, work.first_column};
#pragma unroll
    for (int i = 0; i < kMostPasses; ++i) {
      // Read before it is known whether the pass exists.
      item.begins[i] = window.pass_begins[work.part + i * Window::kParts];
      item.ends[i] = window.pass_begins[work.part + i * Window::kParts + 1];
    }
    item_ = item;
    index_ = next;
  }

  uint32_t column_tiles_;
  uint32_t count_;
  uint32_t index_;  // the work item that was taken last
  Item item_;       // the one before
  int turn_;        // its passes that were returned
};

// Arguments of the kernel besides those of every quantization, whose results are those of the gradient.
struct GatedGradientArguments {
  QuantizeArguments gradient;
  const void* inputs;        // [tokens, 2 gates], the gates first
  const void* gradients;     // [tokens, gates], of the activation's result
  const float* row_weights;  // [tokens], or null for 1
  float* inner_products;     // [tokens, tiles of gates], or null
  Activation activation;
  uint8_t* activated_data;
  ScaleLayout activated_layout;

  __device__ int64_t Gates() const { return activated_layout.features; }
  JAX_GROUPED_HOST_DEVICE uint32_t ColumnTiles() const {
    return static_cast<uint32_t>(CeilDiv(activated_layout.features, kTileColumns));
  }
};

// Two warps have a slot, and each lane has 8 columns of 4 successive rows.
constexpr int kGatedThreads = 64 * kSlots;
constexpr int kGatedRows = 4;
constexpr int kRowParts = kBlock / kGatedRows;

// The results: the gradients of the gates and of the factors, and the activation's result.
constexpr int kGatedResults = 3;
constexpr int kGateGradient = 0;
constexpr int kFactorGradient = 1;
constexpr int kActivated = 2;

// Events of a tile. Each has a barrier in shared memory, at which every thread arrives once and waits once per tile.
enum GatedEvent {
  kAmaxTold,       // the largest values of columns and of warps are in shared memory
  kScalesFound,    // the scales of columns are there, too, and the tile after the next one
  kColumnsStaged,  // the data of columns are there, and the chunks of the tile after the next one
  kColumnsRead,    // the tile is no longer read
  kGatedEvents
};

struct GatedShared {
  static constexpr int kInputs = 3;  // gates, factors and gradients
  static constexpr int kTiles = 3;   // the current one and the next two

  // 8 columns of each row of a lane, for each input, and of the activation's result. Only the thread that has written
  // them reads them, so they need no barrier.
  uint4 staged[kInputs][kGatedRows][kGatedThreads];
  uint4 activated[kGatedRows][2][kGatedThreads];
  union {
    float amax[kGatedResults][kRowParts][kTileColumns];
    // The data of columns: for each one, 8 times 16 bytes.
    uint4 columns[kGatedResults][kTileColumns][kSlots];
  };
  // The scales of the columns of each row block, at the block's first slot.
  float scales[kGatedResults][kSlots][kTileColumns];
  uint32_t warp_amax[2][kGatedThreads / 32];  // of the gradient, and of the activation's result
  TileIterator walk;
  PassTile tiles[kTiles];
  Pass passes[kTiles];  // in a slot that does not exist: a chunk without rows
  uint64_t barriers[kGatedEvents];
};
static_assert(sizeof(GatedShared) <= 227 * 1024, "more than a block can have on Hopper and Blackwell");

template <ScalingMode kMode, typename Fp8, typename T>
class GatedGradient {
  using Pair = PairOf<float>;
  static constexpr bool kBlockScales = kMode == ScalingMode::kBlock1D;
  // 8 columns of the lane's rows.
  using Patch = Pair[kGatedRows][4];

 public:
  __device__ GatedGradient(const GatedGradientArguments& args, GatedShared& shared) : args_(args), shared_(shared) {}

  // Quantizes the tiles of the block. All threads of the block must call it.
  __device__ void Run() {
    if (threadIdx.x == 0) {
      for (uint64_t& barrier : shared_.barriers) cuda::ptx::mbarrier_init(&barrier, kGatedThreads);
      shared_.walk.Start(args_.gradient, args_.ColumnTiles());
      for (int i = 0; i < 2; ++i) shared_.tiles[i] = shared_.walk.Next(args_.gradient);
    }
    __syncthreads();
    for (int i = 0; i < 2; ++i) StoreChunk(i, LoadChunk(i));
    __syncthreads();
    if (shared_.tiles[0].chunks == nullptr) return;
    float weight = LoadWeight(0);
    Copy(0);
    int current = 0;
    int next = 1;
    int after = 2;
    uint32_t parity = 0;
#pragma unroll 1
    while (shared_.tiles[current].chunks != nullptr) {
      const float next_weight = LoadWeight(next);
      Quantize(current, weight, next, after, parity);
      parity ^= 1;
      weight = next_weight;
      const int free = current;
      current = next;
      next = after;
      after = free;
    }
  }

 private:
  __device__ void Arrive(GatedEvent event) const { (void)cuda::ptx::mbarrier_arrive(&shared_.barriers[event]); }
  // Waits for the event of the tile whose number has this parity.
  __device__ void Wait(GatedEvent event, uint32_t parity) const {
    while (!cuda::ptx::mbarrier_try_wait_parity(&shared_.barriers[event], parity)) continue;
  }

  __device__ static int Slot() { return Warp() / 2; }
  // The part of the tile that the lane has, counted in 4 rows.
  __device__ static int Part() { return threadIdx.x / 16; }
  __device__ static int FirstRow() { return Part() % (kFp8Alignment / kGatedRows) * kGatedRows; }
  __device__ static int Column() { return threadIdx.x % 16 * 8; }

  __device__ const Chunk& SlotChunk(int tile) const { return shared_.passes[tile].chunks[Slot()]; }
  __device__ bool HasSlot(int tile) const { return Slot() < shared_.tiles[tile].count; }

  // Load and store a word of the slot's chunk.
  static constexpr int kChunkWords = sizeof(Chunk) / sizeof(uint32_t);
  __device__ uint32_t LoadChunk(int tile) const {
    if (!HasSlot(tile) || Warp() % 2 != 0 || Lane() >= kChunkWords) return 0;
    return reinterpret_cast<const uint32_t*>(shared_.tiles[tile].chunks + Slot())[Lane()];
  }
  __device__ void StoreChunk(int tile, uint32_t word) const {
    if (Warp() % 2 != 0 || Lane() >= kChunkWords) return;
    reinterpret_cast<uint32_t*>(&shared_.passes[tile].chunks[Slot()])[Lane()] = word;
  }

  // Returns the weight of one of the lane's 4 rows, that of number Lane() % 4. Compute passes it to the other lanes.
  __device__ float LoadWeight(int tile) const {
    const Chunk& chunk = SlotChunk(tile);
    const int row = FirstRow() + Lane() % kGatedRows;
    return args_.row_weights != nullptr && row < chunk.rows ? __ldg(args_.row_weights + chunk.first_row + row) : 1.0f;
  }

  // Starts to copy the inputs of a tile. Rows that do not exist become zeros.
  __device__ void Copy(int tile) const {
    const Chunk& chunk = SlotChunk(tile);
    const int64_t gates = args_.Gates();
    const int64_t column = shared_.tiles[tile].first_column + Column();
    const T* gate = static_cast<const T*>(args_.inputs) + int64_t{chunk.first_row} * 2 * gates + column;
    const T* gradient = static_cast<const T*>(args_.gradients) + chunk.first_row * gates + column;
    const void* const first[GatedShared::kInputs] = {gate, gate + gates, gradient};
    const auto row_bytes = static_cast<uint32_t>(gates * sizeof(T));
#pragma unroll
    for (int i = 0; i < kGatedRows; ++i) {
      const bool exists = FirstRow() + i < chunk.rows;
      const uint64_t row = exists ? FirstRow() + i : 0;
#pragma unroll
      for (int input = 0; input < GatedShared::kInputs; ++input) {
        const uint32_t stride = input < 2 ? 2 * row_bytes : row_bytes;
        CopyAsync(&shared_.staged[input][i][threadIdx.x], static_cast<const char*>(first[input]) + row * stride,
                  exists);
      }
    }
  }

  // Quantizes a tile. Starts to copy the inputs of the next one, and finds the tile after that and its chunks.
  __device__ void Quantize(int tile, float weight, int next, int after, uint32_t parity) const {
    const Chunk& chunk = SlotChunk(tile);
    const uint32_t first_column = shared_.tiles[tile].first_column;
    Patch gate_gradients;
    Patch factor_gradients;
    Pair::Largest activated_amax[4]{};
    float given_gradient = 1.0f;
    float given_activated = 1.0f;
    if constexpr (!kBlockScales) {
      if (HasSlot(tile)) {
        given_gradient = args_.gradient.given_scale[chunk.group];
        given_activated = args_.gradient.given_activated_scale[chunk.group];
      }
    }
    WaitForCopies();
    const uint32_t activated = Compute(chunk, first_column, weight, gate_gradients, factor_gradients, activated_amax);
    Copy(next);
    Wait(kColumnsRead, parity ^ 1);  // of the tile before
    TellAmax(kActivated, activated_amax);
    uint32_t row_amax[2 * kGatedRows];
    const uint32_t gate_amax = FindAmax(kGateGradient, gate_gradients, row_amax);
    const uint32_t largest = max(gate_amax, FindAmax(kFactorGradient, factor_gradients, row_amax + kGatedRows));
    if (Lane() == 0) {
      shared_.warp_amax[0][Warp()] = largest;
      shared_.warp_amax[1][Warp()] = activated;
    }
    Arrive(kAmaxTold);
    const float scale = kBlockScales ? 1.0f : ClampScale(given_gradient).scale;
    const float row_scale = kBlockScales ? FindRowScale(chunk, first_column, row_amax) : scale;
    Wait(kAmaxTold, parity);

    // The last warp finds no scales of columns, so it has the time to wait for memory.
    if (threadIdx.x == kGatedThreads - 32) shared_.tiles[after] = shared_.walk.Next(args_.gradient);
    RecordAmaxes(tile);
    if constexpr (kBlockScales) FindColumnScales(tile);
    Arrive(kScalesFound);
    WriteRows(chunk, first_column, gate_gradients, row_scale, 0);
    Wait(kScalesFound, parity);

    const uint32_t word = LoadChunk(after);
    const float activated_scale = kBlockScales ? 1.0f : ClampScale(given_activated).scale;
    StageColumns<Fp8>(tile, kGateGradient, gate_gradients, scale);
    StageColumns<Fp8>(tile, kFactorGradient, factor_gradients, scale);
    Patch activated_patch;
#pragma unroll
    for (int i = 0; i < kGatedRows; ++i) LoadActivated(i, activated_patch[i]);
    StageColumns<E4m3>(tile, kActivated, activated_patch, activated_scale);
    StoreChunk(after, word);
    Arrive(kColumnsStaged);
    WriteRows(chunk, first_column + args_.Gates(), factor_gradients, row_scale, kGatedRows);
    Wait(kColumnsStaged, parity);

    WriteColumns(tile);
    Arrive(kColumnsRead);
  }

  __device__ void StoreActivated(int row, const Pair (&pairs)[4]) const {
    shared_.activated[row][0][threadIdx.x] = reinterpret_cast<const uint4*>(pairs)[0];
    shared_.activated[row][1][threadIdx.x] = reinterpret_cast<const uint4*>(pairs)[1];
  }
  __device__ void LoadActivated(int row, Pair (&pairs)[4]) const {
    reinterpret_cast<uint4*>(pairs)[0] = shared_.activated[row][0][threadIdx.x];
    reinterpret_cast<uint4*>(pairs)[1] = shared_.activated[row][1][threadIdx.x];
  }

  // Computes the lane's part of the results, and writes the inner products. The activation's result goes to shared
  // memory: there are too few registers for three results. Raises the largest values of its columns, from 0, and
  // returns the bits of that in the warp.
  __device__ uint32_t Compute(const Chunk& chunk, uint32_t first_column, float weight, Patch& gate_gradients,
                              Patch& factor_gradients, Pair::Largest (&activated_amax)[4]) const {
    float products[kGatedRows]{};
    WithActivation<true>(args_.activation, [&](auto functions) {
#pragma unroll
      for (int i = 0; i < kGatedRows; ++i) {
        const float row_weight = FromLane(Lane() / 16 * 16 + i, weight);
        alignas(16) PairOf<T> inputs[GatedShared::kInputs][4];
        alignas(16) Pair activated[4];
#pragma unroll
        for (int input = 0; input < GatedShared::kInputs; ++input) {
          *reinterpret_cast<uint4*>(inputs[input]) = shared_.staged[input][i][threadIdx.x];
        }
        const auto compute = [&](float gate, float factor, float gradient, float* gate_gradient, float* factor_gradient,
                                 float* result) {
          products[i] += ActivatedValue<Form::kGated>(functions, gate, factor, gradient, 1.0f) * gradient;
          *gate_gradient = ActivatedValue<Form::kGradientOfGate>(functions, gate, factor, gradient, row_weight);
          *factor_gradient = ActivatedValue<Form::kGradientOfFactor>(functions, gate, factor, gradient, row_weight);
          *result = ActivatedValue<Form::kGated>(functions, gate, factor, gradient, row_weight);
        };
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          compute(inputs[0][j].First(), inputs[1][j].First(), inputs[2][j].First(), &gate_gradients[i][j].values.x,
                  &factor_gradients[i][j].values.x, &activated[j].values.x);
          compute(inputs[0][j].Second(), inputs[1][j].Second(), inputs[2][j].Second(), &gate_gradients[i][j].values.y,
                  &factor_gradients[i][j].values.y, &activated[j].values.y);
          activated_amax[j] = Pair::AbsMax(activated_amax[j], activated[j]);
        }
        StoreActivated(i, activated);
      }
    });
    if (args_.inner_products != nullptr) WriteInnerProducts(chunk, first_column, products);
    return FindActivatedAmax(activated_amax);
  }

  // Adds up the inner products of the lanes of each row, which each have 8 columns, and writes the sums.
  __device__ void WriteInnerProducts(const Chunk& chunk, uint32_t first_column, float (&products)[kGatedRows]) const {
    const int row = FirstRow() + ReduceSteps<16>(products, [](float a, float b) { return a + b; });
    if (Lane() % (16 / kGatedRows) != 0 || row >= chunk.rows) return;
    const int64_t first_product = (chunk.first_row + int64_t{row}) * args_.ColumnTiles();
    args_.inner_products[first_product + first_column / kTileColumns] = products[0];
  }

  // Returns the bits of the warp's largest value.
  __device__ static uint32_t LargestOfWarp(const Pair::Largest (&column_amax)[4]) {
    uint32_t largest = 0;
#pragma unroll
    for (const Pair::Largest& pair : column_amax) largest = max(largest, __float_as_uint(MaxOrNan(pair.x, pair.y)));
    return __reduce_max_sync(kFullWarp, largest);
  }

  // Raises the largest finite absolute values of columns to those of a row, in which infinity becomes NaN.
  __device__ static void HideInfinities(Pair (&row)[4], Pair::Largest (&column_amax)[4]) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 finite = {__uint_as_float(FiniteBits(row[j].First())), __uint_as_float(FiniteBits(row[j].Second()))};
      column_amax[j] = Pair::Max(column_amax[j], finite);
      row[j].values = {HideInfinity(row[j].First()), HideInfinity(row[j].Second())};
    }
  }

  // The place of a column among 128 amaxes or scales. Every other 4 lanes swap the halves of their 8 columns, or 8
  // lanes would access the same banks.
  __device__ static int SwizzledColumn(int column) { return column ^ column / 32 % 2 * 4; }
  __device__ static float4& Half(float* row, int half) {
    return *reinterpret_cast<float4*>(row + SwizzledColumn(Column() + 4 * half));
  }

  // Tells the block the largest values of a result's columns.
  __device__ void TellAmax(int result, const Pair::Largest (&column_amax)[4]) const {
    if constexpr (!kBlockScales) return;
    float* amax = shared_.amax[result][Part()];
    Half(amax, 0) = {column_amax[0].x, column_amax[0].y, column_amax[1].x, column_amax[1].y};
    Half(amax, 1) = {column_amax[2].x, column_amax[2].y, column_amax[3].x, column_amax[3].y};
  }

  // Finds the largest finite absolute values of rows and columns, and makes NaN of infinity. Returns the bits of the
  // warp's largest value.
  __device__ uint32_t FindAmax(int result, Patch& patch, uint32_t* row_amax) const {
    Pair::Largest column_amax[4];
#pragma unroll
    for (int i = 0; i < kGatedRows; ++i) {
      row_amax[i] = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const Pair::Largest pair = Pair::Absolute(patch[i][j]);
        column_amax[j] = i == 0 ? pair : Pair::Max(column_amax[j], pair);
        row_amax[i] = max(row_amax[i], __float_as_uint(MaxOrNan(pair.x, pair.y)));
      }
    }
    uint32_t largest = LargestOfWarp(column_amax);
    if (largest >= kInfinityBits) {
#pragma unroll
      for (Pair::Largest& pair_amax : column_amax) pair_amax = {};
#pragma unroll
      for (int i = 0; i < kGatedRows; ++i) {
        const uint2 bits = PairwiseFiniteAmax(patch[i]);
        row_amax[i] = max(bits.x, bits.y);
        HideInfinities(patch[i], column_amax);
      }
      largest = LargestOfWarp(column_amax);
    }
    TellAmax(result, column_amax);
    return largest;
  }

  // Does the same for the columns of the activation's result. `column_amax` may have values that are not finite.
  __device__ uint32_t FindActivatedAmax(Pair::Largest (&column_amax)[4]) const {
    uint32_t largest = LargestOfWarp(column_amax);
    if (largest >= kInfinityBits) {
#pragma unroll
      for (Pair::Largest& pair_amax : column_amax) pair_amax = {};
#pragma unroll 1
      for (int i = 0; i < kGatedRows; ++i) {
        alignas(16) Pair row[4];
        LoadActivated(i, row);
        HideInfinities(row, column_amax);
        StoreActivated(i, row);
      }
      largest = LargestOfWarp(column_amax);
    }
    return largest;
  }

  static constexpr int kLanesPerScale = 16 / (2 * kGatedRows);

  // Finds the scales of the rows of both gradients, and writes their inverses. Lanes of a row divide the scales between
  // them. Returns the one that the lane has computed.
  __device__ float FindRowScale(const Chunk& chunk, uint32_t first_column, uint32_t (&amax)[2 * kGatedRows]) const {
    const QuantizeArguments& args = args_.gradient;
    const int step = ReduceSteps<16>(amax, [](uint32_t a, uint32_t b) { return max(a, b); });
    const Scale own = ScaleFromAmax<Fp8>(amax[0], args.scale_rule);
    const int row = FirstRow() + step % kGatedRows;
    if (Lane() % kLanesPerScale == 0 && row < ScaleRows(chunk.rows)) {
      const auto half = static_cast<uint32_t>(step / kGatedRows * args_.Gates());
      const auto block = static_cast<int32_t>((half + first_column) / kBlock);
      static_cast<float*>(args.row_scale)[RowScalePosition<kMode>(args.layout, chunk, row, block)] =
          row < chunk.rows ? own.inverse : 0.0f;
    }
    return own.scale;
  }

  // Quantizes the lane's part of a gradient along its rows. `scale` is the given one, or the one that the lane has: row
  // i then has that of number first_scale + i.
  __device__ void WriteRows(const Chunk& chunk, int64_t first_column, const Patch& patch, float scale,
                            int first_scale) const {
    const int64_t features = args_.gradient.layout.features;
    const int64_t first_row = chunk.first_row + int64_t{FirstRow()};
    uint8_t* out = args_.gradient.row_data + first_row * features + first_column + Column();
#pragma unroll
    for (int i = 0; i < kGatedRows; ++i) {
      const int lane = Lane() / 16 * 16 + (first_scale + i) * kLanesPerScale;
      const uint2 data = Quantize8<Fp8, false>(patch[i], kBlockScales ? FromLane(lane, scale) : scale);
      if (FirstRow() + i < chunk.rows) *reinterpret_cast<uint2*>(out) = data;
      out += features;
    }
  }

  // Raises the amaxes of groups. Two warps do it that find no scales of columns.
  __device__ void RecordAmaxes(int tile) const {
    constexpr int kFirstWarp = kGatedResults * kTileColumns / 32;
    const int which = Warp() - kFirstWarp;
    if (which != 0 && which != 1) return;
    const auto find_amax = [&](int slot) {
      return max(shared_.warp_amax[which][2 * slot], shared_.warp_amax[which][2 * slot + 1]);
    };
    RecordAmax(Lane(), shared_.passes[tile].chunks, find_amax, shared_.tiles[tile].count,
               which == 0 ? args_.gradient.amax : args_.gradient.activated_amax);
  }

  // Finds the scales of the columns of every row block, and writes their inverses. Each thread has one column of one
  // result.
  __device__ void FindColumnScales(int tile) const {
    const int result = threadIdx.x / kTileColumns;
    if (result >= kGatedResults) return;
    const int column = threadIdx.x % kTileColumns;
    const QuantizeArguments& args = args_.gradient;
    const bool is_gradient = result != kActivated;
    const ScaleLayout& layout = is_gradient ? args.layout : args_.activated_layout;
    auto* inverses = is_gradient ? static_cast<float*>(args.column_scale) : args.activated_scale;
    const int64_t feature = (result == kFactorGradient ? args_.Gates() : 0) + shared_.tiles[tile].first_column + column;
    const int count = shared_.tiles[tile].count;
#pragma unroll 1
    for (int first = 0; first < count;) {
      const Chunk& chunk = shared_.passes[tile].chunks[first];
      const int chunks = shared_.passes[tile].LastOfBlock(first) + 1 - first;
      constexpr int kParts = kFp8Alignment / kGatedRows;
      static_assert(kParts == 4);
      const float* amaxes = &shared_.amax[result][first * kParts][SwizzledColumn(column)];
      // Each part has its own maximum until the end, or the comparisons would wait for each other.
      float largest[kParts]{};
      const auto compare = [&](int i) {
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          largest[part] = fmaxf(largest[part], amaxes[(i * kParts + part) * kTileColumns]);
        }
      };
      if (chunks == kSlots) {
#pragma unroll
        for (int i = 0; i < kSlots; ++i) compare(i);
      } else {
        for (int i = 0; i < chunks; ++i) compare(i);
      }
      const float amax = fmaxf(fmaxf(largest[0], largest[1]), fmaxf(largest[2], largest[3]));
      const Scale scale = is_gradient ? ScaleFromAmax<Fp8>(__float_as_uint(amax), args.scale_rule)
                                      : ScaleFromAmax<E4m3>(__float_as_uint(amax), args.scale_rule);
      shared_.scales[result][first][SwizzledColumn(column)] = scale.scale;
      inverses[ColumnScalePosition<kMode>(layout, chunk, feature)] = scale.inverse;
      first += chunks;
    }
  }

  // The staged data of a column: 8 times 16 bytes, one for each slot, of 4 parts. Lanes that lie side by side have
  // theirs in different places, or they would access the same banks.
  __device__ static int Swizzled(int slot, int column) { return slot ^ column / 8 % kSlots; }
  __device__ static int SwizzledPart(int part, int column) { return part ^ column / 64 * 2; }

  // Quantizes the lane's part of a result along its columns into shared memory.
  template <typename ToFp8>
  __device__ void StageColumns(int tile, int result, const Patch& patch, float given) const {
    // The padding is zero even if a scale is NaN.
    const int existing = SlotChunk(tile).rows - FirstRow();
    const uint32_t mask = existing >= kGatedRows ? kFullWarp : existing <= 0 ? 0 : kFullWarp >> (32 - 8 * existing);
    const int part = Part() % (kFp8Alignment / kGatedRows);
    auto* out = reinterpret_cast<uint32_t*>(&shared_.columns[result][Column()][Swizzled(Slot(), Column())]) +
                SwizzledPart(part, Column());
    alignas(16) float2 scales[4];
    if constexpr (kBlockScales) {
      float* block_scales = shared_.scales[result][shared_.passes[tile].FirstOfBlock(Slot())];
      reinterpret_cast<float4*>(scales)[0] = Half(block_scales, 0);
      reinterpret_cast<float4*>(scales)[1] = Half(block_scales, 1);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 scale = kBlockScales ? scales[j] : float2{given, given};
      const uint32_t first = Quantize2<ToFp8>(patch[0][j].First(), patch[1][j].First(), scale.x) |
                             Quantize2<ToFp8>(patch[2][j].First(), patch[3][j].First(), scale.x) << 16;
      const uint32_t second = Quantize2<ToFp8>(patch[0][j].Second(), patch[1][j].Second(), scale.y) |
                              Quantize2<ToFp8>(patch[2][j].Second(), patch[3][j].Second(), scale.y) << 16;
      constexpr int kColumnWords = kBlock / sizeof(uint32_t);
      out[2 * j * kColumnWords] = first & mask;
      out[(2 * j + 1) * kColumnWords] = second & mask;
    }
  }

  // Writes the staged columns. 8 lanes write the 8 slots of a column.
  __device__ void WriteColumns(int tile) const {
    const int slot = threadIdx.x % kSlots;
    if (slot >= shared_.tiles[tile].count) return;
    const Chunk& chunk = shared_.passes[tile].chunks[slot];
    const int per_column = chunk.PerColumn();
    constexpr int kAtOnce = kGatedThreads / kSlots;
    const int first = threadIdx.x / kSlots;
    const int64_t column = shared_.tiles[tile].first_column + first;
    auto* gate_gradients =
        reinterpret_cast<uint4*>(args_.gradient.column_data) + ColumnDataChunk(args_.gradient.layout, chunk, column);
    auto* activated_columns =
        reinterpret_cast<uint4*>(args_.activated_data) + ColumnDataChunk(args_.activated_layout, chunk, column);
    uint4* const outs[kGatedResults] = {gate_gradients, gate_gradients + args_.Gates() * per_column, activated_columns};
#pragma unroll
    for (int result = 0; result < kGatedResults; ++result) {
#pragma unroll
      for (int i = 0; i < kTileColumns / kAtOnce; ++i) {
        static_assert(kAtOnce == 64, "the parts of every other columns read are swapped");
        const uint4 data = shared_.columns[result][first + i * kAtOnce][Swizzled(slot, first)];
        outs[result][static_cast<int64_t>(i * kAtOnce) * per_column] =
            i % 2 == 0 ? data : uint4{data.z, data.w, data.x, data.y};
      }
    }
  }

  const GatedGradientArguments& args_;
  GatedShared& shared_;
};

// Zeros the rows of no group, and their inner products. Warps divide the rows between them.
__device__ inline void ZeroOtherRows(const GatedGradientArguments& args) {
  constexpr int kWarps = kGatedThreads / 32;
  const QuantizeArguments& gradient = args.gradient;
  const int64_t features = gradient.layout.features;
  const int64_t tiles = args.ColumnTiles();
  for (int32_t element = 0; element < gradient.groups.batch; ++element) {
    const Window& window = *WindowAt(gradient, element, 0);
    const int64_t others = gradient.groups.capacity - (window.groups_end - window.groups_begin);
    for (int64_t i = blockIdx.x * kWarps + Warp(); i < others; i += static_cast<int64_t>(gridDim.x) * kWarps) {
      const int64_t row = OtherRow(window.first_row, i, window.groups_begin, window.groups_end);
      auto* data = reinterpret_cast<uint4*>(gradient.row_data + row * features);
      for (int64_t vector = Lane(); vector < features / 16; vector += 32) data[vector] = uint4{};
      if (args.inner_products == nullptr) continue;
      for (int64_t tile = Lane(); tile < tiles; tile += 32) args.inner_products[row * tiles + tile] = 0.0f;
    }
  }
}

template <ScalingMode kMode, typename Fp8, typename T>
__global__ void __launch_bounds__(kGatedThreads, 1)
    QuantizeGatedGradient(const __grid_constant__ GatedGradientArguments args) {
  extern __shared__ uint4 shared[];
  cudaGridDependencySynchronize();
  GatedGradient<kMode, Fp8, T>(args, *reinterpret_cast<GatedShared*>(shared)).Run();
  ZeroOtherRows(args);
}

namespace {

template <ScalingMode kMode, typename Fp8, typename T>
Status LaunchKernel(cudaStream_t stream, const GatedGradientArguments& args) {
  const auto kernel = QuantizeGatedGradient<kMode, Fp8, T>;
  constexpr int kBytes = sizeof(GatedShared);
  JAX_GROUPED_RETURN_IF_FAILED(
      AllowSharedMemory(reinterpret_cast<const void*>(kernel), kBytes, cudaSharedmemCarveoutMaxShared));
  DeviceProperties properties;
  JAX_GROUPED_RETURN_IF_FAILED(GetDeviceProperties(&properties));
  const uint32_t items = WorkItem::Count(args.gradient, args.ColumnTiles());
  const auto processors = static_cast<uint32_t>(properties.processors);
  const Grid grid{items < processors ? items : processors, kGatedThreads, kBytes};
  return LaunchEarly("Launching the quantization of a gated gradient", stream, grid, kernel, args);
}

template <ScalingMode kMode>
Status LaunchOfMode(cudaStream_t stream, const GatedGradientArguments& args, const Quantization& quantization) {
  const bool is_half = quantization.input_type == CUDA_R_16F;
  if (quantization.output_type == CUDA_R_8F_E4M3) {
    return is_half ? LaunchKernel<kMode, E4m3, __half>(stream, args)
                   : LaunchKernel<kMode, E4m3, __nv_bfloat16>(stream, args);
  }
  return is_half ? LaunchKernel<kMode, E5m2, __half>(stream, args)
                 : LaunchKernel<kMode, E5m2, __nv_bfloat16>(stream, args);
}

}  // namespace

bool IsGatedGradient(const Quantization& args) {
  const bool scales =
      args.mode == ScalingMode::kBlock1D || (args.mode == ScalingMode::kTensor && args.given_scale != nullptr);
  return scales && args.backward && IsGated(args.activation.kind) && args.input_type != CUDA_R_32F &&
         args.layout.features % (2 * kTileColumns) == 0 && args.row_data != nullptr && args.column_data != nullptr &&
         args.dbias == nullptr && args.skip == nullptr;
}

Status LaunchGatedGradient(cudaStream_t stream, const Quantization& quantization) {
  GatedGradientArguments args{};
  args.gradient = quantization;
  args.inputs = quantization.activation_input;
  args.gradients = quantization.x;
  args.row_weights = quantization.row_weights;
  args.inner_products = quantization.inner_products;
  args.activation = quantization.activation;
  args.activated_data = quantization.activated_data;
  args.activated_layout = {quantization.layout.features / 2};
  if (quantization.mode == ScalingMode::kBlock1D)
    return LaunchOfMode<ScalingMode::kBlock1D>(stream, args, quantization);
  return LaunchOfMode<ScalingMode::kTensor>(stream, args, quantization);
}

}  // namespace jax_grouped
