#include "csrc/gemm/cublaslt/library.h"

#include <dlfcn.h>

#include <mutex>
#include <optional>
#include <type_traits>
#include <utility>

namespace jax_grouped {
namespace {

constexpr char kSoname[] = "libcublasLt.so.13";

std::mutex path_mutex;
std::string& path = *new std::string();

// Opens the library. A copy that is already in the process is the one that JAX uses; a second copy would have its own
// state.
void* OpenLibrary() {
  if (void* loaded = dlopen(kSoname, RTLD_NOW | RTLD_NOLOAD)) return loaded;
  std::lock_guard<std::mutex> lock(path_mutex);
  if (!path.empty()) {
    if (void* found = dlopen(path.c_str(), RTLD_NOW)) return found;
  }
  return dlopen(kSoname, RTLD_NOW);
}

// The process's cuBLASLt.
struct Loaded {
  CublasLt functions;   // null where the library lacks a function
  const char* missing;  // the first function that the library lacks, or null
};

// Loads the functions. Returns nothing if there is no library, or if it cannot tell its version.
std::optional<Loaded> Load() {
  void* handle = OpenLibrary();
  if (handle == nullptr) return std::nullopt;
  Loaded loaded{};
  CublasLt& functions = loaded.functions;
  const auto resolve = [&](const char* name, auto* function) {
    *function = reinterpret_cast<std::remove_pointer_t<decltype(function)>>(dlsym(handle, name));
    if (*function == nullptr && loaded.missing == nullptr) loaded.missing = name;
  };
  resolve("cublasLtGetVersion", &functions.GetVersion);
  if (functions.GetVersion == nullptr) return std::nullopt;
  resolve("cublasLtGetStatusString", &functions.GetStatusString);
  resolve("cublasLtCreate", &functions.Create);
  resolve("cublasLtMatmul", &functions.Matmul);
  resolve("cublasLtMatmulAlgoGetHeuristic", &functions.MatmulAlgoGetHeuristic);
  resolve("cublasLtMatmulAlgoConfigGetAttribute", &functions.MatmulAlgoConfigGetAttribute);
  resolve("cublasLtMatmulDescInit_internal", &functions.MatmulDescInit);
  resolve("cublasLtMatmulDescSetAttribute", &functions.MatmulDescSetAttribute);
  resolve("cublasLtGroupedMatrixLayoutInit_internal", &functions.GroupedMatrixLayoutInit);
  resolve("cublasLtMatmulPreferenceInit_internal", &functions.MatmulPreferenceInit);
  resolve("cublasLtMatmulPreferenceSetAttribute", &functions.MatmulPreferenceSetAttribute);
  return loaded;
}

const std::optional<Loaded>& LoadedOnce() {
  static const std::optional<Loaded> loaded = Load();
  return loaded;
}

std::string VersionString(size_t version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

}  // namespace

Status CublasLt::Check(cublasStatus_t status, const char* what) const {
  if (status == CUBLAS_STATUS_SUCCESS) return Status::Ok();
  return Status::Failed(std::string(what) + " failed: " + GetStatusString(status) + " (cuBLASLt " + Version() + ").");
}

std::string CublasLt::Version() const { return VersionString(GetVersion()); }

void SetCublasLtPath(std::string new_path) {
  std::lock_guard<std::mutex> lock(path_mutex);
  path = std::move(new_path);
}

size_t CublasLtVersion() { return LoadedOnce() ? LoadedOnce()->functions.GetVersion() : 0; }

Status GetCublasLt(const CublasLt** library) {
  const size_t version = CublasLtVersion();
  if (version < kCublasLtNeeded) {
    const std::string found =
        version == 0 ? std::string(kSoname) + " is not found" : "cuBLASLt " + VersionString(version) + " is loaded";
    return Status::Failed(found + ", " + VersionString(kCublasLtNeeded) +
                          " or newer is needed: python3 -m pip install --upgrade 'nvidia-cublas>=13.8,<14'.");
  }
  // Older releases lack functions, too. The error above is then the one that helps.
  const Loaded& loaded = *LoadedOnce();
  if (loaded.missing != nullptr) {
    return Status::Failed("cuBLASLt " + VersionString(version) + " has no function " + loaded.missing +
                          ": install another release of nvidia-cublas>=13.8,<14.");
  }
  *library = &loaded.functions;
  return Status::Ok();
}

}  // namespace jax_grouped
