// The algorithms that were timed and found fastest, in this process and, with a file, in earlier ones.

#ifndef JAX_GROUPED_CSRC_GEMM_CUBLASLT_TUNED_ALGORITHMS_H_
#define JAX_GROUPED_CSRC_GEMM_CUBLASLT_TUNED_ALGORITHMS_H_

#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "csrc/gemm/cublaslt/algorithms.h"

namespace jax_grouped {

// Keys are one line of text, without tabs. Every line of the file is one choice: the key, the algorithm's bytes in
// hexadecimal and its workspace in bytes, with a tab between each two. NVIDIA lets the bytes of an algorithm be stored
// for the same version of cuBLASLt, so that version belongs into the key. Lines are only ever appended, by one process
// at a time, and the first that can run counts: so all processes that share a file make the same choices, even if they
// time the same algorithms at once. Lines that are damaged count as absent. A file that cannot be read or written costs
// time only: the algorithms of the next process are timed again.
//
// The file is read once, and once more for every choice that is added to it, always without the lock of this class.
class TunedAlgorithms {
 public:
  // Whether an algorithm that is known for a key can run here.
  using CanRun = std::function<bool(const Algorithm&)>;

  static TunedAlgorithms& Get();

  // The file to look into and to add to from now on. What is known already stays so.
  void SetFile(std::string path);

  // Finds the oldest algorithm known for the key that can run.
  bool Find(const std::string& key, const CanRun& can_run, Algorithm* algorithm);

  // Adds an algorithm and returns it, unless another process has meanwhile added one that can run: then returns that.
  Algorithm Add(const std::string& key, const CanRun& can_run, const Algorithm& algorithm);

 private:
  // Adds what the file holds to what is known.
  void ReadFileOnce();

  std::mutex mutex_;
  std::string path_;
  bool is_read_ = false;
  std::map<std::string, std::vector<Algorithm>> known_;  // from the file, and what Add returned
};

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_GEMM_CUBLASLT_TUNED_ALGORITHMS_H_
