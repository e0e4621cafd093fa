"""Quantization to FP8, and back: of tokens in groups, and of stacks of equal groups."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jax_grouped.core.groups import (
    FP8_ALIGNMENT,
    GroupRows,
    Groups,
    RowPositions,
    block_positions,
    group_rows,
    max_row_blocks,
    round_up,
    row_positions,
)
from jax_grouped.core.values import vary_alike
from jax_grouped.fp8 import numerics
from jax_grouped.fp8.layout import BLOCK, QuantizedLayout, pad_to, spread
from jax_grouped.fp8.recipes import ScalingMode
from jax_grouped.kernels.activations import Activation, activate_grad_xla, activate_xla, activation_attributes, is_gated
from jax_grouped.kernels.bias import bias_gradient_xla
from jax_grouped.kernels.primitive import batched, bind, define, group_table_size, in_whole_batch
from jax_grouped.kernels.rows import row_tokens

#: Values of the enumeration in csrc.
MODES = tuple(ScalingMode)

#: Chunks of 16 rows that a window of the kernels is made for. It has room for 8 more chunks, 48 bytes each, and for 64
#: more bytes: `QuantizeScratchBytes` in csrc.
_CHUNKS_PER_WINDOW = 32
_WINDOW_BYTES = 64 + 40 * 48


#: Operands of the custom call after `x` and the groups, in its order, each only if it is given:
#:
#: - `x_scale`: inverse scales of an `x` of FP8 numbers, as in a rowwise stack of `BLOCK_1D`. Its values are read as
#:   bfloat16 (`BLOCK_1D` without an activation only).
#: - `row_indices [R]`: row `i` is `x[row_indices[i]]`, or zero if there is no such row.
#: - `scale [G]`: delayed scaling (`TENSOR` only).
#: - `activation_input`: `x` is then the gradient of the activation's result.
#: - `row_weights [T]`: factors of the rows of the activation's result, or with an `activation_input` of its gradient.
#: - `activated_scale [G]`: the scale of the activation's result, if both scales are given.
#: - `skip`, followed by the previous results, whose bytes are kept if it is true.
OPERANDS = ("x_scale", "row_indices", "scale", "activation_input", "row_weights", "activated_scale", "skip")


@dataclasses.dataclass(frozen=True)
class QuantizeSpec:
    """The static part of a quantization `(x, group_sizes, group_offset, *operands) -> results`.

    Attributes:
        mode: which elements share a scale.
        dtype: the FP8 type.
        num_groups: `G`, the number of groups to quantize; `group_sizes` may describe more.
        stack_rows: rows of every group of a stack of equal groups, None for ragged tokens.
        given: names of the further operands, in the order of `OPERANDS`.
        gathered_rows: `R`, the number of rows, if `row_indices` are given.
        rowwise, columnwise: the orientations to make.
        dbias: whether to sum each group's rows.
        finds_amax: whether to find the largest values, which otherwise may be anything; current scaling needs them.
        pow2_scales: whether scales are rounded down to powers of two.
        amax_epsilon: blocks whose largest value is below this are scaled as if it were this.
        activation: function applied to `x` before quantization, in float32. With an `activation_input`, the gradient of
            the activation's input is quantized instead.
        inner_products: whether to make, with an `activation_input`, the inner products of each row of the activation's
            result with `x`, before weights, one per 128 features of `x`; 0 for rows of no group.
        activated: whether to make, with an `activation_input`, also the columnwise copy of the activation's result,
            weighted, as float8_e4m3fn, and its largest values: what `forward` describes.
    """

    mode: ScalingMode
    dtype: DTypeLike
    num_groups: int
    stack_rows: int | None = None
    given: tuple[str, ...] = ()
    gathered_rows: int | None = None
    rowwise: bool = True
    columnwise: bool = False
    dbias: bool = False
    finds_amax: bool = True
    pow2_scales: bool = False
    amax_epsilon: float = 0.0
    activation: Activation | None = None
    inner_products: bool = False
    activated: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", jnp.dtype(self.dtype))

    def forward(self) -> "QuantizeSpec":
        """Returns the spec of what `activated` adds: a columnwise quantization of `activation_input`'s activation."""
        return dataclasses.replace(
            self,
            dtype=jnp.float8_e4m3fn,
            rowwise=False,
            columnwise=True,
            dbias=False,
            inner_products=False,
            activated=False,
            given=tuple([name for name in self.given if name in ("scale", "row_weights")]),
        )

    def named(self, operands: Sequence[Any]) -> dict[str, Any]:
        """Returns the operands after the group offset by name, beside `skip` the previous results as `previous`."""
        by_name = dict(zip(self.given, operands, strict=False))
        if "skip" in self.given:
            by_name["previous"] = tuple(operands[len(self.given) :])
        return by_name

    def features(self, x_features: int) -> int:
        """Returns the number of features of the quantized array, from that of `x`."""
        if not is_gated(self.activation):
            return x_features
        return 2 * x_features if "activation_input" in self.given else x_features // 2

    def layout(self, x_shape: tuple[int, ...], *, columnwise: bool) -> QuantizedLayout:
        """Returns the layout of one orientation's data and scales, for an `x` of this shape, `[T, C]`."""
        return QuantizedLayout(
            self.mode,
            columnwise,
            tokens=x_shape[0] if self.gathered_rows is None else self.gathered_rows,
            features=self.features(x_shape[1]),
            num_groups=self.num_groups,
            stack_rows=self.stack_rows,
        )

    def results(self, x_shape: tuple[int, ...]) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns shapes and types of the results, in the order that the primitive and the custom call have them."""
        results = {}
        scale_dtype = jnp.float8_e8m0fnu if self.mode == ScalingMode.MX else jnp.float32
        for name, columnwise, wanted in (("row", False, self.rowwise), ("column", True, self.columnwise)):
            if wanted:
                layout = self.layout(x_shape, columnwise=columnwise)
                results[f"{name}_data"] = jax.ShapeDtypeStruct(layout.data_shape, self.dtype)
                results[f"{name}_scale"] = jax.ShapeDtypeStruct(layout.scale_shape, scale_dtype)
        results["amax"] = jax.ShapeDtypeStruct((self.num_groups,), jnp.float32)
        if self.dbias:
            results["dbias"] = jax.ShapeDtypeStruct((self.num_groups, self.features(x_shape[1])), jnp.float32)
        if self.inner_products:
            results["inner_products"] = jax.ShapeDtypeStruct((x_shape[0], -(-x_shape[1] // BLOCK)), jnp.float32)
        if self.activated:
            activated = self.forward().results((x_shape[0], self.features(x_shape[1])))
            results |= {
                "activated_data": activated["column_data"],
                "activated_scale": activated["column_scale"],
                "activated_amax": activated["amax"],
            }
        return results

    def permuted_results(self, x_shape: tuple[int, ...]) -> list[jax.ShapeDtypeStruct]:
        """Returns shapes and types of the results of `quantize_permuted`: data, scales, and amax for given scales."""
        results = self.results(x_shape)
        amax = [results["amax"]] if "scale" in self.given else []
        return [results["row_data"], results["row_scale"], *amax]


def quantize(
    x: jax.Array,
    groups: Groups,
    spec: QuantizeSpec,
    previous: Sequence[jax.Array] = (),
    **operands: jax.Array | None,
) -> tuple[QuantizeSpec, dict[str, jax.Array]]:
    """Quantizes `x [T, C]` with those of `OPERANDS` that are not None. The spec that is returned names them."""
    given = {name: operand for name in OPERANDS if (operand := operands.pop(name, None)) is not None}
    assert not operands
    rows = given["row_indices"].shape[0] if "row_indices" in given else None
    spec = dataclasses.replace(spec, given=tuple(given), gathered_rows=rows)
    if rows is not None and x.shape[0] == 0:
        x = jnp.zeros((1, x.shape[1]), x.dtype)  # No index finds this row either, or it is as good as none.
    arrays = vary_alike(x, *groups, *given.values(), *previous)
    if 0 in (x.shape[0] if rows is None else rows, x.shape[1], spec.num_groups):
        made = [vary_alike(result, arrays[0])[0] for result in _quantize_nothing(x, given, spec)]
    else:
        made = bind(QUANTIZE, *arrays, spec=spec)
    return spec, dict(zip(spec.results(x.shape), made, strict=True))


def quantize_xla(
    x: jax.Array, group_sizes: jax.Array, group_offset: jax.Array, *more: jax.Array, spec: QuantizeSpec
) -> tuple[jax.Array, ...]:
    """Returns the results that `spec` asks for, in its order."""
    # Without the barrier, XLA for GPUs leaves out conversions to 16 bits before this, and unrounded numbers are read.
    x, *more = jax.lax.optimization_barrier((x, *more))
    operands = spec.named(more)
    if "x_scale" in operands:
        x = _values(x, operands["x_scale"])
    if "row_indices" in operands:
        x = x.at[operands["row_indices"]].get(mode="fill", fill_value=0, wrap_negative_indices=False)
    activation_input, row_weights = operands.get("activation_input"), operands.get("row_weights")

    def quantized() -> tuple[jax.Array, ...]:
        values = _activate(x.astype(jnp.float32), activation_input, row_weights, spec)
        made = _quantize(values, group_sizes, group_offset, operands.get("scale"), x.shape, spec)
        if spec.inner_products:
            assert activation_input is not None
            assert spec.activation is not None
            rows = row_positions(group_rows(group_sizes, group_offset, spec.num_groups, x.shape[0]), x.shape[0])
            products = activate_xla(activation_input.astype(jnp.float32), spec.activation) * x.astype(jnp.float32)
            sums = jnp.sum(_block_features(products, BLOCK), axis=2)
            made["inner_products"] = jnp.where(rows.valid[:, None], sums, 0)
        if spec.activated:
            assert activation_input is not None
            forward = spec.forward()
            activated = _activate(activation_input.astype(jnp.float32), None, row_weights, forward)
            copy = _quantize(
                activated, group_sizes, group_offset, operands.get("activated_scale"), activation_input.shape, forward
            )
            made |= {
                "activated_data": copy["column_data"],
                "activated_scale": copy["column_scale"],
                "activated_amax": copy["amax"],
            }
        return tuple(made[name] for name in spec.results(x.shape))

    if "skip" in operands:
        return jax.lax.cond(operands["skip"][0], lambda: operands["previous"], quantized)
    return quantized()


def _values(x: jax.Array, scale_inv: jax.Array) -> jax.Array:
    """Returns the values of a rowwise stack of `BLOCK_1D`, `[T, C]`."""
    (tokens, features), groups = x.shape, scale_inv.shape[0]
    rows = tokens // groups
    layout = QuantizedLayout(
        ScalingMode.BLOCK_1D, False, tokens=tokens, features=features, num_groups=groups, stack_rows=rows
    )
    values = _dequantize_stack(x.reshape(groups, rows, features), scale_inv, layout)
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
    copies: _Stack | _Tokens
    if spec.stack_rows is None:
        copies = _Tokens(values, group_rows(group_sizes, group_offset, spec.num_groups, values.shape[0]))
    else:
        copies = _Stack(values.reshape(spec.num_groups, spec.stack_rows, -1))
    amax = copies.amax()
    scaling = _Scaling(spec, amax, scale)

    wanted, results = spec.results(x_shape), {"amax": amax}
    for name, columnwise in (("row", False), ("column", True)):
        if f"{name}_data" in wanted:
            copy = copies.copy(scaling, spec.layout(x_shape, columnwise=columnwise))
            for key, array in zip((f"{name}_data", f"{name}_scale"), copy, strict=True):
                if array.dtype == jnp.uint8:
                    array = jax.lax.bitcast_convert_type(array, wanted[key].dtype)
                results[key] = array.reshape(wanted[key].shape)
    if spec.dbias:
        results["dbias"] = bias_gradient_xla(
            unflushed, group_sizes, group_offset, num_groups=spec.num_groups, out_dtype=jnp.float32
        )
    return results


def _quantize_nothing(x: jax.Array, operands: dict[str, jax.Array], spec: QuantizeSpec) -> tuple[jax.Array, ...]:
    """Returns the results for an `x` without rows, features or groups."""
    results = {name: jnp.zeros(result.shape, result.dtype) for name, result in spec.results(x.shape).items()}
    scaling = _Scaling(spec, results["amax"], operands.get("scale"))
    if scaling.group_scales:
        results |= {name: scaling.group_scales[1] for name in results if name.endswith("_scale")}
    if spec.activated:
        activated = _Scaling(spec.forward(), results["amax"], operands.get("activated_scale"))
        if activated.group_scales:
            results["activated_scale"] = activated.group_scales[1]
    return tuple(results.values())


def _activate(
    x: jax.Array, activation_input: jax.Array | None, row_weights: jax.Array | None, spec: QuantizeSpec
) -> jax.Array:
    """Applies the activation, or its derivative, in float32; the result is what gets quantized."""
    if spec.activation is None:
        return x
    if activation_input is None:
        activated = activate_xla(x, spec.activation)
        return activated if row_weights is None else activated * row_weights[:, None]
    if row_weights is not None:
        x = x * row_weights[:, None]
    activation_input = numerics.flush(activation_input.astype(jnp.float32))
    return activate_grad_xla(activation_input, x, spec.activation)


class _Scaling:
    """Scale computation: one scale per block, from the block's largest value, or one scale per group.

    Attributes:
        group_scales: scales and inverse scales of whole groups, `[G]`, if the mode has one scale per group; else None.
    """

    def __init__(self, spec: QuantizeSpec, amax: jax.Array, given: jax.Array | None):
        self.spec = spec
        self.group_scales: tuple[jax.Array, jax.Array] | None = None
        if spec.mode == ScalingMode.TENSOR:
            scale = self._from_amax(amax) if given is None else numerics.clamp_scale(given)
            self.group_scales = scale, numerics.reciprocal(scale)

    def _from_amax(self, amax: jax.Array) -> jax.Array:
        return numerics.scale_from_amax(amax, self.spec.dtype, self.spec.amax_epsilon, pow2=self.spec.pow2_scales)

    def block_scales(self, amax: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the scales of blocks with these largest values, and the stored inverse scales (`MX`: exponents)."""
        if self.spec.mode == ScalingMode.MX:
            exponent = numerics.mx_exponent(amax, self.spec.dtype, self.spec.amax_epsilon)
            return numerics.mx_scale(exponent), exponent
        scale = self._from_amax(amax)
        return scale, numerics.reciprocal(scale)


