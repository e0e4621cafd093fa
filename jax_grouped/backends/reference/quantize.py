"""Quantization in the `xla` backend: plain JAX, for any platform."""

import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_grouped.backends.reference import stack
from jax_grouped.backends.reference.activations import activate, activation_grad
from jax_grouped.backends.reference.rows import tokens_of
from jax_grouped.backends.reference.scales import Scaling, spread
from jax_grouped.backends.reference.tiles import grouped_bias_grad
from jax_grouped.backends.spec import Activation, QuantizeSpec
from jax_grouped.core.groups import FP8_ALIGNMENT, GroupRows, GroupTable, RowPositions, group_rows, round_up
from jax_grouped.fp8 import numerics
from jax_grouped.fp8.layout import BLOCK, QuantizedLayout
from jax_grouped.fp8.recipes import ScalingMode


def quantize(
    x: jax.Array, group_sizes: jax.Array, group_offset: jax.Array, *more: jax.Array, spec: QuantizeSpec
) -> tuple[jax.Array, ...]:
    """Returns the results that `spec` asks for, in its order."""
    # Without the barrier, XLA for GPUs leaves out conversions to 16 bits before this, and unrounded numbers are read.
    x, *operands = jax.lax.optimization_barrier((x, *more))
    if spec.scaled_input:
        x = _values(x, operands.pop(0))
    if spec.gathered_rows is not None:
        x = x.at[operands.pop(0)].get(mode="fill", fill_value=0, wrap_negative_indices=False)
    scale = operands.pop(0) if spec.given_scale else None
    activation_input = operands.pop(0) if spec.backward else None
    row_weights = operands.pop(0) if spec.weighted else None
    activated_scale = operands.pop(0) if spec.activated and spec.given_scale else None

    def quantized() -> tuple[jax.Array, ...]:
        values = _activate(x.astype(jnp.float32), activation_input, row_weights, spec)
        made = _quantize(values, group_sizes, group_offset, scale, x.shape, spec)
        if spec.inner_products:
            assert activation_input is not None
            assert spec.activation is not None
            rows = GroupTable(group_rows(group_sizes, group_offset, spec.num_groups, x.shape[0])).rows(x.shape[0])
            made["inner_products"] = jnp.where(
                rows.valid[:, None], _inner_products(x, activation_input, spec.activation), 0
            )
        if spec.activated:
            assert activation_input is not None
            forward = spec.of_activation()
            activated = _activate(activation_input.astype(jnp.float32), None, row_weights, forward)
            copy = _quantize(activated, group_sizes, group_offset, activated_scale, activation_input.shape, forward)
            made |= {
                "activated_data": copy["column_data"],
                "activated_scale": copy["column_scale"],
                "activated_amax": copy["amax"],
            }
        return tuple(made[name] for name in spec.results(x.shape))

    if spec.cached:
        skip, *previous = operands
        return jax.lax.cond(skip[0], lambda: tuple(previous), quantized)
    return quantized()


def _values(x: jax.Array, scale_inv: jax.Array) -> jax.Array:
    """Returns the values of a rowwise stack of `BLOCK_1D`, `[T, C]`."""
    (tokens, features), groups = x.shape, scale_inv.shape[0]
    rows = tokens // groups
    layout = QuantizedLayout(
        ScalingMode.BLOCK_1D, False, tokens=tokens, features=features, num_groups=groups, stack_rows=rows
    )
    values = stack.dequantize(x.reshape(groups, rows, features), scale_inv, layout)
    return values.reshape(tokens, features).astype(jnp.bfloat16)


