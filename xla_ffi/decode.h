// One custom call as its handler sees it: operands and results in order, and checks of them. Handlers refuse what would
// make a kernel access memory outside of the call's buffers or compute wrong numbers, unless only the device could
// tell; Python explains options.

#ifndef JAX_GROUPED_XLA_FFI_DECODE_H_
#define JAX_GROUPED_XLA_FFI_DECODE_H_

#include <cuda_runtime_api.h>
#include <library_types.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <initializer_list>
#include <limits>
#include <optional>
#include <sstream>
#include <string>

#include "csrc/common/activation.h"
#include "csrc/common/status.h"
#include "csrc/groups/layout.h"
#include "xla/ffi/api/ffi.h"

XLA_FFI_REGISTER_ENUM_ATTR_DECODING(::jax_grouped::ActivationKind);
XLA_FFI_REGISTER_ENUM_ATTR_DECODING(::jax_grouped::ScalingMode);

namespace jax_grouped {

namespace ffi = ::xla::ffi;

constexpr int64_t kMostInt32 = std::numeric_limits<int32_t>::max();

inline std::optional<cudaDataType_t> FloatType(ffi::DataType type) {
  switch (type) {
    case ffi::BF16:
      return CUDA_R_16BF;
    case ffi::F16:
      return CUDA_R_16F;
    case ffi::F32:
      return CUDA_R_32F;
    default:
      return std::nullopt;
  }
}

inline std::optional<cudaDataType_t> Fp8Type(ffi::DataType type) {
  switch (type) {
    case ffi::F8E4M3FN:
      return CUDA_R_8F_E4M3;
    case ffi::F8E5M2:
      return CUDA_R_8F_E5M2;
    default:
      return std::nullopt;
  }
}

// An operand or a result of a call. One that the call lacks has no elements.
struct Array {
  const char* name;
  std::optional<ffi::AnyBuffer> buffer;

  ffi::DataType Type() const { return buffer ? buffer->element_type() : ffi::DataType::INVALID; }
  int64_t Rank() const { return buffer ? static_cast<int64_t>(buffer->dimensions().size()) : 0; }
  int64_t Axis(int64_t axis) const { return axis < Rank() ? buffer->dimensions()[axis] : 0; }
  int64_t Elements() const { return buffer ? static_cast<int64_t>(buffer->element_count()) : 0; }
  int64_t Bytes() const { return buffer ? static_cast<int64_t>(buffer->size_bytes()) : 0; }
  template <typename T = void>
  T* Data() const {
    return buffer ? static_cast<T*>(buffer->untyped_data()) : nullptr;
  }
};

// Takes a call's operands and results one after another. A check that fails does not end the handler, which must ask
// `ok` before it divides by a size and `Finish` before it uses memory. The first error counts.
class Call {
 public:
  const cudaStream_t stream;
  const int32_t device;

  Call(const char* op, cudaStream_t stream, int32_t device, const ffi::RemainingArgs& operands,
       const ffi::RemainingRets& results)
      : stream(stream), device(device), op_(op), operands_(operands), results_(results) {}

  Array Operand(const char* name) {
    const auto operand = operands_.get<ffi::AnyBuffer>(next_operand_++);
    if (operand.has_value()) return {name, *operand};
    Fail(std::string(name) + " is missing");
    return {name, std::nullopt};
  }
  Array Result(const char* name) {
    Array result = ResultAt(next_result_++);
    result.name = name;
    if (!result.buffer) Fail(std::string(name) + " is missing");
    return result;
  }
  // Returns a result by its index without taking it.
  Array ResultAt(int64_t index) const {
    auto result = results_.get<ffi::AnyBuffer>(index);
    return {"a result", result.has_value() ? std::optional(**result) : std::nullopt};
  }
  int64_t OperandsLeft() const { return static_cast<int64_t>(operands_.size()) - next_operand_; }
  int64_t ResultsLeft() const { return static_cast<int64_t>(results_.size()) - next_result_; }
  int64_t ResultsTaken() const { return next_result_; }

  bool ok() const { return error_.empty(); }

  // Ends the checks: no operands and results may be left over. Returns true if none has failed.
  bool Finish() {
    Check(OperandsLeft() <= 0, "there are more operands than the attributes name");
    Check(ResultsLeft() <= 0, "there are more results than the attributes name");
    return ok();
  }
  // Returns the first error. There must be one.
  ffi::Error Error() const { return ffi::Error::InvalidArgument(std::string(op_) + ": " + error_ + "."); }
  ffi::Error ToError(const Status& status) const {
    if (status.ok()) return ffi::Error::Success();
    return ffi::Error::Internal(std::string(op_) + ": " + status.message());
  }

