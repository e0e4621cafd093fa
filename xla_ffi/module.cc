// The extension module jax_grouped._cuda. It exports the custom calls' handlers, and the settings and properties of
// cuBLASLt.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <utility>

#include "csrc/gemm/cublaslt/library.h"
#include "csrc/gemm/cublaslt/tuned_algorithms.h"
#include "csrc/gemm/gemm.h"
#include "xla_ffi/handlers.h"

namespace nb = nanobind;

namespace jax_grouped {
namespace {

using Handler = XLA_FFI_Error*(XLA_FFI_CallFrame*);

nb::capsule Capsule(Handler* handler) {
  return nb::capsule(reinterpret_cast<void*>(handler), "xla._CUSTOM_CALL_TARGET");
}

// Returns the handlers by custom call name and execution stage, as jax.ffi.register_ffi_target takes them.
nb::dict Handlers() {
  nb::dict gemm;
  gemm["initialize"] = Capsule(GemmInitialize);
  gemm["execute"] = Capsule(GemmExecute);
  nb::dict bias_grad;
  bias_grad["execute"] = Capsule(BiasGradExecute);
  nb::dict quantize;
  quantize["execute"] = Capsule(QuantizeExecute);
  nb::dict quantize_permuted;
  quantize_permuted["execute"] = Capsule(QuantizePermutedExecute);
  nb::dict dequantize;
  dequantize["execute"] = Capsule(DequantizeExecute);
  nb::dict activation_grad;
  activation_grad["execute"] = Capsule(ActivationGradExecute);
  nb::dict permute_rows;
  permute_rows["execute"] = Capsule(PermuteRowsExecute);
  nb::dict sum_rows;
  sum_rows["execute"] = Capsule(SumRowsExecute);
  nb::dict route;
  route["execute"] = Capsule(RouteExecute);
  nb::dict group_pairs;
  group_pairs["execute"] = Capsule(GroupPairsExecute);
  nb::dict handlers;
  handlers["jax_grouped_gemm"] = gemm;
  handlers["jax_grouped_bias_grad"] = bias_grad;
  handlers["jax_grouped_activation_grad"] = activation_grad;
  handlers["jax_grouped_permute_rows"] = permute_rows;
  handlers["jax_grouped_sum_rows"] = sum_rows;
  handlers["jax_grouped_route"] = route;
  handlers["jax_grouped_group_pairs"] = group_pairs;
  handlers["jax_grouped_quantize"] = quantize;
  handlers["jax_grouped_quantize_permuted"] = quantize_permuted;
  handlers["jax_grouped_dequantize"] = dequantize;
  return handlers;
}

}  // namespace

NB_MODULE(_cuda, m) {
  m.def("handlers", &Handlers);
  m.def("set_cublaslt_path", &SetCublasLtPath, nb::arg("path"));
  m.def("cublaslt_version", &CublasLtVersion);
  m.def(
      "set_autotune_file", [](std::string path) { TunedAlgorithms::Get().SetFile(std::move(path)); }, nb::arg("path"));
  m.def("describe_plans", &DescribePlans);
}

}  // namespace jax_grouped
