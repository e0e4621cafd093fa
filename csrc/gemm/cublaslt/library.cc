#include "csrc/gemm/cublaslt/library.h"

#include <dlfcn.h>

#include <mutex>
#include <optional>
#include <utility>

namespace jax_grouped {
namespace {

constexpr char kSoname[] = "libcublasLt.so.13";

std::mutex path_mutex;

std::string& Path() {
  static std::string* path = new std::string();
  return *path;
}

// Opens the library. A copy that is already in the process is the one that JAX uses; a second copy would have its own
// state.
void* OpenLibrary() {
  if (void* loaded = dlopen(kSoname, RTLD_NOW | RTLD_NOLOAD)) return loaded;
  std::lock_guard<std::mutex> lock(path_mutex);
  if (!Path().empty()) {
    if (void* found = dlopen(Path().c_str(), RTLD_NOW)) return found;
  }
  return dlopen(kSoname, RTLD_NOW);
}

template <typename Function>
bool Resolve(void* handle, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(handle, name));
  return *function != nullptr;
}

// Loads the functions. Older releases lack some of them, so a missing function is no error here: the version check
// reports it.
std::optional<CublasLt> Load() {
  void* handle = OpenLibrary();
  CublasLt library{};
  if (handle == nullptr || !Resolve(handle, "cublasLtGetVersion", &library.GetVersion)) return std::nullopt;
  Resolve(handle, "cublasLtGetStatusString", &library.GetStatusString);
  Resolve(handle, "cublasLtCreate", &library.Create);
  Resolve(handle, "cublasLtMatmul", &library.Matmul);
  Resolve(handle, "cublasLtMatmulAlgoGetHeuristic", &library.MatmulAlgoGetHeuristic);
  Resolve(handle, "cublasLtMatmulAlgoCheck", &library.MatmulAlgoCheck);
  Resolve(handle, "cublasLtMatmulAlgoConfigGetAttribute", &library.MatmulAlgoConfigGetAttribute);
  Resolve(handle, "cublasLtMatmulDescInit_internal", &library.MatmulDescInit);
  Resolve(handle, "cublasLtMatmulDescSetAttribute", &library.MatmulDescSetAttribute);
  Resolve(handle, "cublasLtGroupedMatrixLayoutInit_internal", &library.GroupedMatrixLayoutInit);
  Resolve(handle, "cublasLtMatmulPreferenceInit_internal", &library.MatmulPreferenceInit);
  Resolve(handle, "cublasLtMatmulPreferenceSetAttribute", &library.MatmulPreferenceSetAttribute);
  return library;
}

const std::optional<CublasLt>& LoadedOnce() {
  static const std::optional<CublasLt> library = Load();
  return library;
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

void SetCublasLtPath(std::string path) {
  std::lock_guard<std::mutex> lock(path_mutex);
  Path() = std::move(path);
}

size_t CublasLtVersion() { return LoadedOnce() ? LoadedOnce()->GetVersion() : 0; }

Status GetCublasLt(const CublasLt** library) {
  const size_t version = CublasLtVersion();
  if (version < kCublasLtNeeded) {
    const std::string found =
        version == 0 ? std::string(kSoname) + " is not found" : "cuBLASLt " + VersionString(version) + " is loaded";
    return Status::Failed(found + ", " + VersionString(kCublasLtNeeded) +
                          " or newer is needed: python3 -m pip install --upgrade 'nvidia-cublas>=13.8,<14'.");
  }
  *library = &*LoadedOnce();
  return Status::Ok();
}

}  // namespace jax_grouped