  // Copies an operand to a result, unless they are the same buffer. They are, except where XLA makes the call write its
  // result straight into a slice of a larger array, as it does in a loop.
  ffi::Error Copy(const Array& from, const Array& to) const {
    if (from.Data() == to.Data()) return ffi::Error::Success();
    const auto copied = cudaMemcpyAsync(to.Data(), from.Data(), to.Bytes(), cudaMemcpyDeviceToDevice, stream);
    return ToError(Status::FromCuda(copied, "Copying an operand to a result"));
  }

  void Fail(const std::string& error) {
    if (ok()) error_ = error;
  }
  void Check(bool holds, const char* error) {
    if (!holds) Fail(error);
  }
  void CheckRange(const char* what, int64_t got, int64_t least, int64_t most) {
    if (got >= least && got <= most) return;
    Fail(std::string(what) + " must be from " + std::to_string(least) + " to " + std::to_string(most) + ", got " +
         std::to_string(got));
  }
  // Fails unless the value, times the batch, can be counted in int32.
  void CheckElementRange(const char* what, int64_t got, int64_t batch) {
    CheckRange(what, got, 0, kMostInt32 / std::max<int64_t>(batch, 1));
  }
  // Fails unless the features fill whole vectors.
  void CheckFeatures(int64_t features, int64_t multiple) {
    if (features > 0 && features % multiple == 0 && features <= kMostInt32) return;
    Fail("features must be a positive multiple of " + std::to_string(multiple) + " below 2^31, got " +
         std::to_string(features));
  }
  void CheckRank(const Array& array, int64_t rank) {
    if (array.Rank() != rank) Refuse(array, "must have rank " + std::to_string(rank));
  }
  // Fail unless an array has this type and this shape, this number of elements or at least this number of them.
  void CheckArray(const Array& array, ffi::DataType type, std::initializer_list<int64_t> shape) {
    bool equal = array.Type() == type && array.Rank() == static_cast<int64_t>(shape.size());
    for (size_t axis = 0; equal && axis < shape.size(); ++axis) equal = array.Axis(axis) == shape.begin()[axis];
    if (equal) return;
    std::ostringstream expected;
    expected << "must be " << type << "[";
    for (size_t axis = 0; axis < shape.size(); ++axis) expected << (axis > 0 ? ", " : "") << shape.begin()[axis];
    Refuse(array, expected.str() + "]");
  }
  void CheckArray(const Array& array, ffi::DataType type, int64_t elements, bool exactly = true) {
    const bool fits = exactly ? array.Elements() == elements : array.Elements() >= elements;
    if (array.Type() == type && fits) return;
    std::ostringstream expected;
    expected << (exactly ? "must have " : "must have room for ") << elements << " elements of " << type;
    Refuse(array, expected.str());
  }
  void CheckRoom(const Array& array, ffi::DataType type, int64_t elements) { CheckArray(array, type, elements, false); }
  // Fails unless arrays that kernels access in vectors begin on a boundary of these.
  void CheckAligned(std::initializer_list<Array> arrays, int64_t bytes = kAlignmentBytes) {
    for (const Array& array : arrays) {
      if (reinterpret_cast<uintptr_t>(array.Data()) % bytes == 0) continue;
      Refuse(array, "must start on a " + std::to_string(bytes) + "-byte boundary");
    }
  }

  // Return CUDA's name of an array's type.
  cudaDataType_t TakeFloatType(const Array& array) {
    return TakeType(array, FloatType(array.Type()), "must be bfloat16, float16 or float32");
  }
  cudaDataType_t Take16BitType(const Array& array) {
    const auto type = FloatType(array.Type());
    return TakeType(array, type == CUDA_R_32F ? std::nullopt : type, "must be bfloat16 or float16");
  }
  cudaDataType_t TakeFp8Type(const Array& array) {
    return TakeType(array, Fp8Type(array.Type()), "must be float8_e4m3fn or float8_e5m2");
  }

  // Returns the groups of a call. group_offset has an entry for every batch element. `num_groups` and `tokens` are
  // those of all elements.
  Groups TakeGroups(const Array& sizes, const Array& offset, int64_t num_groups, int64_t tokens) {
    CheckArray(sizes, ffi::S32, {sizes.Axis(0)});
    CheckArray(offset, ffi::S32, offset.Elements());
    const int64_t total = sizes.Elements();
    const int64_t batch = offset.Elements();
    CheckRange("the number of groups", num_groups, 1, kMostInt32);
    CheckRange("the number of tokens", tokens, 1, kMostInt32);
    CheckRange("the size of group_sizes", total, 0, kMostInt32);
    // A launch counts blocks along its second axis with 16 bits.
    CheckRange("the size of group_offset", batch, 1, std::numeric_limits<uint16_t>::max());
    if (!ok()) return {};
    Check(total % batch == 0 && num_groups % batch == 0 && tokens % batch == 0,
          "the size of group_offset must divide the numbers of group sizes, groups and tokens");
    return {sizes.Data<int32_t>(),
            offset.Data<int32_t>(),
            static_cast<int32_t>(total / batch),
            static_cast<int32_t>(num_groups / batch),
            tokens / batch,
            static_cast<int32_t>(batch)};
  }

