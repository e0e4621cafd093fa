// The extension module jax_grouped._exchange: custom calls whose results other GPUs write, over NVLink. It needs what
// jaxlib has since 0.12, the communicators and the memory windows of XLA, and is not loaded where the runtime lacks
// them.
//
// XLA makes a result's memory known to all devices: a window. Each of the devices writes its part of the result there,
// between two barriers of all, on the device. Nothing waits for the host. XLA must not capture the calls in CUDA
// graphs, where calls that do not need each other's results have no order: devices wait for each other in that of a
// stream.
//
// ffi::internal is not stable: check it with each new jaxlib.

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <nanobind/nanobind.h>

#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "csrc/exchange/exchange.h"
#include "csrc/rows/rows.h"
#include "xla/ffi/api/collectives_api.h"
#include "xla_ffi/decode.h"
#include "xla_ffi/stages.h"

namespace jax_grouped {

// The devices of the program that exchange rows: groups of `group_size` of its device numbers, in the order of ranks.
struct ExchangeAttributes {
  ffi::Span<const int64_t> devices;
  int64_t group_size;
};

namespace {

// XLA's communicators, without exceptions.
struct ErrorPolicy {
  using Status = ffi::Error;
  template <typename T>
  using StatusOr = ffi::ErrorOr<T>;
  static Status Ok() { return ffi::Error::Success(); }
  static Status TakeError(const XLA_FFI_Api* api, XLA_FFI_Error* error) {
    std::string message = ffi::internal::GetErrorMessage(api, error);
    ffi::internal::DestroyError(api, error);
    return ffi::Error::Internal("XLA's communicator: " + message);
  }
};
using Communicators = ffi::internal::CommunicatorContextBase<ErrorPolicy>;
struct CommunicatorsExtension : ffi::internal::CollectivesExtensionBase<Communicators> {};

// The functions of the NCCL that XLA has loaded; see nccl.h.
struct Nccl {
  int (*version)(int*) = nullptr;
  int (*count)(void* communicator, int*) = nullptr;
  int (*rank)(void* communicator, int*) = nullptr;
  int (*allocate)(void** memory, size_t bytes) = nullptr;
  int (*register_window)(void* communicator, void* memory, size_t bytes, void** window, int flags) = nullptr;
  int (*peer_pointer)(void* window, size_t offset, int peer, void** pointer) = nullptr;
  const char* (*error)(int) = nullptr;

  static const Nccl& Get() {
    static const Nccl nccl;
    return nccl;
  }
  bool IsThere() const { return version && count && rank && allocate && register_window && peer_pointer && error; }

