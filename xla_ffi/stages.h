// The stages of custom calls, as an extension module exports them.

#ifndef JAX_GROUPED_XLA_FFI_STAGES_H_
#define JAX_GROUPED_XLA_FFI_STAGES_H_

#include <cuda_runtime_api.h>
#include <nanobind/nanobind.h>

#include <memory>
#include <mutex>
#include <set>

#include "xla/ffi/api/ffi.h"

namespace jax_grouped {

namespace ffi = ::xla::ffi;
namespace nb = ::nanobind;

// Loading of the kernels that a call launches, before the program that has the call begins.
//
// CUDA loads a kernel when it is first launched. It then waits, with locks held, until the device is idle. In a program
// for several devices that can be for ever: the device is in a collective with another device, whose thread waits for
// such a lock. XLA runs the Initialize stage of all calls of a program before the program's first collective.
//
// The state of a call, which remembers the devices on which its kernels are loaded.
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

inline ffi::TypeId LoadedDevices::id{};
inline ffi::TypeInfo LoadedDevices::info = ffi::MakeTypeInfo<LoadedDevices>();

inline ffi::ErrorOr<std::unique_ptr<LoadedDevices>> MakeState(ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary) {
  return std::make_unique<LoadedDevices>();
}

// The stream of the graph that this thread records.
inline thread_local cudaStream_t recording = nullptr;

inline XLA_FFI_Error* GetRecordingStream(XLA_FFI_Stream_Get_Args* args) {
  args->stream = recording;
  return nullptr;
}

// Runs a call's Execute stage on a stream of its own, which is recorded: other threads may use XLA's stream meanwhile.
// Instantiating the graph loads its kernels. If that fails, the first launch loads them, and tells what is wrong.
inline void Record(const XLA_FFI_CallFrame& frame, XLA_FFI_Handler* execute) {
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

// The Initialize stage of a call with these Execute and Initialize stages. Unless the call's state says that the
// kernels are loaded, runs `prepare`, if it is not null, and then `execute`, in a graph that is thrown away.
template <XLA_FFI_Handler* execute, XLA_FFI_Handler* prepare>
XLA_FFI_Error* Initialize(XLA_FFI_CallFrame* frame) try {
  if (frame->extension_start != nullptr && frame->extension_start->type == XLA_FFI_Extension_Metadata) {
    return execute(frame);
  }
  ffi::DiagnosticEngine diagnostic;
  const auto loaded = ffi::CtxDecoding<ffi::State<LoadedDevices>>::Decode(frame->api, frame->ctx, diagnostic);
  const auto device = ffi::CtxDecoding<ffi::DeviceOrdinal>::Decode(frame->api, frame->ctx, diagnostic);
  if (loaded && device && (*loaded)->Has(*device)) return nullptr;
  if constexpr (prepare != nullptr) {
    if (XLA_FFI_Error* error = prepare(frame)) return error;
  }
  Record(*frame, execute);
  if (loaded && device) (*loaded)->Add(*device);
  return nullptr;
} catch (...) {
  return nullptr;  // There is no memory. The Execute stage says so.
}

inline nb::capsule Capsule(XLA_FFI_Handler* handler) {
  return nb::capsule(reinterpret_cast<void*>(handler), "xla._CUSTOM_CALL_TARGET");
}

XLA_FFI_DEFINE_HANDLER(kInstantiate, MakeState, ffi::Ffi::BindInstantiate().RemainingArgs().RemainingRets().Attrs());

// Returns the handlers of a call by execution stage, as jax.ffi.register_ffi_target takes them.
template <XLA_FFI_Handler* execute, XLA_FFI_Handler* prepare = nullptr>
nb::dict Stages() {
  nb::dict stages;
  stages["instantiate"] = Capsule(kInstantiate);
  stages["initialize"] = Capsule(Initialize<execute, prepare>);
  stages["execute"] = Capsule(execute);
  return stages;
}

// Returns the type of the calls' state, as jax.ffi.register_ffi_type takes it.
inline nb::dict StateType() {
  nb::dict type;
  type["type_id"] = nb::capsule(&LoadedDevices::id);
  type["type_info"] = nb::capsule(&LoadedDevices::info);
  return type;
}

}  // namespace jax_grouped

#endif  // JAX_GROUPED_XLA_FFI_STAGES_H_
