#include "csrc/gemm/cublaslt/tuned_algorithms.h"

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <utility>

#include "csrc/gemm/cublaslt/text_file.h"

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

using Choices = std::map<std::string, std::vector<Algorithm>>;

// Returns the algorithms in a file's text for each key, in the file's order.
Choices Parse(std::string_view text) {
  Choices choices;
  // The text after the last line end was not written in full.
  size_t begin = 0;
  for (size_t end = text.find('\n'); end != std::string_view::npos; begin = end + 1, end = text.find('\n', begin)) {
    std::string_view key;
    Algorithm algorithm;
    if (ParseLine(text.substr(begin, end - begin), &key, &algorithm)) {
      choices[std::string(key)].push_back(algorithm);
    }
  }
  return choices;
}

bool FirstThatRuns(const std::vector<Algorithm>& algorithms, const TunedAlgorithms::CanRun& can_run,
                   Algorithm* algorithm) {
  const auto found = std::find_if(algorithms.begin(), algorithms.end(), can_run);
  if (found == algorithms.end()) return false;
  *algorithm = *found;
  return true;
}

}  // namespace

TunedAlgorithms& TunedAlgorithms::Get() {
  static TunedAlgorithms* tuned = new TunedAlgorithms();
  return *tuned;
}

void TunedAlgorithms::SetFile(std::string path) {
  std::lock_guard<std::mutex> lock(mutex_);
  path_ = std::move(path);
  is_read_ = false;
}

void TunedAlgorithms::ReadFileOnce() {
  std::unique_lock<std::mutex> lock(mutex_);
  if (is_read_) return;
  const std::string path = path_;
  lock.unlock();
  Choices found = Parse(TextFile::OpenToRead(path).Read());
  lock.lock();
  if (is_read_ || path != path_) return;
  is_read_ = true;
  for (auto& [key, algorithms] : found) {
    std::vector<Algorithm>& known = known_[key];
    known.insert(known.end(), algorithms.begin(), algorithms.end());
  }
}

bool TunedAlgorithms::Find(const std::string& key, const CanRun& can_run, Algorithm* algorithm) {
  ReadFileOnce();
  std::unique_lock<std::mutex> lock(mutex_);
  const std::vector<Algorithm> known = known_[key];
  lock.unlock();
  return FirstThatRuns(known, can_run, algorithm);
}

Algorithm TunedAlgorithms::Add(const std::string& key, const CanRun& can_run, const Algorithm& algorithm) {
  std::unique_lock<std::mutex> lock(mutex_);
  const std::string path = path_;
  lock.unlock();
  Algorithm choice = algorithm;
  const TextFile file = TextFile::OpenToAppend(path);
  if (file.Lock()) {
    // Another process may have added an algorithm since the file was read.
    const std::string text = file.Read();
    if (!FirstThatRuns(Parse(text)[key], can_run, &choice)) {
      const std::string separator = text.empty() || text.back() == '\n' ? "" : "\n";
      file.Append(separator + key + "\t" + ToHex(choice.choice) + "\t" + std::to_string(choice.workspace_bytes) + "\n");
    }
  }
  lock.lock();
  known_[key].push_back(choice);
  return choice;
}

}  // namespace jax_grouped
