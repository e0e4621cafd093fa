#include "csrc/cublaslt/tuned_algorithms.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <utility>

namespace jax_grouped {
namespace {

constexpr char kDigits[] = "0123456789abcdef";

std::string ToHex(const cublasLtMatmulAlgo_t& choice) {
  unsigned char bytes[sizeof(choice)];
  std::memcpy(bytes, &choice, sizeof(choice));
  std::string hex;
  for (const unsigned char byte : bytes) {
    hex += kDigits[byte / 16];
    hex += kDigits[byte % 16];
  }
  return hex;
}

template <typename Number>
bool ParseNumber(std::string_view text, int base, Number* number) {
  const char* end = text.data() + text.size();
  const auto [parsed, error] = std::from_chars(text.data(), end, *number, base);
  return error == std::errc() && parsed == end;
}

bool ParseHex(std::string_view hex, cublasLtMatmulAlgo_t* choice) {
  uint8_t bytes[sizeof(*choice)];
  if (hex.size() != 2 * sizeof(bytes)) return false;
  for (size_t i = 0; i < sizeof(bytes); ++i) {
    if (!ParseNumber(hex.substr(2 * i, 2), 16, &bytes[i])) return false;
  }
  std::memcpy(choice, bytes, sizeof(bytes));
  return true;
}

bool ParseLine(std::string_view line, std::string_view* key, Algorithm* algorithm) {
  const size_t key_end = line.find('\t');
  const size_t hex_end = line.rfind('\t');
  if (key_end == std::string_view::npos || key_end == hex_end) return false;
  *key = line.substr(0, key_end);
  return ParseHex(line.substr(key_end + 1, hex_end - key_end - 1), &algorithm->choice) &&
         ParseNumber(line.substr(hex_end + 1), 10, &algorithm->workspace_bytes);
}

// The algorithms that the text of a file has for a key.
std::vector<Algorithm> Parse(std::string_view text, std::string_view wanted) {
  std::vector<Algorithm> algorithms;
  // What follows the last line end was not written in full.
  size_t begin = 0;
  for (size_t end = text.find('\n'); end != std::string_view::npos; begin = end + 1, end = text.find('\n', begin)) {
    std::string_view key;
    Algorithm algorithm;
    if (ParseLine(text.substr(begin, end - begin), &key, &algorithm) && key == wanted) algorithms.push_back(algorithm);
  }
  return algorithms;
}

bool FirstThatRuns(const std::vector<Algorithm>& algorithms, const TunedAlgorithms::CanRun& can_run,
                   Algorithm* algorithm) {
  const auto found = std::find_if(algorithms.begin(), algorithms.end(), can_run);
  if (found == algorithms.end()) return false;
  *algorithm = *found;
  return true;
}

// A file that may not be there, or be something else. Nothing throws, as streams do when they read a folder.
class File {
 public:
  File(const std::string& path, int flags) : descriptor_(open(path.c_str(), flags | O_CLOEXEC, 0644)) {}
  ~File() {
    if (descriptor_ < 0) return;
    // A child that was forked meanwhile has the descriptor, too, and closing would leave the lock to it.
    flock(descriptor_, LOCK_UN);
    close(descriptor_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  // Waits until no other process has locked it; holds until the file is closed. Not every file system has locks.
  void Lock() const {
    while (flock(descriptor_, LOCK_EX) != 0 && errno == EINTR) continue;
  }

  std::string Read() const {
    std::string text;
    char part[4096];
    for (ssize_t size = 0; (size = read(descriptor_, part, sizeof(part))) > 0;) text.append(part, size);
    return text;
  }

  // A line that did not get there in full is a damaged one.
  void Write(const std::string& text) const { (void)!write(descriptor_, text.data(), text.size()); }

 private:
  int descriptor_;  // -1 without a file: then every call fails, and does nothing
};

}  // namespace

TunedAlgorithms& TunedAlgorithms::Get() {
  static TunedAlgorithms* tuned = new TunedAlgorithms();
  return *tuned;
}

void TunedAlgorithms::SetFile(std::string path) {
  std::lock_guard<std::mutex> lock(mutex_);
  path_ = std::move(path);
}

bool TunedAlgorithms::Find(const std::string& key, const CanRun& can_run, Algorithm* algorithm) {
  std::lock_guard<std::mutex> lock(mutex_);
  return FirstThatRuns(known_[key], can_run, algorithm) ||
         FirstThatRuns(Parse(File(path_, O_RDONLY).Read(), key), can_run, algorithm);
}

Algorithm TunedAlgorithms::Add(const std::string& key, const CanRun& can_run, const Algorithm& algorithm) {
  std::lock_guard<std::mutex> lock(mutex_);
  const File file(path_, O_RDWR | O_APPEND | O_CREAT);
  file.Lock();
  const std::string text = file.Read();
  Algorithm choice = algorithm;
  if (!FirstThatRuns(Parse(text, key), can_run, &choice)) {
    const std::string separator = text.empty() || text.back() == '\n' ? "" : "\n";
    file.Write(separator + key + "\t" + ToHex(choice.choice) + "\t" + std::to_string(choice.workspace_bytes) + "\n");
  }
  known_[key].push_back(choice);
  return choice;
}

}  // namespace jax_grouped
