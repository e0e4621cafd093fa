"""Quantization in the `xla` backend: plain JAX, for any platform."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_grouped.backends import fp8
from jax_grouped.backends.spec import QuantizeSpec
from jax_grouped.backends.xla import grouped_bias_grad
from jax_grouped.group_layout import (
    BLOCK,
    FP8_ALIGNMENT,
    Chunks,
    GroupRows,
    QuantizedLayout,
    group_rows,
    round_up,
    row_groups,
    unit_starts,
)
from jax_grouped.recipes import ScalingMode


def quantize(
    x: jax.Array, group_sizes: jax.Array, group_offset: jax.Array, *more: jax.Array, spec: QuantizeSpec
) -> tuple[jax.Array, ...]:
    """The results that `spec` asks for, in its order."""
    operands = list(more)
    scale = operands.pop(0) if spec.given_scale else None
    activation_input = operands.pop(0) if spec.backward else None
    if spec.cached:
        skip, *previous = operands
        return jax.lax.cond(
            skip[0], lambda: tuple(previous), lambda: _quantize(x, group_sizes, group_offset, scale, None, spec)
        )
    return _quantize(x, group_sizes, group_offset, scale, activation_input, spec)


def _quantize(
    x: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array,
    scale: jax.Array | None,
    activation_input: jax.Array | None,
    spec: QuantizeSpec,
) -> tuple[jax.Array, ...]:
    unflushed = _activate(x.astype(jnp.float32), activation_input, spec)
    values = fp8.flush(unflushed)
    rows = group_rows(group_sizes, group_offset, spec.num_groups, x.shape[0])
    group, valid = row_groups(rows, x.shape[0])
    values = jnp.where(valid[:, None], values, 0)
    amax = _maximum(jnp.max(fp8.magnitude(values), axis=1), group, spec.num_groups)
    scaling = _Scaling(spec, amax, scale)

    results: dict[str, jax.Array] = {"amax": amax}
    if spec.rowwise:
        layout = spec.layout(x.shape, columnwise=False)
        results["row_data"], results["row_scale"] = _rowwise(values, rows, group, valid, scaling, layout)
    if spec.columnwise:
        layout = spec.layout(x.shape, columnwise=True)
        results["column_data"], results["column_scale"] = _columnwise(values, rows, scaling, layout)
    if spec.dbias:
        results["dbias"] = grouped_bias_grad(
            unflushed, group_sizes, group_offset, num_groups=spec.num_groups, out_dtype=jnp.float32
        )
    return tuple(results[name] for name in spec.results(x.shape))


def quantize_nothing(x: jax.Array, *more: jax.Array, spec: QuantizeSpec) -> tuple[jax.Array, ...]:
    """The results for an `x` without rows, features or groups."""
    results = {name: jnp.zeros(result.shape, result.dtype) for name, result in spec.results(x.shape).items()}
    scaling = _Scaling(spec, results["amax"], more[0] if spec.given_scale else None)
    if scaling.of_groups:
        results |= {name: scaling.of_groups[1] for name in results if name.endswith("_scale")}
    return tuple(results.values())


def _activate(x: jax.Array, activation_input: jax.Array | None, spec: QuantizeSpec) -> jax.Array:
    """What is quantized, in float32."""
    functions: dict[str, Callable[..., jax.Array]] = {
        "silu_mul": lambda h: jax.nn.silu(h[:, : h.shape[1] // 2]) * h[:, h.shape[1] // 2 :],
        "silu": jax.nn.silu,
        "gelu": jax.nn.gelu,
        # Spelled out: the sign of zero in a maximum is up to the platform.
        "relu": lambda h: jnp.where((h > 0) | jnp.isnan(h), h, 0),
    }
    if spec.activation is None:
        return x
    function = functions[spec.activation]
    if activation_input is None:
        return function(x)
    activation_input = fp8.flush(activation_input.astype(jnp.float32))
    if spec.activation == "relu":
        # Exactly: no product, which would make NaN of an infinite gradient where the derivative is 0.
        return jnp.where(activation_input > 0, x, 0)
    return jax.vjp(function, activation_input)[1](x)[0]


class _Scaling:
    """How blocks get their scales: from their own largest values, or one for each group.

    Attributes:
        of_groups: scales and inverse scales of whole groups, `[G]`, if that is what the mode wants.
    """

    def __init__(self, spec: QuantizeSpec, amax: jax.Array, given: jax.Array | None):
        self.spec = spec
        self.of_groups: tuple[jax.Array, jax.Array] | None = None
        if spec.mode == ScalingMode.TENSOR:
            scale = self._from_amax(amax) if given is None else fp8.clamp_scale(given)
            self.of_groups = scale, fp8.reciprocal(scale)

    def _from_amax(self, amax: jax.Array) -> jax.Array:
        return fp8.scale_from_amax(amax, self.spec.dtype, self.spec.amax_epsilon, pow2=self.spec.pow2_scales)

    def of_blocks(self, amax: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Scales and inverse scales of blocks with these largest values."""
        if self.spec.mode == ScalingMode.MX:
            exponent = fp8.mx_exponent(amax, self.spec.dtype, self.spec.amax_epsilon)
            return fp8.mx_scale(exponent), jax.lax.bitcast_convert_type(exponent, jnp.float8_e8m0fnu)
        scale = self._from_amax(amax)
        return scale, fp8.reciprocal(scale)


