#include <cstdint>

#include "csrc/rows/rows.h"
#include "xla_ffi/decode.h"
#include "xla_ffi/handlers.h"

namespace jax_grouped {
namespace {

struct ActivationGradAttributes {
  ActivationKind activation;
  float limit;
  float gate_limit;
  float alpha;
  float offset;
};
struct PermuteRowsAttributes {
  bool zero_tail;
};

// Fails unless there are tokens, choices and rows, no more than int32 counts. A launch has blocks for each of them.
void CheckPairs(Call& call, int64_t tokens, int64_t choices, int64_t rows) {
  call.CheckRange("the number of tokens", tokens, 1, kMostInt32);
  call.CheckRange("the number of choices", choices, 1, kMostInt32 / (tokens > 0 ? tokens : 1));
  call.CheckRange("the number of rows", rows, 1, kMostInt32);
}

ffi::Error ActivationGrad(Call& call, const ActivationGradAttributes& attributes) {
  const Array input = call.Operand("the input");
  const Array da = call.Operand("da");
  const Array weights = call.Operand("weights");
  const Array dinput = call.Result("dinput");
  const Array weighted = call.Result("weighted");
  const Array inner_products = call.Result("inner_products");
  const cudaDataType_t type = call.Take16BitType(input);
  const int64_t rows = da.Axis(0);
  const int64_t features = da.Axis(1);
  const int64_t in_features = IsGated(attributes.activation) ? 2 * features : features;
  call.CheckActivation(attributes.activation, ActivationKind{1});
  call.CheckRange("the number of rows", rows, 1, kMostInt32);
  call.CheckFeatures(features, kRowVector);
  call.CheckArray(input, input.Type(), {rows, in_features});
  call.CheckArray(da, input.Type(), {rows, features});
  call.CheckArray(dinput, input.Type(), {rows, in_features});
  call.CheckArray(weighted, input.Type(), {rows, features});
  call.CheckArray(inner_products, ffi::F32, rows);
  call.CheckAligned({input, da, dinput, weighted});
  const int32_t* weight_indices = nullptr;
  if (call.OperandsLeft() > 0) {
    const Array order = call.Operand("order");
    call.CheckArray(order, ffi::S32, rows);
    weight_indices = order.Data<int32_t>();
  }
  call.CheckArray(weights, ffi::F32, weight_indices != nullptr ? weights.Elements() : rows);
  if (!call.Finish()) return call.Error();
  const Activation activation{attributes.activation, attributes.limit, attributes.gate_limit, attributes.alpha,
                              attributes.offset};
  const ActivationGradBuffers buffers{input.Data(),  da.Data(),       weights.Data<float>(),       weight_indices,
                                      dinput.Data(), weighted.Data(), inner_products.Data<float>()};
  return call.ToError(LaunchActivationGrad(call.stream, buffers, activation, type, weights.Elements(), rows, features));
}

ffi::Error PermuteRows(Call& call, const PermuteRowsAttributes& attributes) {
  const Array x = call.Operand("x");
  const Array order = call.Operand("order");
  const Array inverse = call.Operand("inverse");
  const Array rows = call.Result("the result");
  const int64_t tokens = x.Axis(0);
  const int64_t choices = inverse.Axis(1);
  CheckPairs(call, tokens, choices, order.Elements());
  call.CheckRank(x, 2);
  // Elements of fewer than 8 bits would count as whole bytes.
  call.Check(FloatType(x.Type()).has_value() || x.Type() == ffi::S32, "x must be bfloat16, float16, float32 or int32");
  call.CheckArray(order, ffi::S32, order.Elements());
  call.CheckArray(inverse, ffi::S32, {tokens, choices});
  call.CheckArray(rows, x.Type(), {order.Elements(), x.Axis(1)});
  const int64_t token_bytes = x.Bytes() / (tokens > 0 ? tokens : 1);
  call.Check(token_bytes > 0 && token_bytes % kPermuteVectorBytes == 0 && token_bytes <= kMostInt32,
             "the bytes of a token must be a positive multiple of 16 below 2^31");
  call.CheckAligned({x, rows});
  if (!call.Finish()) return call.Error();
  const PermuteRowsBuffers buffers{x.Data(), order.Data<int32_t>(), inverse.Data<int32_t>(), rows.Data()};
  return call.ToError(LaunchPermuteRows(call.stream, buffers, tokens, static_cast<int>(choices), order.Elements(),
                                        token_bytes, attributes.zero_tail));
}

ffi::Error SumRows(Call& call, const ffi::Dictionary&) {
  const Array rows = call.Operand("rows");
  const Array inverse = call.Operand("inverse");
  const Array sums = call.Result("the result");
  const cudaDataType_t type = call.Take16BitType(rows);
  const int64_t features = rows.Axis(1);
  const int64_t tokens = inverse.Axis(0);
  const int64_t choices = inverse.Axis(1);
  CheckPairs(call, tokens, choices, rows.Axis(0));
  call.CheckFeatures(features, kRowVector);
  call.CheckRank(rows, 2);
  call.CheckArray(inverse, ffi::S32, {tokens, choices});
  call.CheckArray(sums, rows.Type(), {tokens, features});
  call.CheckAligned({rows, sums});
  SumRowsBuffers buffers{rows.Data(), inverse.Data<int32_t>(), nullptr, sums.Data()};
  if (call.OperandsLeft() > 0) {
    const Array weights = call.Operand("weights");
    call.CheckArray(weights, ffi::F32, tokens * choices);
    buffers.weights = weights.Data<float>();
  }
  if (!call.Finish()) return call.Error();
  return call.ToError(
      LaunchSumRows(call.stream, buffers, type, tokens, static_cast<int>(choices), rows.Axis(0), features));
}

}  // namespace
}  // namespace jax_grouped

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jax_grouped::ActivationGradAttributes,
                                      StructMember<::jax_grouped::ActivationKind>("activation"),
                                      StructMember<float>("limit"), StructMember<float>("gate_limit"),
                                      StructMember<float>("alpha"), StructMember<float>("offset"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jax_grouped::PermuteRowsAttributes, StructMember<bool>("zero_tail"));

namespace jax_grouped {

JAX_GROUPED_DEFINE_EXECUTE(ActivationGradExecute, "jax_grouped_activation_grad", ActivationGrad,
                           ActivationGradAttributes);
JAX_GROUPED_DEFINE_EXECUTE(PermuteRowsExecute, "jax_grouped_permute_rows", PermuteRows, PermuteRowsAttributes);
JAX_GROUPED_DEFINE_EXECUTE(SumRowsExecute, "jax_grouped_sum_rows", SumRows, ffi::Dictionary);

}  // namespace jax_grouped
