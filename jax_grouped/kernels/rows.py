"""Rows without groups: activations, their gradients for rows with weights, copies and sums of rows."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jax_grouped.core.values import vary_alike
from jax_grouped.kernels import activations
from jax_grouped.kernels.activations import Activation, activation_attributes
from jax_grouped.kernels.primitive import bind, define, in_whole_batch

#: Features that the kernels of activations' gradients and of sums load at once: `kRowVector` in csrc.
_ROW_VECTOR = 8
#: Bytes that the copies of tokens move at once: `kPermuteVectorBytes` in csrc.
_PERMUTE_VECTOR_BYTES = 16


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def activate(x: jax.Array, activation: Activation) -> jax.Array:
    """Applies an activation in float32: `[T, F]`, or `[T, 2 F]` with a gate, whose features are first, `-> [T, F]`.

    The backward pass computes it again from `x`. JAX's own rule would keep several float32 arrays `[T, F]` instead.
    """
    return activations.activate_xla(x.astype(jnp.float32), activation).astype(x.dtype)


def _activate_backward(activation: Activation, x: jax.Array, dy: jax.Array) -> tuple[jax.Array]:
    dx = activations.activate_grad_xla(x.astype(jnp.float32), dy.astype(jnp.float32), activation)
    return (dx.astype(x.dtype),)


activate.defvjp(lambda x, activation: (activate(x, activation), x), _activate_backward)


@functools.partial(jax.custom_jvp, nondiff_argnums=(3,))
def activation_grad(
    x: jax.Array, da: jax.Array, weights: jax.Array, activation: Activation, order: jax.Array | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the gradient of `x`, the rows `a = activate(x)` times their weights, and `<a, da>` of each row."""
    # An index in `order` that finds no weight is for a row that nothing reads: it holds anything in all results.
    operands = vary_alike(x, da, weights, *(() if order is None else (order,)))
    if 0 in da.shape:
        return _activation_grad_xla(*operands, activation=activation)
    dx, weighted, inner_products = bind(ACTIVATION_GRAD, *operands, activation=activation)
    return dx, weighted, inner_products


@activation_grad.defjvp
def _activation_grad_jvp(activation: Activation, primals: Any, tangents: Any) -> tuple[Any, Any]:
    x, da, weights, order = primals
    orders = () if order is None else (order,)

    def differentiable(*numbers: jax.Array) -> tuple[jax.Array, ...]:
        return _activation_grad_xla(*numbers, *orders, activation=activation)

    _, derivatives = jax.jvp(differentiable, (x, da, weights), tangents[:3])
    return activation_grad(x, da, weights, activation, order), derivatives


