"""Operands of grouped products for the tests; every value follows from a seed."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from benchmarks.shapes import Shape, group_ends


def normal(seed: int, shape: tuple[int, ...], dtype: npt.DTypeLike = np.float32) -> jax.Array:
    """Draws standard normal numbers with NumPy: JAX would compile a program for each shape."""
    return jnp.asarray(np.random.default_rng((seed, *shape)).standard_normal(shape, np.float32).astype(dtype))


@dataclasses.dataclass(frozen=True)
class Operands:
    """Operands of the three products: `x [T, K]`, `kernel [E, K, N]`, `bias [E, N]`, `dy [T, N]`."""

    x: npt.NDArray[np.generic]
    kernel: npt.NDArray[np.generic]
    bias: npt.NDArray[np.generic]
    dy: npt.NDArray[np.generic]


def random_operands(
    shape: Shape,
    group_sizes: npt.NDArray[np.int32],
    dtype: npt.DTypeLike = np.float32,
    *,
    seed: int = 0,
    magnitude: float = 1e2,
    tail: float = np.nan,
) -> Operands:
    """Draws operands that hide nothing: a row or a scale that reaches the wrong group shows in the result.

    The experts' standard deviations run from `1 / magnitude` to `magnitude`, in another order for each operand. With
    float16, a `magnitude` of 10 keeps products finite. Rows of `x` and `dy` that belong to no group hold `tail`.
    """
    rng = np.random.default_rng(seed)
    ends = group_ends(group_sizes, shape.tokens)
    group_of_row = np.searchsorted(ends, np.arange(ends[-1]), side="right")

    def deviations() -> npt.NDArray[np.float32]:
        return rng.permutation(np.geomspace(1 / magnitude, magnitude, shape.num_groups).astype(np.float32))

    def tokens(features: int) -> npt.NDArray[np.generic]:
        values = np.full((shape.tokens, features), tail, np.float32)
        values[: ends[-1]] = rng.standard_normal((ends[-1], features), np.float32) * deviations()[group_of_row, None]
        return values.astype(dtype)

    def stack(*features: int) -> npt.NDArray[np.generic]:
        values = rng.standard_normal((shape.num_groups, *features), np.float32)
        return (values.T * deviations()).T.astype(dtype)

    return Operands(x=tokens(shape.K), kernel=stack(shape.K, shape.N), bias=stack(shape.N), dy=tokens(shape.N))
