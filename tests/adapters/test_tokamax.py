"""Our products as an implementation for the real Tokamax."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped as jg
from jax_grouped.adapters.tokamax import ragged_dot
from tests.operands import normal
from tests.oracle import assert_trees_close

tokamax = pytest.importorskip("tokamax", reason="needs the extra adapters: tokamax")
qwix = pytest.importorskip("qwix", reason="needs the extra adapters: qwix")
# Tokamax reads flags of the command line, which is pytest's here.
pytest.importorskip("absl.flags").FLAGS.mark_as_parsed()

T, K, N, E = 48, 64, 32, 4
SIZES = jnp.array([20, 0, 17, 7], jnp.int32)


def numbers(lhs: int, rhs: int, group: tuple[int, ...]) -> jax.lax.RaggedDotDimensionNumbers:
    return jax.lax.RaggedDotDimensionNumbers((([lhs], [rhs]), ([], [])), [0], group)


#: Shapes of the operands, and the dimension numbers that Tokamax has.
FORMS = {
    "fprop": ((T, K), (E, K, N), numbers(1, 1, (0,))),
    "dgrad": ((T, K), (E, N, K), numbers(1, 2, (0,))),
    "wgrad": ((T, K), (T, N), numbers(0, 0, ())),
}


def operands(form: str) -> tuple[jax.Array, jax.Array, jax.lax.RaggedDotDimensionNumbers]:
    lhs, rhs, dimension_numbers = FORMS[form]
    return normal(0, lhs), normal(1, rhs), dimension_numbers


def results(implementation: Any, form: str, activation: Callable[..., Any] | None = None) -> Any:
    """Returns the product and its gradients, which JAX's own has not for sums over rows."""
    lhs, rhs, dimension_numbers = operands(form)

    def product(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        y = tokamax.ragged_dot_general(
            lhs,
            rhs,
            SIZES,
            dimension_numbers,
            precision=jax.lax.Precision.HIGHEST,
            activation=activation,
            implementation=implementation,
        )
        # XLA leaves rows of no group as they come.
        return y if form == "wgrad" else jnp.where(jnp.arange(T)[:, None] < jnp.sum(SIZES), y, 0)

    if form == "wgrad":
        return (product(lhs, rhs),)
    y, pull_back = jax.vjp(product, lhs, rhs)
    return y, *pull_back(jnp.cos(y))


@pytest.mark.parametrize(("form", "activation"), [("fprop", jax.nn.relu), ("dgrad", None), ("wgrad", jax.nn.relu)])
def test_products_and_gradients_are_those_of_tokamax(form: str, activation: Callable[..., Any] | None) -> None:
    assert_trees_close(results([ragged_dot], form, activation), results("xla", form, activation), 1e-4)


def test_group_sizes_and_operands_of_tokamax_are_taken_or_fall_through() -> None:
    lhs, rhs, _ = operands("fprop")
    # Group sizes may come with representative ones.
    got = tokamax.ragged_dot(lhs, rhs, tokamax.RaggedDotGroupSizes(SIZES, T), implementation=[ragged_dot])
    np.testing.assert_array_equal(got, jg.ragged_dot(lhs, rhs, SIZES))
    quantized = qwix.quantize(rhs, jnp.int8, channelwise_axes=[0, 2])

    got = tokamax.ragged_dot(lhs, quantized, SIZES, implementation=[ragged_dot, "xla"])

    expected = tokamax.ragged_dot(lhs, quantized, SIZES, implementation="xla")
    np.testing.assert_array_equal(got[:44], expected[:44])
    with pytest.raises(NotImplementedError, match=r"rhs must be an array of bfloat16, float16 or float32"):
        tokamax.ragged_dot(lhs, quantized, SIZES, implementation=[ragged_dot])


def test_a_recipe_computes_in_fp8() -> None:
    lhs, rhs, _ = operands("fprop")
    recipe = jg.Float8BlockScaling()
    in_fp8 = functools.partial(ragged_dot, recipe=recipe)

    got = tokamax.ragged_dot(lhs, rhs, SIZES, implementation=[in_fp8, "xla"])

    np.testing.assert_array_equal(got, jg.grouped_dense(lhs, rhs, SIZES, recipe=recipe))
    with pytest.raises(NotImplementedError, match="takes the dimension numbers of ragged_dot only"):
        results([in_fp8], "dgrad")
    narrow = tokamax.ragged_dot(lhs, rhs[:, :, :20], SIZES, implementation=[in_fp8, "xla"])
    assert narrow.shape == (T, 20)
