"""Arrays, caches and residuals are printed on one short line, wherever they are and whatever is in them."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jax_grouped as jg

X, KERNEL, SIZES = jnp.ones((16, 32)), jnp.ones((2, 32, 16)), jnp.array([10, 4])
DELAYED = jg.DelayedScaling(amax_history_len=4)
STATE = jg.Fp8State.initial(DELAYED, 2)
CACHE = jg.quantize_kernel(KERNEL, jg.Float8CurrentScaling())
Y, RESIDUALS = jg.grouped_dense_fwd(X, KERNEL, SIZES, recipe=DELAYED, fp8_state=STATE)
_, PENDING = jg.grouped_dense_dgrad(RESIDUALS, Y)
QUANTIZED = jg.grouped_quantize(X, SIZES, jg.ScalingMode.BLOCK_1D)

ROWWISE = "ScaledArray(data=float8_e4m3fn[16,32], scale_inv=float32[20], group_sizes=int32[2], layout=BLOCK_1D rowwise)"
OBJECTS = [QUANTIZED, CACHE, STATE, RESIDUALS, PENDING, jg.moe.group_by_expert(jnp.array([[1, 0]]), 2)]
each_object = pytest.mark.parametrize("value", OBJECTS, ids=lambda value: type(value).__name__)


def test_arrays_are_their_types_and_shapes() -> None:
    assert repr(QUANTIZED.rowwise) == ROWWISE
    assert repr(QUANTIZED) == f"GroupedQuantized(rowwise={ROWWISE}, columnwise=None, amax=float32[2], dbias=None)"
    assert repr(CACHE).startswith("KernelCache(rowwise=ScaledArray(data=float8_e4m3fn[2,32,16], scale_inv=float32[2], ")


def test_what_waits_for_the_backward_pass_shows_its_arrays() -> None:
    text = repr(RESIDUALS)
    assert text.startswith("DenseResiduals(x=ScaledArray(data=float8_e4m3fn[1024], scale_inv=float32[2], ")
    assert text.endswith("amax={input: float32[2], kernel: float32[2]})")
    assert repr(PENDING).startswith("PendingWgrad(x=ScaledArray(")


@each_object
def test_one_line_tells_the_same_of_tracers_and_of_shapes(value: Any) -> None:
    traced = []
    jax.eval_shape(lambda value: traced.append(repr(value)), value)

    assert "\n" not in repr(value)
    assert traced == [repr(value)] == [repr(jax.eval_shape(lambda: value))]


@each_object
def test_anything_can_be_a_leaf(value: Any) -> None:
    for leaf in (object(), None, "leaf", 1, {"a": [1]}):
        assert repr(leaf).replace("'", "") in repr(jax.tree.map(lambda _, leaf=leaf: leaf, value)).replace("'", "")


def test_a_state_of_another_type_says_so() -> None:
    assert repr(STATE.astype(jnp.bfloat16)).startswith("Fp8State(input_amax_history=bfloat16[2,4], ")
