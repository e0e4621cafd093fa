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

// Calls launch(source) with the source of a problem's input.
template <typename Launch>
Status WithSource(const QuantizeProblem& problem, const QuantizeBuffers& buffers, const Launch& launch) {
  const auto with_type = [&](auto number) {
    using T = decltype(number);
    if (problem.activation.kind != ActivationKind::kNone) return launch(MakeActivatedSource<T>(problem, buffers));
    return launch(MakePlainSource<T>(problem, buffers));
  };
  switch (problem.input_type) {
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
Status LaunchQuantizeTiles(cudaStream_t stream, const QuantizeProblem& problem, const QuantizeBuffers& buffers,
                           const QuantizeArguments& args) {
  if constexpr (kMode == ScalingMode::kBlock1D) {
    if (buffers.x_scale != nullptr) {
      return LaunchQuantizeTiles<kMode, Fp8>(stream, args, MakeScaledSource(problem, buffers));
    }
  }
  return WithSource(problem, buffers,
                    [&](const auto& source) { return LaunchQuantizeTiles<kMode, Fp8>(stream, args, source); });
}

template <ScalingMode kMode>
Status LaunchQuantizeTiles(cudaStream_t stream, const QuantizeProblem& problem, const QuantizeBuffers& buffers,
                           const QuantizeArguments& args) {
  if (problem.output_type == CUDA_R_8F_E4M3) return LaunchQuantizeTiles<kMode, E4m3>(stream, problem, buffers, args);
  return LaunchQuantizeTiles<kMode, E5m2>(stream, problem, buffers, args);
}

#define JAX_GROUPED_QUANTIZE_MODE(keyword, mode)                                                                  \
  keyword template Status LaunchQuantizeTiles<mode>(cudaStream_t, const QuantizeProblem&, const QuantizeBuffers&, \
                                                    const QuantizeArguments&)

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_QUANTIZE_LAUNCH_CUH_
