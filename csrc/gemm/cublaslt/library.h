// cuBLASLt, loaded at run time from the same place as JAX loads it.

#ifndef JAX_GROUPED_CSRC_GEMM_CUBLASLT_LIBRARY_H_
#define JAX_GROUPED_CSRC_GEMM_CUBLASLT_LIBRARY_H_

#include <cublasLt.h>

#include <cstddef>
#include <string>

#include "csrc/common/status.h"

namespace jax_grouped {

// The functions of cuBLASLt that grouped matmuls use.
struct CublasLt {
  decltype(&::cublasLtGetVersion) GetVersion;
  decltype(&::cublasLtGetStatusString) GetStatusString;
  decltype(&::cublasLtCreate) Create;
  decltype(&::cublasLtMatmul) Matmul;
  decltype(&::cublasLtMatmulAlgoGetHeuristic) MatmulAlgoGetHeuristic;
  decltype(&::cublasLtMatmulAlgoConfigGetAttribute) MatmulAlgoConfigGetAttribute;
  decltype(&::cublasLtMatmulDescInit_internal) MatmulDescInit;
  decltype(&::cublasLtMatmulDescSetAttribute) MatmulDescSetAttribute;
  decltype(&::cublasLtGroupedMatrixLayoutInit_internal) GroupedMatrixLayoutInit;
  decltype(&::cublasLtMatmulPreferenceInit_internal) MatmulPreferenceInit;
  decltype(&::cublasLtMatmulPreferenceSetAttribute) MatmulPreferenceSetAttribute;

  Status Check(cublasStatus_t status, const char* what) const;

  // Returns the version as text, such as 13.10.0.
  std::string Version() const;
};

// The first release whose grouped matmul is correct in every way that this library uses it: 13.8.0.
constexpr size_t kCublasLtNeeded = 130800;

// Sets the file to load if no cuBLASLt is loaded yet. An empty path means the loader's own search. Has an effect only
// before the first call of the functions below.
void SetCublasLtPath(std::string path);

// Returns the library's version, such as 131000 for 13.10.0, or 0 if there is no library.
size_t CublasLtVersion();

// Points `library` to the process's cuBLASLt. Fails if there is none, if it is older than kCublasLtNeeded or if it
// lacks a function.
Status GetCublasLt(const CublasLt** library);

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_GEMM_CUBLASLT_LIBRARY_H_
