"""`ragged_dot` and `grouped_dense`, forward and backward, against NumPy in float64."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jax_grouped as jg
from benchmarks import shapes
from tests import oracle
from tests.operands import random_operands
from tests.ops.quantize_cases import some

pytestmark = pytest.mark.slow

#: Relative Frobenius error per group that the result's own rounding and float32 accumulation explain.
TOLERANCE = {"bfloat16": 4e-3, "float16": 5e-4, "float32": 1e-5}

#: Largest ratio of an expert's magnitude to 1 for which float16 stays finite.
MAGNITUDE = {"bfloat16": 1e2, "float16": 4.0, "float32": 1e2}


@functools.cache
def _forward_and_backward(backend: str) -> jax.stages.Wrapped:
    """Jits once per backend and shape; the sizes are data."""
    del backend

    def call(x, kernel, bias, dy, sizes, offset):
        def dense(x, kernel, bias):
            return jg.grouped_dense(x, kernel, sizes, bias, group_offset=offset, precision="highest")

        y, vjp = jax.vjp(dense, x, kernel, bias)
        return y, *vjp(dy)

    return jax.jit(call)


def check(backend: str, shape: shapes.Shape, sizes: np.ndarray, dtype: str, offset: int = 0) -> None:
    """Compares y, dx, dkernel and dbias, group by group."""
    numpy_dtype = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    local = np.zeros(shape.tokens, bool)
    for _, rows in oracle.local_groups(sizes, shape.num_groups, shape.tokens, offset):
        local[rows] = True
    whole = dataclasses.replace(shape, num_groups=len(sizes))
    at = random_operands(whole, sizes, numpy_dtype, magnitude=MAGNITUDE[dtype])
    x, dy = (np.where(local[:, None], a, np.array(np.nan, numpy_dtype)) for a in (at.x, at.dy))
    kernel, bias = at.kernel[: shape.num_groups], at.bias[: shape.num_groups]

    arrays = [jnp.asarray(a) for a in (x, kernel, bias, dy, sizes, np.array([offset], np.int32))]
    y, dx, dkernel, dbias = _forward_and_backward(backend)(*arrays)

    tolerance = TOLERANCE[dtype]
    expected_y = oracle.add_bias(oracle.fprop(x, kernel, sizes, offset), bias, sizes, offset)
    # The product is rounded before the bias is added, so a sum that cancels keeps the product's error.
    oracle.assert_groups_close(y, expected_y, sizes, shape.num_groups, 3 * tolerance, offset)
    expected_dx = oracle.dgrad(dy, kernel, sizes, offset)
    oracle.assert_groups_close(dx, expected_dx, sizes, shape.num_groups, tolerance, offset)
    oracle.assert_kernels_close(dkernel, oracle.wgrad(x, dy, sizes, shape.num_groups, offset), tolerance)
    oracle.assert_kernels_close(dbias, oracle.bias_grad(dy, sizes, shape.num_groups, offset), tolerance)


@pytest.mark.parametrize("shape", shapes.TEST_SHAPES, ids=lambda shape: shape.name.replace(" ", "-"))
def test_results_and_gradients_match_numpy(backend: str, shape: shapes.Shape) -> None:
    index = shapes.TEST_SHAPES.index(shape)
    for dtype in some(backend, ["float32", "bfloat16", "float16"], index):
        for skew in some(backend, shapes.TEST_SKEWS, index, count=4):
            check(backend, shape, shapes.group_sizes(shape, skew), dtype)


def test_group_offset_selects_the_groups_of_a_longer_list(backend: str) -> None:
    shape = shapes.Shape("local", num_groups=3, tokens=130, K=24, N=40)
    sizes = np.array([20, 0, 31, 7, 1, 44, 13], np.int32)
    for offset in (-3, 0, 2, 4, 7, 2**31 - 1, -(2**31)):
        check(backend, shape, sizes, "float32", offset)


def test_every_pattern_of_empty_groups(backend: str) -> None:
    shape = shapes.Shape("patterns", num_groups=6, tokens=64, K=16, N=24)
    for pattern in itertools.product([0, 9], repeat=shape.num_groups):
        check(backend, shape, np.array(pattern, np.int32), "bfloat16")


def test_arrays_without_elements(backend: str) -> None:
    for tokens, K, N, groups in ((0, 4, 3, 2), (6, 0, 3, 2), (6, 4, 0, 2), (6, 4, 3, 0)):
        x, kernel, bias = jnp.ones((tokens, K)), jnp.ones((groups, K, N)), jnp.zeros((groups, N))
        sizes = jnp.array([1, 2])[:groups]
        y, vjp = jax.vjp(lambda *arrays, sizes=sizes: jg.grouped_dense(*arrays[:2], sizes, arrays[2]), x, kernel, bias)
        dx, dkernel, dbias = vjp(jnp.ones_like(y))
        assert (y.shape, dx.shape, dkernel.shape, dbias.shape) == ((tokens, N), x.shape, kernel.shape, bias.shape)
        assert not any(np.any(array) for array in (y, dx, dkernel))


def test_same_inputs_give_the_same_bits(backend: str) -> None:
    shape = shapes.SHAPES["aligned"]
    sizes = shapes.group_sizes(shape, "lognormal")
    at = random_operands(shape, sizes, ml_dtypes.bfloat16)
    arrays = [jnp.asarray(a) for a in (at.x, at.kernel, at.bias, at.dy, sizes, np.zeros(1, np.int32))]
    first = _forward_and_backward(backend)(*arrays)
    for _ in range(5 if backend == "cuda" else 1):
        again = _forward_and_backward(backend)(*arrays)
        assert all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in zip(first, again, strict=True))


def test_types_are_those_of_jax_also_where_promotion_is_strict(backend: str) -> None:
    types = ["bfloat16", "float16", "float32"]
    for i, (lhs, rhs) in some(backend, enumerate(itertools.product(types, repeat=2)), 0, count=5):
        x, kernel, sizes = jnp.ones((6, 8), lhs), jnp.ones((2, 8, 4), rhs), jnp.array([2, 3])
        options = dict(preferred_element_type=(None, *types)[i % 4])
        with jax.numpy_dtype_promotion("strict"):
            expected = jax.eval_shape(functools.partial(jax.lax.ragged_dot, **options), x, kernel, sizes)
            y, vjp = jax.vjp(functools.partial(jg.ragged_dot, group_sizes=sizes, **options), x, kernel)
            dx, dkernel = vjp(y)
        assert [array.dtype for array in (y, dx, dkernel)] == [expected.dtype, lhs, rhs]
        np.testing.assert_array_equal(y[:, 0].astype(jnp.float32), [8] * 5 + [0])
        np.testing.assert_array_equal(dkernel[:, 0, 0].astype(jnp.float32), [16, 24])


def test_float32_inputs_keep_more_than_bfloat16_would(backend: str) -> None:
    shape = shapes.SHAPES["aligned"]
    sizes = shapes.group_sizes(shape, "equal")
    at = random_operands(shape, sizes, magnitude=1.0)
    expected = oracle.fprop(at.x, at.kernel, sizes)
    for precision, bound in [("default", 2e-5), ("highest", 2e-6)]:
        y = jg.ragged_dot(at.x, at.kernel, jnp.asarray(sizes), precision=precision)
        # A GPU's own float32 matmuls run in TF32 by default, which the xla backend leaves to XLA.
        tf32 = backend == "xla" and precision == "default" and jax.default_backend() == "gpu"
        assert oracle.relative_error(y, expected) < (1e-3 if tf32 else bound)


@pytest.mark.parametrize("kernel_type", ["bfloat16", "float32"])
def test_gradients_come_in_each_arguments_own_type(backend: str, kernel_type: str) -> None:
    shape = shapes.SHAPES["aligned"]
    sizes = shapes.group_sizes(shape, "lognormal")
    at = random_operands(shape, sizes, ml_dtypes.bfloat16, magnitude=2.0)
    kernel = jnp.asarray(at.kernel).astype(kernel_type)

    y, vjp = jax.vjp(
        lambda x, kernel: jg.grouped_dense(x, kernel, jnp.asarray(sizes), preferred_element_type=jnp.float32),
        *(jnp.asarray(at.x), kernel),
    )
    dx, dkernel = vjp(jnp.asarray(at.dy).astype(jnp.float32))
    assert (y.dtype, dx.dtype, dkernel.dtype) == (jnp.float32, jnp.bfloat16, kernel_type)
    kernel_used = np.asarray(kernel.astype(jnp.bfloat16))
    oracle.assert_groups_close(y, oracle.fprop(at.x, kernel_used, sizes), sizes, shape.num_groups, 1e-5)
    # An unrounded float32 gradient is the point: it would be off by 2e-3 if it had passed through bfloat16.
    tolerance = {"bfloat16": 4e-3, "float16": 5e-4, "float32": 1e-5}[kernel_type]
    oracle.assert_kernels_close(dkernel, oracle.wgrad(at.x, at.dy, sizes, shape.num_groups), tolerance)


def test_64_bit_sizes_of_the_host_do_not_wrap(backend: str) -> None:
    x, kernel = jnp.ones((6, 8)), jnp.ones((2, 8, 4)) * jnp.array([1.0, 2.0])[:, None, None]
    for sizes in (np.array([2**32 + 1, 1]), np.array([2**63, 1], np.uint64), [2**40, 1]):
        np.testing.assert_array_equal(jg.ragged_dot(x, kernel, sizes), np.full((6, 4), 8.0))
    assert not np.any(jg.ragged_dot(x, kernel, [2, 2], group_offset=2**31))


def test_large_float32_values_do_not_overflow(backend: str) -> None:
    largest = float(jnp.finfo(jnp.float32).max)
    for precision in ("default", "highest"):
        x = jnp.zeros((4, 8)).at[:, 0].set(largest)
        y = jg.ragged_dot(x, jnp.full((1, 8, 8), 0.5), jnp.array([4]), precision=precision)
        np.testing.assert_allclose(y, 0.5 * largest, rtol=1e-4)
    # A gradient of the result beyond float16.
    x, kernel = jnp.ones((4, 8), jnp.float16), jnp.full((1, 8, 8), 1e-3, jnp.float16)
    for function in (jg.ragged_dot, jg.grouped_dense):
        product = functools.partial(function, preferred_element_type=jnp.float32)
        y, vjp = jax.vjp(lambda x, product=product: product(x, kernel, jnp.array([4])), x)
        (dx,) = vjp(jnp.full_like(y, 1e5))
        assert dx.dtype == jnp.float16
        np.testing.assert_allclose(dx, 800, rtol=2e-3)
