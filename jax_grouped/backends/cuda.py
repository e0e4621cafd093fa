"""The `cuda` backend: the operations as XLA custom calls.

Operands concatenate `batch` batch elements along their first axis. `T` and `G` are the sizes of one element. The custom
calls take the batch size from the size of `group_offset`. They have no `vmap_method`: the primitives have batching
rules, so `jax.vmap` never reaches a custom call.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jax_grouped.backends import extension
from jax_grouped.backends.extension import require_usable as require_usable
from jax_grouped.backends.reference import rows as reference_rows
from jax_grouped.backends.spec import Activation, GemmSpec, Product, QuantizeSpec, batched
from jax_grouped.core.groups import (
    FEATURE_ALIGNMENT,
    bias_grad_tiles,
    gemm_scratch_bytes,
    group_table_size,
    quantize_scratch_bytes,
    round_up,
)
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

#: cuBLASLt's own recommendation for Hopper.
WORKSPACE_BYTES = 32 * 1024 * 1024

#: Most groups of a product that gathers its rows, of all batch elements: `kMostGatheredGroups` in csrc.
MAX_GATHERED_GROUPS = 65536
#: Most features, besides those of the gathered rows, with which a product that gathers takes less time than a copy and
#: cuBLASLt's product (measured on an H200 with the layers of `benchmarks/shapes.toml`).
_MOST_FEATURES_OF_GATHERED, _MOST_FEATURES_OF_GATHERED_WGRAD = 1792, 1024

#: Most bytes to which the groups of a narrow kernel are converted at once, unless a single one is larger.
_CONVERTED_BYTES = 2**25

#: The batch is an axis of the CUDA kernels' grids, which has at most this number of blocks.
MAX_BATCH = 65535

#: Features that the kernels of activations' gradients and of sums load at once: `kRowVector` in csrc.
_ROW_VECTOR = 8
#: Bytes that the copies of tokens move at once: `kPermuteVectorBytes` in csrc.
_PERMUTE_VECTOR_BYTES = 16

#: Values of the enumerations in `csrc/`.
_PRODUCTS = ("fprop", "dgrad", "wgrad")
_MODES = tuple(ScalingMode)
_GATHERED = (None, "a", "b")
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


def _pad_features(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Zero-fills feature axes up to `FEATURE_ALIGNMENT`; rows must start on 16-byte boundaries."""
    missing = [
        round_up(x.shape[axis], FEATURE_ALIGNMENT) - x.shape[axis] if axis in axes else 0 for axis in range(x.ndim)
    ]
    return jnp.pad(x, [(0, features) for features in missing]) if any(missing) else x


