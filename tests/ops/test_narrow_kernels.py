"""`ragged_dot` of tokens and a narrow kernel, which is converted a few groups at a time."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.typing import DTypeLike

import jax_grouped as jg
from jax_grouped.kernels import product as implementation
from jax_grouped.kernels.product import NARROW_TYPES
from tests import oracle
from tests.operands import normal
from tests.ops.quantize_cases import some
from tests.programs import lowered, struct

SIZES = jnp.array([5, 0, 9, 1, 7, 10])  # 5 rows belong to no group.
E, T, K, N = 6, 37, 32, 24


def tokens(dtype: DTypeLike = jnp.bfloat16, features: int = K) -> jax.Array:
    return normal(0, (T, features), dtype)


def kernel(dtype: DTypeLike, shape: tuple[int, ...] = (E, K, N)) -> jax.Array:
    numbers = 3 * normal(1, shape)
    return (jnp.abs(numbers) if jnp.issubdtype(dtype, jnp.unsignedinteger) else numbers).astype(dtype)


@pytest.fixture
def four_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(implementation, "_CONVERTED_BYTES", 4 * K * N * 2)  # Of six groups, so that two are left.


def assert_same(got: jax.Array, expected: jax.Array) -> None:
    """Compares bits; on a GPU, whose products of fewer groups may sum in another order, with the last bit of bf16."""
    if jax.default_backend() == "cpu":
        np.testing.assert_array_equal(got, expected)
    else:
        assert oracle.relative_error(got, np.asarray(expected, np.float64)) < 2**-8


def converted(x: jax.Array, kernel: jax.Array, *more: Any, **options: Any) -> jax.Array:
    return jg.ragged_dot(x, kernel.astype(x.dtype), *more, **options)


@functools.partial(jax.jit, static_argnums=0)
def results(product: Any, x: jax.Array, narrow: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the product and its gradients."""
    y, pull_back = jax.vjp(lambda x, kernel: product(x, kernel, SIZES), x, narrow)
    return y, *pull_back(jnp.sin(jnp.arange(y.size)).reshape(y.shape).astype(y.dtype))


def test_products_and_gradients_are_those_of_the_converted_kernel(backend: str, four_at_once: None) -> None:
    forms = itertools.product(NARROW_TYPES, (jnp.bfloat16, jnp.float16, jnp.float32))
    for dtype, x_dtype in some(backend, forms, 0, count=4):
        x, narrow = tokens(x_dtype), kernel(dtype)

        y, dx, dkernel = results(jg.ragged_dot, x, narrow)

        expected = results(converted, x, narrow)
        assert y.dtype == dx.dtype == x_dtype
        assert_same(y, expected[0])
        assert_same(dx, expected[1])
        if jnp.issubdtype(dtype, jnp.integer):
            assert dkernel.dtype == jax.dtypes.float0
        else:
            assert dkernel.dtype == dtype
            assert_same(dkernel.astype(jnp.float32), expected[2].astype(jnp.float32))


def test_kernels_of_some_groups_have_an_offset(backend: str, four_at_once: None) -> None:
    x, narrow = tokens(), kernel(jnp.int8, (4, K, N))
    product, expected = jax.jit(jg.ragged_dot), jax.jit(converted)
    for offset in (0, 3, -1, 2**31 - 1, -(2**31)):
        assert_same(product(x, narrow, SIZES, group_offset=offset), expected(x, narrow, SIZES, group_offset=offset))


def test_vmap_makes_more_groups(backend: str, four_at_once: None) -> None:
    x, narrow = jnp.stack([tokens(), tokens()[::-1]]), kernel(jnp.int8)
    for axis, kernels in ((None, narrow), (0, jnp.stack([narrow, -narrow]))):
        y = jax.vmap(jg.ragged_dot, (0, axis, None))(x, kernels, SIZES)

        assert_same(y, jax.vmap(converted, (0, axis, None))(x, kernels, SIZES))


def test_sums_over_the_last_axis_and_over_tokens(backend: str, four_at_once: None) -> None:
    over_last = jax.lax.RaggedDotDimensionNumbers((([1], [2]), ([], [])), [0], [0])
    over_tokens = jax.lax.RaggedDotDimensionNumbers((([0], [0]), ([], [])), [0], [])
    for rhs, dimensions in ((kernel(jnp.int8, (E, N, K)), over_last), (kernel(jnp.int8, (T, N)), over_tokens)):
        y = jg.ragged_dot_general(tokens(), rhs, SIZES, dimensions)
        expected = jg.ragged_dot_general(tokens(), rhs.astype(jnp.bfloat16), SIZES, dimensions)
        assert_same(y, expected)


def test_the_features_of_an_exported_program_may_be_symbolic() -> None:
    (inputs,) = export.symbolic_shape("8*k")
    arguments = (
        jax.ShapeDtypeStruct((T, inputs), jnp.bfloat16),
        jax.ShapeDtypeStruct((E, inputs, N), jnp.int8),
        jax.ShapeDtypeStruct((E,), jnp.int32),
    )
    checks = [export.DisabledSafetyCheck.custom_call(name) for name in jg.CUSTOM_CALL_TARGETS]
    exported = export.export(jax.jit(jg.ragged_dot), platforms=["cpu", "cuda"], disabled_checks=checks)(*arguments)
    if jax.default_backend() == "cpu":
        y = exported.call(tokens(), kernel(jnp.int8), SIZES)
        np.testing.assert_array_equal(y, converted(tokens(), kernel(jnp.int8), SIZES))


def test_the_converted_kernel_is_never_a_whole_array() -> None:
    groups, inputs, outputs = 64, 2048, 1536
    arguments = struct((512, inputs)), struct((groups, inputs, outputs), jnp.int8), struct((groups,), jnp.int32)

    def gradient(x: jax.Array, *rest: jax.Array) -> jax.Array:
        return jax.grad(lambda x: jg.ragged_dot(x, *rest).astype(jnp.float32).sum())(x)

    for function in (jg.ragged_dot, gradient):
        text = lowered(function, *arguments)
        assert f"tensor<{groups}x{inputs}x{outputs}xi8>" in text
        assert f"{groups}x{inputs}x{outputs}xbf16" not in text
        assert "tensor<5x2048x1536xbf16>" in text
        assert "tensor<4x2048x1536xbf16>" in text, "the last of the 64"
