"""Bad arguments of quantization raise at trace time, in a sentence that names the argument, what it is and the rule."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jax_grouped as jg
from jax_grouped import ScalingMode
from tests.refusals import assert_refused

X = jnp.ones((6, 32))
SIZES = jnp.array([2, 3])
STACK = jnp.ones((2, 16, 32))
BLOCK, DELAYED = jg.Float8BlockScaling(), jg.DelayedScaling()
CACHE = jax.eval_shape(lambda kernel: jg.quantize_kernel(kernel, BLOCK), STACK)


def test_grouped_quantize_refuses() -> None:
    refused: dict[str, dict[str, Any]] = {
        "x's type must be bfloat16, float16 or float32, got int8.": dict(x=X.astype(jnp.int8)),
        "x must have shape [T, C] where group_sizes is given, got (2, 16, 32).": dict(x=STACK),
        "x must have shape [E, K, C] where group_sizes is None, got (6, 32).": dict(group_sizes=None),
        "group_sizes must be of an integer type, got float32.": dict(group_sizes=SIZES * 1.0),
        "group_sizes must be of an integer type, got bool.": dict(group_sizes=SIZES > 2),
        "group_sizes must have shape [E], got (1, 2).": dict(group_sizes=SIZES[None]),
        "mode must be a ScalingMode (ScalingMode.TENSOR, ": dict(mode="block_1d"),
        "dtype must be float8_e4m3fn or float8_e5m2, got 'fp8'.": dict(dtype="fp8"),
        "dtype must be float8_e4m3fn or float8_e5m2, got bfloat16.": dict(dtype=jnp.bfloat16),
        "columnwise must be True or False, got 'no'.": dict(columnwise="no"),
        "amax_epsilon must be a number, known when the program is traced, got 'a'.": dict(amax_epsilon="a"),
        "amax_epsilon must be finite in float32 and not negative, got -0.5.": dict(amax_epsilon=-0.5),
        "amax_epsilon must be finite in float32 and not negative, got 1e+39.": dict(amax_epsilon=1e39),
        "amax_epsilon must be finite in float32 and not negative, got nan.": dict(amax_epsilon=float("nan")),
        "rowwise or columnwise must be true, or nothing is quantized.": dict(rowwise=False),
        "scale is for ScalingMode.TENSOR, the other modes find their own; got ScalingMode.BLOCK_1D.": dict(
            mode=ScalingMode.BLOCK_1D, scale=jnp.ones(2)
        ),
        "scale must be float32, got bfloat16.": dict(scale=jnp.ones(2, jnp.bfloat16)),
        "scale must have one entry per group, shape (2,), got ().": dict(scale=jnp.float32(1)),
        "quantized features must be a multiple of 16, got 24 from x (6, 24); pad the feature axis with zeros.": dict(
            x=X[:, :24]
        ),
        "quantized features must be a multiple of 16, got 8 from x (6, 16); pad": dict(
            activation="swiglu", x=X[:, :16]
        ),
        "activation must be one of (": dict(activation="swish"),
        "geglu needs an even number of features, gate and up, got x (6, 31).": dict(activation="geglu", x=X[:, :31]),
        "activation_input needs an activation.": dict(activation_input=X),
        "row_indices must be of an integer type, got float32.": dict(row_indices=jnp.zeros(3)),
        "row_indices must have shape [R], got (3, 1).": dict(row_indices=SIZES[:1, None].repeat(3, 0)),
        "row_indices is for x [T, C] with group_sizes and without an activation": dict(
            row_indices=SIZES, activation="relu"
        ),
        "row_indices is for x [T, C] with group_sizes and": dict(row_indices=SIZES, x=STACK, group_sizes=None),
        "activation_input must have the type of x, float32, got bfloat16.": dict(
            activation="gelu", activation_input=X.astype(jnp.bfloat16)
        ),
        "activation_input must have shape (6, 64) for x (6, 32), got (6, 32).": dict(
            activation="swiglu", activation_input=X
        ),
    }
    assert_refused(jg.grouped_quantize, dict(x=X, group_sizes=SIZES, mode=ScalingMode.TENSOR), refused)
    with pytest.raises(ValueError, match="quantized features must be a multiple of 16, got 24"):
        jax.jit(lambda x: jg.grouped_quantize(x, SIZES, ScalingMode.TENSOR)).trace(X[:, :24])


def test_grouped_dequantize_refuses() -> None:
    quantized = jg.grouped_quantize(X, SIZES, ScalingMode.TENSOR)
    copy = quantized.rowwise
    scaled = "scaled must be a ScaledArray (rowwise or columnwise of what was quantized), got "
    refused: dict[str, dict[str, Any]] = {
        f"{scaled}ArrayImpl.": dict(scaled=X),
        f"{scaled}GroupedQuantized.": dict(scaled=quantized),
        "dtype must be bfloat16, float16 or float32, got float8_e4m3fn.": dict(dtype="float8_e4m3fn"),
    }
    fields: dict[str, dict[str, Any]] = {
        "scaled.data's type must be float8_e4m3fn or float8_e5m2, got float32.": dict(data=X),
        "scaled.scale_inv must be float32 with ScalingMode.TENSOR, got bfloat16.": dict(
            scale_inv=jnp.ones(2, jnp.bfloat16)
        ),
        "scaled.scale_inv must have shape (2,) for its layout, got (1,).": dict(scale_inv=jnp.ones(1)),
        "scaled.group_sizes must have shape (2,) for its layout, got (4,) (residuals of a call with group_offset "
        "cannot be dequantized: they hold no offset).": dict(group_sizes=jnp.tile(SIZES, 2)),
    }
    refused |= {message: dict(scaled=dataclasses.replace(copy, **changed)) for message, changed in fields.items()}
    assert_refused(jg.grouped_dequantize, dict(scaled=copy), refused)


def test_quantize_kernel_refuses() -> None:
    together = "previous and skip must be given together: skip says whether to return previous"
    refused: dict[str, dict[str, Any]] = {
        "kernel's type must be bfloat16, float16 or float32, got int32.": dict(kernel=STACK.astype(jnp.int32)),
        "kernel must have shape [E, K, N], got (16, 32).": dict(kernel=STACK[0]),
        "recipe must be a recipe such as Float8BlockScaling(), got 'block'.": dict(recipe="block"),
        "recipe must be a recipe such as Float8BlockScaling(), got the class Float8BlockScaling: "
        "pass Float8BlockScaling().": dict(recipe=jg.Float8BlockScaling),
        "K must be a multiple of 16, got 8 from kernel (2, 8, 32); pad the feature axis with zeros.": dict(
            kernel=STACK[:, :8]
        ),
        "N must be a multiple of 16, got 24 from kernel (2, 16, 24); pad the feature axis with zeros.": dict(
            kernel=STACK[:, :, :24]
        ),
        together: dict(previous=CACHE),
        f"{together}.": dict(skip=True),
        "DelayedScaling needs scale, one per kernel.": dict(recipe=DELAYED),
        "Float8BlockScaling takes no scale, one per kernel.": dict(scale=jnp.ones(2)),
        "scale must have one entry per group, shape (2,), got (3,).": dict(recipe=DELAYED, scale=jnp.ones(3)),
        "scale must be float32, got int32.": dict(recipe=DELAYED, scale=jnp.ones(2, jnp.int32)),
        "skip must be boolean, got 'no'.": dict(previous=CACHE, skip="no"),
        "skip must be boolean, got int32.": dict(previous=CACHE, skip=jnp.int32(1)),
        "skip must be a scalar, got shape (2,).": dict(previous=CACHE, skip=jnp.array([True, False])),
        "previous must be a KernelCache, got ScaledArray.": dict(previous=CACHE.rowwise, skip=True),
    }
    assert_refused(jg.quantize_kernel, dict(kernel=STACK, recipe=BLOCK), refused)


def test_the_cache_of_another_kernel_or_recipe_is_refused() -> None:
    def made(recipe: jg.Recipe = BLOCK, shape: tuple[int, ...] = STACK.shape) -> dict[str, Any]:
        kernel = jax.ShapeDtypeStruct(shape, jnp.float32)
        return dict(previous=jax.eval_shape(lambda kernel: jg.quantize_kernel(kernel, recipe), kernel))

    exchanged = dataclasses.replace(CACHE, columnwise=CACHE.rowwise)
    differences = {
        "recipe.fwd_dtype must be float8_e4m3fn, got float8_e5m2": made(jg.Float8BlockScaling(fwd_dtype="float8_e5m2")),
        "recipe.pow2_scales must be True, got False": made(jg.Float8BlockScaling(pow2_scales=False)),
        "recipe.amax_epsilon must be 0.0, got 0.0001": made(jg.Float8BlockScaling(amax_epsilon=1e-4)),
        "recipe must be Float8BlockScaling, got Float8CurrentScaling": made(jg.Float8CurrentScaling()),
        "rowwise.shape must be (2, 16, 32), got (2, 32, 32)": made(shape=(2, 32, 32)),
        "rowwise.shape must be (2, 16, 32), got (3, 16, 32)": made(shape=(3, 16, 32)),
        "columnwise.layout.columnwise must be True, got False": dict(previous=exchanged),
    }
    same = "previous must be of the same shape and recipe as the result: "
    refused = {f"{same}{difference}.": changed for difference, changed in differences.items()}
    assert_refused(jg.quantize_kernel, dict(kernel=STACK, recipe=BLOCK, skip=True), refused)
    other_gradients = jg.Float8BlockScaling(grad_dtype="float8_e5m2")
    jax.eval_shape(lambda: jg.quantize_kernel(STACK, other_gradients, **made(), skip=True))


def test_checked_group_sizes_raise() -> None:
    def quantize(x: jax.Array, sizes: jax.Array) -> jax.Array:
        return jg.grouped_quantize(x, sizes, ScalingMode.TENSOR).amax

    message = "group_sizes must not be negative and must add up to at most 6 rows"
    with jg.config.override(check=True):
        with pytest.raises(ValueError, match=message):
            quantize(X, jnp.array([4, 3]))
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            jax.block_until_ready(jax.jit(quantize)(X, jnp.array([-1, 3])))
            jax.effects_barrier()