 private:
  Nccl() {
    void* library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_NOLOAD);
    if (library == nullptr) library = dlopen("libnccl.so.2", RTLD_NOW);
    if (library == nullptr) return;
    Find(library, "ncclGetVersion", &version);
    Find(library, "ncclCommCount", &count);
    Find(library, "ncclCommUserRank", &rank);
    Find(library, "ncclMemAlloc", &allocate);
    Find(library, "ncclCommWindowRegister", &register_window);
    Find(library, "ncclGetPeerDevicePointer", &peer_pointer);
    Find(library, "ncclGetErrorString", &error);
  }
  template <typename Function>
  static void Find(void* library, const char* name, Function* function) {
    *function = reinterpret_cast<Function>(dlsym(library, name));
  }
};

#define JAX_GROUPED_RETURN_IF_NCCL_FAILED(call)                                                   \
  do {                                                                                            \
    if (const int result = Nccl::Get().call; result != 0) {                                       \
      return ffi::Error::Internal(std::string("NCCL's " #call ": ") + Nccl::Get().error(result)); \
    }                                                                                             \
  } while (false)
#define JAX_GROUPED_RETURN_IF_ERROR(expression)                         \
  do {                                                                  \
    if (ffi::Error error = (expression); error.failure()) return error; \
  } while (false)

// Peers of one communicator, found once. XLA keeps its communicators until the process ends.
struct KnownPeers {
  std::mutex mutex;
  bool is_ready = false;
  Peers peers{};

  static KnownPeers& Of(void* communicator) {
    static std::mutex all_mutex;
    static std::map<void*, KnownPeers> all;
    std::lock_guard<std::mutex> lock(all_mutex);
    return all[communicator];
  }
};

constexpr auto kGroupMode = ffi::GroupMode::kFlattenedId;

std::vector<std::vector<int64_t>> Groups(const ExchangeAttributes& attributes) {
  std::vector<std::vector<int64_t>> groups;
  for (auto first = attributes.devices.begin(); first < attributes.devices.end(); first += attributes.group_size) {
    groups.emplace_back(first, first + attributes.group_size);
  }
  return groups;
}

// One call's devices, communicator and windows.
struct Exchange {
  Communicators& communicators;
  std::vector<std::vector<int64_t>> groups;
  void* communicator = nullptr;
  Peers peers{};

  ffi::Error FindCommunicator() {
    const auto found = communicators.GetCommunicator(kGroupMode, groups, 0);
    if (found.has_error()) return found.error();
    communicator = reinterpret_cast<void*>(*found);
    return ffi::Error::Success();
  }

  ffi::Error FindPeers() {
    JAX_GROUPED_RETURN_IF_ERROR(FindCommunicator());
    KnownPeers& known = KnownPeers::Of(communicator);
    std::lock_guard<std::mutex> lock(known.mutex);
    if (!known.is_ready) return ffi::Error::Internal("The Initialize stage of a push has not run.");
    peers = known.peers;
    return ffi::Error::Success();
  }

  // Finds where this device's part of a result begins in the memory of each device. Parts have equal sizes.
  ffi::Error FindParts(const Array& result, PeerArrays* parts) const {
    const auto found = communicators.GetWindow(kGroupMode, groups, 0, result.Data());
    if (found.has_error()) return found.error();
    const size_t offset = found->offset + static_cast<size_t>(result.Bytes() / peers.count * peers.rank);
    for (int peer = 0; peer < peers.count; ++peer) {
      JAX_GROUPED_RETURN_IF_NCCL_FAILED(peer_pointer(found->window, offset, peer, &parts->of[peer]));
      if (parts->of[peer] == nullptr) return ffi::Error::Internal("NCCL cannot reach a device's memory over NVLink.");
    }
    return ffi::Error::Success();
  }
};

// Requests the communicator, and windows on all results.
ffi::Error Prepare(Communicators communicators, ffi::RemainingArgs, ffi::RemainingRets results,
                   const ExchangeAttributes& attributes) try {
  if (!Nccl::Get().IsThere()) return ffi::Error::Internal("NCCL 2.30 or newer is not loaded.");
  const auto groups = Groups(attributes);
  JAX_GROUPED_RETURN_IF_ERROR(communicators.RequestCommunicator(kGroupMode, groups, 0));
  std::vector<ffi::CollectiveMemoryRegion> regions;
  for (size_t i = 0; i < results.size(); ++i) {
    const auto result = results.get<ffi::AnyBuffer>(i);
    regions.push_back({(*result)->untyped_data(), (*result)->size_bytes()});
  }
  return communicators.RequestWindow(kGroupMode, groups, 0, regions);
} catch (const std::exception& exception) {
  return ffi::Error::Internal(exception.what());
}

// Gives the devices memory for their barriers, once for each communicator. All of them do it at the same time.
ffi::Error MakePeers(Communicators communicators, int32_t device, ffi::RemainingArgs, ffi::RemainingRets,
                     const ExchangeAttributes& attributes) try {
  Exchange exchange{communicators, Groups(attributes)};
  JAX_GROUPED_RETURN_IF_ERROR(exchange.FindCommunicator());
  void* communicator = exchange.communicator;
  KnownPeers& known = KnownPeers::Of(communicator);
  std::lock_guard<std::mutex> lock(known.mutex);
  if (known.is_ready) return ffi::Error::Success();
  Peers& peers = known.peers;
  JAX_GROUPED_RETURN_IF_NCCL_FAILED(count(communicator, &peers.count));
  JAX_GROUPED_RETURN_IF_NCCL_FAILED(rank(communicator, &peers.rank));
  if (peers.count > kMostPeers) return ffi::Error::InvalidArgument("There are too many devices for an exchange.");
  int before = 0;
  const bool had_device = cudaGetDevice(&before) == cudaSuccess;
  Status done = Status::FromCuda(cudaSetDevice(device), "Choosing a device");
  constexpr size_t kBytes = 2 * 4096;  // A window is of whole pages; the second one is this device's own.
  void* memory = nullptr;
  if (done.ok()) {
    JAX_GROUPED_RETURN_IF_NCCL_FAILED(allocate(&memory, kBytes));
    cudaStream_t stream = nullptr;
    done = Status::FromCuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "Creating a stream");
    if (done.ok()) done = Status::FromCuda(cudaMemsetAsync(memory, 0, kBytes, stream), "Zeroing memory");
    if (done.ok()) done = Status::FromCuda(cudaStreamSynchronize(stream), "Zeroing memory");
    if (stream != nullptr) cudaStreamDestroy(stream);
  }
  if (!done.ok()) return ffi::Error::Internal(done.message());
  void* window = nullptr;
  constexpr int kSymmetric = 1;
  JAX_GROUPED_RETURN_IF_NCCL_FAILED(register_window(communicator, memory, kBytes, &window, kSymmetric));
  for (int peer = 0; peer < peers.count; ++peer) {
    JAX_GROUPED_RETURN_IF_NCCL_FAILED(peer_pointer(window, 0, peer, reinterpret_cast<void**>(&peers.signals[peer])));
    if (peers.signals[peer] == nullptr) return ffi::Error::Internal("NCCL cannot reach a device over NVLink.");
  }
  peers.barriers = static_cast<uint32_t*>(memory) + kBytes / 2 / sizeof(uint32_t);
  peers.released = peers.barriers + 1;
  if (had_device) cudaSetDevice(before);
  known.is_ready = true;
  return ffi::Error::Success();
} catch (const std::exception& exception) {
  return ffi::Error::Internal(exception.what());
}

ffi::Error PushRows(Call& call, Exchange& exchange) {
  const Array wanted = call.Operand("wanted");
  const Array x = call.Operand("x");
  const Array received = call.Result("the result");
  const int64_t rows = x.Axis(0);
  const int64_t count = exchange.peers.count;
  call.CheckRank(x, 2);
  call.CheckRange("the number of rows", rows, 1, kMostInt32 / count);
  call.CheckArray(wanted, ffi::U32, rows);
  call.CheckArray(received, x.Type(), {count, rows, x.Axis(1)});
  const int64_t row_bytes = x.Bytes() / std::max<int64_t>(rows, 1);
  call.Check(row_bytes > 0 && row_bytes % 16 == 0 && row_bytes <= kMostInt32, "a row must have a multiple of 16 bytes");
  call.CheckAligned({x, received});
  if (!call.Finish()) return call.Error();
  PeerArrays parts{};
  JAX_GROUPED_RETURN_IF_ERROR(exchange.FindParts(received, &parts));
  return call.ToError(
      LaunchPushRows(call.stream, exchange.peers, x.Data(), wanted.Data<uint32_t>(), parts, rows, row_bytes));
}

ffi::Error PushSums(Call& call, Exchange& exchange) {
  const Array wanted = call.Operand("wanted");
  const Array rows = call.Operand("rows");
  const Array inverse = call.Operand("inverse");
  const Array sums = call.Result("the result");
  const cudaDataType_t type = call.Take16BitType(rows);
  const int64_t count = exchange.peers.count;
  const int64_t all_tokens = inverse.Axis(0);
  const int64_t choices = inverse.Axis(1);
  const int64_t features = rows.Axis(1);
  call.CheckRange("the number of tokens", all_tokens, count, kMostInt32);
  call.CheckRange("the number of choices", choices, 1, kMostInt32 / std::max<int64_t>(all_tokens, 1));
  call.CheckRange("the number of rows", rows.Axis(0), 1, kMostInt32);
  call.CheckFeatures(features, kRowVector);
  call.CheckRank(rows, 2);
  call.Check(all_tokens % count == 0, "inverse must have equal numbers of tokens of all devices");
  call.CheckArray(wanted, ffi::U32, all_tokens);
  call.CheckArray(inverse, ffi::S32, {all_tokens, choices});
  call.CheckArray(sums, rows.Type(), {count, all_tokens / count, features});
  call.CheckAligned({rows, sums});
  SumRowsBuffers buffers{rows.Data(), inverse.Data<int32_t>(), nullptr, nullptr};
  if (call.OperandsLeft() > 0) {
    const Array weights = call.Operand("weights");
    call.CheckArray(weights, ffi::F32, all_tokens * choices);
    buffers.weights = weights.Data<float>();
  }
  if (!call.Finish()) return call.Error();
  PeerArrays parts{};
  JAX_GROUPED_RETURN_IF_ERROR(exchange.FindParts(sums, &parts));
  return call.ToError(LaunchPushSums(call.stream, buffers, exchange.peers, wanted.Data<uint32_t>(), parts, type,
                                     all_tokens / count, static_cast<int>(choices), rows.Axis(0), features));
}

// The Execute stage of a call.
template <ffi::Error (*function)(Call&, Exchange&)>
ffi::Error Execute(const char* op, Communicators communicators, cudaStream_t stream, int32_t device,
                   const ffi::RemainingArgs& operands, const ffi::RemainingRets& results,
                   const ExchangeAttributes& attributes) try {
  Call call(op, stream, device, operands, results);
  Exchange exchange{communicators, Groups(attributes)};
  JAX_GROUPED_RETURN_IF_ERROR(exchange.FindPeers());
  return function(call, exchange);
} catch (const std::exception& exception) {
  return ffi::Error::Internal(std::string(op) + ": " + exception.what());
}

}  // namespace
}  // namespace jax_grouped

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jax_grouped::ExchangeAttributes,
                                      StructMember<xla::ffi::Span<const int64_t>>("devices"),
                                      StructMember<int64_t>("group_size"));

