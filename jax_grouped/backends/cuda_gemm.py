"""Grouped products of the `cuda` backend, of operands of any type, through those that its custom call can read."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jax_grouped.backends import cuda, extension
from jax_grouped.backends.reference import rows as reference_rows
from jax_grouped.backends.spec import GemmSpec, Product, batched
from jax_grouped.core.groups import FEATURE_ALIGNMENT, gemm_scratch_bytes, round_up
from jax_grouped.fp8.layout import QuantizedLayout
from jax_grouped.fp8.recipes import ScalingMode

#: cuBLASLt's own recommendation for Hopper.
WORKSPACE_BYTES = 32 * 1024 * 1024

#: Most groups of a product that gathers its rows, of all batch elements: `kMostGatheredGroups` in csrc.
MAX_GATHERED_GROUPS = 65536
#: Most features, besides those of the gathered rows, with which a product that gathers takes less time than a copy and
#: cuBLASLt's product (measured on an H200 with the layers of `benchmarks/shapes.toml`).
_MOST_FEATURES_OF_GATHERED, _MOST_FEATURES_OF_GATHERED_WGRAD = 1792, 1024

#: Most bytes to which the groups of a narrow kernel are converted at once, unless a single one is larger.
_CONVERTED_BYTES = 2**25

#: Whether XLA computes a product a second time where a scan keeps it and something else reads it, if no barrier follows
#: (openxla/xla#45799).
_REPEATS_KEPT_PRODUCTS = (0, 11) <= jax.__version_info__ < (0, 12)

#: Values of the enumerations in `csrc/`.
_PRODUCTS = ("fprop", "dgrad", "wgrad")
_GATHERED = (None, "a", "b")


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
            a = cuda.permute_rows(a, *more, **options) if spec.gathered == "a" else a
            b = cuda.permute_rows(b, *more, **options) if spec.gathered == "b" else b
            spec = dataclasses.replace(spec, gathered=None)
            return grouped_gemm(a, b, group_sizes, group_offset, spec=spec, batch=batch)
        tokens = a if spec.gathered == "a" else b
        more = (cuda.in_whole_batch(reference_rows.tokens_of(*more), tokens.shape[0] // batch, batch),)
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
    product = jax.ffi.ffi_call(
        "jax_grouped_gemm",
        [out, scratch, workspace],
        input_output_aliases={len(operands) - 1: 0} if accumulate else None,
    )(
        *operands,
        product=np.int32(_PRODUCTS.index(spec.product)),
        scaled=spec.scaled,
        a_mode=np.int32(cuda.MODES.index(spec.a.mode) if spec.a else 0),
        b_mode=np.int32(cuda.MODES.index(spec.b.mode) if spec.b else 0),
        # The shape of columnwise tokens does not give the number of tokens.
        tokens=np.int64(spec.a.tokens if spec.a else 0),
        expected_tokens=np.int64(spec.expected_tokens),
        weight_batch=np.int64(weights // spec.num_groups),
        gathered=np.int32(_GATHERED.index(spec.gathered)),
        accumulate=accumulate,
        zero_other_rows=spec.zero_other_rows,
        autotune=spec.autotune,
    )[0]
    # A kernel's gradient has no other use, and is best written where the scan keeps it.
    barrier = _REPEATS_KEPT_PRODUCTS and spec.product != "wgrad"
    return jax.lax.optimization_barrier(product) if barrier else product


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
    inner = dataclasses.replace(spec, out_dtype=_sum_dtype(a.dtype, spec.out_dtype))
    if accumulator is not None:
        # The accumulator is updated in place unless cuBLASLt cannot write its type or its number of features.
        accumulator = _pad_features(accumulator, (1, 2)).astype(inner.out_dtype)
    out = accumulator
    for a_part, b_part in _factors(a, b, spec.precision) if a.dtype == jnp.float32 else [(a, b)]:
        onto = () if out is None else (out,)
        out = grouped_gemm(a_part, b_part, group_sizes, group_offset, *onto, spec=inner, batch=batch)
    assert out is not None
    return out.astype(spec.out_dtype)[tuple(slice(size) for size in shape)]


def _sum_dtype(operand: np.dtype, out: DTypeLike) -> np.dtype:
    """Returns the type in which products of operands of a type are added up: the result's if cuBLASLt can write it."""
    writable = (jnp.float32,) if operand == jnp.float32 else (operand, jnp.float32)
    return jnp.dtype(out if out in writable else jnp.float32)


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
    sum_dtype = _sum_dtype(a.dtype, out.dtype)
    b = b.reshape(-1, groups, *matrix)
    at_once: Any = 1
    if all(isinstance(size, int) for size in b.shape):  # In an export, sizes may be symbolic.
        at_once = min(groups, max(1, _CONVERTED_BYTES // (b.size // groups * factors[0].dtype.itemsize)))
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
            return cuda.dequantize(data, scale_inv, group_sizes, group_offset, **options)
        tokens = cuda.dequantize(data, scale_inv, layout.stack_sizes(count), **options)
        return tokens.reshape(-1, layout.stack_rows, layout.features)

    weight_batch = batch if spec.product == "wgrad" else b.shape[0] // spec.num_groups
    a, b = numbers(a, a_scale, spec.a, batch), numbers(b, b_scale, spec.b, weight_batch)
    unscaled = dataclasses.replace(spec, a=None, b=None)
    return _unscaled(a, b, group_sizes, group_offset, *accumulator, spec=unscaled, batch=batch)
