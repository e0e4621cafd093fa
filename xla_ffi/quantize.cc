#include "csrc/quantize/quantize.h"

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>

#include "csrc/groups/layout.h"
#include "xla/ffi/api/ffi.h"
#include "xla_ffi/decode_activation.h"
#include "xla_ffi/decode_quantized.h"
#include "xla_ffi/handlers.h"

namespace jax_grouped {
namespace {

// The static parts of calls, apart from the shapes and types of their buffers.
struct QuantizeAttributes {
  ScalingMode mode;
  int64_t stack_rows;
  bool rowwise;
  bool columnwise;
  bool dbias;
  bool pow2_scales;
  float amax_epsilon;
  bool swizzled_scales;
  bool given_scale;
  bool gathered;
  ActivationKind activation;
  float limit;
  float alpha;
  float offset;
  bool backward;
  bool weighted;
  bool inner_products;
  bool activated;
  bool cached;
};

struct DequantizeAttributes {
  ScalingMode mode;
  int64_t num_groups;
  int64_t stack_rows;
  bool columnwise;
  bool swizzled_scales;
};

}  // namespace
}  // namespace jax_grouped

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    ::jax_grouped::QuantizeAttributes, StructMember<::jax_grouped::ScalingMode>("mode"),
    StructMember<int64_t>("stack_rows"), StructMember<bool>("rowwise"), StructMember<bool>("columnwise"),
    StructMember<bool>("dbias"), StructMember<bool>("pow2_scales"), StructMember<float>("amax_epsilon"),
    StructMember<bool>("swizzled_scales"), StructMember<bool>("given_scale"), StructMember<bool>("gathered"),
    StructMember<::jax_grouped::ActivationKind>("activation"), StructMember<float>("limit"),
    StructMember<float>("alpha"), StructMember<float>("offset"), StructMember<bool>("backward"),
    StructMember<bool>("weighted"), StructMember<bool>("inner_products"), StructMember<bool>("activated"),
    StructMember<bool>("cached"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jax_grouped::DequantizeAttributes,
                                      StructMember<::jax_grouped::ScalingMode>("mode"),
                                      StructMember<int64_t>("num_groups"), StructMember<int64_t>("stack_rows"),
                                      StructMember<bool>("columnwise"), StructMember<bool>("swizzled_scales"));

namespace jax_grouped {
namespace {

constexpr char kQuantize[] = "jax_grouped_quantize";
constexpr char kDequantize[] = "jax_grouped_dequantize";

ffi::Error CheckTable(const char* op, const ffi::AnyBuffer& table, const Groups& groups) {
  if (table.element_type() != ffi::S32) return Invalid(op, "the group table must be int32.");
  return CheckAtLeast(op, "the size of the group table", Elements(table),
                      groups.batch * GroupTable::Size(groups.num_groups));
}

// The operands and results that not every call has, in order.
class OptionalBuffers {
 public:
  OptionalBuffers(const ffi::RemainingArgs& args, const ffi::RemainingRets& results) : args_(args), results_(results) {}

  ffi::ErrorOr<ffi::AnyBuffer> NextArgument() {
    if (ArgumentsLeft() == 0) return Missing("operands");
    return args_.get<ffi::AnyBuffer>(next_argument_++);
  }
  ffi::ErrorOr<AnyResult> NextResult() {
    if (ResultsLeft() == 0) return Missing("results");
    return results_.get<ffi::AnyBuffer>(next_result_++);
  }
  int64_t ArgumentsLeft() const { return static_cast<int64_t>(args_.size()) - static_cast<int64_t>(next_argument_); }
  int64_t ResultsLeft() const { return static_cast<int64_t>(results_.size()) - static_cast<int64_t>(next_result_); }
  size_t ResultsTaken() const { return next_result_; }

 private:
  static ffi::Unexpected<ffi::Error> Missing(const std::string& buffers) {
    return ffi::Unexpected(Invalid(kQuantize, "the attributes ask for more " + buffers + " than there are."));
  }

