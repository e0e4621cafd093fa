// The extension module jax_grouped._cuda. It exports the custom calls' handlers, and what Python sets and asks of
// cuBLASLt.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "csrc/gemm/cublaslt/library.h"
#include "csrc/gemm/gemm.h"
#include "xla_ffi/handlers.h"
#include "xla_ffi/stages.h"

namespace jax_grouped {
namespace {

// Returns the handlers by custom call name.
nb::dict Handlers() {
  nb::dict handlers;
  handlers["jax_grouped_gemm"] = Stages<GemmExecute, GemmInitialize>();
  handlers["jax_grouped_bias_grad"] = Stages<BiasGradExecute>();
  handlers["jax_grouped_activation_grad"] = Stages<ActivationGradExecute>();
  handlers["jax_grouped_permute_rows"] = Stages<PermuteRowsExecute>();
  handlers["jax_grouped_sum_rows"] = Stages<SumRowsExecute>();
  handlers["jax_grouped_route"] = Stages<RouteExecute>();
  handlers["jax_grouped_group_pairs"] = Stages<GroupPairsExecute>();
  handlers["jax_grouped_quantize"] = Stages<QuantizeExecute>();
  handlers["jax_grouped_quantize_permuted"] = Stages<QuantizePermutedExecute>();
  handlers["jax_grouped_dequantize"] = Stages<DequantizeExecute>();
  return handlers;
}

}  // namespace

NB_MODULE(_cuda, m) {
  m.def("handlers", &Handlers);
  m.def("state_type", &StateType);
  m.def("set_cublaslt_path", &SetCublasLtPath, nb::arg("path"));
  m.def("cublaslt_version", &CublasLtVersion);
  m.def("describe_plans", &DescribePlans);
}

}  // namespace jax_grouped
