"""What is measured: an operation on operands of one shape, with one set of group sizes."""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.typing import DTypeLike

from benchmarks.shapes import Shape, group_ends, group_sizes

#: The operations, with how many grouped products each consists of. `backward` is dgrad and wgrad, `step` all three.
OPS = {"fprop": 1, "dgrad": 1, "wgrad": 1, "wgrad f32": 1, "backward": 2, "step": 3}

#: The layers whose whole steps are measured, with the operation and how many grouped products of `K` by `N` it makes.
#: An `accumulating` one adds its kernel's gradient to that of earlier steps. An `mlp` has a gated projection of that
#: size, and one of half of it back to `K`.
LAYERS = {"dense": ("step", 3), "accumulating": ("accumulating step", 3), "mlp": ("mlp step", 4.5)}

_PRODUCTS: dict[str, float] = {**OPS, **dict(LAYERS.values())}

DTYPE = jnp.dtype(jnp.bfloat16)

# Several times the 60 MB of L2 on an H200, so that no input is still there when its turn comes again.
_BYTES_IN_ROTATION = 256e6
_MOST_SETS = 8


class Inputs(NamedTuple):
    """The arrays that an operation reads: `x [T, K]`, `kernel [E, K, N]`, `dy [T, N]`.

    For an `mlp` step `kernel` is a pair, the projections `[E, K, N]` and `[E, N / 2, K]`, and `dy` is `[T, K]`.
    """

    x: jax.Array
    kernel: jax.Array | tuple[jax.Array, jax.Array]
    dy: jax.Array

    @property
    def kernels(self) -> tuple[jax.Array, ...]:
        """One kernel, or the pair."""
        return self.kernel if isinstance(self.kernel, tuple) else (self.kernel,)


@dataclasses.dataclass(frozen=True)
class Case:
    """One operation to measure.

    Attributes:
        shape: the static sizes.
        op: one of `OPS`, or that of one of `LAYERS`.
        sizes: rows per group, `int32[E]`.
        inputs: sets of operands that calls take in turn.
    """

    shape: Shape
    op: str
    sizes: npt.NDArray[np.int32]
    inputs: tuple[Inputs, ...]

    @property
    def valid_rows(self) -> int:
        """How many rows belong to a group."""
        return int(group_ends(self.sizes, self.shape.tokens)[-1])

    @property
    def useful_operations(self) -> int:
        """Multiplications and additions that the result needs."""
        return round(_PRODUCTS[self.op] * 2 * self.valid_rows * self.shape.K * self.shape.N)

    def tflops(self, milliseconds: float) -> float:
        """TFLOP/s over the useful operations of a call that takes so long."""
        return self.useful_operations / milliseconds / 1e9


normal = jax.jit(jax.random.normal, static_argnums=(1, 2))


def sets_in_rotation(elements: int, most: int) -> int:
    """How many sets of operands it takes, `most` at most, so that calls that read so many elements find none in L2."""
    return min(most, math.ceil(_BYTES_IN_ROTATION / (elements * DTYPE.itemsize)))


def random_inputs(shape: Shape, seed: int, kernel_dtype: DTypeLike = DTYPE, layer: str = "dense") -> tuple[Inputs, ...]:
    """Normally distributed operands: as many sets as it takes to keep them from being read out of the L2 cache.

    Zeros would draw less power, and the chip would run at a higher clock than it does in training.
    """
    T, E, K, N = shape.tokens, shape.num_groups, shape.K, shape.N
    count = sets_in_rotation(min(T * K + E * K * N, T * N + E * K * N, T * (K + N)), _MOST_SETS)

    def one(key: jax.Array) -> Inputs:
        x, kernel, dy, down = jax.random.split(key, 4)
        first = normal(kernel, (E, K, N), kernel_dtype)
        if layer != "mlp":
            return Inputs(normal(x, (T, K), DTYPE), first, normal(dy, (T, N), DTYPE))
        return Inputs(
            normal(x, (T, K), DTYPE), (first, normal(down, (E, N // 2, K), kernel_dtype)), normal(dy, (T, K), DTYPE)
        )

    return tuple(one(key) for key in jax.random.split(jax.random.key(seed), count))


def make_case(shape: Shape, skew: str, op: str, inputs: tuple[Inputs, ...], seed: int) -> Case:
    """A case whose group sizes follow from the skew and the seed."""
    return Case(shape, op, group_sizes(shape, skew, seed), inputs)


@jax.jit
def _relative_difference(got: jax.Array, expected: jax.Array, valid_rows: jax.Array) -> jax.Array:
    got, expected = got.astype(jnp.float32), expected.astype(jnp.float32)
    if got.ndim == 2:
        # What a row outside every group holds is not defined for all peers.
        valid = jnp.arange(got.shape[0])[:, None] < valid_rows
        got, expected = jnp.where(valid, got, 0), jnp.where(valid, expected, 0)
    norm = jnp.sqrt(jnp.sum(expected**2))
    return jnp.sqrt(jnp.sum((got - expected) ** 2)) / jnp.where(norm == 0, 1, norm)


def relative_difference(got: tuple[jax.Array, ...], expected: tuple[jax.Array, ...], case: Case) -> float:
    """The largest relative Frobenius norm of the differences between two peers' results."""
    pairs = zip(got, expected, strict=True)
    return max(float(_relative_difference(mine, other, case.valid_rows)) for mine, other in pairs)
