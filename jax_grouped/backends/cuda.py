"""The `cuda` backend: the operations as XLA custom calls; products are in `cuda_gemm`, routing in `cuda_routing`.

Operands concatenate `batch` batch elements along their first axis. `T` and `G` are the sizes of one element. The custom
calls take the batch size from the size of `group_offset`. They have no `vmap_method`: the primitives have batching
rules, so `jax.vmap` never reaches a custom call.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jax_grouped.backends.extension import require_usable as require_usable
from jax_grouped.backends.reference import rows as reference_rows
from jax_grouped.backends.spec import Activation, QuantizeSpec, batched
from jax_grouped.core.groups import bias_grad_tiles, group_table_size, quantize_scratch_bytes
from jax_grouped.fp8.layout import BLOCK, QuantizedLayout
from jax_grouped.fp8.recipes import ScalingMode

#: Names of the custom calls in a lowered program. `jax.export` needs them:
#: `jax.export.export(f, disabled_checks=[DisabledSafetyCheck.custom_call(t) for t in CUSTOM_CALL_TARGETS])`.
CUSTOM_CALL_TARGETS = (
    "jax_grouped_gemm",
    "jax_grouped_bias_grad",
    "jax_grouped_activation_grad",
    "jax_grouped_permute_rows",
    "jax_grouped_sum_rows",
    "jax_grouped_route",
    "jax_grouped_group_pairs",
    "jax_grouped_quantize",
    "jax_grouped_quantize_permuted",
    "jax_grouped_dequantize",
)

#: The batch is an axis of the CUDA kernels' grids, which has at most this number of blocks.
MAX_BATCH = 65535

#: Features that the kernels of activations' gradients and of sums load at once: `kRowVector` in csrc.
_ROW_VECTOR = 8
#: Bytes that the copies of tokens move at once: `kPermuteVectorBytes` in csrc.
_PERMUTE_VECTOR_BYTES = 16

#: Values of the enumerations in `csrc/`.
MODES = tuple(ScalingMode)
_ACTIVATIONS: tuple[Activation | None, ...] = (
    None,
    "silu",
    "gelu",
    "relu",
    "relu_squared",
    "silu_mul",
    "gelu_mul",
    "clamped_silu_mul",
)


def check_batch(batch: int) -> None:
    """Raises ValueError if the batch is too large for one custom call."""
    if isinstance(batch, int) and batch > MAX_BATCH:  # In an export, the batch may be symbolic.
        raise ValueError(
            f"jax.vmap over {batch} calls of jax_grouped makes one custom call, which takes a batch of at most "
            f"{MAX_BATCH}: use jax.vmap over fewer, or jax.lax.map."
        )


def grouped_bias_grad(
    dy: jax.Array, group_sizes: jax.Array, group_offset: jax.Array, *, num_groups: int, out_dtype: DTypeLike, batch: int
) -> jax.Array:
    """Sums each group's rows, `[T, N] -> [G, N]`, accumulated in float32 in a fixed order."""
    rows, features = dy.shape
    tiles = bias_grad_tiles(rows // batch, num_groups)
    out = jax.ShapeDtypeStruct((batch * num_groups, features), jnp.float32)
    partial_sums = jax.ShapeDtypeStruct((batch * tiles, features), jnp.float32)
    tables = jax.ShapeDtypeStruct((batch, group_table_size(num_groups)), jnp.int32)
    call = jax.ffi.ffi_call("jax_grouped_bias_grad", [out, partial_sums, tables])
    return call(dy, group_sizes, group_offset)[0].astype(out_dtype)


def activation_grad(
    x: jax.Array, da: jax.Array, weights: jax.Array, *order: jax.Array, activation: Activation, batch: int
) -> tuple[jax.Array, ...]:
    """Returns the results of the reference backend, from one kernel if the numbers have 16 bits."""
    if order and batch > 1:
        order = (in_whole_batch(order[0], weights.shape[0] // batch, batch),)
    if x.dtype == jnp.float32 or da.shape[1] % _ROW_VECTOR != 0:
        return reference_rows.activation_grad(x, da, weights, *order, activation=activation)
    inner_products = jax.ShapeDtypeStruct(da.shape[:1], jnp.float32)
    results = [*(jax.ShapeDtypeStruct(of.shape, of.dtype) for of in (x, da)), inner_products]
    call = jax.ffi.ffi_call("jax_grouped_activation_grad", results)
    return tuple(call(x, da, weights, *order, activation=np.int32(_ACTIVATIONS.index(activation))))


def permute_rows(x: jax.Array, order: jax.Array, inverse: jax.Array, *, zero_tail: bool, batch: int) -> jax.Array:
    """Returns the rows of the reference backend, from one kernel if the tokens are of whole vectors."""
    if batch > 1:
        pairs, of_element = inverse.size, inverse.size // batch
        inverse = in_whole_batch(inverse.reshape(-1), order.shape[0] // batch, batch).reshape(inverse.shape)
        order = in_whole_batch(order, of_element, batch)
        order = jnp.where(order < 0, pairs, order)
    if x.shape[1] * x.dtype.itemsize % _PERMUTE_VECTOR_BYTES != 0:
        return reference_rows.permute(x, order, inverse)
    rows = jax.ShapeDtypeStruct((order.shape[0], x.shape[1]), x.dtype)
    call = jax.ffi.ffi_call("jax_grouped_permute_rows", rows)
    return call(x, order, inverse, zero_tail=zero_tail)


def sum_rows(rows: jax.Array, inverse: jax.Array, *weights: jax.Array, batch: int) -> jax.Array:
    """Returns the sums of the reference backend, from one kernel if the numbers have 16 bits."""
    if batch > 1:
        inverse = in_whole_batch(inverse.reshape(-1), rows.shape[0] // batch, batch).reshape(inverse.shape)
    if rows.dtype == jnp.float32 or rows.shape[1] % _ROW_VECTOR != 0:
        return reference_rows.sum_rows(rows, inverse, *weights)
    sums = jax.ShapeDtypeStruct((inverse.shape[0], rows.shape[1]), rows.dtype)
    return jax.ffi.ffi_call("jax_grouped_sum_rows", sums)(rows, inverse, *weights)


def quantize(
    x: jax.Array, group_sizes: jax.Array, group_offset: jax.Array, *more: jax.Array, spec: QuantizeSpec, batch: int
) -> tuple[jax.Array, ...]:
    """Returns the results that `spec` asks for, in its order. Makes one pass over `x`, two for current scaling."""
    shape = (x.shape[0] // batch, x.shape[1])
    layout = spec.layout(shape, columnwise=False)
    scratch = jax.ShapeDtypeStruct((quantize_scratch_bytes(spec.rows(shape[0]), spec.num_groups),), jnp.uint8)
    partial_sums = jax.ShapeDtypeStruct((layout.row_blocks(BLOCK) if spec.dbias else 0, layout.features), jnp.float32)
    results = list(spec.results(shape).values())
    if spec.gathered_rows is not None and batch > 1:
        i = int(spec.scaled_input)
        more = (*more[:i], in_whole_batch(more[i], shape[0], batch), *more[i + 1 :])
    operands = (x, group_sizes, group_offset, *more)
    # The previous results are the last operands and alias the results, so their bytes stay if `skip` is true.
    first = len(operands) - len(results)
    aliases = {first + i: i for i in range(len(results))} if spec.cached else None
    outputs = jax.ffi.ffi_call(
        "jax_grouped_quantize",
        [batched(result, batch) for result in (*results, scratch, partial_sums)],
        input_output_aliases=aliases,
    )(
        *operands,
        mode=np.int32(MODES.index(spec.mode)),
        stack_rows=np.int64(spec.stack_rows or 0),
        rowwise=spec.rowwise,
        columnwise=spec.columnwise,
        dbias=spec.dbias,
        pow2_scales=spec.pow2_scales,
        amax_epsilon=np.float32(spec.amax_epsilon),
        swizzled_scales=spec.swizzled_scales,
        given_scale=spec.given_scale,
        gathered=spec.gathered_rows is not None,
        activation=np.int32(_ACTIVATIONS.index(spec.activation)),
        backward=spec.backward,
        weighted=spec.weighted,
        inner_products=spec.inner_products,
        activated=spec.activated,
        cached=spec.cached,
    )
    return tuple(outputs[: len(results)])


def quantize_permuted(
    x: jax.Array,
    order: jax.Array,
    inverse: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array,
    *more: jax.Array,
    spec: QuantizeSpec,
    batch: int,
) -> tuple[jax.Array, ...]:
    """Returns the rowwise data and scales, and with given scales the largest values. Reads each token once."""
    del order
    results = spec.permuted_results((x.shape[0] // batch, x.shape[1]))
    results.insert(2, jax.ShapeDtypeStruct((group_table_size(spec.num_groups),), jnp.int32))
    data, scale, _, *amax = jax.ffi.ffi_call(
        "jax_grouped_quantize_permuted", [batched(result, batch) for result in results]
    )(
        x,
        inverse,
        group_sizes,
        group_offset,
        *more,
        num_groups=np.int64(batch * spec.num_groups),
        given_scale=spec.given_scale,
        pow2_scales=spec.pow2_scales,
        amax_epsilon=np.float32(spec.amax_epsilon),
    )
    return data, scale, *amax


def in_whole_batch(row_indices: jax.Array, x_rows: int, batch: int) -> jax.Array:
    """Counts indices into the rows of each batch element from the first element's, `[B * R]`; -1 for no row."""
    of_elements = row_indices.reshape(batch, -1)
    exist = (of_elements >= 0) & (of_elements < x_rows)
    first_rows = x_rows * jnp.arange(batch, dtype=jnp.int32)[:, None]
    return jnp.where(exist, of_elements + first_rows, -1).reshape(row_indices.shape)


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
    """Computes `data * scale_inv` in float32 and converts it to `out_dtype`: `[T, C]`, zero in rows of no group."""
    out = jax.ShapeDtypeStruct((layout.tokens, layout.features), out_dtype)
    table = jax.ShapeDtypeStruct((group_table_size(layout.num_groups),), jnp.int32)
    return jax.ffi.ffi_call(
        "jax_grouped_dequantize",
        [batched(out, batch), batched(table, batch)],
    )(
        data,
        scale_inv,
        group_sizes,
        jnp.zeros((batch,), jnp.int32) if group_offset is None else group_offset,
        mode=np.int32(MODES.index(layout.mode)),
        num_groups=np.int64(layout.num_groups),
        stack_rows=np.int64(layout.stack_rows or 0),
        columnwise=layout.columnwise,
        swizzled_scales=layout.swizzled_scales,
    )[0]
