// The outcome of a call that can fail. Nothing in csrc throws.

#ifndef JAX_GROUPED_CSRC_COMMON_STATUS_H_
#define JAX_GROUPED_CSRC_COMMON_STATUS_H_

#include <cuda_runtime_api.h>

#include <string>
#include <utility>

namespace jax_grouped {

class [[nodiscard]] Status {
 public:
  static Status Ok() { return Status(std::string()); }
  // `message` is a sentence that names what failed; it must not be empty.
  static Status Failed(std::string message) { return Status(std::move(message)); }
  static Status FromCuda(cudaError_t error, const char* what) {
    if (error == cudaSuccess) return Ok();
    return Failed(std::string(what) + " failed: " + cudaGetErrorString(error) + ".");
  }

  bool ok() const { return message_.empty(); }
  const std::string& message() const { return message_; }

 private:
  explicit Status(std::string message) : message_(std::move(message)) {}

  std::string message_;
};

}  // namespace jax_grouped

#define JAX_GROUPED_RETURN_IF_FAILED(expression)                     \
  do {                                                               \
    if (::jax_grouped::Status status = (expression); !status.ok()) { \
      return status;                                                 \
    }                                                                \
  } while (false)

#endif  // JAX_GROUPED_CSRC_COMMON_STATUS_H_
