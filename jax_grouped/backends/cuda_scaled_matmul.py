"""Products of quantized operands in the `cuda` backend: a custom call, of batches as in `jax_grouped.backends.cuda`."""

import jax
import jax.numpy as jnp
import numpy as np

from jax_grouped.backends import cuda, cuda_quantize, extension
from jax_grouped.backends.spec import MatmulSpec, ScaledMatmulSpec, batched
from jax_grouped.group_layout import scaled_matmul_scratch_bytes
from jax_grouped.quantized_layout import QuantizedLayout
from jax_grouped.recipes import ScalingMode


def scaled_matmul(
    a_data: jax.Array,
    a_scale: jax.Array,
    b_data: jax.Array,
    b_scale: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array,
    *accumulator: jax.Array,
    spec: ScaledMatmulSpec,
    batch: int,
) -> jax.Array:
    """One of the three products of `ScaledMatmulSpec`, accumulated in float32."""
    operands = (a_data, a_scale, b_data, b_scale, group_sizes, group_offset, *accumulator)
    if spec.a.mode == ScalingMode.MX and not extension.has_mx_products():
        return _in_bfloat16(*operands, spec=spec, batch=batch)
    if spec.a.mode == ScalingMode.BLOCK_1D:
        extension.require_block_scaling()
    scratch = jax.ShapeDtypeStruct((scaled_matmul_scratch_bytes(batch, spec.num_groups),), jnp.uint8)
    workspace = jax.ShapeDtypeStruct((cuda.WORKSPACE_BYTES,), jnp.uint8)
    return cuda.call(
        "jax_grouped_scaled_matmul",
        [batched(spec.out, batch), scratch, workspace],
        *operands,
        aliases={6: 0} if accumulator else None,
        product=spec.product,
        a_mode=spec.a.mode.value,
        b_mode=spec.b.mode.value,
        tokens=np.int64(spec.a.tokens),
        kernel_batch=np.int64(_kernel_batch(b_data, spec, batch)),
        autotune=spec.autotune,
    )[0]


def _kernel_batch(b_data: jax.Array, spec: ScaledMatmulSpec, batch: int) -> int:
    """How many batch elements have kernels of their own."""
    return batch if spec.product == "wgrad" else b_data.shape[0] // spec.num_groups


def _in_bfloat16(
    a_data: jax.Array,
    a_scale: jax.Array,
    b_data: jax.Array,
    b_scale: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array,
    *accumulator: jax.Array,
    spec: ScaledMatmulSpec,
    batch: int,
) -> jax.Array:
    """The same product of the same numbers, which bfloat16 holds exactly: for GPUs without products of this format."""

    def numbers(data: jax.Array, scale_inv: jax.Array, layout: QuantizedLayout, count: int) -> jax.Array:
        options = dict(layout=layout, out_dtype=jnp.bfloat16, batch=count)
        if layout.stack_rows is None:
            return cuda_quantize.dequantize(data, scale_inv, group_sizes, group_offset, **options)
        tokens = cuda_quantize.dequantize(data, scale_inv, layout.stack_sizes(count), **options)
        return tokens.reshape(-1, layout.stack_rows, layout.features)

    a = numbers(a_data, a_scale, spec.a, batch)
    b = numbers(b_data, b_scale, spec.b, _kernel_batch(b_data, spec, batch))
    product = MatmulSpec(spec.product, spec.num_groups, spec.out_dtype, autotune=spec.autotune)
    return cuda.grouped_matmul(a, b, group_sizes, group_offset, *accumulator, spec=product, batch=batch)
