#include <cstdint>
#include <limits>
#include <string>

#include "csrc/groups/layout.h"
#include "csrc/quantize/permuted.h"
#include "xla/ffi/api/ffi.h"
#include "xla_ffi/decode_quantized.h"
#include "xla_ffi/handlers.h"

namespace jax_grouped {
namespace {

struct QuantizePermutedAttributes {
  int64_t num_groups;  // of all batch elements
  bool given_scale;    // of kTensor; without, the scales are those of kBlock1D
  bool pow2_scales;
  float amax_epsilon;
};

}  // namespace
}  // namespace jax_grouped

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jax_grouped::QuantizePermutedAttributes, StructMember<int64_t>("num_groups"),
                                      StructMember<bool>("given_scale"), StructMember<bool>("pow2_scales"),
                                      StructMember<float>("amax_epsilon"));

namespace jax_grouped {
namespace {

constexpr char kOp[] = "jax_grouped_quantize_permuted";

// Checks the tokens and their rows, and decodes their number and types.
ffi::Error DecodeProblem(const ffi::AnyBuffer& x, const S32Buffer& inverse, const ffi::AnyBuffer& data,
                         PermutedProblem* problem) {
  const auto fp8_type = Fp8Type(x.element_type());
  const auto input_type = fp8_type ? fp8_type : FloatType(x.element_type());
  if (!input_type) return Invalid(kOp, "x must be bfloat16, float16, float32 or FP8.");
  const auto output_type = Fp8Type(data.element_type());
  if (!output_type) return Invalid(kOp, "the data must be float8_e4m3fn or float8_e5m2.");
  JAX_GROUPED_RETURN_IF_ERROR(CheckRank(kOp, "x", x, 2));
  JAX_GROUPED_RETURN_IF_ERROR(CheckRank(kOp, "inverse", inverse, 2));
  JAX_GROUPED_RETURN_IF_ERROR(CheckRank(kOp, "the data", data, 2));
  const int64_t tokens = x.dimensions()[0];
  JAX_GROUPED_RETURN_IF_ERROR(CheckEqual(kOp, "inverse's shape[0]", inverse.dimensions()[0], tokens));
  JAX_GROUPED_RETURN_IF_ERROR(CheckEqual(kOp, "the data's shape[1]", data.dimensions()[1], x.dimensions()[1]));
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  if (tokens == 0) return Invalid(kOp, "x must have rows.");
  const int64_t choices = inverse.dimensions()[1];
  if (choices == 0) return Invalid(kOp, "inverse must have choices.");
  if (tokens > kMost || choices > kMost) return Invalid(kOp, "tokens and choices must be fewer than 2^31.");
  problem->input_type = *input_type;
  problem->output_type = *output_type;
  problem->tokens = tokens;
  problem->choices = static_cast<int>(choices);
  problem->features = x.dimensions()[1];
  JAX_GROUPED_RETURN_IF_ERROR(CheckFeatures(kOp, problem->features));
  return CheckAlignment(kOp, "x", x.untyped_data());
}

// Decodes what follows the groups: the scales of an FP8 x, or those of the groups and their largest values.
ffi::Error DecodeScales(const ffi::AnyBuffer& x, const ffi::RemainingArgs& more, const ffi::RemainingRets& results,
                        const QuantizePermutedAttributes& attributes, PermutedBuffers* buffers) {
  const bool is_fp8 = Fp8Type(x.element_type()).has_value();
  const bool given = attributes.given_scale;
  if (is_fp8 && given) return Invalid(kOp, "FP8 tokens have scales of their own; given_scale is for others.");
  JAX_GROUPED_RETURN_IF_ERROR(
      CheckEqual(kOp, "the number of scales", static_cast<int64_t>(more.size()), is_fp8 || given ? 1 : 0));
  JAX_GROUPED_RETURN_IF_ERROR(
      CheckEqual(kOp, "the number of further results", static_cast<int64_t>(results.size()), given ? 1 : 0));
  if (is_fp8) {
    JAX_GROUPED_ASSIGN_OR_RETURN(x_scale, more.get<ffi::AnyBuffer>(0));
    return DecodeScaledInput(kOp, x, *x_scale, &buffers->x_scale, &buffers->x_group_rows);
  }
  if (!given) return ffi::Error::Success();
  JAX_GROUPED_ASSIGN_OR_RETURN(scale, more.get<F32Buffer>(0));
  JAX_GROUPED_ASSIGN_OR_RETURN(amax, results.get<F32Buffer>(0));
  JAX_GROUPED_RETURN_IF_ERROR(CheckEqual(kOp, "the number of given scales",
                                         static_cast<int64_t>(scale->element_count()), attributes.num_groups));
  JAX_GROUPED_RETURN_IF_ERROR(CheckEqual(kOp, "the number of largest values",
                                         static_cast<int64_t>((*amax)->element_count()), attributes.num_groups));
  buffers->given_scale = scale->typed_data();
  buffers->amax = reinterpret_cast<uint32_t*>((*amax)->typed_data());
  return ffi::Error::Success();
}

ffi::Error QuantizePermuted(cudaStream_t stream, ffi::AnyBuffer x, S32Buffer inverse, S32Buffer group_sizes,
                            S32Buffer group_offset, ffi::RemainingArgs more, AnyResult data, AnyResult scale,
                            ffi::Result<S32Buffer> table, ffi::RemainingRets results,
                            const QuantizePermutedAttributes& attributes) try {
  PermutedProblem problem{};
  JAX_GROUPED_RETURN_IF_ERROR(DecodeProblem(x, inverse, *data, &problem));
  problem.pow2_scales = attributes.pow2_scales;
  problem.amax_epsilon = attributes.amax_epsilon;
  Groups groups{};
  JAX_GROUPED_RETURN_IF_ERROR(
      DecodeGroups(kOp, group_sizes, group_offset, attributes.num_groups, data->dimensions()[0], &groups));
  JAX_GROUPED_RETURN_IF_ERROR(
      CheckEqual(kOp, "the remainder of tokens by the batch size", problem.tokens % groups.batch, 0));
  problem.tokens /= groups.batch;
  QuantizedLayout layout{};
  layout.mode = attributes.given_scale ? ScalingMode::kTensor : ScalingMode::kBlock1D;
  layout.batch = groups.batch;
  layout.tokens = groups.capacity;
  layout.features = problem.features;
  layout.num_groups = groups.num_groups;
  JAX_GROUPED_RETURN_IF_ERROR(CheckScaled(kOp, layout, *data, *scale));
  JAX_GROUPED_RETURN_IF_ERROR(CheckAtLeast(kOp, "the size of the group table",
                                           static_cast<int64_t>(table->element_count()),
                                           groups.batch * GroupTable::Size(groups.num_groups)));
  PermutedBuffers buffers{};
  JAX_GROUPED_RETURN_IF_ERROR(DecodeScales(x, more, results, attributes, &buffers));
  buffers.x = x.untyped_data();
  buffers.inverse = inverse.typed_data();
  buffers.data = static_cast<uint8_t*>(data->untyped_data());
  buffers.scale = static_cast<float*>(scale->untyped_data());
  buffers.table = table->typed_data();
  return ToError(kOp, LaunchQuantizePermuted(stream, groups, problem, layout.ElementRowBlocks(), buffers));
}
JAX_GROUPED_CATCH(kOp)

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(QuantizePermutedExecute, QuantizePermuted,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<S32Buffer>()
                                  .Arg<S32Buffer>()
                                  .Arg<S32Buffer>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<S32Buffer>()
                                  .RemainingRets()
                                  .Attrs<QuantizePermutedAttributes>(),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jax_grouped
