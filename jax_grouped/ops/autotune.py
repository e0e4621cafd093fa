"""Autotuning: times cuBLASLt's algorithms instead of trusting its first choice."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax

from jax_grouped.core.config import config

P = ParamSpec("P")
R = TypeVar("R")


def autotune(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Runs `function(*args, **kwargs)` once while every grouped matmul in it looks for its fastest algorithm.

    For each product's types, sizes and layouts, the algorithms that cuBLASLt offers are timed on the GPU, with groups
    of equal sizes, before the product runs. From then on the process uses the fastest one for that product, so call
    this before the programs that count. Another algorithm may round differently. Products that a kernel of this library
    computes are not timed, and on the `xla` backend nothing is.

    A file also keeps the choices, per GPU, cuBLAS version and product. Later processes take them from there if they
    ask for tuning, by this function or by `JAX_GROUPED_AUTOTUNE=1`. A choice in the file does not change. Let one
    process write the file before many start. It is `~/.cache/jax_grouped/algorithms.tsv`, or the file that
    `JAX_GROUPED_AUTOTUNE_CACHE` names; an empty value means no file.

    Args:
        function: may be jitted, but not compiled ahead of time; a donated argument is gone afterwards, as always.
        *args: arguments of the function.
        **kwargs: keyword arguments of the function.

    Returns:
        The result of the function, after it has been computed.

    Example:
        step = jax.jit(jg.ragged_dot)

        y = jg.autotune(step, jnp.ones((16, 32)), jnp.ones((2, 32, 16)), jnp.array([10, 4]))

        assert y.shape == (16, 16)
    """
    with config.override(autotune=True):
        return jax.block_until_ready(function(*args, **kwargs))
