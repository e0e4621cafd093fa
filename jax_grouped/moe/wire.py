"""Form in which rows travel between devices: with block scaling, as FP8 numbers and their scales.

They take 0.516 of the bytes of bfloat16. Blocks whose scales are powers of two can be quantized again without another
error: the numbers have as few digits, and the scale is the same or fits them better. Only numbers far below the largest
of another block lose digits.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_grouped.backends.reference.scales import spread
from jax_grouped.backends.spec import QuantizeSpec
from jax_grouped.core.varying import vary_alike
from jax_grouped.fp8.arrays import ScaledArray
from jax_grouped.fp8.layout import BLOCK
from jax_grouped.fp8.recipes import Float8BlockScaling, Recipe
from jax_grouped.moe.exchange import Exchange, move_rows, return_rows, send_rows
from jax_grouped.moe.permutation import Permutation, checked_shared, permute, sum_of_choices, unpermute
from jax_grouped.ops.quantize import quantize_stack
from jax_grouped.ops.quantize_kernel import scaling_options
from jax_grouped.ops.rows import permute_rows


def wire_recipe(recipe: Recipe | None, *, quantized: bool) -> Float8BlockScaling | None:
    """Returns the recipe if rows may travel in its FP8 numbers: if asked for, and if it scales by powers of two."""
    if quantized and isinstance(recipe, Float8BlockScaling) and recipe.pow2_scales:
        return recipe
    return None


def quantize_rows(x: jax.Array, recipe: Float8BlockScaling, dtype: DTypeLike) -> ScaledArray:
    """Quantizes rows `[T, C]` rowwise, as a stack of one."""
    spec = QuantizeSpec(recipe.token_mode, dtype, num_groups=1, stack_rows=x.shape[0], **scaling_options(recipe))
    rowwise = quantize_stack(x[None], spec=spec).rowwise
    assert rowwise is not None
    return rowwise


def send_tokens(
    x: jax.Array, permutation: Permutation, exchange: Exchange, recipe: Float8BlockScaling | None
) -> jax.Array:
    """Computes `send_rows(permute(x, permutation), exchange)`; with a recipe, tokens are quantized once for the way.

    Gradients return in the type of `x`.
    """
    if recipe is None or 0 in x.shape:
        return send_rows(permute(x, permutation), exchange)
    return _send(recipe, *_varying(x, permutation, exchange))


def sum_returned(
    rows: jax.Array,
    permutation: Permutation,
    exchange: Exchange,
    recipe: Float8BlockScaling | None,
    shared: jax.Array | None,
) -> jax.Array:
    """Computes `unpermute(return_rows(rows, exchange), permutation, shared=shared)`: `[capacity, C]` to `[T, C]`.

    Rows return in their own type. With a recipe, the gradients of the sums are quantized once for their way.
    """
    if recipe is None or 0 in rows.shape:
        return unpermute(return_rows(rows, exchange), permutation, shared=shared)
    sums = _sum(recipe, rows.dtype, *_varying(rows, permutation, exchange))
    if shared is not None:
        sums += checked_shared(shared, sums.shape).astype(jnp.float32)
    return sums.astype(rows.dtype)


def _varying(x: jax.Array, permutation: Permutation, exchange: Exchange) -> Any:
    arrays, structure = jax.tree.flatten((x, permutation, exchange))
    return jax.tree.unflatten(structure, vary_alike(*arrays))


def _sent(
    x: jax.Array, permutation: Permutation, exchange: Exchange, recipe: Float8BlockScaling, dtype: DTypeLike
) -> jax.Array:
    """Sends the rows of tokens as FP8 numbers and scales, in one array of 32-bit words."""
    quantized = quantize_rows(x, recipe, dtype)
    tokens, features = x.shape
    numbers = jax.lax.bitcast_convert_type(quantized.data.reshape(tokens, features // 4, 4), jnp.int32)
    scales = jax.lax.bitcast_convert_type(quantized.scale_inv[0, :, :tokens].T, jnp.int32)
    words = permute_rows(jnp.concatenate([numbers, scales], axis=1), permutation.order, permutation.inverse)
    received = move_rows(words, exchange)
    numbers, scales = jnp.split(received, [features // 4], axis=1)
    data = jax.lax.bitcast_convert_type(numbers, dtype).reshape(-1, features)
    of_columns = spread(jax.lax.bitcast_convert_type(scales, jnp.float32), BLOCK, features, axis=1)
    return (data.astype(jnp.float32) * of_columns).astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _send(recipe: Float8BlockScaling, x: jax.Array, permutation: Permutation, exchange: Exchange) -> jax.Array:
    return _sent(x, permutation, exchange, recipe, recipe.fwd_dtype)


def _send_forward(
    recipe: Float8BlockScaling, x: jax.Array, permutation: Permutation, exchange: Exchange
) -> tuple[jax.Array, Any]:
    return _send(recipe, x, permutation, exchange), (permutation, exchange)


def _send_backward(recipe: Float8BlockScaling, residuals: Any, drows: jax.Array) -> tuple[Any, ...]:
    del recipe
    permutation, exchange = residuals
    return unpermute(return_rows(drows, exchange), permutation), None, None


_send.defvjp(_send_forward, _send_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _sum(
    recipe: Float8BlockScaling, dtype: DTypeLike, rows: jax.Array, permutation: Permutation, exchange: Exchange
) -> jax.Array:
    """Sums rows of this type."""
    del recipe, dtype
    return sum_of_choices(return_rows(rows, exchange), permutation.inverse)


def _sum_forward(
    recipe: Float8BlockScaling, dtype: DTypeLike, rows: jax.Array, permutation: Permutation, exchange: Exchange
) -> tuple[jax.Array, Any]:
    return _sum(recipe, dtype, rows, permutation, exchange), (permutation, exchange)


def _sum_backward(recipe: Float8BlockScaling, dtype: DTypeLike, residuals: Any, dy: jax.Array) -> tuple[Any, ...]:
    permutation, exchange = residuals
    return _sent(dy.astype(dtype), permutation, exchange, recipe, recipe.grad_dtype), None, None


_sum.defvjp(_sum_forward, _sum_backward)