def grouped_gemm(
    a: jax.Array,
    b: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array,
    *more: jax.Array,
    spec: GemmSpec,
    batch: int,
) -> jax.Array:
    """Returns the product that `spec` names, accumulated in float32."""
    if spec.gathered is not None:
        if not _gathers(a, b, spec, batch):
            options: dict[str, Any] = dict(zero_tail=spec.zero_other_rows, batch=batch)
            a = permute_rows(a, *more, **options) if spec.gathered == "a" else a
            b = permute_rows(b, *more, **options) if spec.gathered == "b" else b
            spec = dataclasses.replace(spec, gathered=None)
            return grouped_gemm(a, b, group_sizes, group_offset, spec=spec, batch=batch)
        tokens = a if spec.gathered == "a" else b
        more = (_in_whole_batch(reference_rows.tokens_of(*more), tokens.shape[0] // batch, batch),)
    if spec.a is None and b.dtype != a.dtype:
        assert not more
        return _of_narrow_kernel(a, b, group_sizes, group_offset, spec=spec, batch=batch)
    operands = (a, b, group_sizes, group_offset, *more)
    if spec.a is None:
        if not _can_be_read(a, b, spec):
            return _unscaled(*operands, spec=spec, batch=batch)
        # The shapes of unquantized operands hold the rows of all batch elements.
        of_batch = dataclasses.replace(spec, num_groups=batch * spec.num_groups)
        out = of_batch.out(a.shape, b.shape, *(row_indices.shape for row_indices in more if spec.gathered))
    else:
        if spec.a.mode == ScalingMode.MX and not extension.has_mx_products():
            return _in_bfloat16(*operands, spec=spec, batch=batch)
        if spec.a.mode == ScalingMode.BLOCK_1D:
            extension.require_block_scaling()
        out = batched(spec.out(a.shape, b.shape), batch)
    scratch = jax.ShapeDtypeStruct((gemm_scratch_bytes(batch, spec.num_groups),), jnp.uint8)
    workspace = jax.ShapeDtypeStruct((WORKSPACE_BYTES,), jnp.uint8)
    accumulate = spec.gathered is None and len(more) > (2 if spec.scaled else 0)
    weights = (out if spec.product == "wgrad" else b).shape[0]
    return jax.ffi.ffi_call(
        "jax_grouped_gemm",
        [out, scratch, workspace],
        input_output_aliases={len(operands) - 1: 0} if accumulate else None,
    )(
        *operands,
        product=np.int32(_PRODUCTS.index(spec.product)),
        scaled=spec.scaled,
        a_mode=np.int32(_MODES.index(spec.a.mode) if spec.a else 0),
        b_mode=np.int32(_MODES.index(spec.b.mode) if spec.b else 0),
        # The shape of columnwise tokens does not give the number of tokens.
        tokens=np.int64(spec.a.tokens if spec.a else 0),
        expected_tokens=np.int64(spec.expected_tokens),
        weight_batch=np.int64(weights // spec.num_groups),
        gathered=np.int32(_GATHERED.index(spec.gathered)),
        accumulate=accumulate,
        zero_other_rows=spec.zero_other_rows,
        autotune=spec.autotune,
    )[0]


def _can_be_read(a: jax.Array, b: jax.Array, spec: GemmSpec) -> bool:
    """Tells whether cuBLASLt can read these operands and write this result without conversion."""
    aligned = all(size % FEATURE_ALIGNMENT == 0 for size in (*a.shape[1:], *b.shape[1:]))
    return aligned and a.dtype != jnp.float32 and spec.out_dtype in (a.dtype, jnp.float32)


def gathers_fast(product: Product, features: int) -> bool:
    """Tells whether a product of 16-bit numbers that gathers rows takes less time than one after a copy of them.

    A copy takes the longer beside the product, the fewer features the product has besides those of the rows.
    """
    return features <= (_MOST_FEATURES_OF_GATHERED_WGRAD if product == "wgrad" else _MOST_FEATURES_OF_GATHERED)


def _gathers(a: jax.Array, b: jax.Array, spec: GemmSpec, batch: int) -> bool:
    """Tells whether a kernel gathers the rows of an operand: it can, and copying them first would take longer."""
    few_groups = isinstance(batch, int) and batch * spec.num_groups <= MAX_GATHERED_GROUPS
    if not few_groups or not _can_be_read(a, b, spec) or not extension.has_gathering_products():
        return False
    if spec.product == "wgrad":
        return gathers_fast("wgrad", (b if spec.gathered == "a" else a).shape[1])
    return gathers_fast(spec.product, b.shape[2 if spec.product == "fprop" else 1])


def _unscaled(
    a: jax.Array,
    b: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array,
    accumulator: jax.Array | None = None,
    *,
    spec: GemmSpec,
    batch: int,
) -> jax.Array:
    """Returns a product of operands that cuBLASLt cannot read, through products of operands that it can read."""
    shape = dataclasses.replace(spec, num_groups=batch * spec.num_groups).out(a.shape, b.shape).shape
    a = _pad_features(a, (1,))
    b = _pad_features(b, (1,) if b.ndim == 2 else (1, 2))
    in_parts = a.dtype == jnp.float32
    direct = not in_parts and spec.out_dtype in (a.dtype, jnp.float32)
    inner = spec if direct else dataclasses.replace(spec, out_dtype=jnp.float32)
    if accumulator is not None:
        # The accumulator is updated in place unless cuBLASLt cannot write its type or its number of features.
        accumulator = _pad_features(accumulator, (1, 2)).astype(inner.out_dtype)
    out = accumulator
    for a_part, b_part in _factors(a, b, spec.precision) if in_parts else [(a, b)]:
        onto = () if out is None else (out,)
        out = grouped_gemm(a_part, b_part, group_sizes, group_offset, *onto, spec=inner, batch=batch)
    assert out is not None
    return out.astype(spec.out_dtype)[tuple(slice(size) for size in shape)]


def _of_narrow_kernel(
    a: jax.Array, b: jax.Array, group_sizes: jax.Array, group_offset: jax.Array, *, spec: GemmSpec, batch: int
) -> jax.Array:
    """Returns a product of a narrow kernel, from products of a few groups each, which are converted in turn.

    Each row belongs to one group, so a product that is added to the rows of its groups rounds nothing twice.
    """
    groups, (_, *matrix) = spec.num_groups, b.shape
    out = dataclasses.replace(spec, num_groups=batch * groups).out(a.shape, b.shape)
    a = _pad_features(a, (1,))
    # Parts of float32 tokens, the smallest first; bfloat16 holds all of the kernel.
    factors = _bf16_parts(a, _parts(spec.precision))[::-1] if a.dtype == jnp.float32 else [a]
    direct = a.dtype != jnp.float32 and out.dtype in (a.dtype, jnp.float32)
    sum_dtype = out.dtype if direct else jnp.dtype(jnp.float32)
    b = b.reshape(-1, groups, *matrix)
    at_once: Any = 1
    if all(isinstance(size, int) for size in b.shape):  # In an export, sizes may be symbolic.
        at_once = min(groups, max(1, _CONVERTED_BYTES // (2 * b.size // groups)))
    # Beyond these limits no kernel has a group, and the sums below do not overflow.
    group_offset = jnp.clip(group_offset, -groups, group_sizes.shape[0])

    def add(first: Any, count: int, total: jax.Array) -> jax.Array:
        few = jax.lax.dynamic_slice_in_dim(b, first, count, axis=1).reshape(-1, *matrix)
        few = _pad_features(few.astype(factors[0].dtype), (1, 2))
        of_few = dataclasses.replace(spec, num_groups=count, out_dtype=sum_dtype)
        for factor in factors:
            total = grouped_gemm(factor, few, group_sizes, group_offset + first, total, spec=of_few, batch=batch)
        return total

    total = _pad_features(jnp.zeros(out.shape, sum_dtype), (1,))
    total = jax.lax.fori_loop(0, groups // at_once, lambda i, total: add(i * at_once, at_once, total), total)
    if rest := groups % at_once:
        total = add(groups - rest, rest, total)
    return total.astype(out.dtype)[:, : out.shape[1]]


def _factors(a: jax.Array, b: jax.Array, precision: jax.lax.Precision) -> list[tuple[jax.Array, jax.Array]]:
    """Returns the pairs of bfloat16 factors whose products sum to a float32 product, the smallest first.

    Only the products of parts `i` and `j` with `i + j` below the number of parts matter: 3 products for two parts,
    6 for three.
    """
    count = _parts(precision)
    a_parts, b_parts = _bf16_parts(a, count), _bf16_parts(b, count)
    pairs = sorted(((i, j) for i in range(count) for j in range(count - i)), key=sum, reverse=True)
    return [(a_parts[i], b_parts[j]) for i, j in pairs]


def _parts(precision: jax.lax.Precision) -> int:
    """Returns the number of bfloat16 parts that float32 is split into."""
    return 3 if precision == jax.lax.Precision.HIGHEST else 2


def _bf16_parts(x: jax.Array, count: int) -> list[jax.Array]:
    """Splits float32 into bfloat16 parts, largest first, whose sum is `x` to about 8 bits per part."""
    parts = []
    largest = float(jnp.finfo(jnp.bfloat16).max)
    for _ in range(count):
        # XLA may drop a round trip through bfloat16 as excess precision, but never a reduce_precision.
        part = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
        # The largest float32 values would round to infinity. Clip them; the next part takes the remainder.
        part = jnp.where(jnp.isfinite(x), jnp.clip(part, -largest, largest), part)
        parts.append(part.astype(jnp.bfloat16))
        # Infinity minus infinity is NaN, which would hide the overflow in the parts that follow.
        x = jnp.where(jnp.isfinite(part), x - part, 0.0)
    return parts


def _in_bfloat16(
    a: jax.Array,
    b: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array,
    a_scale: jax.Array,
    b_scale: jax.Array,
    *accumulator: jax.Array,
    spec: GemmSpec,
    batch: int,
) -> jax.Array:
    """Returns the same product in bfloat16, for GPUs without matmuls of this format.

    bfloat16 represents all numbers of the format exactly.
    """

    def numbers(data: jax.Array, scale_inv: jax.Array, layout: QuantizedLayout | None, count: int) -> jax.Array:
        assert layout is not None
        options = dict(layout=layout, out_dtype=jnp.bfloat16, batch=count)
        if layout.stack_rows is None:
            return dequantize(data, scale_inv, group_sizes, group_offset, **options)
        tokens = dequantize(data, scale_inv, layout.stack_sizes(count), **options)
        return tokens.reshape(-1, layout.stack_rows, layout.features)

    weight_batch = batch if spec.product == "wgrad" else b.shape[0] // spec.num_groups
    a, b = numbers(a, a_scale, spec.a, batch), numbers(b, b_scale, spec.b, weight_batch)
    unscaled = dataclasses.replace(spec, a=None, b=None)
    return _unscaled(a, b, group_sizes, group_offset, *accumulator, spec=unscaled, batch=batch)


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
        order = (_in_whole_batch(order[0], weights.shape[0] // batch, batch),)
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
        inverse = _in_whole_batch(inverse.reshape(-1), order.shape[0] // batch, batch).reshape(inverse.shape)
        order = _in_whole_batch(order, of_element, batch)
        order = jnp.where(order < 0, pairs, order)
    if x.shape[1] * x.dtype.itemsize % _PERMUTE_VECTOR_BYTES != 0:
        return reference_rows.permute(x, order, inverse)
    rows = jax.ShapeDtypeStruct((order.shape[0], x.shape[1]), x.dtype)
    call = jax.ffi.ffi_call("jax_grouped_permute_rows", rows)
    return call(x, order, inverse, zero_tail=zero_tail)


def sum_rows(rows: jax.Array, inverse: jax.Array, *weights: jax.Array, batch: int) -> jax.Array:
    """Returns the sums of the reference backend, from one kernel if the numbers have 16 bits."""
    if batch > 1:
        inverse = _in_whole_batch(inverse.reshape(-1), rows.shape[0] // batch, batch).reshape(inverse.shape)
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
        more = (*more[:i], _in_whole_batch(more[i], shape[0], batch), *more[i + 1 :])
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
        mode=np.int32(_MODES.index(spec.mode)),
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
    *x_scale: jax.Array,
    spec: QuantizeSpec,
    batch: int,
) -> tuple[jax.Array, ...]:
    """Returns the rowwise data and scales of `BLOCK_1D`. Reads each token once."""
    del order
    results = spec.permuted_results((x.shape[0] // batch, x.shape[1]))
    table = jax.ShapeDtypeStruct((group_table_size(spec.num_groups),), jnp.int32)
    outputs = jax.ffi.ffi_call(
        "jax_grouped_quantize_permuted", [batched(result, batch) for result in (*results, table)]
    )(
        x,
        inverse,
        group_sizes,
        group_offset,
        *x_scale,
        num_groups=np.int64(batch * spec.num_groups),
        pow2_scales=spec.pow2_scales,
        amax_epsilon=np.float32(spec.amax_epsilon),
    )
    return tuple(outputs[: len(results)])


def _in_whole_batch(row_indices: jax.Array, x_rows: int, batch: int) -> jax.Array:
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
        mode=np.int32(_MODES.index(layout.mode)),
        num_groups=np.int64(layout.num_groups),
        stack_rows=np.int64(layout.stack_rows or 0),
        columnwise=layout.columnwise,
        swizzled_scales=layout.swizzled_scales,
    )[0]
