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
// become free, because some items have more passes than others.
class TileIterator {
 public:
  __device__ void Start(const QuantizeArguments& args, uint32_t column_tiles) {
    column_tiles_ = column_tiles;
    count_ = WorkItem::Count(args, column_tiles);
    Take(args);
    Advance(args);
  }

  // Returns the next tile.
  __device__ PassTile Next(const QuantizeArguments& args) {
    while (current_.window != nullptr && current_.pass >= current_.passes) Advance(args);
    if (current_.window == nullptr) return {};
    const int first = current_.window->pass_begins[current_.pass];
    const int end = current_.window->pass_begins[current_.pass + 1];
    current_.pass += Window::kParts;
    return {current_.window->chunks + first, end - first, current_.first_column};
  }

 private:
  struct Item {
    const Window* window;  // null after the last item
    int pass;
    int passes;
    uint32_t first_column;
  };

  __device__ void Advance(const QuantizeArguments& args) {
    current_ = next_;
    Take(args);
  }

  __device__ void Take(const QuantizeArguments& args) {
    next_ = {};
    const uint32_t index = atomicAdd(&args.windows->taken, 1u);
    if (index >= count_) return;
    const WorkItem work(args, index, column_tiles_);
    // An item that does not exist has no passes.
    next_.window = args.windows;
    if (!work.exists) return;
    next_.window = args.WindowAt(work.element, work.window);
    next_.pass = work.part;
    next_.passes = next_.window->num_passes;
    next_.first_column = work.first_column;
  }

  uint32_t column_tiles_;
  uint32_t count_;
  Item current_;
  Item next_;
};

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_QUANTIZE_TILE_ITERATOR_CUH_