def _activation_grad_xla(
    x: jax.Array, da: jax.Array, weights: jax.Array, *order: jax.Array, activation: Activation
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the gradient of `x`, weighted rows `[R, F]` and inner products `[R]`, NaN for rows without a weight."""
    values, gradient = x.astype(jnp.float32), da.astype(jnp.float32)
    row_weights = (gather(weights, order[0]) if order else weights)[:, None]
    a = activations.activate_xla(values, activation)
    dx = activations.activate_grad_xla(values, gradient * row_weights, activation)
    results = dx.astype(x.dtype), (a * row_weights).astype(da.dtype), jnp.sum(a * gradient, axis=1)
    if not order:
        return results
    exists = (order[0] >= 0) & (order[0] < weights.shape[0])
    dx, weighted, inner_products = results
    return (
        jnp.where(exists[:, None], dx, jnp.nan),
        jnp.where(exists[:, None], weighted, jnp.nan),
        jnp.where(exists, inner_products, jnp.nan),
    )


def _activation_grad_cuda(
    x: jax.Array, da: jax.Array, weights: jax.Array, *order: jax.Array, activation: Activation, batch: int
) -> tuple[jax.Array, ...]:
    """Calls the kernel if the numbers have 16 bits."""
    if order and batch > 1:
        order = (in_whole_batch(order[0], weights.shape[0] // batch, batch),)
    if x.dtype == jnp.float32 or da.shape[1] % _ROW_VECTOR != 0:
        return _activation_grad_xla(x, da, weights, *order, activation=activation)
    call = jax.ffi.ffi_call("jax_grouped_activation_grad", _activation_grad_results(x, da))
    return tuple(call(x, da, weights, *order, **activation_attributes(activation)))


def _activation_grad_results(x: Any, da: Any, *_: Any, **__: Any) -> list[jax.ShapeDtypeStruct]:
    shapes = (x.shape, x.dtype), (da.shape, da.dtype), (da.shape[:1], jnp.float32)
    return [jax.ShapeDtypeStruct(*shape) for shape in shapes]


@functools.partial(jax.custom_jvp, nondiff_argnums=(3,))
def permute_rows(x: jax.Array, order: jax.Array, inverse: jax.Array, zero_tail: bool = True) -> jax.Array:
    """Copies tokens to the rows of a `Permutation`, differentiable; without `zero_tail` the tail holds anything."""
    operands = vary_alike(x, order, inverse)
    if 0 in (*x.shape, *order.shape):
        return permute_xla(*operands)
    return bind(PERMUTE_ROWS, *operands, zero_tail=zero_tail)[0]


@permute_rows.defjvp
def _permute_rows_jvp(zero_tail: bool, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return permute_rows(*primals, zero_tail), permute_xla(tangents[0], *primals[1:])


def permute_xla(x: jax.Array, order: jax.Array, inverse: jax.Array, *, zero_tail: bool = True) -> jax.Array:
    """Returns each row's token, zeros in the tail, or NaN where it may hold anything: `[T, C] -> [R, C]`."""
    return gather(x, row_tokens(order, inverse), fill=0.0 if zero_tail else jnp.nan)


def permute_cuda(x: jax.Array, order: jax.Array, inverse: jax.Array, *, zero_tail: bool, batch: int) -> jax.Array:
    """Calls the kernel if the tokens are whole vectors."""
    if batch > 1:
        pairs = inverse.size
        inverse = in_whole_batch(inverse.reshape(-1), order.shape[0] // batch, batch).reshape(inverse.shape)
        order = in_whole_batch(order, pairs // batch, batch)
        order = jnp.where(order < 0, pairs, order)
    if x.shape[1] * x.dtype.itemsize % _PERMUTE_VECTOR_BYTES != 0:
        return permute_xla(x, order, inverse)
    rows = jax.ShapeDtypeStruct((order.shape[0], x.shape[1]), x.dtype)
    call = jax.ffi.ffi_call("jax_grouped_permute_rows", rows)
    return call(x, order, inverse, zero_tail=zero_tail)


def gather(x: jax.Array, indices: jax.Array, fill: float = 0.0) -> jax.Array:
    """Returns `x[indices]`, `fill` for an index outside of `[0, T)`, whatever any other row of `x` holds."""
    if x.shape[0] == 0:  # XLA refuses to gather from an empty array.
        x = jnp.pad(x, [(0, 1)] + [(0, 0)] * (x.ndim - 1))
    return x.at[indices].get(mode="fill", fill_value=fill, wrap_negative_indices=False)


def row_tokens(order: jax.Array, inverse: jax.Array) -> jax.Array:
    """Returns the token of each row, `int32[R]`, and `T` or more in the tail."""
    return jax.lax.div(order, jnp.full_like(order, inverse.shape[1]))


@jax.custom_jvp
def sum_rows(rows: jax.Array, inverse: jax.Array, weights: jax.Array | None = None) -> jax.Array:
    """Sums the rows of each token, times `weights[T, k]` if given, in float32, and rounds once; differentiable."""
    # The kernel reads nothing for a choice without a row. XLA reads some row, but can fuse the sum with other work:
    # `sum_choices` is for tokens whose choices nearly all have rows.
    operands = vary_alike(rows, inverse, *(() if weights is None else (weights,)))
    if 0 in (*rows.shape, *inverse.shape):
        return _sum_rows_xla(*operands)
    return bind(SUM_ROWS, *operands)[0]


@sum_rows.defjvp
def _sum_rows_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    rows, inverse, weights = primals

    def differentiable(rows: jax.Array, weights: jax.Array | None) -> jax.Array:
        return sum_choices(rows, inverse, weights).astype(rows.dtype)

    _, derivative = jax.jvp(differentiable, (rows, weights), (tangents[0], tangents[2]))
    return sum_rows(*primals), derivative


def _sum_rows_xla(rows: jax.Array, inverse: jax.Array, *weights: jax.Array) -> jax.Array:
    return sum_choices(rows, inverse, *weights).astype(rows.dtype)


def _sum_rows_cuda(rows: jax.Array, inverse: jax.Array, *weights: jax.Array, batch: int) -> jax.Array:
    """Calls the kernel if the numbers have 16 bits."""
    if batch > 1:
        inverse = in_whole_batch(inverse.reshape(-1), rows.shape[0] // batch, batch).reshape(inverse.shape)
    if rows.dtype == jnp.float32 or rows.shape[1] % _ROW_VECTOR != 0:
        return _sum_rows_xla(rows, inverse, *weights)
    sums = jax.ShapeDtypeStruct((inverse.shape[0], rows.shape[1]), rows.dtype)
    return jax.ffi.ffi_call("jax_grouped_sum_rows", sums)(rows, inverse, *weights)


def sum_choices(rows: jax.Array, inverse: jax.Array, weights: jax.Array | None = None) -> jax.Array:
    """Sums the existing rows of each token, times their weights if there are any: `[R, C] -> float32[T, C]`."""
    # Compute one mask for all choices: XLA may compute the masks of single choices in one kernel each.
    exists = (inverse >= 0) & (inverse < rows.shape[0])
    if rows.shape[0] == 0:  # XLA refuses to gather from an empty array.
        rows = jnp.pad(rows, [(0, 1), (0, 0)])
    if weights is not None:
        # Zero the weights of dropped pairs: their rows are zero, and zero times a weight that is not finite is NaN.
        weights = jnp.where(exists, weights, 0)
    # Gather choice by choice: XLA fuses the gathers and a sum of fixed order into one kernel. XLA may materialise one
    # gather of all choices as an array `[T, k, C]`.
    terms = []
    for choice in range(inverse.shape[1]):
        found = rows.at[inverse[:, choice]].get(mode="clip", wrap_negative_indices=False)
        term = jnp.where(exists[:, choice, None], found, 0).astype(jnp.float32)
        terms.append(term if weights is None else term * weights[:, choice, None])
    return functools.reduce(jnp.add, terms)


#: `(x, da, weights, *order) -> [dx, weighted, inner_products]` with `activation`, and an order or none.
ACTIVATION_GRAD = define("activation_grad", _activation_grad_results, _activation_grad_xla, _activation_grad_cuda)
#: `(x, order, inverse) -> [rows]` with `zero_tail`.
PERMUTE_ROWS = define(
    "permute_rows",
    lambda x, order, *_, **__: jax.ShapeDtypeStruct((order.shape[0], *x.shape[1:]), x.dtype),
    permute_xla,
    permute_cuda,
)
#: `(rows, inverse, *weights) -> [sums]`, with weights or without.
SUM_ROWS = define(
    "sum_rows",
    lambda rows, inverse, *_: jax.ShapeDtypeStruct((inverse.shape[0], rows.shape[1]), rows.dtype),
    _sum_rows_xla,
    _sum_rows_cuda,
)