  const ffi::RemainingArgs& args_;
  const ffi::RemainingRets& results_;
  size_t next_argument_ = 0;
  size_t next_result_ = 0;
};

ffi::Error CheckFloats(const std::string& name, const ffi::AnyBuffer& buffer, int64_t size) {
  if (buffer.element_type() != ffi::F32) return Invalid(kQuantize, name + " must be float32.");
  return CheckEqual(kQuantize, "the size of " + name, Elements(buffer), size);
}

// Decode the next operand or result, which must be float32 of this size.
ffi::Error DecodeArgument(const std::string& name, int64_t size, OptionalBuffers* optional, const float** data) {
  JAX_GROUPED_ASSIGN_OR_RETURN(argument, optional->NextArgument());
  JAX_GROUPED_RETURN_IF_ERROR(CheckFloats(name, *argument, size));
  *data = static_cast<const float*>(argument->untyped_data());
  return ffi::Error::Success();
}
ffi::Error DecodeResult(const std::string& name, int64_t size, OptionalBuffers* optional, float** data) {
  JAX_GROUPED_ASSIGN_OR_RETURN(result, optional->NextResult());
  JAX_GROUPED_RETURN_IF_ERROR(CheckFloats(name, **result, size));
  *data = static_cast<float*>((*result)->untyped_data());
  return ffi::Error::Success();
}

// Fails unless a batch element's tokens can be a stack: groups of `stack_rows` rows each. 0 stands for groups of other
// sizes. Only the device knows whether group_sizes agree.
ffi::Error CheckStackRows(const char* op, int64_t stack_rows, const Groups& groups) {
  const bool is_stack = groups.capacity % groups.num_groups == 0 && stack_rows == groups.capacity / groups.num_groups;
  if (stack_rows == 0 || is_stack) return ffi::Error::Success();
  return Invalid(op, "stack_rows must be 0, or the number of rows divided by the number of groups, got " +
                         std::to_string(stack_rows) + " for " + std::to_string(groups.capacity) + " rows in " +
                         std::to_string(groups.num_groups) + " groups.");
}

// Fails if options of the attributes do not fit each other.
ffi::Error CheckOptions(const QuantizeAttributes& attributes) {
  const bool has_activation = attributes.activation != ActivationKind::kNone;
  if (attributes.given_scale && attributes.mode != ScalingMode::kTensor) {
    return Invalid(kQuantize, "scales can be given for whole groups only.");
  }
  if (attributes.gathered && has_activation) return Invalid(kQuantize, "rows are gathered without an activation only.");
  if (attributes.weighted && !has_activation) return Invalid(kQuantize, "weights of rows need an activation.");
  if (attributes.backward && !has_activation) return Invalid(kQuantize, "backward needs an activation.");
  if (attributes.inner_products && !attributes.backward) {
    return Invalid(kQuantize, "inner products are those of a backward form.");
  }
  if (attributes.activated && !attributes.backward) {
    return Invalid(kQuantize, "the activation's result is quantized with a backward form only.");
  }
  // The sums of dbias do not read `skip`.
  if (attributes.cached && attributes.dbias) return Invalid(kQuantize, "dbias cannot be cached.");
  if (attributes.cached && attributes.activated)
    return Invalid(kQuantize, "the activation's result of a backward form cannot be cached.");
  return ffi::Error::Success();
}

// Returns the number of features that `x` must have, from the features of the result.
int64_t InputFeatures(const QuantizeProblem& problem, int64_t features) {
  if (!IsGated(problem.activation.kind)) return features;
  return problem.backward ? features / 2 : 2 * features;
}

ffi::Error DecodeProblem(const ffi::AnyBuffer& x, const QuantizeAttributes& attributes, QuantizeProblem* problem) {
  JAX_GROUPED_RETURN_IF_ERROR(CheckMode(kQuantize, attributes.mode));
  JAX_GROUPED_RETURN_IF_ERROR(CheckActivation(kQuantize, attributes.activation));
  const auto fp8_type = Fp8Type(x.element_type());
  const auto type = fp8_type ? fp8_type : FloatType(x.element_type());
  if (!type) return Invalid(kQuantize, "x must be bfloat16, float16, float32 or FP8.");
  if (fp8_type && (attributes.mode != ScalingMode::kBlock1D || attributes.activation != ActivationKind::kNone)) {
    return Invalid(kQuantize, "an FP8 x is quantized in mode BLOCK_1D without an activation only.");
  }
  JAX_GROUPED_RETURN_IF_ERROR(CheckRank(kQuantize, "x", x, 2));
  if (x.dimensions()[0] == 0) return Invalid(kQuantize, "x must have rows.");
  JAX_GROUPED_RETURN_IF_ERROR(CheckOptions(attributes));
  problem->mode = attributes.mode;
  problem->input_type = *type;
  problem->pow2_scales = attributes.pow2_scales;
  problem->swizzled_scales = attributes.swizzled_scales && attributes.mode == ScalingMode::kMx;
  problem->amax_epsilon = attributes.amax_epsilon;
  problem->activation = {attributes.activation, attributes.limit, attributes.alpha, attributes.offset};
  problem->backward = attributes.backward;
  const int64_t in_features = x.dimensions()[1];
  const bool gated = IsGated(attributes.activation);
  problem->features = gated ? (attributes.backward ? 2 * in_features : in_features / 2) : in_features;
  JAX_GROUPED_RETURN_IF_ERROR(CheckFeatures(kQuantize, problem->features));
  JAX_GROUPED_RETURN_IF_ERROR(
      CheckEqual(kQuantize, "x's shape[1]", in_features, InputFeatures(*problem, problem->features)));
  return CheckAlignment(kQuantize, "x", x.untyped_data());
}

// Decodes `x`, the scales of an FP8 `x` and the indices of its rows, and gives the number of rows to quantize.
ffi::Error DecodeRows(const ffi::AnyBuffer& x, const QuantizeAttributes& attributes, OptionalBuffers* optional,
                      QuantizeBuffers* buffers, int64_t* rows) {
  buffers->x = x.untyped_data();
  buffers->x_rows = x.dimensions()[0];
  *rows = buffers->x_rows;
  if (Fp8Type(x.element_type())) {
    JAX_GROUPED_ASSIGN_OR_RETURN(x_scale, optional->NextArgument());
    JAX_GROUPED_RETURN_IF_ERROR(DecodeScaledInput(kQuantize, x, *x_scale, &buffers->x_scale, &buffers->x_group_rows));
  }
  if (!attributes.gathered) return ffi::Error::Success();
  JAX_GROUPED_ASSIGN_OR_RETURN(indices, optional->NextArgument());
  if (indices->element_type() != ffi::S32) return Invalid(kQuantize, "row_indices must be int32.");
  buffers->row_indices = static_cast<const int32_t*>(indices->untyped_data());
  *rows = Elements(*indices);
  return *rows > 0 ? ffi::Error::Success() : Invalid(kQuantize, "row_indices must have entries.");
}

ffi::Error DecodeArguments(const ffi::AnyBuffer& x, int64_t batch, int64_t num_groups,
                           const QuantizeAttributes& attributes, const QuantizeProblem& problem,
                           OptionalBuffers* optional, QuantizeBuffers* buffers) {
  if (attributes.given_scale) {
    JAX_GROUPED_RETURN_IF_ERROR(DecodeArgument("scale", num_groups, optional, &buffers->scale));
  }
  if (attributes.backward) {
    JAX_GROUPED_ASSIGN_OR_RETURN(input, optional->NextArgument());
    if (input->element_type() != x.element_type()) return Invalid(kQuantize, "activation_input must have x's type.");
    JAX_GROUPED_RETURN_IF_ERROR(CheckEqual(kQuantize, "the number of elements of activation_input", Elements(*input),
                                           x.dimensions()[0] * problem.features));
    JAX_GROUPED_RETURN_IF_ERROR(CheckAlignment(kQuantize, "activation_input", input->untyped_data()));
    buffers->activation_input = input->untyped_data();
  }
  if (attributes.weighted) {
    JAX_GROUPED_RETURN_IF_ERROR(DecodeArgument("row_weights", x.dimensions()[0], optional, &buffers->row_weights));
  }
  if (attributes.activated && attributes.given_scale) {
    JAX_GROUPED_RETURN_IF_ERROR(
        DecodeArgument("activated_scale", num_groups, optional, &buffers->given_activated_scale));
  }
  if (attributes.cached) {
    JAX_GROUPED_ASSIGN_OR_RETURN(skip, optional->NextArgument());
    if (skip->element_type() != ffi::PRED) return Invalid(kQuantize, "skip must be boolean.");
    JAX_GROUPED_RETURN_IF_ERROR(CheckEqual(kQuantize, "the size of skip", Elements(*skip), batch));
    buffers->skip = static_cast<const bool*>(skip->untyped_data());
  }
  return ffi::Error::Success();
}

// Decodes one orientation's results.
ffi::Error DecodeScaled(const QuantizedLayout& layout, OptionalBuffers* optional, std::optional<cudaDataType_t>* type,
                        void** data, void** scale, int64_t* scale_bytes) {
  JAX_GROUPED_ASSIGN_OR_RETURN(data_result, optional->NextResult());
  JAX_GROUPED_ASSIGN_OR_RETURN(scale_result, optional->NextResult());
  const ffi::AnyBuffer& data_buffer = **data_result;
  const ffi::AnyBuffer& scale_buffer = **scale_result;
  JAX_GROUPED_RETURN_IF_ERROR(CheckScaled(kQuantize, layout, data_buffer, scale_buffer));
  const auto data_type = Fp8Type(data_buffer.element_type());
  if (!data_type || (*type && **type != *data_type)) {
    return Invalid(kQuantize, "the results must be of one type, float8_e4m3fn or float8_e5m2.");
  }
  *type = data_type;
  *data = data_buffer.untyped_data();
  *scale = scale_buffer.untyped_data();
  *scale_bytes = static_cast<int64_t>(scale_buffer.size_bytes());
  return ffi::Error::Success();
}

ffi::Error DecodeResults(QuantizedLayout layout, const QuantizeAttributes& attributes, OptionalBuffers* optional,
                         QuantizeProblem* problem, QuantizeBuffers* buffers) {
  std::optional<cudaDataType_t> type;
  if (attributes.rowwise) {
    layout.columnwise = false;
    JAX_GROUPED_RETURN_IF_ERROR(
        DecodeScaled(layout, optional, &type, &buffers->row_data, &buffers->row_scale, &buffers->row_scale_bytes));
  }
  if (attributes.columnwise) {
    layout.columnwise = true;
    JAX_GROUPED_RETURN_IF_ERROR(DecodeScaled(layout, optional, &type, &buffers->column_data, &buffers->column_scale,
                                             &buffers->column_scale_bytes));
  }
  if (!type) return Invalid(kQuantize, "rowwise or columnwise must be true.");
  problem->output_type = *type;

  const int64_t num_groups = layout.batch * layout.num_groups;
  JAX_GROUPED_RETURN_IF_ERROR(DecodeResult("amax", num_groups, optional, &buffers->amax));
  if (attributes.dbias) {
    JAX_GROUPED_RETURN_IF_ERROR(DecodeResult("dbias", num_groups * layout.features, optional, &buffers->dbias));
  }
  const int64_t x_features = InputFeatures(*problem, layout.features);
  if (attributes.inner_products) {
    const int64_t size = layout.batch * layout.tokens * CeilDiv(x_features, kBlock);
    JAX_GROUPED_RETURN_IF_ERROR(DecodeResult("inner_products", size, optional, &buffers->inner_products));
  }
  if (!attributes.activated) return ffi::Error::Success();
  layout.columnwise = true;
  layout.features = x_features;
  type.reset();
  JAX_GROUPED_RETURN_IF_ERROR(CheckFeatures(kQuantize, layout.features));
  JAX_GROUPED_RETURN_IF_ERROR(DecodeScaled(layout, optional, &type, &buffers->activated_data, &buffers->activated_scale,
                                           &buffers->activated_scale_bytes));
  if (*type != CUDA_R_8F_E4M3) return Invalid(kQuantize, "the activation's result must become float8_e4m3fn.");
  return DecodeResult("activated_amax", num_groups, optional, &buffers->activated_amax);
}

ffi::Error DecodeScratch(const QuantizedLayout& layout, OptionalBuffers* optional, QuantizeBuffers* buffers) {
  JAX_GROUPED_ASSIGN_OR_RETURN(scratch, optional->NextResult());
  JAX_GROUPED_RETURN_IF_ERROR(CheckAtLeast(kQuantize, "the bytes of scratch",
                                           static_cast<int64_t>((*scratch)->size_bytes()),
                                           QuantizeScratchBytes(layout.batch, layout.tokens, layout.num_groups)));
  buffers->scratch = (*scratch)->untyped_data();
  JAX_GROUPED_ASSIGN_OR_RETURN(partial_sums, optional->NextResult());
  const int64_t expected = buffers->dbias != nullptr ? layout.RowBlocks(kBlock) * layout.features : 0;
  if ((*partial_sums)->element_type() != ffi::F32) return Invalid(kQuantize, "the partial sums must be float32.");
  JAX_GROUPED_RETURN_IF_ERROR(
      CheckAtLeast(kQuantize, "the size of the partial sums", Elements(**partial_sums), expected));
  buffers->partial_sums = static_cast<float*>((*partial_sums)->untyped_data());
  JAX_GROUPED_RETURN_IF_ERROR(CheckAlignment(kQuantize, "scratch", buffers->scratch));
  if (expected > 0) JAX_GROUPED_RETURN_IF_ERROR(CheckAlignment(kQuantize, "the partial sums", buffers->partial_sums));
  return CheckEqual(kQuantize, "the number of surplus results", optional->ResultsLeft(), 0);
}

// Copies the previous results, the last arguments, to the results, unless they are the same buffers. They are, except
// where XLA makes the call write its results straight into a slice of a larger array, as it does in a loop.
ffi::Error LoadPrevious(cudaStream_t stream, size_t count, const ffi::RemainingRets& results,
                        OptionalBuffers* optional) {
  for (size_t i = 0; i < count; ++i) {
    JAX_GROUPED_ASSIGN_OR_RETURN(previous, optional->NextArgument());
    JAX_GROUPED_ASSIGN_OR_RETURN(result, results.get<ffi::AnyBuffer>(i));
    JAX_GROUPED_RETURN_IF_ERROR(CheckEqual(kQuantize, "the bytes of a previous result",
                                           static_cast<int64_t>(previous->size_bytes()),
                                           static_cast<int64_t>((*result)->size_bytes())));
    if (previous->untyped_data() == (*result)->untyped_data()) continue;
    JAX_GROUPED_RETURN_IF_ERROR(
        ToError(kQuantize, Status::FromCuda(cudaMemcpyAsync((*result)->untyped_data(), previous->untyped_data(),
                                                            previous->size_bytes(), cudaMemcpyDeviceToDevice, stream),
                                            "Copying a previous result")));
  }
  return ffi::Error::Success();
}

ffi::Error Quantize(cudaStream_t stream, ffi::AnyBuffer x, S32Buffer group_sizes, S32Buffer group_offset,
                    ffi::RemainingArgs more, ffi::RemainingRets results, const QuantizeAttributes& attributes) try {
  OptionalBuffers optional(more, results);
  QuantizeProblem problem{};
  QuantizeBuffers buffers{};
  JAX_GROUPED_RETURN_IF_ERROR(DecodeProblem(x, attributes, &problem));
  // The number of groups is that of amax's entries, because a call may be for only some of the groups of group_sizes.
  const size_t amax_index = 2 * (static_cast<size_t>(attributes.rowwise) + static_cast<size_t>(attributes.columnwise));
  JAX_GROUPED_RETURN_IF_ERROR(CheckAtLeast(kQuantize, "the number of results", static_cast<int64_t>(results.size()),
                                           static_cast<int64_t>(amax_index) + 1));
  JAX_GROUPED_ASSIGN_OR_RETURN(amax, results.get<ffi::AnyBuffer>(amax_index));
  const int64_t num_groups = Elements(**amax);
  int64_t rows = 0;
  JAX_GROUPED_RETURN_IF_ERROR(DecodeRows(x, attributes, &optional, &buffers, &rows));
  Groups groups{};
  JAX_GROUPED_RETURN_IF_ERROR(DecodeGroups(kQuantize, group_sizes, group_offset, num_groups, rows, &groups));
  JAX_GROUPED_RETURN_IF_ERROR(CheckStackRows(kQuantize, attributes.stack_rows, groups));
  QuantizedLayout layout{};
  layout.mode = problem.mode;
  layout.swizzled_scales = problem.swizzled_scales;
  layout.batch = groups.batch;
  layout.tokens = groups.capacity;
  layout.features = problem.features;
  layout.num_groups = groups.num_groups;
  layout.stack_rows = attributes.stack_rows;
  JAX_GROUPED_RETURN_IF_ERROR(DecodeArguments(x, groups.batch, num_groups, attributes, problem, &optional, &buffers));
  JAX_GROUPED_RETURN_IF_ERROR(DecodeResults(layout, attributes, &optional, &problem, &buffers));
  const size_t num_results = optional.ResultsTaken();
  JAX_GROUPED_RETURN_IF_ERROR(DecodeScratch(layout, &optional, &buffers));
  JAX_GROUPED_RETURN_IF_ERROR(CheckEqual(kQuantize, "the number of operands after those of the attributes",
                                         optional.ArgumentsLeft(),
                                         attributes.cached ? static_cast<int64_t>(num_results) : 0));
  if (attributes.cached) JAX_GROUPED_RETURN_IF_ERROR(LoadPrevious(stream, num_results, results, &optional));
  return ToError(kQuantize, LaunchQuantize(stream, groups, problem, layout.ElementRowBlocks(), buffers));
}
JAX_GROUPED_CATCH(kQuantize)

ffi::Error Dequantize(cudaStream_t stream, ffi::AnyBuffer data, ffi::AnyBuffer scale_inv, S32Buffer group_sizes,
                      S32Buffer group_offset, AnyResult out, AnyResult table,
                      const DequantizeAttributes& attributes) try {
  JAX_GROUPED_RETURN_IF_ERROR(CheckMode(kDequantize, attributes.mode));
  const int64_t num_groups = attributes.num_groups;
  JAX_GROUPED_RETURN_IF_ERROR(CheckRank(kDequantize, "the result", *out, 2));
  const auto type = FloatType(out->element_type());
  if (!type) return Invalid(kDequantize, "the result must be bfloat16, float16 or float32.");
  const auto data_type = Fp8Type(data.element_type());
  if (!data_type) return Invalid(kDequantize, "data must be float8_e4m3fn or float8_e5m2.");

  const int64_t tokens = out->dimensions()[0];
  const auto batch = static_cast<int64_t>(group_offset.element_count());
  JAX_GROUPED_RETURN_IF_ERROR(CheckOfElement(kDequantize, "num_groups", num_groups, batch));
  const int64_t all_groups = num_groups * batch;
  Groups groups{};
  JAX_GROUPED_RETURN_IF_ERROR(DecodeGroups(kDequantize, group_sizes, group_offset, all_groups, tokens, &groups));
  JAX_GROUPED_RETURN_IF_ERROR(CheckStackRows(kDequantize, attributes.stack_rows, groups));
  QuantizedLayout layout{};
  layout.mode = attributes.mode;
  layout.columnwise = attributes.columnwise;
  layout.swizzled_scales = attributes.swizzled_scales;
  layout.batch = groups.batch;
  layout.tokens = groups.capacity;
  layout.features = out->dimensions()[1];
  layout.num_groups = groups.num_groups;
  layout.stack_rows = attributes.stack_rows;
  JAX_GROUPED_RETURN_IF_ERROR(CheckFeatures(kDequantize, layout.features));
  JAX_GROUPED_RETURN_IF_ERROR(CheckScaled(kDequantize, layout, data, scale_inv));
  JAX_GROUPED_RETURN_IF_ERROR(CheckTable(kDequantize, *table, groups));
  JAX_GROUPED_RETURN_IF_ERROR(CheckAlignment(kDequantize, "the result", out->untyped_data()));
  return ToError(kDequantize,
                 LaunchDequantize(stream, groups, layout, data.untyped_data(), *data_type, scale_inv.untyped_data(),
                                  out->untyped_data(), *type, static_cast<int32_t*>(table->untyped_data())));
}
JAX_GROUPED_CATCH(kDequantize)

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(QuantizeExecute, Quantize,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<S32Buffer>()
                                  .Arg<S32Buffer>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs<QuantizeAttributes>(),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(DequantizeExecute, Dequantize,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<S32Buffer>()
                                  .Arg<S32Buffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attrs<DequantizeAttributes>(),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jax_grouped
