// A text file that several processes read and append to.

#ifndef JAX_GROUPED_CSRC_GEMM_CUBLASLT_TEXT_FILE_H_
#define JAX_GROUPED_CSRC_GEMM_CUBLASLT_TEXT_FILE_H_

#include <cstddef>
#include <string>

namespace jax_grouped {

// An open file, if the path names a regular file that may be opened in this way. The path comes from users and may name
// a device, a FIFO or a folder. Opening never waits. Without such a file the functions do nothing.
class TextFile {
 public:
  // The largest size of a file. Text beyond it is ignored.
  static constexpr size_t kMostBytes = size_t{4} << 20;

  static TextFile OpenToRead(const std::string& path);
  // Opens the file to append to it. Creates it if there is none.
  static TextFile OpenToAppend(const std::string& path);

  TextFile(TextFile&& other) noexcept;
  TextFile& operator=(TextFile&&) = delete;
  ~TextFile();

  // Locks the file against other processes until it is closed, if the file system has locks. Returns false if another
  // process holds the lock for longer than a second.
  bool Lock() const;

  // Returns the text from the beginning on.
  std::string Read() const;

  // Appends the whole text, or a part of it if the disk is full. Appends nothing if the file would become too long.
  void Append(const std::string& text) const;

 private:
  explicit TextFile(int descriptor) : descriptor_(descriptor) {}
  static TextFile Open(const std::string& path, int flags);

  int descriptor_;  // -1 without a file
};

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_GEMM_CUBLASLT_TEXT_FILE_H_
