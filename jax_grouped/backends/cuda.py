"""The `cuda` backend: the operations as XLA custom calls.

Operands hold `batch` batch elements one after another along their first axis; `T` and `G` are those of one element.
The custom calls take the batch from the size of `group_offset`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jax_grouped.backends.extension import require_usable as require_usable
from jax_grouped.backends.spec import MatmulSpec
from jax_grouped.group_layout import FEATURE_ALIGNMENT, bias_grad_tiles, matmul_scratch_bytes, round_up

#: Names of the custom calls in a lowered program. `jax.export` needs them:
#: `jax.export.export(f, disabled_checks=[DisabledSafetyCheck.custom_call(t) for t in CUSTOM_CALL_TARGETS])`.
CUSTOM_CALL_TARGETS = (
    "jax_grouped_matmul",
    "jax_grouped_bias_grad",
    "jax_grouped_quantize",
    "jax_grouped_dequantize",
    "jax_grouped_scaled_matmul",
)

#: cuBLASLt's own recommendation for Hopper.
WORKSPACE_BYTES = 32 * 1024 * 1024

#: Batch elements lie along an axis of the kernels' grids that has no more blocks.
MAX_BATCH = 65535


def check_batch(batch: int) -> None:
    """Raises ValueError if one custom call cannot take so many batch elements."""
    if isinstance(batch, int) and batch > MAX_BATCH:  # An export may leave it open.
        raise ValueError(
            f"jax.vmap over {batch} calls of jax_grouped makes one custom call, which takes a batch of at most "
            f"{MAX_BATCH}: use jax.vmap over fewer, or jax.lax.map."
        )


def call(target: str, results: list[jax.ShapeDtypeStruct], *args: jax.Array, aliases: Any = None, **attrs: Any) -> Any:
    """The custom call `target`; `aliases` says which arguments share memory with which results."""
    # Batching is a rule of the primitive that this call implements, so it never reaches the call itself.
    return jax.ffi.ffi_call(target, results, vmap_method="sequential", input_output_aliases=aliases)(*args, **attrs)


def _pad_features(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Zero-fills feature axes up to `FEATURE_ALIGNMENT`; rows must start on 16-byte boundaries."""
    missing = [
        round_up(x.shape[axis], FEATURE_ALIGNMENT) - x.shape[axis] if axis in axes else 0 for axis in range(x.ndim)
    ]
    return jnp.pad(x, [(0, features) for features in missing]) if any(missing) else x


def _matmul16(
    a: jax.Array,
    b: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array,
    spec: MatmulSpec,
    accumulator: jax.Array | None = None,
) -> jax.Array:
    """One cuBLASLt grouped matmul of bfloat16 or float16 operands, optionally added onto `accumulator`.

    `spec` has the groups of the whole batch.
    """
    out = jax.ShapeDtypeStruct(spec.out_shape(a.shape, b.shape), spec.out_dtype)
    scratch = jax.ShapeDtypeStruct((matmul_scratch_bytes(spec.num_groups),), jnp.uint8)
    workspace = jax.ShapeDtypeStruct((WORKSPACE_BYTES,), jnp.uint8)
    args = [a, b, group_sizes, group_offset]
    aliases = {}
    if accumulator is not None:
        aliases[len(args)] = 0
        args.append(accumulator)
    # Batch elements may have kernels in common, and groups they all have.
    kernels = (out if spec.product == "wgrad" else b).shape[0]
    return call(
        "jax_grouped_matmul",
        [out, scratch, workspace],
        *args,
        aliases=aliases,
        product=spec.product,
        kernel_batch=np.int64(group_offset.shape[0] * kernels // spec.num_groups),
        autotune=spec.autotune,
    )[0]


def _bf16_parts(x: jax.Array, count: int) -> list[jax.Array]:
    """Splits float32 into bfloat16 parts, largest first, whose sum is `x` to about 8 bits per part."""
    parts = []
    largest = float(jnp.finfo(jnp.bfloat16).max)
    for _ in range(count):
        # XLA may drop a round trip through bfloat16 as excess precision, but never a reduce_precision.
        part = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
        # The largest float32 values would round to infinity; what is cut off goes into the next part.
        part = jnp.where(jnp.isfinite(x), jnp.clip(part, -largest, largest), part)
        parts.append(part.astype(jnp.bfloat16))
        # Infinity minus itself would hide an overflow behind NaN in the parts that follow.
        x = jnp.where(jnp.isfinite(part), x - part, 0.0)
    return parts


def _matmul32(
    a: jax.Array,
    b: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array,
    spec: MatmulSpec,
    accumulator: jax.Array | None,
) -> jax.Array:
    """A float32 grouped matmul of such operands as bfloat16 products, the smallest first, accumulated in float32.

    Of the products of parts `i` and `j`, those with `i + j` below the number of parts matter: 3 for two parts,
    6 for three.
    """
    count = 3 if spec.precision == jax.lax.Precision.HIGHEST else 2
    a_parts, b_parts = _bf16_parts(a, count), _bf16_parts(b, count)
    pairs = sorted(((i, j) for i in range(count) for j in range(count - i)), key=sum, reverse=True)
    out = accumulator
    for i, j in pairs:
        out = _matmul16(a_parts[i], b_parts[j], group_sizes, group_offset, spec, out)
    assert out is not None
    return out


def grouped_matmul(
    a: jax.Array,
    b: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array,
    accumulator: jax.Array | None = None,
    *,
    spec: MatmulSpec,
    batch: int,
) -> jax.Array:
    """One of the three products of `MatmulSpec`, accumulated in float32."""
    spec = dataclasses.replace(spec, num_groups=batch * spec.num_groups)
    shape = spec.out_shape(a.shape, b.shape)
    a = _pad_features(a, (1,))
    b = _pad_features(b, (1,) if b.ndim == 2 else (1, 2))
    in_parts = a.dtype == jnp.float32
    direct = not in_parts and spec.out_dtype in (a.dtype, jnp.float32)
    gemm = spec if direct else dataclasses.replace(spec, out_dtype=jnp.float32)
    if accumulator is not None:
        # In place, unless its type or its features are none that cuBLASLt can write.
        accumulator = _pad_features(accumulator, (1, 2)).astype(gemm.out_dtype)
    multiply = _matmul32 if in_parts else _matmul16
    out = multiply(a, b, group_sizes, group_offset, gemm, accumulator)
    return out.astype(spec.out_dtype)[tuple(slice(size) for size in shape)]


def grouped_bias_grad(
    dy: jax.Array, group_sizes: jax.Array, group_offset: jax.Array, *, num_groups: int, out_dtype: DTypeLike, batch: int
) -> jax.Array:
    """The sum of each group's rows, `[T, N] -> [G, N]`, accumulated in float32 in a fixed order."""
    rows, features = dy.shape
    tiles = bias_grad_tiles(rows // batch, num_groups)
    out = jax.ShapeDtypeStruct((batch * num_groups, features), jnp.float32)
    partial_sums = jax.ShapeDtypeStruct((batch * tiles, features), jnp.float32)
    starts = jax.ShapeDtypeStruct((batch * 2, num_groups + 1), jnp.int32)
    dbias = call("jax_grouped_bias_grad", [out, partial_sums, starts], dy, group_sizes, group_offset)[0]
    return dbias.astype(out_dtype)
