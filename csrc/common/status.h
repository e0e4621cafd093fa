// The outcome of a call that can fail. Nothing in csrc throws, except std::bad_alloc.

#ifndef JAX_GROUPED_CSRC_COMMON_STATUS_H_
#define JAX_GROUPED_CSRC_COMMON_STATUS_H_

#include <cuda_runtime_api.h>

#include <string>
#include <utility>

namespace jax_grouped {

class [[nodiscard]] Status {
 public:
  static Status Ok() { return Status(std::string(), cudaSuccess); }
  // Returns a failure. `message` is a sentence that names what failed; it must not be empty.
  static Status Failed(std::string message) { return Status(std::move(message), cudaSuccess); }
  // Returns the status of a CUDA call and clears CUDA's last error. Otherwise the next caller of cudaGetLastError would
  // get this error again.
  static Status FromCuda(cudaError_t error, const char* what) {
    if (error == cudaSuccess) return Ok();
    (void)cudaGetLastError();
    return Status(std::string(what) + " failed: " + cudaGetErrorString(error) + ".", error);
  }

  bool ok() const { return message_.empty(); }
  const std::string& message() const { return message_; }
  // Returns CUDA's error if a CUDA call failed.
  cudaError_t cuda_error() const { return cuda_error_; }

 private:
  Status(std::string message, cudaError_t cuda_error) : message_(std::move(message)), cuda_error_(cuda_error) {}

  std::string message_;
  cudaError_t cuda_error_;
};

}  // namespace jax_grouped

#define JAX_GROUPED_RETURN_IF_FAILED(expression)                     \
  do {                                                               \
    if (::jax_grouped::Status status = (expression); !status.ok()) { \
      return status;                                                 \
    }                                                                \
  } while (false)

#endif  // JAX_GROUPED_CSRC_COMMON_STATUS_H_
