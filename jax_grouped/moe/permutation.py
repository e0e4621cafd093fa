"""Permutation of tokens to the rows of their experts and back. Both directions and both gradients are gathers."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jax_grouped.core.values import as_array, as_int32, canonical_dtype, check_type, static_size, vary_alike
from jax_grouped.fp8.arrays import register_pytree
from jax_grouped.kernels.routing import group_pairs
from jax_grouped.kernels.rows import gather, permute_rows, sum_choices
from jax_grouped.ops.inputs import check_tokens


@register_pytree
@dataclasses.dataclass(frozen=True)
class Permutation:
    """Map between rows and the pairs of `T` tokens and their `k` choices. Rows are sorted by expert, expert 0 first.

    Pair `token * k + choice` is that token's choice. Rows past the last expert's are the tail.

    Attributes:
        order: `int32[R]`, the pair of each row, and `T * k` in the tail.
        inverse: `int32[T, k]`, the row of each pair, and `R` for a pair that was dropped.
        group_sizes: `int32[E]`, rows per expert; it never leaves the device.
        dropped: `int32[]`, number of pairs without a row.

    Example:
        permutation = jg.moe.group_by_expert(jnp.array([[1, 0], [1, 2]]), num_experts=3)

        assert isinstance(permutation, jg.moe.Permutation)
        assert permutation.order.tolist() == [1, 0, 2, 3]  # pairs: token 0's second choice, its first one, ...
        assert permutation.inverse.tolist() == [[1, 0], [2, 3]]
    """

    order: jax.Array
    inverse: jax.Array
    group_sizes: jax.Array
    dropped: jax.Array


def group_by_expert(experts: jax.Array, num_experts: int, *, capacity: int | None = None) -> Permutation:
    """Gives every pair of a token and an expert a row, in the order of the experts, and of the tokens within an expert.

    On the `cuda` backend it is two kernels for up to 512 experts; beyond that a slower sort.

    Args:
        experts: `[T, k]` integers, the experts of each token, `T * k` at most 2^30. Pairs with a value outside of
            `[0, num_experts)` have no expert and are dropped, as padding tokens should be.
        num_experts: `E`.
        capacity: most rows, `T * k` by default. If more are needed, the longest groups are cut to one length, and
            lose pairs at equal distances.

    Returns:
        The permutation, of `R = min(capacity, T * k)` rows.

    Raises:
        TypeError, ValueError: an argument has a type, a shape or a value that does not fit.

    Example:
        permutation = jg.moe.group_by_expert(jnp.array([[1, 0], [1, 2]]), num_experts=3)

        assert permutation.group_sizes.tolist() == [1, 2, 1]
        assert int(permutation.dropped) == 0
    """
    experts = as_int32("experts", experts)
    if experts.ndim != 2 or experts.shape[1] == 0:
        raise ValueError(f"experts must have shape [T, k] with k of at least 1, got {experts.shape}.")
    if not isinstance(experts.shape[0], int):
        raise ValueError(
            f"The number of tokens must be known when the program is traced, got experts of shape {experts.shape}."
        )
    num_experts = static_size("num_experts", num_experts, least=1)
    rows = experts.size
    if capacity is not None:
        rows = min(rows, static_size("capacity", capacity))
    order, inverse, group_sizes, dropped = group_pairs(experts, num_experts, rows)
    return Permutation(order, inverse, group_sizes, dropped[0])


def permute(x: jax.Array, permutation: Permutation) -> jax.Array:
    """Copies tokens to the rows of their experts.

    Args:
        x: `[T, C]`, bfloat16, float16 or float32.
        permutation: of `T` tokens to `R` rows.

    Returns:
        `[R, C]` in the type of `x`; the tail is zero. The gradient adds each token's rows up in float32.

    Raises:
        TypeError, ValueError: `x` has a type or a shape that does not fit, or `permutation` is no `Permutation`.

    Example:
        permutation = jg.moe.group_by_expert(jnp.array([[1, 0], [1, 2]]), num_experts=3)

        rows = jg.moe.permute(jnp.array([[10.0], [20.0]]), permutation)

        assert rows.tolist() == [[10], [10], [20], [20]]
    """
    x = as_array("x", x)
    check_type("permutation", permutation, Permutation)
    _check_rows("x", x, "[T, C]", permutation.inverse.shape[0], "tokens")
    return _permute(*vary_alike(x, permutation.order, permutation.inverse))


def unpermute(
    rows: jax.Array, permutation: Permutation, weights: jax.Array | None = None, *, shared: jax.Array | None = None
) -> jax.Array:
    """Adds up the rows of each token, times their weights: in float32, first choice first.

    The contents of the tail reach neither the result nor a gradient.

    Args:
        rows: `[R, C]`, bfloat16, float16 or float32.
        permutation: of `T` tokens to `R` rows.
        weights: `[T, k]`, of these types, the factor of each choice's row; None for 1.
        shared: `[T, C]`, of these types, added to the sums before they are rounded; see `moe_mlp`.

    Returns:
        `[T, C]` in the type of `rows`. A pair that was dropped adds nothing, and its weight's gradient is zero.

    Raises:
        TypeError, ValueError: an argument has a type or a shape that does not fit.

    Example:
        permutation = jg.moe.group_by_expert(jnp.array([[1, 0], [1, 2]]), num_experts=3)
        rows = jnp.array([[1.0], [2.0], [3.0], [4.0]])

        y = jg.moe.unpermute(rows, permutation, jnp.array([[1.0, 1.0], [0.5, 0.5]]))

        assert y.tolist() == [[3.0], [3.5]]
    """
    rows = as_array("rows", rows)
    check_type("permutation", permutation, Permutation)
    order, inverse = permutation.order, permutation.inverse
    _check_rows("rows", rows, "[R, C]", order.shape[0], "rows")
    if weights is not None:
        weights = as_array("weights", weights)
        canonical_dtype("weights' type", weights.dtype)
        if weights.shape != inverse.shape:
            raise ValueError(
                f"weights must have the permutation's shape [T, k] = {inverse.shape}, got {weights.shape}."
            )
        weights = weights.astype(jnp.float32)
    sums = _unpermute(*vary_alike(rows, weights, order, inverse))
    if shared is not None:
        sums += checked_shared(shared, sums.shape).astype(jnp.float32)
    return sums.astype(rows.dtype)


def checked_shared(shared: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns `shared` as an array, if it has this shape."""
    shared = as_array("shared", shared)
    canonical_dtype("shared's type", shared.dtype)
    if shared.shape != shape:
        raise ValueError(f"shared must have the shape [T, N] of the result, {shape}, got {shared.shape}.")
    return shared