def _rowwise(
    values: jax.Array, rows: GroupRows, group: jax.Array, valid: jax.Array, scaling: _Scaling, layout: QuantizedLayout
) -> tuple[jax.Array, jax.Array]:
    row = jnp.where(valid, jnp.arange(layout.tokens, dtype=jnp.int32) - rows.starts[group], 0)
    if scaling.of_groups:
        scale, scale_inv = scaling.of_groups
        scale = scale[group][:, None]
    else:
        amax = _block_features(fp8.magnitude(values), layout.block).max(axis=2)
        if layout.mode == ScalingMode.BLOCK_2D:
            block = unit_starts(rows, BLOCK)[group] + row // BLOCK
            amax = _maximum(amax, jnp.where(valid, block, -1), layout.units(BLOCK))[block]
        scale, scale_inv = scaling.of_blocks(amax)
        scale_inv = _place(scale_inv, layout.row_scales(rows, group, row), valid, layout)
    data = fp8.cast(values, _spread(scale, layout.block, layout.features), scaling.spec.dtype)
    data = _zero_unless(valid[:, None], data)
    return data.reshape(layout.data_shape), scale_inv.reshape(layout.scale_shape)


def _columnwise(
    values: jax.Array, rows: GroupRows, scaling: _Scaling, layout: QuantizedLayout
) -> tuple[jax.Array, jax.Array]:
    chunks = Chunks(rows, layout)
    # The rows of every chunk; [chunks, 16, features].
    row = jnp.minimum(chunks.first_row[:, None] + jnp.arange(FP8_ALIGNMENT, dtype=jnp.int32), layout.tokens - 1)
    values = jnp.where(chunks.row_valid[:, :, None], values[row], 0)
    if scaling.of_groups:
        scale, scale_inv = scaling.of_groups
        scale = scale[chunks.group][:, None]
    else:
        amax = fp8.magnitude(values).max(axis=1)
        if layout.mode == ScalingMode.BLOCK_2D:
            amax = _block_features(amax, BLOCK).max(axis=2)
        block = unit_starts(rows, layout.block)[chunks.group] + chunks.row // layout.block
        amax = _maximum(amax, jnp.where(chunks.valid, block, -1), layout.units(layout.block))[block]
        scale, scale_inv = scaling.of_blocks(amax)
        where = layout.column_scales(rows, chunks.group, chunks.row)
        scale_inv = _place(scale_inv, where, chunks.valid, layout)
    per_feature = _spread(scale, BLOCK if layout.mode == ScalingMode.BLOCK_2D else 1, layout.features)
    data = fp8.cast(values, per_feature[:, None, :], scaling.spec.dtype)
    data = _zero_unless(chunks.row_valid[:, :, None], data).swapaxes(1, 2)
    units = jnp.zeros((layout.units(FP8_ALIGNMENT) * layout.features, FP8_ALIGNMENT), jnp.uint8)
    units = units.at[jnp.where(chunks.valid[:, None], chunks.units, units.shape[0])].set(_bits(data), mode="drop")
    data = jax.lax.bitcast_convert_type(units.reshape(layout.data_shape), scaling.spec.dtype)
    return data, scale_inv.reshape(layout.scale_shape)


