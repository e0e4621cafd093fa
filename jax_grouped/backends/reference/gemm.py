"""Grouped products in plain JAX: quantized operands are dequantized, then multiplied in float32."""

import dataclasses

import jax
import jax.numpy as jnp

from jax_grouped.backends.reference.quantize import dequantize
from jax_grouped.backends.reference.rows import permute
from jax_grouped.backends.reference.tiles import grouped_product
from jax_grouped.backends.spec import GemmSpec
from jax_grouped.fp8.layout import QuantizedLayout


def grouped_gemm(
    a: jax.Array,
    b: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array,
    *more: jax.Array,
    spec: GemmSpec,
) -> jax.Array:
    """Returns the product that `spec` names. With quantized operands, only the accumulation in float32 rounds."""
    if spec.gathered is not None:
        a, b = (permute(x, *more) if name == spec.gathered else x for name, x in (("a", a), ("b", b)))
        spec, more = dataclasses.replace(spec, gathered=None), ()
    if spec.a is None or spec.b is None:
        return grouped_product(a, b, group_sizes, group_offset, *more, spec=spec)

    def numbers(data: jax.Array, scale_inv: jax.Array, layout: QuantizedLayout) -> jax.Array:
        if layout.stack_rows is None:
            return dequantize(data, scale_inv, group_sizes, group_offset, layout=layout, out_dtype=jnp.float32)
        tokens = dequantize(data, scale_inv, layout.stack_sizes(), layout=layout, out_dtype=jnp.float32)
        return tokens.reshape(layout.num_groups, layout.stack_rows, layout.features)

    a_scale, b_scale, *accumulator = more
    a, b = numbers(a, a_scale, spec.a), numbers(b, b_scale, spec.b)
    unscaled = dataclasses.replace(spec, a=None, b=None, precision=jax.lax.Precision.HIGHEST)
    return grouped_product(a, b, group_sizes, group_offset, *accumulator, spec=unscaled)