def _quantize(
    unflushed: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array,
    scale: jax.Array | None,
    x_shape: tuple[int, ...],
    spec: QuantizeSpec,
) -> dict[str, jax.Array]:
    values = numerics.flush(unflushed)
    copies: stack.Stack | _Tokens
    if spec.stack_rows is None:
        copies = _Tokens(values, group_rows(group_sizes, group_offset, spec.num_groups, values.shape[0]))
    else:
        copies = stack.Stack(values.reshape(spec.num_groups, spec.stack_rows, -1))
    amax = copies.amax()
    scaling = Scaling(spec, amax, scale)

    results: dict[str, jax.Array] = {"amax": amax}
    for name, columnwise, wanted in (("row", False, spec.rowwise), ("column", True, spec.columnwise)):
        if wanted:
            layout = spec.layout(x_shape, columnwise=columnwise)
            data, scale_inv = copies.copy(scaling, layout)
            results[f"{name}_data"] = numerics.as_type(data, spec.dtype).reshape(layout.data_shape)
            results[f"{name}_scale"] = numerics.as_type(scale_inv, spec.scale_dtype).reshape(layout.scale_shape)
    if spec.dbias:
        results["dbias"] = grouped_bias_grad(
            unflushed, group_sizes, group_offset, num_groups=spec.num_groups, out_dtype=jnp.float32
        )
    return results


def quantize_nothing(x: jax.Array, *more: jax.Array, spec: QuantizeSpec) -> tuple[jax.Array, ...]:
    """Returns the results for an `x` without rows, features or groups."""
    results = {name: jnp.zeros(result.shape, result.dtype) for name, result in spec.results(x.shape).items()}
    given = more[spec.gathered_rows is not None] if spec.given_scale else None
    scaling = Scaling(spec, results["amax"], given)
    if scaling.of_groups:
        results |= {name: scaling.of_groups[1] for name in results if name.endswith("_scale")}
    if spec.activated:
        of_activation = Scaling(spec.of_activation(), results["amax"], more[-1] if spec.given_scale else None)
        if of_activation.of_groups:
            results["activated_scale"] = of_activation.of_groups[1]
    return tuple(results.values())


def _activate(
    x: jax.Array, activation_input: jax.Array | None, row_weights: jax.Array | None, spec: QuantizeSpec
) -> jax.Array:
    """Applies the activation, or its derivative, in float32; the result is what gets quantized."""
    if spec.activation is None:
        return x
    if activation_input is None:
        activated = activate(x, spec.activation)
        return activated if row_weights is None else activated * row_weights[:, None]
    if row_weights is not None:
        x = x * row_weights[:, None]
    activation_input = numerics.flush(activation_input.astype(jnp.float32))
    return activation_grad(activation_input, x, spec.activation)


def _inner_products(gradient: jax.Array, activation_input: jax.Array, activation: Activation) -> jax.Array:
    """Returns the inner products of the rows of the result with its gradient `[R, F]`, one per 128 features."""
    products = activate(activation_input.astype(jnp.float32), activation) * gradient.astype(jnp.float32)
    return jnp.sum(_block_features(products, BLOCK), axis=2)