class _Tokens:
    """Quantizer of ragged tokens `[T, C]`."""

    def __init__(self, values: jax.Array, rows: GroupRows):
        self._rows = rows
        self._positions = row_positions(rows, values.shape[0])
        self._valid = self._positions.valid[:, None]
        self._values = jnp.where(self._valid, values, 0)
        self._num_groups = rows.sizes.shape[0]

    def amax(self) -> jax.Array:
        """Returns the largest absolute value of each group."""
        row_amax = jnp.max(numerics.magnitude(self._values), axis=1)
        return _maximum(row_amax, self._positions.group, self._num_groups)

    def copy(self, scaling: _Scaling, layout: QuantizedLayout) -> tuple[jax.Array, jax.Array]:
        """Returns the bytes and the inverse scales of one orientation."""
        chunks = (
            block_positions(self._rows, FP8_ALIGNMENT, layout.row_blocks(FP8_ALIGNMENT))
            if layout.columnwise
            else self._positions
        )
        scale, scale_inv = self._scales(scaling, layout, chunks)
        data = numerics.cast(self._values, scale, scaling.spec.dtype)
        if not layout.columnwise:
            return jnp.where(self._valid, data, jnp.uint8(0)), scale_inv
        row, feature, exists = layout.column_source(chunks)
        return jnp.where(exists, _take(data, row, feature), jnp.uint8(0)), scale_inv

    def _scales(self, scaling: _Scaling, layout: QuantizedLayout, chunks: RowPositions) -> tuple[jax.Array, jax.Array]:
        """Returns the scales of every row, and the inverse scales in their stored layout."""
        if scaling.group_scales:
            scale, scale_inv = scaling.group_scales
            return _take(scale, self._positions.group)[:, None], scale_inv
        rows, features = layout.block_shape
        amax = _block_features(numerics.magnitude(self._values), features).max(axis=2)
        if rows == 1:
            scale, scale_inv = scaling.block_scales(amax)
        else:
            block = self._positions.block(rows)
            amax = _maximum(amax, jnp.where(self._positions.valid, block, -1), layout.row_blocks(rows))
            scale, scale_inv = scaling.block_scales(amax)
            scale = _take(scale, block)
        scale = spread(scale, features, layout.features, axis=1)
        (size,) = layout.scale_shape
        if layout.scales_in_block_order:
            return scale, pad_to(scale_inv, (scale_inv.shape[0], size // scale_inv.shape[0]))
        if rows > 1:
            scale_inv = _take(scale_inv, chunks.block(rows))
        where = layout.column_scales(chunks) if layout.columnwise else layout.row_scales(chunks)
        where = jnp.where(chunks.valid[:, None], where, size)
        return scale, jnp.zeros(size, scale_inv.dtype).at[where].set(scale_inv, mode="drop")


class _Stack:
    """Quantizer of a stack `[E, K, C]`."""

    def __init__(self, values: jax.Array):
        self._values = values

    def amax(self) -> jax.Array:
        """Returns the largest absolute value of each group."""
        return jnp.max(numerics.magnitude(self._values), axis=(1, 2))

    def copy(self, scaling: _Scaling, layout: QuantizedLayout) -> tuple[jax.Array, jax.Array]:
        """Returns the bytes and the inverse scales of one orientation."""
        if scaling.group_scales:
            scale, scale_inv = scaling.group_scales
            scale = scale[:, None, None]
        else:
            scale, scale_inv = scaling.block_scales(self._block_amax(layout))
            scale, scale_inv = layout.spread_blocks(scale), layout.lay_out_scales(scale_inv)
        data = numerics.cast(self._values, scale, scaling.spec.dtype)
        return pad_to(data.swapaxes(1, 2), layout.data_shape) if layout.columnwise else data, scale_inv

    def _block_amax(self, layout: QuantizedLayout) -> jax.Array:
        rows, features = layout.block_shape
        groups, height, width = self._values.shape
        padded = pad_to(numerics.magnitude(self._values), (groups, round_up(height, rows), round_up(width, features)))
        blocks = padded.reshape(groups, padded.shape[1] // rows, rows, padded.shape[2] // features, features)
        return blocks.max(axis=(2, 4))


def quantize_permuted_xla(
    x: jax.Array,
    order: jax.Array,
    inverse: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array,
    *more: jax.Array,
    spec: QuantizeSpec,
) -> tuple[jax.Array, ...]:
    """Returns rowwise data and scales of gathered rows, each that of its pair's token; amax too if scales are given."""
    operands = spec.named(more) | {"row_indices": row_tokens(order, inverse)}
    given = tuple(name for name in OPERANDS if name in operands)
    spec = dataclasses.replace(spec, given=given)
    results = quantize_xla(x, group_sizes, group_offset, *(operands[name] for name in given), spec=spec)
    return results[: 3 if "scale" in given else 2]


def dequantize_xla(
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
        return _dequantize_stack(data, scale_inv, layout).reshape(layout.tokens, layout.features).astype(out_dtype)
    offset = jnp.zeros((1,), jnp.int32) if group_offset is None else group_offset
    positions = row_positions(group_rows(group_sizes, offset, layout.num_groups, layout.tokens), layout.tokens)
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


def _dequantize_stack(data: jax.Array, scale_inv: jax.Array, layout: QuantizedLayout) -> jax.Array:
    """Computes `data * scale_inv` of a stack, `[E, K, C]`, in float32."""
    if layout.columnwise:
        data = data[:, :, : layout.stack_rows].swapaxes(1, 2)
    if layout.mode == ScalingMode.TENSOR:
        scale_inv = scale_inv[:, None, None]
    else:
        scale_inv = layout.spread_blocks(numerics.stored_scale(layout.read_scales(scale_inv)))
    return numerics.flush(data.astype(jnp.float32) * scale_inv)


def _take(values: jax.Array, *index: jax.Array) -> jax.Array:
    """Returns `values[index]` with indices clipped to the array."""
    return values.at[index].get(mode="clip", wrap_negative_indices=False)


def _maximum(values: jax.Array, segment: jax.Array, num_segments: int) -> jax.Array:
    """Returns the maximum of each segment of nonnegative values along the first axis; drops segment -1."""
    zeros = jnp.zeros((num_segments, *values.shape[1:]), values.dtype)
    return zeros.at[jnp.where(segment < 0, num_segments, segment)].max(values, mode="drop")


def _block_features(values: jax.Array, block: int) -> jax.Array:
    """Reshapes `[n, C] -> [n, ceil(C / block), block]`, padded with zeros."""
    rows, features = values.shape
    return pad_to(values, (rows, round_up(features, block))).reshape(rows, -1, block)


def quantize_cuda(
    x: jax.Array, group_sizes: jax.Array, group_offset: jax.Array, *more: jax.Array, spec: QuantizeSpec, batch: int
) -> tuple[jax.Array, ...]:
    """Returns the results that `spec` asks for, in its order. Makes one pass over `x`, two for current scaling."""
    shape = (x.shape[0] // batch, x.shape[1])
    layout = spec.layout(shape, columnwise=False)
    scratch = jax.ShapeDtypeStruct((scratch_bytes(layout.tokens, spec.num_groups),), jnp.uint8)
    partial_sums = jax.ShapeDtypeStruct((layout.row_blocks(BLOCK) if spec.dbias else 0, layout.features), jnp.float32)
    results = list(spec.results(shape).values())
    if "row_indices" in spec.given and batch > 1:
        i = spec.given.index("row_indices")
        more = (*more[:i], in_whole_batch(more[i], shape[0], batch), *more[i + 1 :])
    operands = (x, group_sizes, group_offset, *more)
    # The previous results are the last operands and alias the results, so their bytes stay if `skip` is true.
    first = len(operands) - len(results)
    aliases = {first + i: i for i in range(len(results))} if "skip" in spec.given else None
    outputs = jax.ffi.ffi_call(
        "jax_grouped_quantize",
        [batched(result, batch) for result in (*results, scratch, partial_sums)],
        input_output_aliases=aliases,
    )(*operands, **quantize_attributes(spec))
    return tuple(outputs[: len(results)])


def quantize_attributes(spec: QuantizeSpec) -> dict[str, Any]:
    """Returns the attributes of the custom call."""
    return dict(
        mode=np.int32(MODES.index(spec.mode)),
        stack_rows=np.int64(spec.stack_rows or 0),
        rowwise=spec.rowwise,
        columnwise=spec.columnwise,
        dbias=spec.dbias,
        finds_amax=spec.finds_amax,
        pow2_scales=spec.pow2_scales,
        amax_epsilon=np.float32(spec.amax_epsilon),
        given_scale="scale" in spec.given,
        gathered="row_indices" in spec.given,
        **activation_attributes(spec.activation),
        backward="activation_input" in spec.given,
        weighted="row_weights" in spec.given,
        inner_products=spec.inner_products,
        activated=spec.activated,
        cached="skip" in spec.given,
    )


def quantize_permuted_cuda(
    x: jax.Array, order: jax.Array, inverse: jax.Array, *operands: jax.Array, spec: QuantizeSpec, batch: int
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
        *operands,
        num_groups=np.int64(spec.num_groups),
        given_scale="scale" in spec.given,
        pow2_scales=spec.pow2_scales,
        amax_epsilon=np.float32(spec.amax_epsilon),
    )
    return data, scale, *amax


def dequantize_cuda(
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
    )[0]


def scratch_bytes(capacity: int, num_groups: int) -> int:
    """Returns the bytes of a quantization's windows and group table on the device (`QuantizeScratchBytes` in C++)."""
    chunks = max_row_blocks(capacity, num_groups, FP8_ALIGNMENT)
    windows = -(-chunks // _CHUNKS_PER_WINDOW)
    return windows * _WINDOW_BYTES + 4 * group_table_size(num_groups)


def _drop_unread_results(read: Sequence[bool], *inputs_and_equation: Any) -> tuple[list[bool], Any]:
    """Drops orientations, sums and copies of activations' results that no product reads.

    Differentiation rules ask for everything that any gradient needs, and under `jax.checkpoint` both passes quantize.
    """
    equation = inputs_and_equation[-1]  # Since JAX 0.12, the flags of live inputs come before it.
    spec, shape = equation.params["spec"], equation.invars[0].aval.shape
    if not any(read):
        return [False] * len(equation.invars), None
    if "skip" in spec.given:  # Its previous results are operands.
        return [True] * len(equation.invars), equation
    results = dict(zip(spec.results(shape), equation.outvars, strict=True))
    names = [name for name, is_read in zip(results, read, strict=True) if is_read]
    positions = {name: i for i, name in enumerate(("x", "group_sizes", "group_offset", *spec.given))}
    sides = {name.partition("_")[0] for name in names}
    # Scales of whole groups come from the largest values of this call or of earlier ones.
    spec = dataclasses.replace(
        spec, finds_amax=spec.mode == ScalingMode.TENSOR or "amax" in names or "activated_amax" in names
    )
    if sides == {"activated"}:
        # The forward form of what `activated` adds reads no gradient.
        positions["x"] = positions["activation_input"]
        if "scale" in spec.given:
            positions["scale"] = positions["activated_scale"]
        spec = spec.forward()
        made = [results[f"activated_{name}"] for name in ("data", "scale", "amax")]
    else:
        rowwise, columnwise = "row" in sides, "column" in sides
        if not rowwise and not columnwise:
            rowwise, columnwise = spec.rowwise, not spec.rowwise
        sums = {name: name in names for name in ("dbias", "inner_products")}
        activated = "activated" in sides
        given = tuple([name for name in spec.given if name != "activated_scale" or activated])
        spec = dataclasses.replace(
            spec, rowwise=rowwise, columnwise=columnwise, activated=activated, given=given, **sums
        )
        made = [results[name] for name in spec.results(shape)]
    kept = [positions[name] for name in ("x", "group_sizes", "group_offset", *spec.given)]
    params = {**equation.params, "spec": spec, "batches": tuple([equation.params["batches"][i] for i in kept])}
    reduced = equation.replace(invars=[equation.invars[i] for i in kept], outvars=made, params=params)
    return [i in kept for i in range(len(equation.invars))], reduced


#: `(x, group_sizes, group_offset, *operands) -> results` with a `QuantizeSpec`, which names operands and results.
QUANTIZE = define(
    "quantize",
    lambda x, *_, spec: list(spec.results(x.shape).values()),
    quantize_xla,
    quantize_cuda,
    dce_rule=_drop_unread_results,
)
#: `(x, order, inverse, group_sizes, group_offset, *operands) -> [row_data, row_scale, *amax]` with a `QuantizeSpec`.
QUANTIZE_PERMUTED = define(
    "quantize_permuted",
    lambda x, *_, spec: spec.permuted_results(x.shape),
    quantize_permuted_xla,
    quantize_permuted_cuda,
)
#: `(data, scale_inv, group_sizes) -> [x]` with `layout` and `out_dtype`.
DEQUANTIZE = define(
    "dequantize",
    lambda *_, layout, out_dtype: jax.ShapeDtypeStruct((layout.tokens, layout.features), out_dtype),
    dequantize_xla,
    dequantize_cuda,
)
