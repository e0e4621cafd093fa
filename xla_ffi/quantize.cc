#include "csrc/quantize/quantize.h"

#include <cstdint>
#include <vector>

#include "xla_ffi/decode.h"
#include "xla_ffi/handlers.h"

namespace jax_grouped {
namespace {

// The static parts of calls, apart from the shapes and types of their arrays.
struct QuantizeAttributes {
  ScalingMode mode;
  int64_t stack_rows;
  bool rowwise;
  bool columnwise;
  bool dbias;
  bool finds_amax;  // otherwise the largest values may be anything
  bool pow2_scales;
  float amax_epsilon;
  bool given_scale;
  bool gathered;
  ActivationKind activation;
  float limit;
  float gate_limit;
  float alpha;
  float offset;
  bool backward;
  bool weighted;
  bool inner_products;
  bool activated;
  bool cached;
};

struct QuantizePermutedAttributes {
  int64_t num_groups;  // of one batch element
  bool given_scale;    // of kTensor; without, the scales are those of kBlock1D
  bool pow2_scales;
  float amax_epsilon;
};

struct DequantizeAttributes {
  ScalingMode mode;
  int64_t num_groups;  // of one batch element
  int64_t stack_rows;
  bool columnwise;
};

// Gives all groups `stack_rows` rows, or their own sizes for 0. Fails unless a batch element's tokens can be such a
// stack.
void TakeStackRows(Call& call, int64_t stack_rows, Groups* groups) {
  // Divide: a product with any attribute might overflow.
  const bool is_stack =
      groups->capacity % groups->num_groups == 0 && stack_rows == groups->capacity / groups->num_groups;
  call.Check(stack_rows == 0 || is_stack,
             "stack_rows must be 0, or the number of rows divided by the number of groups");
  groups->stack_rows = static_cast<int32_t>(stack_rows);
}

// Returns the rowwise layout.
QuantizedLayout MakeLayout(ScalingMode mode, const Groups& groups, int64_t features) {
  return {mode, false, groups.batch, groups.capacity, features, groups.num_groups, groups.stack_rows};
}

cudaDataType_t TakeInputType(Call& call, const Array& x) {
  const auto fp8_type = Fp8Type(x.Type());
  return fp8_type ? *fp8_type : call.TakeFloatType(x);
}

// Takes one orientation's results. All of a call's must have one type.
void TakeQuantized(Call& call, const QuantizedLayout& layout, cudaDataType_t* type, uint8_t** data, void** scale,
                   int64_t* scale_bytes) {
  const Array data_result = call.Result(layout.columnwise ? "the columnwise data" : "the rowwise data");
  const Array scale_result = call.Result(layout.columnwise ? "the columnwise scales" : "the rowwise scales");
  const cudaDataType_t data_type = call.TakeFp8Type(data_result);
  call.Check(*type == cudaDataType_t{} || *type == data_type, "the results must be of one type");
  call.CheckQuantized(layout, data_result, scale_result);
  *type = data_type;
  *data = data_result.Data<uint8_t>();
  *scale = scale_result.Data();
  *scale_bytes = scale_result.Bytes();
}

// Return the data of the next operand (result), which must be float32 of this size; null if the call has none.
const float* TakeOperand(Call& call, bool has, const char* name, int64_t size) {
  if (!has) return nullptr;
  const Array operand = call.Operand(name);
  call.CheckArray(operand, ffi::F32, size);
  return operand.Data<float>();
}
float* TakeResult(Call& call, bool has, const char* name, int64_t size) {
  if (!has) return nullptr;
  const Array result = call.Result(name);
  call.CheckArray(result, ffi::F32, size);
  return result.Data<float>();
}

ffi::Error Quantize(Call& call, const QuantizeAttributes& attributes) {
  const Array x = call.Operand("x");
  const Array sizes = call.Operand("group_sizes");
  const Array offset = call.Operand("group_offset");
  const bool has_activation = attributes.activation != ActivationKind::kNone;
  const bool is_gated = IsGated(attributes.activation);
  const bool is_fp8 = Fp8Type(x.Type()).has_value();
  const int64_t x_rows = x.Axis(0);
  const int64_t x_features = x.Axis(1);
  const int64_t features = is_gated ? (attributes.backward ? 2 * x_features : x_features / 2) : x_features;
  call.CheckMode(attributes.mode);
  call.CheckActivation(attributes.activation, ActivationKind::kNone);
  call.CheckRank(x, 2);
  call.CheckRange("the number of rows of x", x_rows, 1, kMostInt32);
  call.CheckFeatures(features, kFp8Alignment);
  call.Check(!is_gated || attributes.backward || x_features % 2 == 0, "x must have an even number of features");
  call.CheckAligned({x});
  // The kernels do not have these combinations. The sums of dbias do not read `skip`.
  call.Check(attributes.rowwise || attributes.columnwise, "rowwise or columnwise must be true");
  call.Check(!is_fp8 || (attributes.mode == ScalingMode::kBlock1D && !has_activation),
             "an FP8 x is quantized in mode BLOCK_1D without an activation only");
  call.Check(!attributes.given_scale || attributes.mode == ScalingMode::kTensor,
             "scales can be given for whole groups only");
  call.Check(attributes.finds_amax || attributes.given_scale || attributes.mode != ScalingMode::kTensor,
             "finds_amax must be true where scales of whole groups are not given");
  call.Check(!attributes.gathered || !has_activation, "rows are gathered without an activation only");
  call.Check(has_activation || (!attributes.weighted && !attributes.backward),
             "weights of rows and a backward form need an activation");
  call.Check(attributes.backward || (!attributes.inner_products && !attributes.activated),
             "inner products and the activation's result need a backward form");
  call.Check(!attributes.cached || (!attributes.dbias && !attributes.activated),
             "dbias and the activation's result cannot be cached");

  Quantization args{};
  args.mode = attributes.mode;
  args.input_type = TakeInputType(call, x);
  args.layout = {features};
  args.scale_rule = {attributes.pow2_scales, attributes.amax_epsilon};
  args.activation = {attributes.activation, attributes.limit, attributes.gate_limit, attributes.alpha,
                     attributes.offset};
  args.backward = attributes.backward;
  args.x = x.Data();
  args.x_rows = x_rows;
  int64_t rows = x_rows;
  if (is_fp8) {
    const Array x_scale = call.Operand("x_scale");
    args.x_group_rows = call.CheckScaledInput(x, x_scale);
    args.x_scale = x_scale.Data<float>();
  }
  if (attributes.gathered) {
    const Array indices = call.Operand("row_indices");
    rows = indices.Elements();
    call.CheckArray(indices, ffi::S32, rows);
    args.row_indices = indices.Data<int32_t>();
  }
  // A call may be for only some of the groups of group_sizes: the number of groups is that of amax's entries, which
  // stands behind the data and scales.
  const int64_t num_groups =
      call.ResultAt(2 * (int64_t{attributes.rowwise} + int64_t{attributes.columnwise})).Elements();
  args.groups = call.TakeGroups(sizes, offset, num_groups, rows);
  if (!call.ok()) return call.Error();
  TakeStackRows(call, attributes.stack_rows, &args.groups);
  QuantizedLayout layout = MakeLayout(args.mode, args.groups, features);
  args.element_row_blocks = layout.ElementRowBlocks();

  args.given_scale = TakeOperand(call, attributes.given_scale, "scale", num_groups);
  if (attributes.backward) {
    const Array input = call.Operand("activation_input");
    call.CheckArray(input, x.Type(), x_rows * features);
    call.CheckAligned({input});
    args.activation_input = input.Data();
  }
  args.row_weights = TakeOperand(call, attributes.weighted, "row_weights", x_rows);
  args.given_activated_scale =
      TakeOperand(call, attributes.activated && attributes.given_scale, "activated_scale", num_groups);
  std::vector<Array> previous;
  if (attributes.cached) {
    const Array skip = call.Operand("skip");
    call.CheckArray(skip, ffi::PRED, layout.batch);
    args.skip = skip.Data<bool>();
    while (call.OperandsLeft() > 0) previous.push_back(call.Operand("a previous result"));
  }

  if (attributes.rowwise) {
    TakeQuantized(call, layout, &args.output_type, &args.row_data, &args.row_scale, &args.row_scale_bytes);
  }
  layout.columnwise = true;
  if (attributes.columnwise) {
    TakeQuantized(call, layout, &args.output_type, &args.column_data, &args.column_scale, &args.column_scale_bytes);
  }
  float* const amax = TakeResult(call, true, "amax", num_groups);
  if (attributes.finds_amax) args.amax = reinterpret_cast<uint32_t*>(amax);
  args.dbias = TakeResult(call, attributes.dbias, "dbias", num_groups * features);
  args.inner_products = TakeResult(call, attributes.inner_products, "inner_products",
                                   layout.batch * layout.tokens * CeilDiv(x_features, kBlock));
  if (attributes.activated) {
    layout.features = x_features;
    cudaDataType_t type{};
    void* scale = nullptr;
    call.CheckFeatures(x_features, kFp8Alignment);
    TakeQuantized(call, layout, &type, &args.activated_data, &scale, &args.activated_scale_bytes);
    call.Check(type == CUDA_R_8F_E4M3, "the activation's result must become float8_e4m3fn");
    args.activated_scale = static_cast<float*>(scale);
    float* const activated_amax = TakeResult(call, true, "activated_amax", num_groups);
    if (attributes.finds_amax) args.activated_amax = reinterpret_cast<uint32_t*>(activated_amax);
  }
  const int64_t num_results = call.ResultsTaken();
  const Array scratch = call.Result("scratch");
  const Array partial_sums = call.Result("the partial sums");
  call.CheckRoom(scratch, ffi::U8, QuantizeScratchBytes(layout.batch, layout.tokens, layout.num_groups));
  call.CheckRoom(partial_sums, ffi::F32, attributes.dbias ? layout.RowBlocks(kBlock) * features : 0);
  call.CheckAligned({scratch});
  if (attributes.dbias) call.CheckAligned({partial_sums});
  args.scratch = scratch.Data();
  args.partial_sums = partial_sums.Data<float>();

  const auto num_previous = static_cast<int64_t>(previous.size());
  call.Check(!attributes.cached || num_previous == num_results, "every result needs a previous one");
  for (int64_t i = 0; i < num_previous && call.ok(); ++i) {
    const Array result = call.ResultAt(i);
    call.CheckArray(previous[i], result.Type(), result.Elements());
  }
  if (!call.Finish()) return call.Error();
  for (int64_t i = 0; i < num_previous; ++i) {
    const ffi::Error copied = call.Copy(previous[i], call.ResultAt(i));
    if (copied.failure()) return copied;
  }
  return call.ToError(LaunchQuantize(call.stream, args));
}

ffi::Error QuantizePermuted(Call& call, const QuantizePermutedAttributes& attributes) {
  const Array x = call.Operand("x");
  const Array inverse = call.Operand("inverse");
  const Array sizes = call.Operand("group_sizes");
  const Array offset = call.Operand("group_offset");
  const Array data = call.Result("the data");
  const Array scale = call.Result("the scales");
  const Array table = call.Result("the group table");
  const int64_t tokens = x.Axis(0);
  const int64_t choices = inverse.Axis(1);
  const int64_t features = x.Axis(1);
  const bool is_fp8 = Fp8Type(x.Type()).has_value();
  call.CheckRank(x, 2);
  call.CheckRange("the number of tokens", tokens, 1, kMostInt32);
  call.CheckRange("the number of choices", choices, 1, kMostInt32);
  call.CheckFeatures(features, kFp8Alignment);
  call.CheckArray(inverse, ffi::S32, {tokens, choices});
  call.CheckArray(data, data.Type(), {data.Axis(0), features});
  call.CheckAligned({x});
  call.Check(!is_fp8 || !attributes.given_scale, "FP8 tokens have scales of their own; given_scale is for others");
  PermutedQuantization args{};
  args.input_type = TakeInputType(call, x);
  args.output_type = call.TakeFp8Type(data);
  call.CheckElementRange("num_groups", attributes.num_groups, offset.Elements());
  if (!call.ok()) return call.Error();
  const int64_t num_groups = attributes.num_groups * offset.Elements();
  args.groups = call.TakeGroups(sizes, offset, num_groups, data.Axis(0));
  if (!call.ok()) return call.Error();
  call.Check(tokens % args.groups.batch == 0, "the batch must divide the number of tokens");
  const auto mode = attributes.given_scale ? ScalingMode::kTensor : ScalingMode::kBlock1D;
  const QuantizedLayout layout = MakeLayout(mode, args.groups, features);
  call.CheckQuantized(layout, data, scale);
  call.CheckRoom(table, ffi::S32, args.groups.batch * GroupTable::Size(args.groups.num_groups));
  if (is_fp8) {
    const Array x_scale = call.Operand("x_scale");
    args.x_group_rows = call.CheckScaledInput(x, x_scale);
    args.x_scale = x_scale.Data<float>();
  }
  args.given_scale = TakeOperand(call, attributes.given_scale, "scale", num_groups);
  args.amax = reinterpret_cast<uint32_t*>(TakeResult(call, attributes.given_scale, "amax", num_groups));
  if (!call.Finish()) return call.Error();
  args.element_row_blocks = layout.ElementRowBlocks();
  args.tokens = tokens;
  args.choices = static_cast<int>(choices);
  args.features = static_cast<int32_t>(features);
  args.scale_rule = {attributes.pow2_scales, attributes.amax_epsilon};
  args.x = x.Data();
  args.inverse = inverse.Data<int32_t>();
  args.data = data.Data<uint8_t>();
  args.scale = scale.Data<float>();
  args.table = table.Data<int32_t>();
  return call.ToError(LaunchQuantizePermuted(call.stream, args));
}

ffi::Error Dequantize(Call& call, const DequantizeAttributes& attributes) {
  const Array data = call.Operand("data");
  const Array scale_inv = call.Operand("scale_inv");
  const Array sizes = call.Operand("group_sizes");
  const Array offset = call.Operand("group_offset");
  const Array out = call.Result("the result");
  const Array table = call.Result("the group table");
  call.CheckMode(attributes.mode);
  call.CheckRank(out, 2);
  call.CheckFeatures(out.Axis(1), kFp8Alignment);
  call.CheckElementRange("num_groups", attributes.num_groups, offset.Elements());
  if (!call.ok()) return call.Error();
  const cudaDataType_t type = call.TakeFloatType(out);
  const cudaDataType_t data_type = call.TakeFp8Type(data);
  Groups groups = call.TakeGroups(sizes, offset, attributes.num_groups * offset.Elements(), out.Axis(0));
  if (!call.ok()) return call.Error();
  TakeStackRows(call, attributes.stack_rows, &groups);
  QuantizedLayout layout = MakeLayout(attributes.mode, groups, out.Axis(1));
  layout.columnwise = attributes.columnwise;
  call.CheckQuantized(layout, data, scale_inv);
  call.CheckRoom(table, ffi::S32, groups.batch * GroupTable::Size(groups.num_groups));
  call.CheckAligned({out});
  if (!call.Finish()) return call.Error();
  return call.ToError(LaunchDequantize(call.stream, groups, layout, data.Data(), data_type, scale_inv.Data(),
                                       out.Data(), type, table.Data<int32_t>()));
}

}  // namespace
}  // namespace jax_grouped

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    ::jax_grouped::QuantizeAttributes, StructMember<::jax_grouped::ScalingMode>("mode"),
    StructMember<int64_t>("stack_rows"), StructMember<bool>("rowwise"), StructMember<bool>("columnwise"),
    StructMember<bool>("dbias"), StructMember<bool>("finds_amax"), StructMember<bool>("pow2_scales"),
    StructMember<float>("amax_epsilon"), StructMember<bool>("given_scale"), StructMember<bool>("gathered"),
    StructMember<::jax_grouped::ActivationKind>("activation"), StructMember<float>("limit"),
    StructMember<float>("gate_limit"), StructMember<float>("alpha"), StructMember<float>("offset"),
    StructMember<bool>("backward"), StructMember<bool>("weighted"), StructMember<bool>("inner_products"),
    StructMember<bool>("activated"), StructMember<bool>("cached"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jax_grouped::QuantizePermutedAttributes, StructMember<int64_t>("num_groups"),
                                      StructMember<bool>("given_scale"), StructMember<bool>("pow2_scales"),
                                      StructMember<float>("amax_epsilon"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jax_grouped::DequantizeAttributes,
                                      StructMember<::jax_grouped::ScalingMode>("mode"),
                                      StructMember<int64_t>("num_groups"), StructMember<int64_t>("stack_rows"),
                                      StructMember<bool>("columnwise"));

namespace jax_grouped {

JAX_GROUPED_DEFINE_EXECUTE(QuantizeExecute, "jax_grouped_quantize", Quantize, QuantizeAttributes);
JAX_GROUPED_DEFINE_EXECUTE(QuantizePermutedExecute, "jax_grouped_quantize_permuted", QuantizePermuted,
                           QuantizePermutedAttributes);
JAX_GROUPED_DEFINE_EXECUTE(DequantizeExecute, "jax_grouped_dequantize", Dequantize, DequantizeAttributes);

}  // namespace jax_grouped
