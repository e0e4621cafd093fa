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

template <ScalingMode kMode>
Status LaunchOfMode(cudaStream_t stream, const GatedGradientArguments& args, const Quantization& quantization) {
  const bool is_half = quantization.input_type == CUDA_R_16F;
  if (quantization.output_type == CUDA_R_8F_E4M3) {
    return is_half ? LaunchKernel<kMode, E4m3, __half>(stream, args)
                   : LaunchKernel<kMode, E4m3, __nv_bfloat16>(stream, args);
  }
  return is_half ? LaunchKernel<kMode, E5m2, __half>(stream, args)
                 : LaunchKernel<kMode, E5m2, __nv_bfloat16>(stream, args);
}

}  // namespace

bool IsGatedGradient(const Quantization& args) {
  const bool scales =
      args.mode == ScalingMode::kBlock1D || (args.mode == ScalingMode::kTensor && args.scale != nullptr);
  return scales && args.backward && IsGated(args.activation) && args.input_type != CUDA_R_32F &&
         args.layout.features % (2 * kTileColumns) == 0 && args.row_data != nullptr && args.column_data != nullptr &&
         args.dbias == nullptr && args.skip == nullptr;
}

Status LaunchGatedGradient(cudaStream_t stream, const Quantization& quantization) {
  GatedGradientArguments args{};
  args.gradient = quantization;
  args.inputs = quantization.activation_input;
  args.gradients = quantization.x;
  args.row_weights = quantization.row_weights;
  args.inner_products = quantization.inner_products;
  args.activation = quantization.activation;
  args.activated_data = quantization.activated_data;
  args.activated_layout = {quantization.layout.features / 2, false};
  if (quantization.mode == ScalingMode::kBlock1D)
    return LaunchOfMode<ScalingMode::kBlock1D>(stream, args, quantization);
  return LaunchOfMode<ScalingMode::kTensor>(stream, args, quantization);
}

}  // namespace jax_grouped
