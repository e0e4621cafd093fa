// Lets the handlers of custom calls for GPUs run on the CPU, as far as they get there: XLA then has no CUDA stream to
// give them, so they get null for it.

#include <cstddef>

#include "xla/ffi/api/c_api.h"

namespace {

XLA_FFI_Error* GetNullStream(XLA_FFI_Stream_Get_Args* args) {
  args->stream = nullptr;
  return nullptr;
}

XLA_FFI_Error* GetFirstDevice(XLA_FFI_DeviceOrdinal_Get_Args* args) {
  args->device_ordinal = 0;
  return nullptr;
}

// Wraps one handler. XLA passes no data from which one function could tell which handler it wraps, so each handler has
// a function of its own.
template <int kIndex>
struct Wrapper {
  static inline XLA_FFI_Handler* handler = nullptr;

  static XLA_FFI_Error* Call(XLA_FFI_CallFrame* frame) {
    XLA_FFI_Api api = *frame->api;
    api.XLA_FFI_Stream_Get = GetNullStream;
    api.XLA_FFI_DeviceOrdinal_Get = GetFirstDevice;
    XLA_FFI_CallFrame with_api = *frame;
    with_api.api = &api;
    return handler(&with_api);
  }
};

template <int kIndex>
XLA_FFI_Handler* Wrap(XLA_FFI_Handler* handler) {
  Wrapper<kIndex>::handler = handler;
  return Wrapper<kIndex>::Call;
}

}  // namespace

// Returns a handler that calls `handler`. Each index, from 0 to 9, has one.
extern "C" XLA_FFI_Handler* WithoutStream(int index, XLA_FFI_Handler* handler) {
  constexpr XLA_FFI_Handler* (*kWraps[])(XLA_FFI_Handler*) = {Wrap<0>, Wrap<1>, Wrap<2>, Wrap<3>, Wrap<4>,
                                                              Wrap<5>, Wrap<6>, Wrap<7>, Wrap<8>, Wrap<9>};
  return kWraps[index](handler);
}
