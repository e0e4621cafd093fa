"""Code shared by the tests of `grouped_dense` with a recipe: recipes, operands and states."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import jax_grouped as jg
from benchmarks import shapes
from tests import oracle
from tests.operands import random_operands
from tests.ops.quantize_cases import poison
from tests.states import NAMES, fp8_state

HISTORY = 3
BLOCK, CURRENT = jg.Float8BlockScaling(), jg.Float8CurrentScaling()
DELAYED = jg.DelayedScaling(amax_history_len=HISTORY, margin=1.0)

SHAPE = shapes.Shape("unaligned", num_groups=4, tokens=300, K=144, N=272)
SIZES = np.array([37, 0, 130, 1], np.int32)


def operands(seed: int = 0, sizes: np.ndarray = SIZES) -> tuple[np.ndarray, ...]:
    """Returns bfloat16 `x` and `dy`, float32 `kernel` and `bias`; poison in the rows of no group."""
    at = random_operands(SHAPE, sizes, np.float32, magnitude=4.0, seed=seed)
    x, dy = at.x.astype(ml_dtypes.bfloat16), at.dy.astype(ml_dtypes.bfloat16)
    for array in (x, dy):
        poison(array[shapes.group_ends(sizes, SHAPE.tokens)[-1] :])
    return x, at.kernel, at.bias, dy


def some_state(seed: int = 0, num_groups: int = SHAPE.num_groups) -> jg.Fp8State:
    """Returns a state with another history in every group; group 1 has none."""
    rng = np.random.default_rng(seed)
    fields = {}
    for name in NAMES:
        history = rng.uniform(0.5, 20, (num_groups, HISTORY)).astype(np.float32)
        history[1] = 0
        fields[f"{name}_amax_history"] = jnp.asarray(history)
        fields[f"{name}_scale"] = jnp.asarray(rng.uniform(8, 32, num_groups).astype(np.float32))
    return fp8_state(**fields)


def assert_close(got: tuple[jax.Array, ...], expected: tuple[jax.Array, ...], tolerance: float = 1e-6) -> None:
    for one, other in zip(got, expected, strict=True):
        assert oracle.relative_error(one, np.asarray(other, np.float64)) <= tolerance
