// Reads calls of the size functions from the standard input, one a line: a name and its integer arguments. Prints each
// result.

#include <cstdint>
#include <functional>
#include <iostream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "csrc/gemm/scratch.h"
#include "csrc/groups/layout.h"
#include "csrc/routing/blocks.h"

namespace {

using Arguments = std::vector<int64_t>;

jax_grouped::QuantizedLayout Layout(const Arguments& arguments) {
  jax_grouped::QuantizedLayout layout{};
  layout.mode = static_cast<jax_grouped::ScalingMode>(arguments.at(0));
  layout.columnwise = arguments.at(1) != 0;
  layout.batch = arguments.at(2);
  layout.tokens = arguments.at(3);
  layout.features = arguments.at(4);
  layout.num_groups = arguments.at(5);
  layout.stack_rows = arguments.at(6);
  return layout;
}

const std::map<std::string, std::function<int64_t(const Arguments&)>> kSizes = {
    {"row_blocks", [](const Arguments& a) { return jax_grouped::MaxRowBlocks(a.at(0), a.at(1), a.at(2)); }},
    {"group_table", [](const Arguments& a) { return jax_grouped::GroupTable::Size(a.at(0)); }},
    {"gemm_scratch", [](const Arguments& a) { return jax_grouped::GemmScratch::Bytes(a.at(0), a.at(1)); }},
    {"quantize_scratch",
     [](const Arguments& a) { return jax_grouped::QuantizeScratchBytes(a.at(0), a.at(1), a.at(2)); }},
    {"bias_grad_tiles", [](const Arguments& a) { return jax_grouped::BiasGradTiles(a.at(0), a.at(1)); }},
    {"routing_blocks", [](const Arguments& a) { return jax_grouped::RoutingBlocks(a.at(0)); }},
    {"data", [](const Arguments& a) { return Layout(a).DataElements(); }},
    {"scale", [](const Arguments& a) { return Layout(a).ScaleElements(); }},
};

}  // namespace

int main() {
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    std::string name;
    words >> name;
    Arguments arguments;
    for (int64_t argument; words >> argument;) arguments.push_back(argument);
    std::cout << kSizes.at(name)(arguments) << "\n";
  }
}
