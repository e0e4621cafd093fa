// A text file that several processes read and append to.

#ifndef JAX_GROUPED_CSRC_GEMM_CUBLASLT_TEXT_FILE_H_
#define JAX_GROUPED_CSRC_GEMM_CUBLASLT_TEXT_FILE_H_

#include <cstddef>
#include <string>

namespace jax_grouped {

// An open file, if the path names a regular one that may be opened so: whoever sets the path may name a device, a FIFO
// or a folder. Opening never waits, and where there is no such file the functions do nothing.
class TextFile {
 public:
  // Files are no longer than this; what a longer one holds past it does not exist.
  static constexpr size_t kMostBytes = size_t{4} << 20;

  static TextFile OpenToRead(const std::string& path);
  // Makes the file if there is none.
  static TextFile OpenToAppend(const std::string& path);

  TextFile(TextFile&& other) noexcept;
  TextFile& operator=(TextFile&&) = delete;
  ~TextFile();

  // Keeps other processes from locking the file until it is closed, where the file system has locks. Returns false if
  // another process has it locked for longer than a second.
  bool Lock() const;

  // The text from the beginning on.
  std::string Read() const;

  // Appends text, all of it or, on a disk that is full, a part; none if the file would become too long.
  void Append(const std::string& text) const;

 private:
  explicit TextFile(int descriptor) : descriptor_(descriptor) {}
  static TextFile Open(const std::string& path, int flags);

  int descriptor_;  // -1 without a file
};

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_GEMM_CUBLASLT_TEXT_FILE_H_
