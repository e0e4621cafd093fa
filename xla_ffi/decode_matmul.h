// What the handlers of matmuls share.

#ifndef JAX_GROUPED_XLA_FFI_DECODE_MATMUL_H_
#define JAX_GROUPED_XLA_FFI_DECODE_MATMUL_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "csrc/matmul/grouped_matmul.h"
#include "xla_ffi/decode.h"

namespace jax_grouped {

inline std::optional<Product> ToProduct(std::string_view name) {
  if (name == "fprop") return Product::kFprop;
  if (name == "dgrad") return Product::kDgrad;
  if (name == "wgrad") return Product::kWgrad;
  return std::nullopt;
}

// Fails unless `kernel_batch` batch elements can have kernels of their own: each serves as many successive elements.
inline ffi::Error CheckKernelBatch(const char* op, Product product, int64_t batch, int64_t kernel_batch,
                                   int64_t kernels) {
  if (kernel_batch > 0 && batch % kernel_batch == 0 && kernels % kernel_batch == 0 &&
      (product != Product::kWgrad || kernel_batch == batch)) {
    return ffi::Error::Success();
  }
  return Invalid(op,
                 "kernel_batch must divide the batch size and the number of kernels, and be the batch size for "
                 "wgrad, got " +
                     std::to_string(kernel_batch) + " of " + std::to_string(batch) + " and " + std::to_string(kernels) +
                     " kernels.");
}

// Makes the result hold the accumulator, if the call brings one. It is the result's own buffer, except where XLA has
// the result written straight into a slice of a larger array, as it does with the results of a loop.
inline ffi::Error LoadAccumulator(const char* op, cudaStream_t stream, const ffi::RemainingArgs& rest,
                                  const ffi::AnyBuffer& d) {
  if (rest.size() == 0) return ffi::Error::Success();
  const auto accumulator = rest.get<ffi::AnyBuffer>(0);
  if (!accumulator.has_value()) return accumulator.error();
  if (accumulator->untyped_data() == d.untyped_data()) return ffi::Error::Success();
  JAX_GROUPED_RETURN_IF_ERROR(CheckEqual(op, "the bytes of the accumulator",
                                         static_cast<int64_t>(accumulator->size_bytes()),
                                         static_cast<int64_t>(d.size_bytes())));
  return ToError(op, Status::FromCuda(cudaMemcpyAsync(d.untyped_data(), accumulator->untyped_data(), d.size_bytes(),
                                                      cudaMemcpyDeviceToDevice, stream),
                                      "Copying the accumulator"));
}

}  // namespace jax_grouped

#endif  // JAX_GROUPED_XLA_FFI_DECODE_MATMUL_H_
