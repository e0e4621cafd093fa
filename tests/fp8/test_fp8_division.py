"""The division behind scales: rounded as IEEE 754 says, in floating point on CPUs and in integers elsewhere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_grouped.fp8 import numerics

pytestmark = pytest.mark.slow

LIMIT = np.float32(2.0**126)


@pytest.mark.parametrize(("numerator", "exponent"), [(1, 0), (7, 6), (7, 13)], ids=["1", "448", "57344"])
def test_integers_divide_as_numpy_does(numerator: int, exponent: int) -> None:
    rng = np.random.default_rng(0)
    mantissas = np.concatenate([np.arange(512), 2**23 - 1 - np.arange(512), rng.integers(0, 2**23, 100_000)])
    exponents = np.concatenate([np.arange(1, 255), rng.integers(1, 255, mantissas.size - 254)])
    x = (exponents << 23 | mantissas).astype(np.int32).view(np.float32)

    quotient = jax.jit(lambda x: numerics.divide_integers(numerator, exponent, x))(x)

    with np.errstate(over="ignore"):
        expected = np.clip(np.float32(numerator * 2.0**exponent) / x, 1 / LIMIT, LIMIT)
    np.testing.assert_array_equal(quotient, expected)


def test_cpus_divide_in_floating_point_and_others_in_integers() -> None:
    traced = jax.jit(numerics.reciprocal).trace(jax.ShapeDtypeStruct((8,), jnp.float32))

    for platform in ("cpu", "cuda", "tpu"):
        program = traced.lower(lowering_platforms=(platform,)).as_text()
        assert ("stablehlo.remainder" in program) == (platform != "cpu"), platform