class _Tokens:
    """Quantizer of ragged tokens `[T, C]`."""

    def __init__(self, values: jax.Array, rows: GroupRows):
        self._table = GroupTable(rows)
        self._positions = self._table.rows(values.shape[0])
        self._valid = self._positions.valid[:, None]
        self._values = jnp.where(self._valid, values, 0)
        self._num_groups = rows.sizes.shape[0]

    def amax(self) -> jax.Array:
        """Returns the largest absolute value of each group."""
        of_rows = jnp.max(numerics.magnitude(self._values), axis=1)
        return _maximum(of_rows, self._positions.group, self._num_groups)

    def copy(self, scaling: Scaling, layout: QuantizedLayout) -> tuple[jax.Array, jax.Array]:
        """Returns the bytes and the inverse scales of one orientation."""
        chunks = (
            self._table.row_blocks(FP8_ALIGNMENT, layout.row_blocks(FP8_ALIGNMENT))
            if layout.columnwise
            else self._positions
        )
        scale, scale_inv = self._scales(scaling, layout, chunks)
        data = numerics.cast(self._values, scale, scaling.spec.dtype)
        if not layout.columnwise:
            return jnp.where(self._valid, data, jnp.uint8(0)), scale_inv
        row, feature, exists = layout.column_source(chunks)
        return jnp.where(exists, _take(data, row, feature), jnp.uint8(0)), scale_inv

    def _scales(self, scaling: Scaling, layout: QuantizedLayout, chunks: RowPositions) -> tuple[jax.Array, jax.Array]:
        """Returns the scales of every row, and the inverse scales in their stored layout."""
        if scaling.of_groups:
            scale, scale_inv = scaling.of_groups
            return _take(scale, self._positions.group)[:, None], scale_inv
        rows, features = layout.block_shape
        amax = _block_features(numerics.magnitude(self._values), features).max(axis=2)
        if rows == 1:
            scale, scale_inv = scaling.of_blocks(amax)
        else:
            block = self._positions.block(rows)
            amax = _maximum(amax, jnp.where(self._positions.valid, block, -1), layout.row_blocks(rows))
            scale, scale_inv = scaling.of_blocks(amax)
            scale = _take(scale, block)
        scale = spread(scale, features, layout.features, axis=1)
        if layout.scales_in_block_order:
            (size,), width = layout.scale_shape, scale_inv.shape[1]
            return scale, jnp.pad(scale_inv, ((0, 0), (0, size // scale_inv.shape[0] - width)))
        if rows > 1:
            scale_inv = _take(scale_inv, chunks.block(rows))
        where = layout.column_scales(chunks) if layout.columnwise else layout.row_scales(chunks)
        return scale, _scatter_scales(scale_inv, where, chunks.valid, layout)


def quantize_permuted(
    x: jax.Array,
    order: jax.Array,
    inverse: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array,
    *more: jax.Array,
    spec: QuantizeSpec,
) -> tuple[jax.Array, ...]:
    """Returns rowwise data and scales of gathered rows, each that of its pair's token; amax too if scales are given."""
    x_scale, scale = more[: spec.scaled_input], more[spec.scaled_input :]
    results = quantize(x, group_sizes, group_offset, *x_scale, tokens_of(order, inverse), *scale, spec=spec)
    return results[: 3 if spec.given_scale else 2]


def dequantize(
    data: jax.Array,
    scale_inv: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array | None = None,
    *,
    layout: QuantizedLayout,
    out_dtype: DTypeLike,
) -> jax.Array:
    """Computes `data * scale_inv` in float32 and converts it to `out_dtype`: `[T, C]`, zero in rows of no group."""
    if layout.stack_rows is not None:
        return stack.dequantize(data, scale_inv, layout).reshape(layout.tokens, layout.features).astype(out_dtype)
    offset = jnp.zeros((1,), jnp.int32) if group_offset is None else group_offset
    positions = GroupTable(group_rows(group_sizes, offset, layout.num_groups, layout.tokens)).rows(layout.tokens)
    if layout.columnwise:
        data = _take(data.reshape(-1, FP8_ALIGNMENT), *layout.column_data(positions))
        where = layout.column_scales(positions)
    else:
        where = layout.row_scales(positions)
    scale_inv = numerics.stored_scale(_take(scale_inv, where))
    values = numerics.flush(
        data.astype(jnp.float32) * spread(scale_inv, layout.block_shape[1], layout.features, axis=1)
    )
    return jnp.where(positions.valid[:, None], values, 0).astype(out_dtype)


def _take(values: jax.Array, *index: jax.Array) -> jax.Array:
    """Returns `values[index]` with indices clipped to the array."""
    return values.at[index].get(mode="clip", wrap_negative_indices=False)


def _maximum(values: jax.Array, segment: jax.Array, num_segments: int) -> jax.Array:
    """Returns the maximum of each segment of nonnegative values along the first axis; drops segment -1."""
    zeros = jnp.zeros((num_segments, *values.shape[1:]), values.dtype)
    return zeros.at[jnp.where(segment < 0, num_segments, segment)].max(values, mode="drop")


def _block_features(values: jax.Array, block: int) -> jax.Array:
    """Reshapes `[n, C] -> [n, ceil(C / block), block]`, padded with zeros."""
    features = values.shape[1]
    padded = jnp.pad(values, ((0, 0), (0, round_up(features, block) - features)))
    return padded.reshape(values.shape[0], -1, block)


def _scatter_scales(scale_inv: jax.Array, where: jax.Array, valid: jax.Array, layout: QuantizedLayout) -> jax.Array:
    """Scatters the inverse scales to their positions in the flat array, zeros elsewhere."""
    size = math.prod(layout.scale_shape)
    where = jnp.where(valid[:, None], where, size)
    return jnp.zeros(size, scale_inv.dtype).at[where].set(scale_inv, mode="drop")
