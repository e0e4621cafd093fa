// The algorithms that were timed and found fastest, in this process and, with a file, in earlier processes.

#ifndef JAX_GROUPED_CSRC_GEMM_CUBLASLT_TUNED_ALGORITHMS_H_
#define JAX_GROUPED_CSRC_GEMM_CUBLASLT_TUNED_ALGORITHMS_H_

#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "csrc/gemm/cublaslt/algorithms.h"

namespace jax_grouped {

// Table of the fastest algorithms by key. A key is one line of text without tabs. Every line of the file is one choice,
// with three fields separated by tabs: the key, the algorithm's bytes in hexadecimal and its workspace in bytes. NVIDIA
// permits storing the bytes of an algorithm for use with the same version of cuBLASLt, so the key contains that
// version.
//
// Lines are only ever appended, by one process at a time, and the first line that can run counts. So all processes that
// share a file make the same choices, even if they time the same algorithms at once. Damaged lines are ignored. A file
// that cannot be read or written only costs time: the next process times the algorithms again.
//
// The file is read once, and once more for every choice that is added to it, always without holding the lock of this
// class.
class TunedAlgorithms {
 public:
  // Returns true if a known algorithm for a key can run here.
  using CanRun = std::function<bool(const Algorithm&)>;

  static TunedAlgorithms& Get();

  // Sets the file to read from and append to from now on. Known algorithms stay known.
  void SetFile(std::string path);

  // Finds the oldest known algorithm for the key that can run.
  bool Find(const std::string& key, const CanRun& can_run, Algorithm* algorithm);

  // Adds an algorithm and returns it. If another process has meanwhile added one that can run, returns that instead.
  Algorithm Add(const std::string& key, const CanRun& can_run, const Algorithm& algorithm);

 private:
  // Adds the file's algorithms to the known ones.
  void ReadFileOnce();

  std::mutex mutex_;
  std::string path_;
  bool is_read_ = false;
  std::map<std::string, std::vector<Algorithm>> known_;  // from the file, and those that Add returned
};

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_GEMM_CUBLASLT_TUNED_ALGORITHMS_H_