namespace jax_grouped {
namespace {

XLA_FFI_DEFINE_HANDLER(kPrepare, Prepare,
                       ffi::Ffi::BindPrepare()
                           .Ctx<ffi::Extension<CommunicatorsExtension>>()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attrs<ExchangeAttributes>());
XLA_FFI_DEFINE_HANDLER(kMakePeers, MakePeers,
                       ffi::Ffi::BindInitialize()
                           .Ctx<ffi::Extension<CommunicatorsExtension>>()
                           .Ctx<ffi::DeviceOrdinal>()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attrs<ExchangeAttributes>());

#define JAX_GROUPED_DEFINE_EXCHANGE(symbol, op, function)                                               \
  XLA_FFI_DEFINE_HANDLER(                                                                               \
      symbol,                                                                                           \
      [](Communicators communicators, cudaStream_t stream, int32_t device, ffi::RemainingArgs operands, \
         ffi::RemainingRets results, const ExchangeAttributes& attributes) {                            \
        return Execute<function>(op, communicators, stream, device, operands, results, attributes);     \
      },                                                                                                \
      ffi::Ffi::Bind()                                                                                  \
          .Ctx<ffi::Extension<CommunicatorsExtension>>()                                                \
          .Ctx<ffi::PlatformStream<cudaStream_t>>()                                                     \
          .Ctx<ffi::DeviceOrdinal>()                                                                    \
          .RemainingArgs()                                                                              \
          .RemainingRets()                                                                              \
          .Attrs<ExchangeAttributes>())

JAX_GROUPED_DEFINE_EXCHANGE(kPushRows, "jax_grouped_push_rows", PushRows);
JAX_GROUPED_DEFINE_EXCHANGE(kPushSums, "jax_grouped_push_sums", PushSums);

template <XLA_FFI_Handler* execute>
nb::dict ExchangeStages() {
  nb::dict stages = Stages<execute, kMakePeers>();
  stages["prepare"] = Capsule(kPrepare);
  return stages;
}

// Returns the handlers by custom call name.
nb::dict Handlers() {
  nb::dict handlers;
  handlers["jax_grouped_push_rows"] = ExchangeStages<kPushRows>();
  handlers["jax_grouped_push_sums"] = ExchangeStages<kPushSums>();
  return handlers;
}

// Returns the version of NCCL, for example 23007; 0 if it is not there, or too old to have all functions.
int NcclVersion() {
  int version = 0;
  if (Nccl::Get().IsThere()) Nccl::Get().version(&version);
  return version;
}

}  // namespace

NB_MODULE(_exchange, m) {
  m.def("handlers", &Handlers);
  m.def("state_type", &StateType);
  m.def("nccl_version", &NcclVersion);
}

}  // namespace jax_grouped
