#include "csrc/gemm/problem.h"

#include <tuple>

namespace jax_grouped {
namespace {

auto Fields(const GemmProblem& problem) {
  return std::make_tuple(problem.product, problem.a_type, problem.b_type, problem.result_type, problem.scaled,
                         problem.a_mode, problem.b_mode, problem.tokens, problem.expected_tokens, problem.in_features,
                         problem.out_features, problem.num_groups, problem.elements_per_weight, problem.accumulate,
                         problem.gathered, problem.gathered_from);
}

const char* Name(Product product) {
  switch (product) {
    case Product::kFprop:
      return "fprop";
    case Product::kDgrad:
      return "dgrad";
    case Product::kWgrad:
      break;
  }
  return "wgrad";
}

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

const char* Name(ScalingMode mode) {
  switch (mode) {
    case ScalingMode::kBlock1D:
      return "1x128";
    case ScalingMode::kBlock2D:
      return "128x128";
    case ScalingMode::kMx:
      return "1x32";
    case ScalingMode::kTensor:
      break;
  }
  return "tensor";
}

std::string DescribeOperands(const GemmProblem& problem) {
  if (!problem.scaled) return Name(problem.a_type);
  return std::string(Name(problem.a_type)) + " " + Name(problem.a_mode) + " x " + Name(problem.b_type) + " " +
         Name(problem.b_mode);
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
  tokens.swizzled_scales = problem.a_mode == ScalingMode::kMx;
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
  weights.swizzled_scales = problem.b_mode == ScalingMode::kMx;
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
  std::string text = std::string(Name(problem.product)) + " " + DescribeOperands(problem) +
                     (problem.accumulate ? " onto " : " -> ") + Name(problem.result_type) + ", E " +
                     std::to_string(problem.num_groups) + " T " + std::to_string(problem.tokens) + " K " +
                     std::to_string(problem.in_features) + " N " + std::to_string(problem.out_features);
  if (problem.expected_tokens < problem.tokens) {
    text += ", " + std::to_string(problem.expected_tokens) + " tokens expected";
  }
  if (problem.elements_per_weight > 1) {
    text += ", weights of " + std::to_string(problem.elements_per_weight) + " batch elements";
  }
  if (problem.gathered != Gather::kNone) {
    text += std::string(", ") + (problem.gathered == Gather::kA ? "a" : "b") + " gathered from " +
            std::to_string(problem.gathered_from);
  }
  return text;
}

}  // namespace jax_grouped
