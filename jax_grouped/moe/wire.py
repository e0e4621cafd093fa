"""Form in which rows travel between devices: with block scaling, as FP8 numbers and their scales.

They take 0.516 of the bytes of bfloat16. Blocks whose scales are powers of two can be quantized again without another
error: the numbers have as few digits, and the scale is the same or fits them better. Only numbers far below the largest
of another block lose digits.
"""

import functools
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_grouped.core.values import vary_alike
from jax_grouped.fp8.arrays import ScaledArray
from jax_grouped.fp8.layout import BLOCK
from jax_grouped.fp8.recipes import Float8BlockScaling, Recipe
from jax_grouped.kernels.quantization import QuantizeSpec, spread
from jax_grouped.kernels.rows import permute_rows, sum_of_choices
from jax_grouped.moe.exchange import Exchange, move_rows, move_rows_back, return_rows, send_rows
from jax_grouped.moe.permutation import Permutation, checked_shared, permute, unpermute
from jax_grouped.ops.inputs import scaling_options
from jax_grouped.ops.quantize import quantize_stack


class RowForm(NamedTuple):
    """Recipe and FP8 type with which rows are quantized for a transfer."""

    recipe: Float8BlockScaling
    dtype: DTypeLike


class Wire(NamedTuple):
    """Forms in which tokens and results travel, and their gradients back; None for rows in their own type."""

    tokens: RowForm | None = None
    results: RowForm | None = None
    dresults: RowForm | None = None
    dtokens: RowForm | None = None

    @classmethod
    def make(cls, recipe: Recipe | None, *, dispatch: bool, combine: bool) -> Self:
        """Returns FP8 forms, if the recipe scales blocks by powers of two."""
        if not isinstance(recipe, Float8BlockScaling) or not recipe.pow2_scales:
            return cls()
        forward, backward = RowForm(recipe, recipe.fwd_dtype), RowForm(recipe, recipe.grad_dtype)
        return cls(
            tokens=forward if dispatch else None,
            results=forward if combine else None,
            dresults=backward if dispatch else None,
            dtokens=backward if combine else None,
        )


def quantize_stacked_rows(x: jax.Array, form: RowForm) -> ScaledArray:
    """Quantizes a stack of rows, `[D, T, C]`, rowwise."""
    spec = QuantizeSpec(
        form.recipe.token_mode,
        form.dtype,
        num_groups=x.shape[0],
        stack_rows=x.shape[1],
        **scaling_options(form.recipe),
    )
    rowwise = quantize_stack(x, spec).rowwise
    assert rowwise is not None
    return rowwise


def dequantize_rows(data: jax.Array, scale_inv: jax.Array) -> jax.Array:
    """Computes the float32 values of rows `[T, C]` with scales `[T, blocks]`, for XLA to fuse with what reads them."""
    return data.astype(jnp.float32) * spread(scale_inv, BLOCK, data.shape[1], axis=1)


def send_tokens(x: jax.Array, permutation: Permutation, exchange: Exchange, wire: Wire) -> jax.Array:
    """Computes `send_rows(permute(x, permutation), exchange)`, with each token quantized at most once for the way."""
    if not any(wire) or 0 in x.shape:
        return send_rows(permute(x, permutation), exchange)
    return _send(wire, *_varying(x, permutation, exchange))


def sum_returned(
    rows: jax.Array, permutation: Permutation, exchange: Exchange, wire: Wire, shared: jax.Array | None
) -> jax.Array:
    """Computes `unpermute(return_rows(rows, exchange), permutation, shared=shared)`: `[capacity, C]` to `[T, C]`."""
    if not any(wire) or 0 in rows.shape:
        return unpermute(return_rows(rows, exchange), permutation, shared=shared)
    sums = _sum(wire, rows.dtype, *_varying(rows, permutation, exchange))
    if shared is not None:
        sums += checked_shared(shared, sums.shape).astype(jnp.float32)
    return sums.astype(rows.dtype)


def _varying(x: jax.Array, permutation: Permutation, exchange: Exchange) -> Any:
    arrays, structure = jax.tree.flatten((x, permutation, exchange))
    return jax.tree.unflatten(structure, vary_alike(*arrays))


def _sent(x: jax.Array, permutation: Permutation, exchange: Exchange, form: RowForm | None) -> jax.Array:
    """Sends the rows of tokens."""
    if form is None:
        return send_rows(permute(x, permutation), exchange)
    words = permute_rows(_words(x, form), permutation.order, permutation.inverse)
    return _rows(move_rows(words, exchange), x.shape[1], form).astype(x.dtype)


def _summed(rows: jax.Array, permutation: Permutation, exchange: Exchange, form: RowForm | None) -> jax.Array:
    """Sends rows back, and sums those of each token in float32."""
    if form is None:
        returned = return_rows(rows, exchange)
    else:
        words = move_rows_back(_words(rows, form), exchange)
        returned = _rows(words, rows.shape[1], form).astype(rows.dtype)
    return sum_of_choices(returned, permutation.inverse)


def _words(x: jax.Array, form: RowForm) -> jax.Array:
    """Quantizes rows `[T, C]` to `int32[T, C / 4 + blocks]`: their numbers, then their scales."""
    quantized = quantize_stacked_rows(x[None], form)
    tokens, features = x.shape
    numbers = jax.lax.bitcast_convert_type(quantized.data.reshape(tokens, features // 4, 4), jnp.int32)
    scales = jax.lax.bitcast_convert_type(quantized.scale_inv[0, :, :tokens].T, jnp.int32)
    return jnp.concatenate([numbers, scales], axis=1)


def _rows(words: jax.Array, features: int, form: RowForm) -> jax.Array:
    """Returns the float32 values of rows from `_words`."""
    numbers, scales = jnp.split(words, [features // 4], axis=1)
    data = jax.lax.bitcast_convert_type(numbers, form.dtype).reshape(-1, features)
    return dequantize_rows(data, jax.lax.bitcast_convert_type(scales, jnp.float32))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _send(wire: Wire, x: jax.Array, permutation: Permutation, exchange: Exchange) -> jax.Array:
    return _sent(x, permutation, exchange, wire.tokens)


def _send_forward(
    wire: Wire, x: jax.Array, permutation: Permutation, exchange: Exchange
) -> tuple[jax.Array, tuple[Permutation, Exchange]]:
    return _send(wire, x, permutation, exchange), (permutation, exchange)


def _send_backward(wire: Wire, routing: tuple[Permutation, Exchange], drows: jax.Array) -> tuple[Any, ...]:
    return _summed(drows, *routing, wire.dtokens).astype(drows.dtype), None, None


_send.defvjp(_send_forward, _send_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _sum(wire: Wire, dtype: DTypeLike, rows: jax.Array, permutation: Permutation, exchange: Exchange) -> jax.Array:
    """Sums rows of this type, in which the backward pass sends the gradients of the sums."""
    del dtype
    return _summed(rows, permutation, exchange, wire.results)


def _sum_forward(
    wire: Wire, dtype: DTypeLike, rows: jax.Array, permutation: Permutation, exchange: Exchange
) -> tuple[jax.Array, tuple[Permutation, Exchange]]:
    return _sum(wire, dtype, rows, permutation, exchange), (permutation, exchange)


def _sum_backward(
    wire: Wire, dtype: DTypeLike, routing: tuple[Permutation, Exchange], dy: jax.Array
) -> tuple[Any, ...]:
    return _sent(dy.astype(dtype), *routing, wire.dresults), None, None


_sum.defvjp(_sum_forward, _sum_backward)
