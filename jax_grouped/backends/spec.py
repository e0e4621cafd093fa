"""What a grouped matmul computes, as one static value that every backend understands."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

Product = Literal["fprop", "dgrad", "wgrad"]


@dataclasses.dataclass(frozen=True)
class MatmulSpec:
    """The static part of a grouped matmul `(a, b, group_sizes, group_offset) -> out`.

    | product | a         | b              | out            |
    |---------|-----------|----------------|----------------|
    | `fprop` | x `[T,K]` | kernel `[G,K,N]` | y `[T,N]`      |
    | `dgrad` | dy `[T,N]`| kernel `[G,K,N]` | dx `[T,K]`     |
    | `wgrad` | x `[T,K]` | dy `[T,N]`       | dkernel `[G,K,N]` |

    Attributes:
        product: which of the three.
        num_groups: `G`, the groups whose kernels are here; `group_sizes` may describe more.
        out_dtype: type of the result.
        precision: applies to float32 inputs; see `jax_grouped.ragged_dot`.
    """

    product: Product
    num_groups: int
    out_dtype: DTypeLike
    precision: jax.lax.Precision = jax.lax.Precision.DEFAULT

    def __post_init__(self) -> None:
        # One value per type, so that specs compare and hash alike.
        object.__setattr__(self, "out_dtype", jnp.dtype(self.out_dtype))

    def out_shape(self, a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the result for operands of these shapes."""
        match self.product:
            case "fprop":
                return (a[0], b[2])
            case "dgrad":
                return (a[0], b[1])
            case "wgrad":
                return (self.num_groups, a[1], b[1])
