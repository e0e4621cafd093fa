#ifndef JAX_GROUPED_CSRC_COMMON_SCALE_RULE_H_
#define JAX_GROUPED_CSRC_COMMON_SCALE_RULE_H_

namespace jax_grouped {

// The way from the largest value of a block or a group to its scale.
struct ScaleRule {
  bool pow2;           // round the scale down to a power of two
  float amax_epsilon;  // least value that the largest one counts as
};

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_COMMON_SCALE_RULE_H_
