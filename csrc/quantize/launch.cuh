// Launches of the quantization kernel for the types of a problem. Each scaling mode is instantiated in its own file, so
// that the modes compile in parallel.

#ifndef JAX_GROUPED_CSRC_QUANTIZE_LAUNCH_CUH_
#define JAX_GROUPED_CSRC_QUANTIZE_LAUNCH_CUH_

#include "csrc/common/launch.cuh"
#include "csrc/common/shared_memory.h"
#include "csrc/quantize/activation.cuh"
#include "csrc/quantize/scaled_source.cuh"
#include "csrc/quantize/tiles.cuh"

namespace jax_grouped {

// Calls launch(source) with the source of the input.
template <typename Launch>
Status WithSource(const Quantization& args, const Launch& launch) {
  const auto with_type = [&](auto number) {
    using T = decltype(number);
    if (args.activation != Activation::kNone) return launch(MakeActivatedSource<T>(args));
    return launch(MakePlainSource<T>(args));
  };
  switch (args.input_type) {
    case CUDA_R_16BF:
      return with_type(__nv_bfloat16());
    case CUDA_R_16F:
      return with_type(__half());
    case CUDA_R_32F:
      return with_type(float());
    default:
      return Status::Failed("Quantization takes bfloat16, float16 or float32.");
  }
}

template <ScalingMode kMode, typename Fp8, typename Source>
Status LaunchQuantizeTiles(cudaStream_t stream, const QuantizeArguments& args, const Source& source) {
  constexpr int kBytes = InputTile<typename Source::Element>::kBytes;
  const auto kernel =
      args.single_launch ? QuantizeTiles<kMode, Fp8, Source, true> : QuantizeTiles<kMode, Fp8, Source, false>;
  JAX_GROUPED_RETURN_IF_FAILED(
      AllowSharedMemory(reinterpret_cast<const void*>(kernel), kBytes, cudaSharedmemCarveoutMaxShared));
  constexpr char kWhat[] = "Launching the quantization";
  const Grid grid{WorkItem::Blocks(args), kTileThreads, kBytes};
  return args.single_launch ? LaunchCooperative(kWhat, stream, grid, kernel, args, source)
                            : LaunchEarly(kWhat, stream, grid, kernel, args, source);
}

template <ScalingMode kMode, typename Fp8>
Status LaunchQuantizeTilesTo(cudaStream_t stream, const Quantization& args) {
  if constexpr (kMode == ScalingMode::kBlock1D) {
    if (args.x_scale != nullptr) return LaunchQuantizeTiles<kMode, Fp8>(stream, args, MakeScaledSource(args));
  }
  return WithSource(args, [&](const auto& source) { return LaunchQuantizeTiles<kMode, Fp8>(stream, args, source); });
}

template <ScalingMode kMode>
Status LaunchQuantizeTiles(cudaStream_t stream, const Quantization& args) {
  if (args.output_type == CUDA_R_8F_E4M3) return LaunchQuantizeTilesTo<kMode, E4m3>(stream, args);
  return LaunchQuantizeTilesTo<kMode, E5m2>(stream, args);
}

#define JAX_GROUPED_QUANTIZE_MODE(keyword, mode) \
  keyword template Status LaunchQuantizeTiles<mode>(cudaStream_t, const Quantization&)

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_QUANTIZE_LAUNCH_CUH_
