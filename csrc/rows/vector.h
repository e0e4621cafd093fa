// The unit in which a thread loads a row.

#ifndef JAX_GROUPED_CSRC_ROWS_VECTOR_H_
#define JAX_GROUPED_CSRC_ROWS_VECTOR_H_

namespace jax_grouped {

// 16-bit numbers of a vector. A row's features must be a multiple, and its array must start at one.
constexpr int kRowVector = 8;

}  // namespace jax_grouped

#endif  // JAX_GROUPED_CSRC_ROWS_VECTOR_H_
