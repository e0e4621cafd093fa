// The tiles that a resident block takes one after the other: passes, each in 128 columns.

#ifndef JAX_GROUPED_CSRC_QUANTIZE_TILE_ITERATOR_CUH_
#define JAX_GROUPED_CSRC_QUANTIZE_TILE_ITERATOR_CUH_

#include <cstdint>

#include "csrc/quantize/pass.cuh"

namespace jax_grouped {

// A pass in 128 columns.
struct PassTile {
  const Chunk* chunks;  // null after the last tile
  int count;
  uint32_t first_column;
};

// Iterator over the tiles of a block, in shared memory. One thread at a time uses it. Blocks take work items as they
// become free, because some items have more passes than others. The item after the next one is taken while the next one
// is looked up, so that a thread waits for memory once per item.
class TileIterator {
 public:
  __device__ void Start(const QuantizeArguments& args, uint32_t column_tiles) {
    column_tiles_ = column_tiles;
    count_ = WorkItem::Count(args, column_tiles);
    index_ = Take(args);
    LookUp(args);
    Advance(args);
  }

  // Returns the next tile.
  __device__ PassTile Next(const QuantizeArguments& args) {
    while (current_.chunks != nullptr && turn_ == current_.passes) Advance(args);
    if (current_.chunks == nullptr) return {};
    const int begin = current_.begins[turn_];
    const int count = current_.ends[turn_] - begin;
    ++turn_;
    return {current_.chunks + begin, count, current_.first_column};
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

  __device__ void Advance(const QuantizeArguments& args) {
    current_ = next_;
    turn_ = 0;
    LookUp(args);
  }

  __device__ void LookUp(const QuantizeArguments& args) {
    const uint32_t index = index_;
    if (index >= count_) {
      next_ = {};
      return;
    }
    const uint32_t following = Take(args);
    const WorkItem work(args, index, column_tiles_);
    const Window& window = work.exists ? *WindowAt(args, work.element, work.window) : *args.windows;
    const int num_passes = window.num_passes;
    Item item{window.chunks, 0, {}, {}, work.first_column};
#pragma unroll
    for (int i = 0; i < kMostPasses; ++i) {
      // Read before it is known whether the pass exists.
      item.begins[i] = window.pass_begins[work.part + i * Window::kParts];
      item.ends[i] = window.pass_begins[work.part + i * Window::kParts + 1];
    }
    if (work.exists) {
      for (int pass = work.part; pass < num_passes; pass += Window::kParts) ++item.passes;
    }
    next_ = item;
    index_ = following;
  }

  uint32_t column_tiles_;
  uint32_t count_;
  uint32_t index_;  // the work item that was taken last
  Item current_;
  int turn_;  // the passes of the current item that were returned
  Item next_;
};

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_QUANTIZE_TILE_ITERATOR_CUH_
