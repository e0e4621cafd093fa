#include "csrc/gemm/cublaslt/autotune.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <mutex>
#include <string>
#include <vector>

#include "csrc/common/stopwatch.h"
#include "csrc/gemm/cublaslt/algorithms.h"
#include "csrc/gemm/cublaslt/launch.h"
#include "csrc/gemm/cublaslt/trial_operands.h"
#include "csrc/gemm/cublaslt/tuned_algorithms.h"

namespace jax_grouped {
namespace {

constexpr int kMostAlgorithms = 32;

// Number of rounds in which every algorithm is timed. Algorithms alternate, so that other work on the device during one
// round does not decide. An algorithm's time in a round is the median of its measurements; its final time is that of
// its best round.
constexpr int kRounds = 3;
constexpr int kMeasurements = 3;

// Target duration of a measurement. One measurement is a graph with as many products as take about this long.
constexpr float kMeasurementMilliseconds = 2.0f;
constexpr int kMostProducts = 20;

// Ratio up to which two times count as equal.
constexpr float kTie = 1.01f;

constexpr float kNever = std::numeric_limits<float>::infinity();

// Comparison of a problem's algorithms by their time.
class AlgorithmTimer {
 public:
  AlgorithmTimer(const CublasLt& library, cublasLtHandle_t handle, const GemmProblem& problem)
      : library_(library), handle_(handle), problem_(problem) {}

  // Times each algorithm; writes kNever for those that do not run.
  Status Run(const std::vector<Algorithm>& algorithms, std::vector<float>* times) {
    times->assign(algorithms.size(), kNever);
    JAX_GROUPED_RETURN_IF_FAILED(stopwatch_.Create());
    JAX_GROUPED_RETURN_IF_FAILED(operands_.Create(problem_, stopwatch_.stream()));
    std::vector<Owned<cudaGraphExec_t>> graphs(algorithms.size());
    for (size_t i = 0; i < algorithms.size(); ++i) {
      if (WarmUp(algorithms[i], &graphs[i]).ok()) continue;
      graphs[i].reset();
      (void)cudaGetLastError();  // Otherwise CUDA would report it again to the next caller.
    }
    for (int round = 0; round < kRounds; ++round) {
      for (size_t i = 0; i < algorithms.size(); ++i) {
        if (graphs[i] == nullptr) continue;
        float time = kNever;
        JAX_GROUPED_RETURN_IF_FAILED(TimeOnce(graphs[i].get(), &time));
        (*times)[i] = std::min((*times)[i], time);
      }
    }
    return Status::Ok();
  }

 private:
  // Runs an algorithm once on its own, which loads its kernels; then records its graph and runs it. Fails if cuBLASLt
  // refuses the algorithm or if it cannot be captured.
  Status WarmUp(const Algorithm& algorithm, Owned<cudaGraphExec_t>* graph) {
    int call = 0;
    const auto launch = [&] {
      return LaunchCublasLt(library_, handle_, algorithm, stopwatch_.stream(), problem_, operands_.groups(),
                            operands_.Buffers(call++));
    };
    JAX_GROUPED_RETURN_IF_FAILED(launch());
    JAX_GROUPED_RETURN_IF_FAILED(
        Status::FromCuda(cudaStreamSynchronize(stopwatch_.stream()), "Running an algorithm of cuBLASLt to time it"));
    float milliseconds = 0;
    if (products_ == 0) {
      JAX_GROUPED_RETURN_IF_FAILED(stopwatch_.Time(launch, &milliseconds));
      const float products = std::ceil(kMeasurementMilliseconds / milliseconds);
      products_ = static_cast<int>(std::clamp<float>(products, 1, kMostProducts));
    }
    JAX_GROUPED_RETURN_IF_FAILED(stopwatch_.Record(products_, launch, graph));
    return stopwatch_.Time(graph->get(), &milliseconds);
  }

