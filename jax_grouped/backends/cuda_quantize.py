"""Quantization in the `cuda` backend: custom calls, of batches as in `jax_grouped.backends.cuda`."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jax_grouped.backends.cuda import call
from jax_grouped.backends.spec import QuantizeSpec, batched
from jax_grouped.group_layout import group_table_size, quantize_scratch_bytes
from jax_grouped.quantized_layout import BLOCK, QuantizedLayout


def quantize(
    x: jax.Array, group_sizes: jax.Array, group_offset: jax.Array, *more: jax.Array, spec: QuantizeSpec, batch: int
) -> tuple[jax.Array, ...]:
    """The results that `spec` asks for, in its order: one pass over `x`, two for current scaling."""
    shape = (x.shape[0] // batch, x.shape[1])
    layout = spec.layout(shape, columnwise=False)
    scratch = jax.ShapeDtypeStruct((quantize_scratch_bytes(shape[0], spec.num_groups),), jnp.uint8)
    partial_sums = jax.ShapeDtypeStruct((layout.units(BLOCK) if spec.dbias else 0, layout.features), jnp.float32)
    results = list(spec.results(shape).values())
    operands = (x, group_sizes, group_offset, *more)
    # The results come last among the operands, so that they stay where they are if `skip` says so.
    first = len(operands) - len(results)
    aliases = {first + i: i for i in range(len(results))} if spec.cached else None
    outputs = call(
        "jax_grouped_quantize",
        [batched(result, batch) for result in (*results, scratch, partial_sums)],
        *operands,
        aliases=aliases,
        mode=spec.mode.value,
        stack_rows=np.int64(spec.stack_rows or 0),
        rowwise=spec.rowwise,
        columnwise=spec.columnwise,
        dbias=spec.dbias,
        pow2_scales=spec.pow2_scales,
        amax_epsilon=np.float32(spec.amax_epsilon),
        swizzled_scales=spec.swizzled_scales,
        given_scale=spec.given_scale,
        activation=spec.activation or "none",
        backward=spec.backward,
        cached=spec.cached,
    )
    return tuple(outputs[: len(results)])


def dequantize(
    data: jax.Array,
    scale_inv: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array | None = None,
    *,
    layout: QuantizedLayout,
    out_dtype: DTypeLike,
    batch: int,
) -> jax.Array:
    """`data * scale_inv`, in float32 and then in `out_dtype`: `[T, C]`, zero where there is no group."""
    out = jax.ShapeDtypeStruct((layout.tokens, layout.features), out_dtype)
    table = jax.ShapeDtypeStruct((group_table_size(layout.num_groups),), jnp.int32)
    return call(
        "jax_grouped_dequantize",
        [batched(out, batch), batched(table, batch)],
        data,
        scale_inv,
        group_sizes,
        jnp.zeros((batch,), jnp.int32) if group_offset is None else group_offset,
        mode=layout.mode.value,
        num_groups=np.int64(layout.num_groups),
        stack_rows=np.int64(layout.stack_rows or 0),
        columnwise=layout.columnwise,
        swizzled_scales=layout.swizzled_scales,
    )[0]
