#include "csrc/quantize/gated_gradient.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "csrc/common/device.h"
#include "csrc/common/launch.cuh"
#include "csrc/common/shared_memory.h"
#include "csrc/quantize/gated_gradient.cuh"

namespace jax_grouped {
namespace {

template <ScalingMode kMode, typename Fp8, typename T>
Status LaunchKernel(cudaStream_t stream, const GatedGradientArguments& args) {
  const auto kernel = QuantizeGatedGradient<kMode, Fp8, T>;
  constexpr int kBytes = sizeof(GatedShared);
  JAX_GROUPED_RETURN_IF_FAILED(
      AllowSharedMemory(reinterpret_cast<const void*>(kernel), kBytes, cudaSharedmemCarveoutMaxShared));
  DeviceProperties properties;
  JAX_GROUPED_RETURN_IF_FAILED(GetDeviceProperties(&properties));
  const uint32_t items = WorkItem::Count(args.gradient, args.ColumnTiles());
  const auto processors = static_cast<uint32_t>(properties.processors);
  const Grid grid{items < processors ? items : processors, kGatedThreads, kBytes};
  return LaunchEarly("Launching the quantization of a gated gradient", stream, grid, kernel, args);
}

template <ScalingMode kMode, typename Fp8>
Status LaunchOfType(cudaStream_t stream, const GatedGradientArguments& args, const QuantizeProblem& problem) {
  if (problem.input_type == CUDA_R_16F) return LaunchKernel<kMode, Fp8, __half>(stream, args);
  return LaunchKernel<kMode, Fp8, __nv_bfloat16>(stream, args);
}

template <ScalingMode kMode>
Status LaunchOfMode(cudaStream_t stream, const GatedGradientArguments& args, const QuantizeProblem& problem) {
  if (problem.output_type == CUDA_R_8F_E4M3) return LaunchOfType<kMode, E4m3>(stream, args, problem);
  return LaunchOfType<kMode, E5m2>(stream, args, problem);
}

}  // namespace

bool IsGatedGradient(const QuantizeProblem& problem, const QuantizeBuffers& buffers) {
  const bool scales =
      problem.mode == ScalingMode::kBlock1D || (problem.mode == ScalingMode::kTensor && buffers.scale != nullptr);
  return scales && problem.backward && IsGated(problem.activation.kind) && problem.input_type != CUDA_R_32F &&
         problem.features % (2 * kTileColumns) == 0 && buffers.row_data != nullptr && buffers.column_data != nullptr &&
         buffers.dbias == nullptr && buffers.skip == nullptr;
}

Status LaunchGatedGradient(cudaStream_t stream, const QuantizeProblem& problem, const QuantizeBuffers& buffers,
                           const QuantizeArguments& gradient) {
  GatedGradientArguments args{};
  args.gradient = gradient;
  args.inputs = buffers.activation_input;
  args.gradients = buffers.x;
  args.row_weights = buffers.row_weights;
  args.inner_products = buffers.inner_products;
  args.activation = problem.activation;
  args.activated_data = static_cast<uint8_t*>(buffers.activated_data);
  args.activated_layout = {problem.features / 2, false};
  if (problem.mode == ScalingMode::kBlock1D) return LaunchOfMode<ScalingMode::kBlock1D>(stream, args, problem);
  return LaunchOfMode<ScalingMode::kTensor>(stream, args, problem);
}

}  // namespace jax_grouped