  Status TimeOnce(cudaGraphExec_t graph, float* median) const {
    std::array<float, kMeasurements> milliseconds{};
    for (float& measured : milliseconds) JAX_GROUPED_RETURN_IF_FAILED(stopwatch_.Time(graph, &measured));
    std::sort(milliseconds.begin(), milliseconds.end());
    *median = milliseconds[kMeasurements / 2];
    return Status::Ok();
  }

  const CublasLt& library_;
  const cublasLtHandle_t handle_;
  const GemmProblem& problem_;
  Stopwatch stopwatch_;
  TrialOperands operands_;
  int products_ = 0;  // in one graph
};

// Returns the algorithm that the heuristic ranks highest among those as fast as the fastest.
size_t Winner(const std::vector<float>& times) {
  const float fastest = *std::min_element(times.begin(), times.end());
  const auto ties = [&](float time) { return time <= kTie * fastest; };
  return std::find_if(times.begin(), times.end(), ties) - times.begin();
}

// Returns the key under which the choice for a problem is stored.
Status TuningKey(const CublasLt& library, const Plans::Key& key, std::string* text) {
  cudaDeviceProp properties;
  JAX_GROUPED_RETURN_IF_FAILED(
      Status::FromCuda(cudaGetDeviceProperties(&properties, key.first), "cudaGetDeviceProperties"));
  *text = std::string(properties.name) + ", cuBLASLt " + library.Version() + ", " + Describe(key.second);
  return Status::Ok();
}

// Replaces the plan, unless it fails.
Status ChooseByTime(const CublasLt& library, const Plans::Key& key, Plan* plan) {
  std::string text;
  JAX_GROUPED_RETURN_IF_FAILED(TuningKey(library, key, &text));
  const GemmProblem& problem = key.second;
  const auto can_run = [&](const Algorithm& known) { return CanRun(library, plan->handle, problem, known); };
  TunedAlgorithms& tuned = TunedAlgorithms::Get();
  Algorithm choice;
  if (!tuned.Find(text, can_run, &choice)) {
    std::vector<Algorithm> algorithms;
    JAX_GROUPED_RETURN_IF_FAILED(ProposeAlgorithms(library, plan->handle, problem, kMostAlgorithms, &algorithms));
    size_t winner = 0;
    if (algorithms.size() > 1) {
      std::vector<float> times;
      JAX_GROUPED_RETURN_IF_FAILED(AlgorithmTimer(library, plan->handle, problem).Run(algorithms, &times));
      winner = Winner(times);
      if (times[winner] == kNever) return Status::Failed("None of cuBLASLt's algorithms ran.");
    }
    choice = tuned.Add(text, can_run, algorithms[winner]);
  }
  *plan = {plan->handle, choice, Origin::kTuned};
  return Status::Ok();
}

}  // namespace

Status Tune(const CublasLt& library, const Plans::Key& key) {
  Plans& plans = Plans::Get();
  Plan plan;
  if (!plans.Find(key, &plan)) return Status::Failed("A grouped matmul was tuned before it had been initialized.");
  if (plan.origin != Origin::kHeuristic) return Status::Ok();
  // Only one problem is timed at once: two would slow each other down, and devices of one kind need only one run. Other
  // threads still find their plans meanwhile, including that of this problem, because the lock of Plans is not held for
  // this time.
  static std::mutex* const one_at_a_time = new std::mutex();
  std::lock_guard<std::mutex> lock(*one_at_a_time);
  if (!plans.Find(key, &plan) || plan.origin != Origin::kHeuristic) return Status::Ok();
  // On failure the program goes on with the algorithm that it has, which works. A fault of the device shows in the
  // program's next call.
  if (!ChooseByTime(library, key, &plan).ok()) {
    (void)cudaGetLastError();
    plan.origin = Origin::kNotTimed;
  }
  plans.Replace(key, plan);
  return Status::Ok();
}

}  // namespace jax_grouped
