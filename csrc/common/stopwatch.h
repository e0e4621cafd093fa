// Graphs of work on the current device, and its time.

#ifndef JAX_GROUPED_CSRC_COMMON_STOPWATCH_H_
#define JAX_GROUPED_CSRC_COMMON_STOPWATCH_H_

#include <cuda_runtime_api.h>

#include <functional>
#include <memory>
#include <type_traits>

#include "csrc/common/status.h"

namespace jax_grouped {

struct DestroyHandle {
  void operator()(cudaStream_t stream) const { cudaStreamDestroy(stream); }
  void operator()(cudaEvent_t event) const { cudaEventDestroy(event); }
  void operator()(cudaGraph_t graph) const { cudaGraphDestroy(graph); }
  void operator()(cudaGraphExec_t graph) const { cudaGraphExecDestroy(graph); }
};

template <typename Handle>
using Owned = std::unique_ptr<std::remove_pointer_t<Handle>, DestroyHandle>;

// A timer of work on a stream of its own, which waits for no other stream.
class Stopwatch {
 public:
  using Enqueue = std::function<Status()>;

  Status Create();

  cudaStream_t stream() const { return stream_.get(); }

  // Enqueues work and waits for it. `milliseconds` is the device's time only.
  Status Time(const Enqueue& enqueue, float* milliseconds) const;

  // Captures `calls` calls of `enqueue` in one graph, whose kernels follow each other without the host.
  Status Record(int calls, const Enqueue& enqueue, Owned<cudaGraphExec_t>* graph) const;

  // Runs a recorded graph and times it in the same way.
  Status Time(cudaGraphExec_t graph, float* milliseconds) const;

 private:
  Owned<cudaStream_t> stream_;
  Owned<cudaEvent_t> begin_;
  Owned<cudaEvent_t> end_;
};

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_COMMON_STOPWATCH_H_