def dequantize(
    data: jax.Array,
    scale_inv: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array | None = None,
    *,
    layout: QuantizedLayout,
    out_dtype: DTypeLike,
) -> jax.Array:
    """`data * scale_inv`, in float32 and then in `out_dtype`: `[T, C]`, zero where there is no group."""
    offset = jnp.zeros((1,), jnp.int32) if group_offset is None else group_offset
    rows = group_rows(group_sizes, offset, layout.num_groups, layout.tokens)
    group, valid = row_groups(rows, layout.tokens)
    row = jnp.where(valid, jnp.arange(layout.tokens, dtype=jnp.int32) - rows.starts[group], 0)
    if layout.columnwise:
        chunks = Chunks(rows, layout)
        units = data.reshape(-1, FP8_ALIGNMENT)[chunks.units].swapaxes(1, 2).reshape(-1, layout.features)
        data = units[FP8_ALIGNMENT * unit_starts(rows, FP8_ALIGNMENT)[group] + row]
        where = layout.column_scales(rows, group, row)
        block = BLOCK if layout.mode == ScalingMode.BLOCK_2D else 1
    else:
        data = data.reshape(layout.tokens, layout.features)
        where = layout.row_scales(rows, group, row)
        block = layout.block
    scale_inv = scale_inv.reshape(-1)[where]
    if layout.mode == ScalingMode.MX:
        scale_inv = fp8.mx_scale_inv(_bits(scale_inv))
    values = fp8.flush(data.astype(jnp.float32) * _spread(scale_inv, block, layout.features))
    return jnp.where(valid[:, None], values, 0).astype(out_dtype)


def _bits(x: jax.Array) -> jax.Array:
    """The bytes of 8-bit numbers."""
    return jax.lax.bitcast_convert_type(x, jnp.uint8)


def _zero_unless(valid: jax.Array, data: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(jnp.where(valid, _bits(data), 0), data.dtype)


def _maximum(values: jax.Array, segment: jax.Array, num_segments: int) -> jax.Array:
    """The largest of the values, none negative, of each segment along the first axis; segment -1 is dropped."""
    zeros = jnp.zeros((num_segments, *values.shape[1:]), values.dtype)
    return zeros.at[jnp.where(segment < 0, num_segments, segment)].max(values, mode="drop")


def _block_features(values: jax.Array, block: int) -> jax.Array:
    """`[n, C] -> [n, ceil(C / block), block]`, filled up with zeros."""
    features = values.shape[1]
    padded = jnp.pad(values, ((0, 0), (0, round_up(features, block) - features)))
    return padded.reshape(values.shape[0], -1, block)


def _spread(per_block: jax.Array, block: int, features: int) -> jax.Array:
    """One value per feature from one per block of features, `[n, blocks] -> [n, C]`; `[n, 1]` stays."""
    if per_block.shape[1] == 1 or block == 1:
        return per_block
    return jnp.repeat(per_block, block, axis=1)[:, :features]


def _place(scale_inv: jax.Array, where: jax.Array, valid: jax.Array, layout: QuantizedLayout) -> jax.Array:
    """The inverse scales at their positions in the flat array, zeros elsewhere."""
    size = math.prod(layout.scale_shape)
    where = jnp.where(valid[:, None], where, size)
    if scale_inv.dtype != jnp.float8_e8m0fnu:
        return jnp.zeros(size, scale_inv.dtype).at[where].set(scale_inv, mode="drop")
    flat = jnp.zeros(size, jnp.uint8).at[where].set(_bits(scale_inv), mode="drop")
    return jax.lax.bitcast_convert_type(flat, scale_inv.dtype)
