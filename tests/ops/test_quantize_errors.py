"""Bad arguments of quantization raise at trace time, in a sentence that names the argument, what it is and the rule."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_grouped as jg
from jax_grouped import ScalingMode

X = jnp.ones((6, 32))
SIZES = jnp.array([2, 3])
STACK = jnp.ones((2, 16, 32))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (dict(x=X.astype(jnp.int8)), TypeError, "x's type must be bfloat16, float16 or float32, got int8."),
        (
            dict(x=X.astype(jnp.float8_e4m3fn)),
            TypeError,
            "x's type must be bfloat16, float16 or float32, got float8_e4m3fn.",
        ),
        (dict(x=STACK), ValueError, "x must have shape [T, C] where group_sizes is given, got (2, 16, 32)."),
        (dict(x=X[0]), ValueError, "x must have shape [T, C] where group_sizes is given, got (32,)."),
        (dict(group_sizes=None), ValueError, "x must have shape [E, K, C] where group_sizes is None, got (6, 32)."),
        (dict(group_sizes=SIZES * 1.0), TypeError, "group_sizes must be of an integer type, got float32."),
        (dict(group_sizes=SIZES > 2), TypeError, "group_sizes must be of an integer type, got bool."),
        (dict(group_sizes=SIZES[None]), ValueError, "group_sizes must have shape [E], got (1, 2)."),
        (
            dict(mode="block_1d"),
            TypeError,
            "mode must be a ScalingMode (ScalingMode.TENSOR, ScalingMode.BLOCK_1D, ScalingMode.BLOCK_2D, "
            "ScalingMode.MX), got 'block_1d'.",
        ),
        (dict(dtype="fp8"), TypeError, "dtype must be float8_e4m3fn or float8_e5m2, got 'fp8'."),
        (dict(dtype=None), TypeError, "dtype must be float8_e4m3fn or float8_e5m2, got None."),
        (dict(columnwise="no"), TypeError, "columnwise must be True or False, got 'no'."),
        (
            dict(amax_epsilon="a"),
            TypeError,
            "amax_epsilon must be a number, known when the program is traced, got 'a'.",
        ),
        (dict(dtype=jnp.bfloat16), TypeError, "dtype must be float8_e4m3fn or float8_e5m2, got bfloat16."),
        (
            dict(dtype="float8_e4m3fnuz"),
            TypeError,
            "dtype must be float8_e4m3fn or float8_e5m2, got float8_e4m3fnuz.",
        ),
        (dict(rowwise=False), ValueError, "rowwise or columnwise must be true, or nothing is quantized."),
        (
            dict(swizzled_scales=True),
            ValueError,
            "swizzled_scales is for ScalingMode.MX, got ScalingMode.TENSOR.",
        ),
        (dict(amax_epsilon=-0.5), ValueError, "amax_epsilon must be finite in float32 and not negative, got -0.5."),
        (dict(amax_epsilon=1e39), ValueError, "amax_epsilon must be finite in float32 and not negative, got 1e+39."),
        (
            dict(amax_epsilon=float("inf")),
            ValueError,
            "amax_epsilon must be finite in float32 and not negative, got inf.",
        ),
        (
            dict(amax_epsilon=float("nan")),
            ValueError,
            "amax_epsilon must be finite in float32 and not negative, got nan.",
        ),
        (
            dict(mode=ScalingMode.BLOCK_1D, scale=jnp.ones(2)),
            ValueError,
            "scale is for ScalingMode.TENSOR, the other modes find their own; got ScalingMode.BLOCK_1D.",
        ),
        (dict(scale=jnp.ones(2, jnp.bfloat16)), TypeError, "scale must be float32, got bfloat16."),
        (dict(scale=jnp.ones(3)), ValueError, "scale must have one entry per group, shape (2,), got (3,)."),
        (dict(scale=jnp.float32(1)), ValueError, "scale must have one entry per group, shape (2,), got ()."),
        (
            dict(x=X[:, :24]),
            ValueError,
            "quantized features must be a multiple of 16, got 24 from x (6, 24); pad the feature axis with zeros.",
        ),
        (
            dict(activation="swiglu", x=X[:, :16]),
            ValueError,
            "quantized features must be a multiple of 16, got 8 from x (6, 16); pad the feature axis with zeros.",
        ),
        (
            dict(activation="swish"),
            ValueError,
            "activation must be one of ('swiglu', 'geglu', 'reglu', 'silu', 'gelu', 'relu', 'relu_squared'), a "
            "jax_grouped.SwiGLU or None, got 'swish'.",
        ),
        (
            dict(activation="geglu", x=X[:, :31]),
            ValueError,
            "geglu needs an even number of features, gate and up, got x (6, 31).",
        ),
        (dict(activation_input=X), ValueError, "activation_input needs an activation."),
        (
            dict(activation="gelu", activation_input=X.astype(jnp.bfloat16)),
            TypeError,
            "activation_input must have the type of x, float32, got bfloat16.",
        ),
        (
            dict(activation="gelu", activation_input=X[:5]),
            ValueError,
            "activation_input must have shape (6, 32) for x (6, 32), got (5, 32).",
        ),
        (
            dict(activation="swiglu", activation_input=X),
            ValueError,
            "activation_input must have shape (6, 64) for x (6, 32), got (6, 32).",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_grouped_quantize_rejects(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        jg.grouped_quantize(**(dict(x=X, group_sizes=SIZES, mode=ScalingMode.TENSOR) | arguments))


def test_errors_are_raised_while_tracing() -> None:
    with pytest.raises(ValueError, match="quantized features must be a multiple of 16, got 24"):
        jax.jit(lambda x: jg.grouped_quantize(x, SIZES, ScalingMode.TENSOR)).trace(X[:, :24])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            dict(scaled=X),
            "scaled must be a ScaledArray (rowwise or columnwise of what was quantized), got ArrayImpl.",
        ),
        (
            dict(scaled=jax.eval_shape(lambda x: jg.grouped_quantize(x, SIZES, ScalingMode.TENSOR), X)),
            "scaled must be a ScaledArray (rowwise or columnwise of what was quantized), got GroupedQuantized.",
        ),
        (
            dict(scaled=None),
            "scaled must be a ScaledArray (rowwise or columnwise of what was quantized), got NoneType.",
        ),
        (dict(dtype=jnp.int32), "dtype must be bfloat16, float16 or float32, got int32."),
        (dict(dtype="float8_e4m3fn"), "dtype must be bfloat16, float16 or float32, got float8_e4m3fn."),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_grouped_dequantize_rejects(arguments: dict[str, Any], message: str) -> None:
    quantized = jg.grouped_quantize(X, SIZES, ScalingMode.TENSOR)
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        jg.grouped_dequantize(**(dict(scaled=quantized.rowwise) | arguments))


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        (
            dict(data=X),
            TypeError,
            "scaled.data's type must be float8_e4m3fn or float8_e5m2, got float32.",
        ),
        (
            dict(scale_inv=jnp.ones(2, jnp.bfloat16)),
            TypeError,
            "scaled.scale_inv must be float32 with ScalingMode.TENSOR, got bfloat16.",
        ),
        (
            dict(scale_inv=jnp.ones(1)),
            ValueError,
            "scaled.scale_inv must have shape (2,) for its layout, got (1,).",
        ),
        (
            dict(group_sizes=SIZES[:1]),
            ValueError,
            "scaled.group_sizes must have shape (2,) for its layout, got (1,).",
        ),
        (
            dict(group_sizes=jnp.tile(SIZES, 2)),
            ValueError,
            "scaled.group_sizes must have shape (2,) for its layout, got (4,) (residuals of a call with group_offset "
            "cannot be dequantized: they hold no offset).",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_arrays_that_do_not_fit_their_layout_are_refused(
    fields: dict[str, Any], error: type[Exception], message: str
) -> None:
    quantized = jg.grouped_quantize(X, SIZES, ScalingMode.TENSOR)
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        jg.grouped_dequantize(dataclasses.replace(quantized.rowwise, **fields))


BLOCK, DELAYED = jg.Float8BlockScaling(), jg.DelayedScaling()
CACHE = jax.eval_shape(lambda kernel: jg.quantize_kernel(kernel, BLOCK), STACK)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            dict(kernel=STACK.astype(jnp.int32)),
            TypeError,
            "kernel's type must be bfloat16, float16 or float32, got int32.",
        ),
        (dict(kernel=STACK[0]), ValueError, "kernel must have shape [E, K, N], got (16, 32)."),
        (
            dict(recipe="block"),
            TypeError,
            "recipe must be a recipe such as Float8BlockScaling(), got 'block'.",
        ),
        (
            dict(recipe=jg.Float8BlockScaling),
            TypeError,
            "recipe must be a recipe such as Float8BlockScaling(), got the class Float8BlockScaling: "
            "pass Float8BlockScaling().",
        ),
        (dict(previous=CACHE, skip="no"), TypeError, "skip must be boolean, got 'no'."),
        (
            dict(kernel=STACK[:, :8]),
            ValueError,
            "K must be a multiple of 16, got 8 from kernel (2, 8, 32); pad the feature axis with zeros.",
        ),
        (
            dict(kernel=STACK[:, :, :24]),
            ValueError,
            "N must be a multiple of 16, got 24 from kernel (2, 16, 24); pad the feature axis with zeros.",
        ),
        (
            dict(previous=CACHE),
            ValueError,
            "previous and skip must be given together: skip says whether to return previous.",
        ),
        (
            dict(skip=True),
            ValueError,
            "previous and skip must be given together: skip says whether to return previous.",
        ),
        (dict(recipe=DELAYED), ValueError, "DelayedScaling needs scale, one per kernel."),
        (dict(scale=jnp.ones(2)), ValueError, "Float8BlockScaling takes no scale, one per kernel."),
        (
            dict(recipe=DELAYED, scale=jnp.ones(3)),
            ValueError,
            "scale must have one entry per group, shape (2,), got (3,).",
        ),
        (
            dict(recipe=DELAYED, scale=jnp.ones(2, jnp.int32)),
            TypeError,
            "scale must be float32, got int32.",
        ),
        (dict(previous=CACHE, skip=jnp.int32(1)), TypeError, "skip must be boolean, got int32."),
        (
            dict(previous=CACHE, skip=jnp.array([True, False])),
            ValueError,
            "skip must be a scalar, got shape (2,).",
        ),
        (dict(previous=CACHE.rowwise, skip=True), TypeError, "previous must be a KernelCache, got ScaledArray."),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_quantize_kernel_rejects(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        jg.quantize_kernel(**(dict(kernel=STACK, recipe=BLOCK) | arguments))


@pytest.mark.parametrize(
    ("made_with", "kernel", "difference"),
    [
        (
            jg.Float8BlockScaling(fwd_dtype="float8_e5m2"),
            STACK,
            "recipe.fwd_dtype must be float8_e4m3fn, got float8_e5m2",
        ),
        (jg.Float8BlockScaling(pow2_scales=False), STACK, "recipe.pow2_scales must be True, got False"),
        (jg.Float8BlockScaling(amax_epsilon=1e-4), STACK, "recipe.amax_epsilon must be 0.0, got 0.0001"),
        (jg.Float8CurrentScaling(), STACK, "recipe must be Float8BlockScaling, got Float8CurrentScaling"),
        (BLOCK, jnp.ones((2, 32, 32)), "rowwise.shape must be (2, 16, 32), got (2, 32, 32)"),
        (BLOCK, jnp.ones((3, 16, 32)), "rowwise.shape must be (2, 16, 32), got (3, 16, 32)"),
    ],
    ids=["another type", "other powers", "another epsilon", "another recipe", "another size", "more kernels"],
)
def test_the_cache_of_another_kernel_or_recipe_is_refused(made_with: Any, kernel: jax.Array, difference: str) -> None:
    other = jax.eval_shape(lambda kernel: jg.quantize_kernel(kernel, made_with), kernel)
    message = f"previous must be of the same shape and recipe as the result: {difference}."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        jg.quantize_kernel(STACK, BLOCK, previous=other, skip=True)


def test_a_recipe_whose_gradients_differ_takes_the_same_cache() -> None:
    other = jg.Float8BlockScaling(grad_dtype="float8_e5m2")
    jax.eval_shape(lambda: jg.quantize_kernel(STACK, other, previous=jg.quantize_kernel(STACK, BLOCK), skip=True))


def test_a_cache_whose_copies_are_exchanged_is_refused() -> None:
    exchanged = dataclasses.replace(CACHE, columnwise=CACHE.rowwise)
    with pytest.raises(ValueError, match=r"the result: columnwise\.layout\.columnwise must be True, got False\.$"):
        jg.quantize_kernel(STACK, BLOCK, previous=exchanged, skip=True)


@pytest.mark.parametrize("sizes", [[-1, 3], [4, 3]], ids=["negative", "past the rows"])
def test_checked_group_sizes_raise(sizes: list[int]) -> None:
    def quantize(x: jax.Array, sizes: jax.Array) -> jax.Array:
        return jg.grouped_quantize(x, sizes, ScalingMode.TENSOR).amax

    message = "group_sizes must not be negative and must add up to at most 6 rows"
    with jg.config.override(check=True):
        with pytest.raises(ValueError, match=message):
            quantize(X, jnp.array(sizes))
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            jax.block_until_ready(jax.jit(quantize)(X, jnp.array(sizes)))
            jax.effects_barrier()


def test_arrays_on_explicit_mesh_axes_are_refused() -> None:
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,), devices=jax.devices("cpu")[:2])
    x = jax.device_put(X, NamedSharding(mesh, P("data")))
    with pytest.raises(ValueError, match=re.escape("call it inside jax.shard_map")):
        jg.grouped_quantize(x, SIZES, ScalingMode.TENSOR)
