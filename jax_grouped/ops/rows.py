"""Operations on rows without groups: SwiGLU and its gradient for rows that have weights, and copies of rows."""

from typing import Any

import jax
import jax.numpy as jnp

from jax_grouped.backends import primitives
from jax_grouped.backends.reference import rows as reference
from jax_grouped.core.varying import vary_alike


@jax.custom_vjp
def swiglu(gate_up: jax.Array) -> jax.Array:
    """Computes `silu(gate) * up` (arXiv:2002.05202) in float32: `[T, 2 F]`, the gate's features first, `-> [T, F]`.

    The backward pass computes it again from `gate_up`. JAX's own rule would keep five float32 arrays `[T, F]` instead.
    """
    return _swiglu(gate_up)


def _swiglu(gate_up: jax.Array) -> jax.Array:
    return reference.swiglu(gate_up.astype(jnp.float32)).astype(gate_up.dtype)


def _swiglu_forward(gate_up: jax.Array) -> tuple[jax.Array, jax.Array]:
    return swiglu(gate_up), gate_up


def _swiglu_backward(gate_up: jax.Array, dy: jax.Array) -> tuple[jax.Array]:
    _, pull_back = jax.vjp(_swiglu, gate_up)
    return pull_back(dy)


swiglu.defvjp(_swiglu_forward, _swiglu_backward)


@jax.custom_jvp
def swiglu_grad(gate_up: jax.Array, da: jax.Array, row_weights: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes what the backward pass of `row_weights[:, None] * a` needs, where `a` is `swiglu(gate_up)`.

    It computes everything in float32 in one pass, and is differentiable any number of times.

    Args:
        gate_up: `[R, 2 F]`.
        da: `[R, F]` in the type of `gate_up`, the gradient of the weighted rows.
        row_weights: `float32[R]`.

    Returns:
        The gradient of `gate_up`; the weighted rows `row_weights[:, None] * a`, in the type of `gate_up`; and the inner
        product of each row of `a` with that of `da`, `float32[R]`, which is the gradient of `row_weights`.
    """
    operands = vary_alike(gate_up, da, row_weights)
    if 0 in da.shape:
        return reference.swiglu_grad(*operands)
    dgate_up, weighted, inner_products = primitives.SWIGLU_GRAD.bind(*operands, **primitives.common_params(operands))
    return dgate_up, weighted, inner_products


@swiglu_grad.defjvp
def _swiglu_grad_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    _, derivatives = jax.jvp(reference.swiglu_grad, primals, tangents)
    return swiglu_grad(*primals), derivatives


@jax.custom_jvp
def permute_rows(x: jax.Array, order: jax.Array, inverse: jax.Array) -> jax.Array:
    """Copies each token to the rows of its choices; differentiable any number of times.

    Args:
        x: `[T, C]`.
        order: `int32[R]`, the pair of a token and a choice in each row, `T * k` in the tail, as in
            `jax_grouped.moe.Permutation`.
        inverse: `int32[T, k]`, the row of each pair; `R` or more, or a negative number, for one that has none.

    Returns:
        `[R, C]`, zeros in the tail.
    """
    operands = vary_alike(x, order, inverse)
    if 0 in (*x.shape, *order.shape):
        return reference.permute(*operands)
    return primitives.PERMUTE_ROWS.bind(*operands, **primitives.common_params(operands))[0]


@permute_rows.defjvp
def _permute_rows_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return permute_rows(*primals), reference.permute(tangents[0], *primals[1:])