  void CheckMode(ScalingMode mode) {
    CheckRange("the scaling mode", static_cast<int64_t>(mode), 0, static_cast<int64_t>(ScalingMode::kMx));
  }
  void CheckActivation(ActivationKind kind, ActivationKind first) {
    CheckRange("activation", static_cast<int64_t>(kind), static_cast<int64_t>(first),
               static_cast<int64_t>(kLastActivation));
  }
  // Checks one orientation's arrays against the layout of its data and scales.
  void CheckQuantized(const QuantizedLayout& layout, const Array& data, const Array& scale) {
    // No array has more than 32 elements per feature and block of 16 rows.
    const int64_t per_block = 2 * kFp8Alignment * std::max<int64_t>(layout.features, 1);
    CheckRange("the number of blocks of 16 rows", layout.RowBlocks(kFp8Alignment), 0,
               std::numeric_limits<int64_t>::max() / per_block);
    if (!ok()) return;
    CheckArray(data, data.Type(), layout.DataElements());
    CheckArray(scale, layout.mode == ScalingMode::kMx ? ffi::F8E8M0FNU : ffi::F32, layout.ScaleElements());
    CheckAligned({data, scale});
  }
  // Checks an FP8 input and its inverse scales, those of kBlock1D for a stack of equal groups. Returns their rows.
  int64_t CheckScaledInput(const Array& x, const Array& x_scale) {
    CheckRank(x_scale, 3);
    QuantizedLayout layout{};
    layout.mode = ScalingMode::kBlock1D;
    layout.batch = 1;
    layout.tokens = x.Axis(0);
    layout.features = x.Axis(1);
    layout.num_groups = x_scale.Axis(0);
    CheckRange("the number of groups of x_scale", layout.num_groups, 1, kMostInt32);
    if (!ok()) return 1;
    Check(layout.tokens % layout.num_groups == 0, "the groups of x_scale must divide the rows of x");
    layout.stack_rows = layout.tokens / layout.num_groups;
    CheckQuantized(layout, x, x_scale);
    return layout.stack_rows;
  }

 private:
  cudaDataType_t TakeType(const Array& array, std::optional<cudaDataType_t> type, const char* expected) {
    if (!type) Refuse(array, expected);
    return type.value_or(CUDA_R_32F);
  }

  // Fails with what an array must be and what it is.
  void Refuse(const Array& array, const std::string& expected) {
    if (!ok()) return;
    std::ostringstream got;
    got << array.name << " " << expected << ", got " << array.Type() << "[";
    for (int64_t axis = 0; axis < array.Rank(); ++axis) got << (axis > 0 ? ", " : "") << array.Axis(axis);
    Fail(got.str() + "]");
  }

  const char* const op_;
  const ffi::RemainingArgs& operands_;
  const ffi::RemainingRets& results_;
  int64_t next_operand_ = 0;
  int64_t next_result_ = 0;
  std::string error_;
};

// Runs a handler with its call. Converts exceptions such as std::bad_alloc to errors, because no exception may cross
// the C interface.
template <typename Attributes>
ffi::Error RunHandler(ffi::Error (*handler)(Call&, const Attributes&), const char* op, cudaStream_t stream,
                      int32_t device, const ffi::RemainingArgs& operands, const ffi::RemainingRets& results,
                      const Attributes& attributes) try {
  Call call(op, stream, device, operands, results);
  return handler(call, attributes);
} catch (const std::exception& exception) {
  return ffi::Error::Internal(std::string(op) + ": " + exception.what());
}

}  // namespace jax_grouped

// Defines the Execute stage of a custom call: `function` is an ffi::Error(Call&, const Attributes&).
#define JAX_GROUPED_DEFINE_EXECUTE(symbol, op, function, Attributes)                                             \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(symbol,                                                                          \
                                [](cudaStream_t stream, int32_t device, ffi::RemainingArgs operands,             \
                                   ffi::RemainingRets results, const Attributes& attributes) {                   \
                                  return RunHandler<Attributes>(function, op, stream, device, operands, results, \
                                                                attributes);                                     \
                                },                                                                               \
                                ffi::Ffi::Bind()                                                                 \
                                    .Ctx<ffi::PlatformStream<cudaStream_t>>()                                    \
                                    .Ctx<ffi::DeviceOrdinal>()                                                   \
                                    .RemainingArgs()                                                             \
                                    .RemainingRets()                                                             \
                                    .Attrs<Attributes>(),                                                        \
                                {ffi::Traits::kCmdBufferCompatible})

#endif  // JAX_GROUPED_XLA_FFI_DECODE_H_
