// Loading of the kernels that a call launches, before the program that has the call begins.
//
// CUDA loads a kernel when it is first launched. It then waits, with locks held, until the device is idle. In a program
// for several devices that can be for ever: the device is in a collective with another device, whose thread waits for
// such a lock. XLA runs the Initialize stage of all calls of a program before the program's first collective.

#ifndef JAX_GROUPED_XLA_FFI_LOADING_H_
#define JAX_GROUPED_XLA_FFI_LOADING_H_

#include "xla/ffi/api/ffi.h"

namespace jax_grouped {

// The type of a call's state, which remembers the devices on which its kernels are loaded, and the stage that makes it.
::xla::ffi::TypeId* LoadedDevicesId();
::xla::ffi::TypeInfo* LoadedDevicesInfo();
XLA_FFI_DECLARE_HANDLER_SYMBOL(Instantiate);

// Unless the state says that the kernels are loaded, runs `prepare`, if it is not null, and then `execute`, in a graph
// that is thrown away.
XLA_FFI_Error* LoadKernels(XLA_FFI_CallFrame* frame, XLA_FFI_Handler* execute, XLA_FFI_Handler* prepare);

// The Initialize stage of a call with these Execute and Initialize stages.
template <XLA_FFI_Handler* execute, XLA_FFI_Handler* prepare = nullptr>
XLA_FFI_Error* Initialize(XLA_FFI_CallFrame* frame) {
  return LoadKernels(frame, execute, prepare);
}

}  // namespace jax_grouped

#endif  // JAX_GROUPED_XLA_FFI_LOADING_H_
