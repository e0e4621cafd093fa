#include "csrc/gemm/gemm.h"

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "csrc/common/device.h"
#include "csrc/gemm/cublaslt/library.h"
#include "csrc/gemm/cublaslt/products.h"
#include "csrc/gemm/sm90/products.h"

namespace jax_grouped {
namespace {

auto Fields(const GemmProblem& problem) {
  return std::make_tuple(problem.product, problem.a_type, problem.b_type, problem.result_type, problem.scaled,
                         problem.a_mode, problem.b_mode, problem.tokens, problem.expected_tokens, problem.in_features,
                         problem.out_features, problem.num_groups, problem.elements_per_weight, problem.accumulate,
                         problem.gathered, problem.batch_invariant, problem.swiglu, problem.gathered_from);
}

constexpr const char* kProductNames[] = {"fprop", "dgrad", "wgrad"};
constexpr const char* kModeNames[] = {"tensor", "1x128", "128x128", "1x32"};

const char* Name(cudaDataType_t type) {
  switch (type) {
    case CUDA_R_32F:
      return "f32";
    case CUDA_R_16BF:
      return "bf16";
    case CUDA_R_8F_E4M3:
      return "e4m3";
    case CUDA_R_8F_E5M2:
      return "e5m2";
    default:
      return "f16";
  }
}

std::string DescribeOperands(const GemmProblem& problem) {
  if (!problem.scaled) return Name(problem.a_type);
  return std::string(Name(problem.a_type)) + " " + kModeNames[static_cast<int>(problem.a_mode)] + " x " +
         Name(problem.b_type) + " " + kModeNames[static_cast<int>(problem.b_mode)];
}

// Depth up to which our kernel of fprop and dgrad for larger groups is faster than cuBLASLt's, if its tiles are
// full: 1.3 times as fast at 1024, 1.1 times at 2048, 1.03 times at 4096, as fast at 7168. If its tiles are not full,
// it is faster only if each pair of multiprocessors computes few.
constexpr int64_t kMostDepth = 4096;
constexpr int64_t kMostPartialTiles = 2;  // of a pair of multiprocessors, which compute a tile together

// Most tokens per group, on average, of the kernel for small groups. It is 1.2 to 1.7 times as fast as cuBLASLt's with
// one token, 1 to 1.4 times with 64, and slower with 96.
constexpr int64_t kSmallGroupTokens = 64;

bool IsSm90Wgrad(const GemmProblem& problem) {
  // The kernel reads accumulators of float32 only.
  if (problem.accumulate && problem.result_type != CUDA_R_32F) return false;
  return sm90::MaxFp8WgradWorkspaceBytes(problem.num_groups) <= static_cast<int64_t>(kWorkspaceBytes);
}

// Returns true if groups have few tokens on average. Reading the weights then takes most of the time.
bool HasSmallGroups(const GemmProblem& problem) {
  return problem.expected_tokens <= kSmallGroupTokens * problem.num_groups;
}

bool IsSm90TokenProduct(const GemmProblem& problem, int processors) {
  if (problem.accumulate) return false;
  const int64_t features = ResultFeatures(problem);
  // The copy engine (TMA) counts rows with 32 bits.
  if (NumWeights(problem) * features > INT32_MAX) return false;
  if (sm90::MaxFp8TokenProductWorkspaceBytes(problem.num_groups) > static_cast<int64_t>(kWorkspaceBytes)) return false;
  // Both of our kernels add up the same products in the same order.
  if (problem.batch_invariant || HasSmallGroups(problem)) return true;
  if (Depth(problem) > kMostDepth) return false;
  if (problem.expected_tokens >= sm90::kTileTokens * problem.num_groups) return true;
  const int64_t tiles = MaxRowBlocks(problem.expected_tokens, problem.num_groups, sm90::kTileTokens) *
                        CeilDiv(features, sm90::kTileFeatures);
  return tiles <= kMostPartialTiles * (processors / 2);
}

// Returns true if one of our kernels computes the product on such a GPU. On Hopper these products are those of gathered
// rows, those with SwiGLU, FP8 weight gradients, except those that accumulate in 16 bits, and products of FP8 tokens in
// small groups or over a limited depth.
bool IsSm90Product(const GemmProblem& problem, const DeviceProperties& device) {
  if (device.major != 9) return false;
  if (problem.gathered != Gather::kNone || problem.swiglu) return true;
  if (!problem.scaled) return false;
  if (problem.a_mode != ScalingMode::kTensor && problem.a_mode != ScalingMode::kBlock1D) return false;
  return problem.product == Product::kWgrad ? IsSm90Wgrad(problem) : IsSm90TokenProduct(problem, device.processors);
}

Status LaunchSm90(cudaStream_t stream, int device, const GemmProblem& problem, const Groups& groups,
                  const GemmBuffers& buffers) {
  const bool is_wgrad = problem.product == Product::kWgrad;
  if (!problem.scaled) {
    return is_wgrad ? sm90::LaunchGatheredWgrad(stream, device, problem, groups, buffers)
                    : sm90::LaunchGatheredTokenProduct(stream, device, problem, groups, buffers);
  }
  if (is_wgrad) return sm90::LaunchFp8Wgrad(stream, device, problem, groups, buffers);
  const bool is_plain = problem.gathered == Gather::kNone && !problem.swiglu;
  return is_plain && HasSmallGroups(problem)
             ? sm90::LaunchFp8SmallGroupProduct(stream, device, problem, groups, buffers)
             : sm90::LaunchFp8TokenProduct(stream, device, problem, groups, buffers);
}

}  // namespace

bool operator<(const GemmProblem& first, const GemmProblem& second) { return Fields(first) < Fields(second); }

int64_t NumWeights(const GemmProblem& problem) { return problem.num_groups / problem.elements_per_weight; }

int64_t Depth(const GemmProblem& problem) {
  return problem.product == Product::kFprop ? problem.in_features : problem.out_features;
}

int64_t ResultFeatures(const GemmProblem& problem) {
  return problem.product == Product::kFprop ? problem.out_features : problem.in_features;
}

QuantizedLayout LayoutOfA(const GemmProblem& problem, const Groups& groups) {
  QuantizedLayout tokens{};
  tokens.mode = problem.a_mode;
  tokens.columnwise = problem.product == Product::kWgrad;
  tokens.batch = groups.batch;
  tokens.tokens = groups.capacity;
  tokens.features = problem.product == Product::kDgrad ? problem.out_features : problem.in_features;
  tokens.num_groups = groups.num_groups;
  return tokens;
}

QuantizedLayout LayoutOfB(const GemmProblem& problem, const Groups& groups) {
  if (problem.product == Product::kWgrad) {
    QuantizedLayout tokens = LayoutOfA(problem, groups);
    tokens.features = problem.out_features;
    return tokens;
  }
  QuantizedLayout weights{};
  weights.mode = problem.b_mode;
  weights.columnwise = problem.product == Product::kFprop;
  weights.batch = 1;
  weights.tokens = NumWeights(problem) * problem.in_features;
  weights.features = problem.out_features;
  weights.num_groups = NumWeights(problem);
  weights.stack_rows = problem.in_features;
  return weights;
}

Status CheckCapability(const GemmProblem& problem, int major, int minor) {
  const std::string found = "this GPU has " + std::to_string(major) + "." + std::to_string(minor);
  if (problem.gathered != Gather::kNone && major != 9) {
    return Status::Failed("products that gather their rows need Hopper (compute capability 9.0), " + found +
                          ": lower the program where this GPU is visible, which copies the rows first.");
  }
  if (!problem.scaled) return Status::Ok();
  if (major < 9) return Status::Failed("FP8 products need compute capability 9.0 or newer, " + found + ".");
  if (problem.a_mode == ScalingMode::kMx && major < 10) {
    return Status::Failed("MXFP8 products need Blackwell (10.0), " + found +
                          ": lower the program where this GPU is visible, which multiplies in bfloat16 instead.");
  }
  if (problem.a_mode == ScalingMode::kBlock1D && major > 9) {
    return Status::Failed("block scaling needs Hopper (compute capability 9.0), " + found + ": use MXFP8BlockScaling.");
  }
  return Status::Ok();
}

std::string Describe(const GemmProblem& problem) {
  std::string text = std::string(kProductNames[static_cast<int>(problem.product)]) + " " + DescribeOperands(problem) +
                     (problem.accumulate ? " onto " : " -> ") + Name(problem.result_type) + ", E " +
                     std::to_string(problem.num_groups) + " T " + std::to_string(problem.tokens) + " K " +
                     std::to_string(problem.in_features) + " N " + std::to_string(problem.out_features);
  if (problem.expected_tokens < problem.tokens) {
    text += ", " + std::to_string(problem.expected_tokens) + " tokens expected";
  }
  if (problem.elements_per_weight > 1) {
    text += ", weights of " + std::to_string(problem.elements_per_weight) + " batch elements";
  }
  if (problem.batch_invariant) text += ", batch invariant";
  if (problem.swiglu) text += ", with SwiGLU";
  if (problem.gathered != Gather::kNone) {
    text += std::string(", ") + (problem.gathered == Gather::kA ? "a" : "b") + " gathered from " +
            std::to_string(problem.gathered_from);
  }
  return text;
}

Status PrepareGemm(int device, const GemmProblem& problem) {
  DeviceProperties properties;
  JAX_GROUPED_RETURN_IF_FAILED(GetDeviceProperties(device, &properties));
  const Plans::Key key{device, problem};
  if (IsSm90Product(problem, properties)) {
    Plans::Get().AddOwnKernel(key);
    return Status::Ok();
  }
  if (problem.batch_invariant) {
    return Status::Failed("batch_invariant needs Hopper (compute capability 9.0), no accumulator, and features and " +
                          std::string("groups that kernels of jax_grouped take, got ") + Describe(problem) + ".");
  }
  const CublasLt* library = nullptr;
  JAX_GROUPED_RETURN_IF_FAILED(GetCublasLt(&library));
  return Plans::Get().Ensure(*library, key);
}

Status EnqueueGemm(int device, cudaStream_t stream, const GemmProblem& problem, const Groups& groups,
                   const GemmBuffers& buffers) {
  DeviceProperties properties;
  JAX_GROUPED_RETURN_IF_FAILED(GetDeviceProperties(device, &properties));
  if (IsSm90Product(problem, properties)) return LaunchSm90(stream, device, problem, groups, buffers);
  Plan plan;
  if (!Plans::Get().Find({device, problem}, &plan)) {
    return Status::Failed("A grouped product ran on a device on which it had not been initialized.");
  }
  const CublasLt* library = nullptr;
  JAX_GROUPED_RETURN_IF_FAILED(GetCublasLt(&library));
  return LaunchCublasLt(*library, plan.handle, plan.algorithm, stream, problem, groups, buffers);
}

std::vector<std::string> DescribePlans() {
  std::vector<std::string> lines;
  for (const auto& [key, plan] : Plans::Get().Copy()) {
    const auto& [device, problem] = key;
    const CublasLt* library = nullptr;
    const bool is_ours = plan.handle == nullptr || !GetCublasLt(&library).ok();
    lines.push_back("device " + std::to_string(device) + ": " + Describe(problem) + ": " +
                    (is_ours ? "kernel of jax_grouped" : Describe(*library, plan.algorithm)));
  }
  return lines;
}

}  // namespace jax_grouped
