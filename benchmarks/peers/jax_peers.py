"""Peers that are JAX functions: a differentiable grouped product, from which every operation follows."""

import functools
import importlib
from collections.abc import Callable

import jax
import jax.numpy as jnp

import jax_grouped as jg
from benchmarks.cases import Case
from benchmarks.jax_work import JaxWork, Results
from benchmarks.timing import Work
from jax_grouped.moe.mlp import swiglu

#: `(x, kernel, group_sizes) -> y`
Forward = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def _program(op: str, forward: Forward, forward_f32: Forward) -> Callable[..., Results]:
    """The operation as a function of `x`, `kernel`, `dy` and the group sizes.

    Derivatives are taken of `forward`, whose own result is then unused, so that the compiler drops it. `forward_f32`
    takes a float32 kernel, as mixed-precision training has, and so gives a float32 gradient for it.
    """

    def run(x: jax.Array, kernel: jax.Array, dy: jax.Array, sizes: jax.Array) -> Results:
        match op:
            case "fprop":
                return (forward(x, kernel, sizes),)
            case "dgrad":
                return jax.vjp(lambda x: forward(x, kernel, sizes), x)[1](dy)
            case "wgrad":
                return jax.vjp(lambda kernel: forward(x, kernel, sizes), kernel)[1](dy)
            case "wgrad f32":
                return jax.vjp(lambda kernel: forward_f32(x, kernel, sizes), kernel.astype(jnp.float32))[1](dy)
            case "backward":
                return jax.vjp(lambda x, kernel: forward(x, kernel, sizes), x, kernel)[1](dy)
            case "step":
                product = forward if kernel.dtype == x.dtype else forward_f32
                y, backward = jax.vjp(lambda x, kernel: product(x, kernel, sizes), x, kernel)
                return y, *backward(dy)
            case "mlp step":
                product = forward if kernel[0].dtype == x.dtype else forward_f32

                def mlp(x: jax.Array, kernel: tuple[jax.Array, jax.Array]) -> jax.Array:
                    return product(swiglu(product(x, kernel[0], sizes)), kernel[1], sizes)

                y, backward = jax.vjp(mlp, x, kernel)
                return y, *jax.tree.leaves(backward(dy))
            case _:
                raise ValueError(f"unknown operation {op!r}")

    return run


def _prepare(case: Case, *, forward: Forward, forward_f32: Forward, all_rows: bool = False) -> Work:
    if all_rows and case.valid_rows != case.shape.tokens:
        raise ValueError("needs every row to belong to a group")
    sizes = jnp.asarray(case.sizes)
    return JaxWork(_program(case.op, forward, forward_f32), [(*inputs, sizes) for inputs in case.inputs])


def _casting(forward: Forward) -> Forward:
    """`forward` for a float32 kernel; the gradient is converted after the product."""
    return lambda x, kernel, sizes: forward(x, kernel.astype(x.dtype), sizes)


def load_jax_grouped() -> Callable[[Case], Work]:
    """`jax_grouped.ragged_dot`, and `jax_grouped.grouped_dense` for the float32 kernel gradient."""
    return functools.partial(_prepare, forward=jg.ragged_dot, forward_f32=jg.grouped_dense)


def load_lax() -> Callable[[Case], Work]:
    """`jax.lax.ragged_dot`."""
    return functools.partial(_prepare, forward=jax.lax.ragged_dot, forward_f32=_casting(jax.lax.ragged_dot))


def load_transformer_engine() -> Callable[[Case], Work]:
    """TransformerEngine's `grouped_dense` for JAX, without quantization."""
    grouped_dense = importlib.import_module("transformer_engine.jax.dense").grouped_dense
    return functools.partial(_prepare, forward=grouped_dense, forward_f32=_casting(grouped_dense), all_rows=True)
