#include "csrc/gemm/cublaslt/text_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <thread>
#include <utility>

namespace jax_grouped {

TextFile TextFile::Open(const std::string& path, int flags) {
  // O_NONBLOCK has no effect on regular files. Without it, opening a FIFO would wait for the other end.
  TextFile file(open(path.c_str(), flags | O_CLOEXEC | O_NONBLOCK | O_NOCTTY, 0644));
  struct stat status;
  if (file.descriptor_ < 0 || (fstat(file.descriptor_, &status) == 0 && S_ISREG(status.st_mode))) return file;
  return TextFile(-1);
}

TextFile TextFile::OpenToRead(const std::string& path) { return Open(path, O_RDONLY); }

TextFile TextFile::OpenToAppend(const std::string& path) { return Open(path, O_RDWR | O_APPEND | O_CREAT); }

TextFile::TextFile(TextFile&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}

TextFile::~TextFile() {
  if (descriptor_ < 0) return;
  // A child that was forked meanwhile also has the descriptor. Closing alone would leave the lock with the child.
  flock(descriptor_, LOCK_UN);
  close(descriptor_);
}

bool TextFile::Lock() const {
  constexpr auto kPause = std::chrono::milliseconds(10);
  for (int attempt = 0; attempt < 100; ++attempt) {
    if (flock(descriptor_, LOCK_EX | LOCK_NB) == 0) return true;
    if (errno != EWOULDBLOCK && errno != EINTR) return true;
    std::this_thread::sleep_for(kPause);
  }
  return false;
}

std::string TextFile::Read() const {
  std::string text;
  char part[4096];
  while (text.size() < kMostBytes) {
    const ssize_t size =
        pread(descriptor_, part, std::min(sizeof(part), kMostBytes - text.size()), static_cast<off_t>(text.size()));
    if (size < 0 && errno == EINTR) continue;
    if (size <= 0) break;
    text.append(part, static_cast<size_t>(size));
  }
  return text;
}

void TextFile::Append(const std::string& text) const {
  struct stat status;
  if (fstat(descriptor_, &status) != 0 || static_cast<size_t>(status.st_size) + text.size() > kMostBytes) return;
  for (size_t written = 0; written < text.size();) {
    const ssize_t size = write(descriptor_, text.data() + written, text.size() - written);
    if (size < 0 && errno == EINTR) continue;
    if (size <= 0) return;
    written += static_cast<size_t>(size);
  }
}

}  // namespace jax_grouped
