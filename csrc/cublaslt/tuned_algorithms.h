// The algorithms that were timed and found fastest, in this process and, with a file, in earlier ones.

#ifndef JAX_GROUPED_CSRC_CUBLASLT_TUNED_ALGORITHMS_H_
#define JAX_GROUPED_CSRC_CUBLASLT_TUNED_ALGORITHMS_H_

#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "csrc/cublaslt/algorithms.h"

namespace jax_grouped {

// Keys are one line of text, without tabs. Every line of the file is one choice: the key, the algorithm's bytes in
// hexadecimal and its workspace in bytes, with a tab between each two. NVIDIA lets the bytes of an algorithm be stored
// for the same version of cuBLASLt, so that version belongs into the key. Lines are only ever appended, each with one
// write, so that processes can share a file; those that are damaged count as absent. A file that cannot be read or
// written costs time only: the algorithms of the next process are timed again.
class TunedAlgorithms {
 public:
  static TunedAlgorithms& Get();

  // The file to look into and to add to from now on. What is known already stays so.
  void SetFile(std::string path);

  // What is known for the key, oldest first.
  std::vector<Algorithm> Find(const std::string& key);

  void Add(const std::string& key, const Algorithm& algorithm);

 private:
  void ReadFile();

  std::mutex mutex_;
  std::string path_;
  bool read_ = true;  // whether the file has been
  std::map<std::string, std::vector<Algorithm>> known_;
};

// Names the file of TunedAlgorithms::Get().
void SetAutotuneFile(std::string path);

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_CUBLASLT_TUNED_ALGORITHMS_H_
