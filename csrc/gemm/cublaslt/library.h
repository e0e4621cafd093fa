// cuBLASLt, loaded at run time from where JAX loads it.

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
  decltype(&::cublasLtMatmulAlgoCheck) MatmulAlgoCheck;
  decltype(&::cublasLtMatmulAlgoConfigGetAttribute) MatmulAlgoConfigGetAttribute;
  decltype(&::cublasLtMatmulDescInit_internal) MatmulDescInit;
  decltype(&::cublasLtMatmulDescSetAttribute) MatmulDescSetAttribute;
  decltype(&::cublasLtGroupedMatrixLayoutInit_internal) GroupedMatrixLayoutInit;
  decltype(&::cublasLtMatmulPreferenceInit_internal) MatmulPreferenceInit;
  decltype(&::cublasLtMatmulPreferenceSetAttribute) MatmulPreferenceSetAttribute;

  Status Check(cublasStatus_t status, const char* what) const;

  // As 13.10.0.
  std::string Version() const;
};

// The first release whose grouped matmul is right in every use made of it here: 13.8.0.
constexpr size_t kCublasLtNeeded = 130800;

// Names the file to load if no cuBLASLt is loaded yet; empty for the loader's own search. Has an effect before the
// first call of the functions below only.
void SetCublasLtPath(std::string path);

// The version of the library, as 131000 for 13.10.0, or 0 if there is none.
size_t CublasLtVersion();

// Points `library` to the process's cuBLASLt. Fails if there is none or if it is older than kCublasLtNeeded.
Status GetCublasLt(const CublasLt** library);

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_GEMM_CUBLASLT_LIBRARY_H_
