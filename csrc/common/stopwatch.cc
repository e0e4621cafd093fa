#include "csrc/common/stopwatch.h"

namespace jax_grouped {

Status Stopwatch::Create() {
  cudaStream_t stream = nullptr;
  JAX_GROUPED_RETURN_IF_FAILED(
      Status::FromCuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags"));
  stream_.reset(stream);
  for (Owned<cudaEvent_t>* owner : {&begin_, &end_}) {
    cudaEvent_t event = nullptr;
    JAX_GROUPED_RETURN_IF_FAILED(Status::FromCuda(cudaEventCreate(&event), "cudaEventCreate"));
    owner->reset(event);
  }
  return Status::Ok();
}

Status Stopwatch::Time(const Enqueue& enqueue, float* milliseconds) const {
  JAX_GROUPED_RETURN_IF_FAILED(Status::FromCuda(cudaEventRecord(begin_.get(), stream_.get()), "cudaEventRecord"));
  JAX_GROUPED_RETURN_IF_FAILED(enqueue());
  JAX_GROUPED_RETURN_IF_FAILED(Status::FromCuda(cudaEventRecord(end_.get(), stream_.get()), "cudaEventRecord"));
  JAX_GROUPED_RETURN_IF_FAILED(Status::FromCuda(cudaEventSynchronize(end_.get()), "cudaEventSynchronize"));
  return Status::FromCuda(cudaEventElapsedTime(milliseconds, begin_.get(), end_.get()), "cudaEventElapsedTime");
}

Status Stopwatch::Record(int calls, const Enqueue& enqueue, Owned<cudaGraphExec_t>* graph) const {
  JAX_GROUPED_RETURN_IF_FAILED(Status::FromCuda(cudaStreamBeginCapture(stream_.get(), cudaStreamCaptureModeThreadLocal),
                                                "cudaStreamBeginCapture"));
  Status enqueued = Status::Ok();
  for (int i = 0; i < calls && enqueued.ok(); ++i) enqueued = enqueue();
  cudaGraph_t captured = nullptr;
  const cudaError_t ended = cudaStreamEndCapture(stream_.get(), &captured);
  const Owned<cudaGraph_t> owner(captured);
  JAX_GROUPED_RETURN_IF_FAILED(enqueued);
  JAX_GROUPED_RETURN_IF_FAILED(Status::FromCuda(ended, "cudaStreamEndCapture"));
  cudaGraphExec_t instance = nullptr;
  JAX_GROUPED_RETURN_IF_FAILED(Status::FromCuda(cudaGraphInstantiate(&instance, captured, 0), "cudaGraphInstantiate"));
  graph->reset(instance);
  return Status::Ok();
}

Status Stopwatch::Time(cudaGraphExec_t graph, float* milliseconds) const {
  const auto launch = [&] { return Status::FromCuda(cudaGraphLaunch(graph, stream_.get()), "cudaGraphLaunch"); };
  return Time(launch, milliseconds);
}

}  // namespace jax_grouped
