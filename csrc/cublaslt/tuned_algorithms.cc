#include "csrc/cublaslt/tuned_algorithms.h"

#include <fcntl.h>
#include <unistd.h>

#include <charconv>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
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

bool ParseLine(std::string_view line, std::string* key, Algorithm* algorithm) {
  const size_t key_end = line.find('\t');
  const size_t hex_end = line.rfind('\t');
  if (key_end == std::string_view::npos || key_end == hex_end) return false;
  *key = line.substr(0, key_end);
  return ParseHex(line.substr(key_end + 1, hex_end - key_end - 1), &algorithm->choice) &&
         ParseNumber(line.substr(hex_end + 1), 10, &algorithm->workspace_bytes);
}

}  // namespace

TunedAlgorithms& TunedAlgorithms::Get() {
  static TunedAlgorithms* tuned = new TunedAlgorithms();
  return *tuned;
}

void TunedAlgorithms::SetFile(std::string path) {
  std::lock_guard<std::mutex> lock(mutex_);
  path_ = std::move(path);
  read_ = path_.empty();
}

void TunedAlgorithms::ReadFile() {
  std::ifstream file(path_, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  // What follows the last line end was not written in full.
  size_t begin = 0;
  for (size_t end = text.find('\n'); end != std::string::npos; begin = end + 1, end = text.find('\n', begin)) {
    std::string key;
    Algorithm algorithm;
    if (ParseLine(std::string_view(text).substr(begin, end - begin), &key, &algorithm)) {
      known_[key].push_back(algorithm);
    }
  }
}

std::vector<Algorithm> TunedAlgorithms::Find(const std::string& key) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!std::exchange(read_, true)) ReadFile();
  const auto found = known_.find(key);
  return found == known_.end() ? std::vector<Algorithm>() : found->second;
}

void TunedAlgorithms::Add(const std::string& key, const Algorithm& algorithm) {
  std::lock_guard<std::mutex> lock(mutex_);
  known_[key].push_back(algorithm);
  if (path_.empty()) return;
  const std::string line =
      key + "\t" + ToHex(algorithm.choice) + "\t" + std::to_string(algorithm.workspace_bytes) + "\n";
  const int file = open(path_.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644);
  if (file < 0) return;
  // A line that did not get there in full is a damaged one.
  (void)!write(file, line.data(), line.size());
  close(file);
}

void SetAutotuneFile(std::string path) { TunedAlgorithms::Get().SetFile(std::move(path)); }

}  // namespace jax_grouped
