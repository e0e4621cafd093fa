#include "xla_ffi/loading.h"

#include <cuda_runtime_api.h>

#include <memory>
#include <mutex>
#include <set>

namespace jax_grouped {

namespace ffi = ::xla::ffi;

namespace {

class LoadedDevices {
 public:
  static ffi::TypeId id;
  static ffi::TypeInfo info;

  bool Has(int device) {
    std::lock_guard<std::mutex> lock(mutex_);
    return devices_.count(device) > 0;
  }

  void Add(int device) {
    std::lock_guard<std::mutex> lock(mutex_);
    devices_.insert(device);
  }

 private:
  std::mutex mutex_;
  std::set<int> devices_;
};

ffi::TypeId LoadedDevices::id{};
ffi::TypeInfo LoadedDevices::info = ffi::MakeTypeInfo<LoadedDevices>();

ffi::ErrorOr<std::unique_ptr<LoadedDevices>> MakeState(ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary) {
  return std::make_unique<LoadedDevices>();
}

// The stream of the graph that this thread records.
thread_local cudaStream_t recording = nullptr;

XLA_FFI_Error* GetRecordingStream(XLA_FFI_Stream_Get_Args* args) {
  args->stream = recording;
  return nullptr;
}

// Runs a call's Execute stage on a stream of its own, which is recorded: other threads may use XLA's stream meanwhile.
// Instantiating the graph loads its kernels. If that fails, the first launch loads them, and tells what is wrong.
void Record(const XLA_FFI_CallFrame& frame, XLA_FFI_Handler* execute) {
  XLA_FFI_Api api = *frame.api;
  api.XLA_FFI_Stream_Get = GetRecordingStream;
  XLA_FFI_CallFrame call = frame;
  call.api = &api;
  call.stage = XLA_FFI_ExecutionStage_EXECUTE;
  if (cudaStreamCreateWithFlags(&recording, cudaStreamNonBlocking) == cudaSuccess) {
    if (cudaStreamBeginCapture(recording, cudaStreamCaptureModeThreadLocal) == cudaSuccess) {
      if (XLA_FFI_Error* error = execute(&call)) {
        XLA_FFI_Error_Destroy_Args destroyed{XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, nullptr, error};
        api.XLA_FFI_Error_Destroy(&destroyed);
      }
      cudaGraph_t graph = nullptr;
      cudaGraphExec_t instance = nullptr;
      if (cudaStreamEndCapture(recording, &graph) == cudaSuccess) {
        if (cudaGraphInstantiate(&instance, graph, 0) == cudaSuccess) cudaGraphExecDestroy(instance);
        cudaGraphDestroy(graph);
      }
    }
    cudaStreamDestroy(recording);
  }
  recording = nullptr;
  (void)cudaGetLastError();  // Otherwise CUDA would report it again to the next caller.
}

}  // namespace

ffi::TypeId* LoadedDevicesId() { return &LoadedDevices::id; }
ffi::TypeInfo* LoadedDevicesInfo() { return &LoadedDevices::info; }

XLA_FFI_DEFINE_HANDLER_SYMBOL(Instantiate, MakeState,
                              ffi::Ffi::BindInstantiate().RemainingArgs().RemainingRets().Attrs());

XLA_FFI_Error* LoadKernels(XLA_FFI_CallFrame* frame, XLA_FFI_Handler* execute, XLA_FFI_Handler* prepare) try {
  if (frame->extension_start != nullptr && frame->extension_start->type == XLA_FFI_Extension_Metadata) {
    return execute(frame);
  }
  ffi::DiagnosticEngine diagnostic;
  const auto loaded = ffi::CtxDecoding<ffi::State<LoadedDevices>>::Decode(frame->api, frame->ctx, diagnostic);
  const auto device = ffi::CtxDecoding<ffi::DeviceOrdinal>::Decode(frame->api, frame->ctx, diagnostic);
  if (loaded && device && (*loaded)->Has(*device)) return nullptr;
  if (XLA_FFI_Error* error = prepare != nullptr ? prepare(frame) : nullptr) return error;
  Record(*frame, execute);
  if (loaded && device) (*loaded)->Add(*device);
  return nullptr;
} catch (...) {
  return nullptr;  // There is no memory. The Execute stage says so.
}

}  // namespace jax_grouped