def _check_rows(name: str, x: jax.Array, shape: str, rows: int, what: str) -> None:
    check_tokens(name, x, shape)
    if x.shape[0] != rows:
        raise ValueError(f"{name} must have the permutation's {rows} {what}, got {x.shape}.")


# The gradient of a gather is a scatter-add, which a GPU does with atomics in any order. `permute` and `unpermute` are
# each other's gradients instead, and both are gathers: faster, and the same bits in every run. Sums stay float32 until
# all that is added to them is there; their gradients were rounded to the type of the rows, and are gathered in it.


@jax.custom_vjp
def _permute(x: jax.Array, order: jax.Array, inverse: jax.Array) -> jax.Array:
    return permute_rows(x, order, inverse)


def _permute_forward(x: jax.Array, order: jax.Array, inverse: jax.Array) -> tuple[jax.Array, Any]:
    return _permute(x, order, inverse), (order, inverse)


def _permute_backward(residuals: Any, drows: jax.Array) -> tuple[Any, ...]:
    order, inverse = residuals
    return _unpermute(drows, None, order, inverse).astype(drows.dtype), None, None


_permute.defvjp(_permute_forward, _permute_backward)


@jax.custom_vjp
def _unpermute(rows: jax.Array, weights: jax.Array | None, order: jax.Array, inverse: jax.Array) -> jax.Array:
    del order
    return sum_choices(rows, inverse, weights)


def _unpermute_forward(
    rows: jax.Array, weights: jax.Array | None, order: jax.Array, inverse: jax.Array
) -> tuple[jax.Array, Any]:
    # Without weights, the backward pass needs no row, but their type.
    kept = rows[:0] if weights is None else rows
    return _unpermute(rows, weights, order, inverse), (kept, weights, order, inverse)


def _unpermute_backward(residuals: Any, dy: jax.Array) -> tuple[Any, ...]:
    rows, weights, order, inverse = residuals
    dy = dy.astype(rows.dtype)
    drows = _permute(dy, order, inverse)
    if weights is None:
        return drows, None, None, None
    row_weights = gather(weights.reshape(weights.size), order)
    drows = (drows.astype(jnp.float32) * row_weights[:, None]).astype(rows.dtype)
    # Gather the rows, not `dy` again: XLA may materialise a gather that two fusions share.
    products = dy[:, None].astype(jnp.float32) * gather(rows, inverse).astype(jnp.float32)
    dweights = jnp.where(inverse < order.shape[0], jnp.sum(products, axis=2), 0)
    return drows, dweights, None, None


_unpermute.defvjp(_unpermute_forward, _unpermute_backward)
