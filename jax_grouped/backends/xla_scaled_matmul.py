"""Products of quantized operands in the `xla` backend: dequantized, then multiplied in float32."""

import jax
import jax.numpy as jnp

from jax_grouped.backends.spec import MatmulSpec, ScaledMatmulSpec
from jax_grouped.backends.xla import grouped_matmul
from jax_grouped.backends.xla_quantize import dequantize
from jax_grouped.quantized_layout import QuantizedLayout


def scaled_matmul(
    a_data: jax.Array,
    a_scale: jax.Array,
    b_data: jax.Array,
    b_scale: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array,
    accumulator: jax.Array | None = None,
    *,
    spec: ScaledMatmulSpec,
) -> jax.Array:
    """One of the three products of `ScaledMatmulSpec`, exact but for accumulation in float32."""

    def numbers(data: jax.Array, scale_inv: jax.Array, layout: QuantizedLayout) -> jax.Array:
        if layout.stack_rows is None:
            return dequantize(data, scale_inv, group_sizes, group_offset, layout=layout, out_dtype=jnp.float32)
        tokens = dequantize(data, scale_inv, layout.stack_sizes(), layout=layout, out_dtype=jnp.float32)
        return tokens.reshape(layout.num_groups, layout.stack_rows, layout.features)

    a, b = numbers(a_data, a_scale, spec.a), numbers(b_data, b_scale, spec.b)
    product = MatmulSpec(spec.product, spec.num_groups, spec.out_dtype, jax.lax.Precision.HIGHEST)
    return grouped_matmul(a, b, group_sizes, group_offset, accumulator, spec=product)
