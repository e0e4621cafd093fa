"""Quantization to FP8: `grouped_quantize` and `grouped_dequantize`."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_grouped.core.groups import Groups, stack_sizes
from jax_grouped.core.values import as_array, shown, static_bool
from jax_grouped.core.varying import vary_alike
from jax_grouped.fp8.arrays import GroupedQuantized, ScaledArray
from jax_grouped.fp8.recipes import (
    ScalingMode,
    canonical_epsilon,
    canonical_fp8,
)
from jax_grouped.kernels.activations import Activation
from jax_grouped.kernels.primitive import bind
from jax_grouped.kernels.quantization import DEQUANTIZE, QUANTIZE_PERMUTED, QuantizeSpec, quantize
from jax_grouped.kernels.rows import tokens_of
from jax_grouped.ops import checks
from jax_grouped.ops.checks import GroupSizes


def grouped_quantize(
    x: jax.Array,
    group_sizes: GroupSizes | None,
    mode: ScalingMode,
    *,
    dtype: DTypeLike = jnp.float8_e4m3fn,
    rowwise: bool = True,
    columnwise: bool = False,
    pow2_scales: bool = False,
    amax_epsilon: float = 0.0,
    scale: jax.Array | None = None,
    row_indices: jax.Array | None = None,
    dbias: bool = False,
    activation: Activation | None = None,
    activation_input: jax.Array | None = None,
    swizzled_scales: bool = False,
) -> GroupedQuantized:
    """Quantizes the rows of each group to FP8, in one pass over `x` (two where a group's scale has to be found first).

    The scale of a block is `fp8_max / amax`, computed in float32 and correctly rounded, where `amax` is the block's
    largest finite absolute value. A block of zeros has the scale 1. Values that are not finite become NaN. Subnormal
    float32 numbers count as zero. Data, scales and largest values are the same to the bit on every backend, unless an
    activation is inexact. There is no gradient. Under `jax.vmap` the batch becomes more groups of one call.

    Args:
        x: `[T, C]` tokens, rows of group 0 first, or `[E, K, C]`, a stack of equal groups. bfloat16, float16 or
            float32; the quantized features must be a multiple of 16.
        group_sizes: `[G]` integers, rows per group, read on the device only; None for a stack. Negative ones count
            as 0, and rows past `T` do not exist.
        mode: which elements share a scale.
        dtype: float8_e4m3fn or float8_e5m2.
        rowwise: make the copy that is quantized along the features.
        columnwise: make the copy that is quantized along the rows, and stored transposed.
        pow2_scales: round scales down to powers of two, if they are not given; `MX` always has such scales, rounded so
            that nothing saturates.
        amax_epsilon: blocks whose largest value is below this are scaled as if it were this.
        scale: `float32[G]`, with `TENSOR` only: use these scales (delayed scaling). They are brought into
            [2^-126, 2^126].
        row_indices: `[R]` integers: quantize the rows `x[row_indices]`, which are then never written as such; they are
            what `group_sizes` counts. The indices may repeat, and one outside of `[0, T)` gives a row of zeros. Not
            for a stack, and not with an `activation`.
        dbias: also sum each group's rows, in float32 and before quantization, in a fixed order. `cuda` adds 16 rows in
            sequence, then these sums pairwise within 128 rows, then the sums of 128 rows in sequence.
        activation: quantize `activation(x)`, computed in float32, instead of `x`: `"silu"`, `"gelu"` (with tanh, as
            `jax.nn.gelu`), `"relu"` or `"relu_squared"` (arXiv:2109.08668). For an `x` of `[T, 2 C]`, the gate first:
            `"swiglu"`, `silu(gate) * up` (arXiv:2002.05202), likewise `"geglu"` with `gelu` and `"reglu"` with `relu`;
            or a `SwiGLU` with numbers of its own.
        activation_input: the input of `activation`, in the type of `x`. Then `x` is the gradient of the activation's
            result, and the gradient of its input is quantized and summed into `dbias`.
        swizzled_scales: with `MX`, put the scales into the order that Blackwell's matmul reads.

    Returns:
        The copies with their scales, and `amax` of each group.

    Raises:
        TypeError: an argument has a type that is not supported.
        ValueError: an argument has a shape or a value that does not fit.

    Example:
        x, group_sizes = jnp.arange(16.0 * 32).reshape(16, 32), jnp.array([10, 4])

        quantized = jg.grouped_quantize(x, group_sizes, jg.ScalingMode.TENSOR, columnwise=True)

        assert quantized.rowwise.data.dtype == jnp.float8_e4m3fn
        assert quantized.amax.tolist() == [10 * 32 - 1, 14 * 32 - 1]
    """
    x = as_array("x", x)
    activation_input = None if activation_input is None else as_array("activation_input", activation_input)
    checks.check_quantizable("x", x, group_sizes)
    if not isinstance(mode, ScalingMode):
        raise TypeError(f"mode must be a ScalingMode ({', '.join(map(str, ScalingMode))}), got {shown(mode)}.")
    rowwise, columnwise = static_bool("rowwise", rowwise), static_bool("columnwise", columnwise)
    swizzled_scales = static_bool("swizzled_scales", swizzled_scales)
    if not (rowwise or columnwise):
        raise ValueError("rowwise or columnwise must be true, or nothing is quantized.")
    if swizzled_scales and mode != ScalingMode.MX:
        raise ValueError(f"swizzled_scales is for ScalingMode.MX, got {mode}.")
    if scale is not None and mode != ScalingMode.TENSOR:
        raise ValueError(f"scale is for ScalingMode.TENSOR, the other modes find their own; got {mode}.")
    checks.check_activation(activation, x, activation_input)
    if row_indices is not None:
        if group_sizes is None or activation is not None:
            raise ValueError("row_indices is for x [T, C] with group_sizes and without an activation.")
        row_indices = checks.canonical_row_indices(row_indices, x.shape[0])

    num_groups, stack_rows, x, sizes = _as_tokens(x, group_sizes, row_indices)
    spec = QuantizeSpec(
        mode,
        canonical_fp8("dtype", dtype),
        num_groups=num_groups,
        stack_rows=stack_rows,
        rowwise=rowwise,
        columnwise=columnwise,
        dbias=static_bool("dbias", dbias),
        pow2_scales=static_bool("pow2_scales", pow2_scales),
        amax_epsilon=canonical_epsilon(amax_epsilon),
        swizzled_scales=swizzled_scales,
        activation=activation,
        given=() if activation_input is None else ("activation_input",),
    )
    checks.check_fp8_features("x", x.shape, spec.features(x.shape[1]))
    if activation_input is not None:
        activation_input = activation_input.reshape(x.shape[0], activation_input.shape[-1])
    return quantize_tokens(
        x,
        Groups(sizes, jnp.zeros((1,), jnp.int32)),
        spec,
        row_indices=row_indices,
        scale=None if scale is None else checks.canonical_scale(scale, spec.num_groups),
        activation_input=activation_input,
    )


def _as_tokens(
    x: jax.Array, group_sizes: GroupSizes | None, row_indices: jax.Array | None = None
) -> tuple[int, int | None, jax.Array, jax.Array]:
    """Returns the number of groups, the rows of each if `x` is a stack, `x` as tokens, and `int32` group sizes."""
    if group_sizes is not None:
        capacity = x.shape[0] if row_indices is None else row_indices.shape[0]
        sizes = checks.canonical_sizes_of(group_sizes, capacity)
        return sizes.shape[0], None, x, sizes
    groups, rows, features = x.shape
    return groups, rows, x.reshape(groups * rows, features), stack_sizes(groups, rows)


def quantize_tokens(
    x: jax.Array | ScaledArray,
    groups: Groups,
    spec: QuantizeSpec,
    previous: Sequence[jax.Array] = (),
    **operands: jax.Array | None,
) -> GroupedQuantized:
    """Quantizes `x [T, C]`, or a rowwise stack of `BLOCK_1D` as such, with those of `OPERANDS` that are not None."""
    data, x_scale = _data_and_scale(x)
    spec, results = quantize(data, groups, spec, previous, x_scale=x_scale, **operands)
    return _scaled_arrays(results, data.shape, groups, spec)


def _data_and_scale(x: jax.Array | ScaledArray) -> tuple[jax.Array, jax.Array | None]:
    """Returns the data `[T, C]`, and the scales if there are any."""
    return (x.data.reshape(-1, x.layout.features), x.scale_inv) if isinstance(x, ScaledArray) else (x, None)


def quantize_with_activation(
    x: jax.Array, groups: Groups, spec: QuantizeSpec, **operands: jax.Array | None
) -> tuple[GroupedQuantized, GroupedQuantized, jax.Array]:
    """Returns the result of `quantize_tokens`, the columnwise copy of the activation's result, and inner products."""
    spec, results = quantize(x, groups, spec, (), **operands)
    names = {"activated_data": "column_data", "activated_scale": "column_scale", "activated_amax": "amax"}
    input_shape = (x.shape[0], spec.features(x.shape[1]))
    activated = {to: results[name] for name, to in names.items()}
    return (
        _scaled_arrays(results, x.shape, groups, spec),
        _scaled_arrays(activated, input_shape, groups, spec.forward()),
        jnp.sum(results["inner_products"], axis=1),
    )


def _scaled_arrays(
    results: dict[str, jax.Array], x_shape: tuple[int, ...], groups: Groups, spec: QuantizeSpec
) -> GroupedQuantized:
    """Returns the results with their layouts."""
    sizes = groups.sizes if spec.stack_rows is None else None

    def scaled_array(name: str, *, columnwise: bool) -> ScaledArray | None:
        if f"{name}_data" not in results:
            return None
        layout = spec.layout(x_shape, columnwise=columnwise)
        return ScaledArray(results[f"{name}_data"], results[f"{name}_scale"], sizes, layout)

    return GroupedQuantized(
        rowwise=scaled_array("row", columnwise=False),
        columnwise=scaled_array("column", columnwise=True),
        amax=results["amax"],
        dbias=results.get("dbias"),
    )


def quantize_permuted(
    x: jax.Array | ScaledArray,
    groups: Groups,
    order: jax.Array,
    inverse: jax.Array,
    scale: jax.Array | None = None,
    *,
    spec: QuantizeSpec,
) -> tuple[ScaledArray, jax.Array | None]:
    """Returns the rowwise copy that `quantize_tokens` makes of the rows of a permutation. Reads each token once.

    With given scales, the second result is the largest absolute value of each group, `float32[G]`, else None.

    Args:
        x: `[T, C]` tokens, or a stack, as in `quantize_tokens`.
        groups: the groups of the `R` rows.
        order: `int32[R]`, the pair of each row, as in `jax_grouped.moe.Permutation`.
        inverse: `int32[T, k]`, the row of each pair, likewise.
        scale: `float32[G]`, the given scales, for an `x` of tokens.
        spec: rowwise alone: of `BLOCK_1D`, or of `TENSOR` with given scales.
    """
    data, x_scale = _data_and_scale(x)
    operands = {"x_scale": x_scale, "scale": scale}
    given = {name: operand for name, operand in operands.items() if operand is not None}
    arrays = vary_alike(data, order, inverse, *groups, *given.values())
    if 0 in (*data.shape, *order.shape, spec.num_groups):
        made = quantize_tokens(x, groups, spec, row_indices=tokens_of(order, inverse), scale=scale)
        assert made.rowwise is not None
        return made.rowwise, None if scale is None else made.amax
    spec = dataclasses.replace(spec, given=tuple(given), gathered_rows=order.shape[0])
    rows, scale_inv, *amax = bind(QUANTIZE_PERMUTED, *arrays, spec=spec)
    rowwise = ScaledArray(rows, scale_inv, groups.sizes, spec.layout(data.shape, columnwise=False))
    return rowwise, amax[0] if amax else None


def quantize_stack(
    kernel: jax.Array, spec: QuantizeSpec, previous: Sequence[jax.Array] = (), **operands: jax.Array | None
) -> GroupedQuantized:
    """Quantizes kernels `[E, K, N]`, as `quantize_tokens` does tokens."""
    _, _, x, sizes = _as_tokens(kernel, None)
    return quantize_tokens(x, Groups(sizes, jnp.zeros((1,), jnp.int32)), spec, previous, **operands)


def grouped_dequantize(scaled: ScaledArray, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """Computes `data * scale_inv` in float32.

    Args:
        scaled: either orientation of a quantized array. Not one from the residuals of a call with a `group_offset`: it
            does not hold the offset, and the result would be wrong if it has as many sizes as groups.
        dtype: type of the result: bfloat16, float16 or float32.

    Returns:
        An array of the shape before quantization, `[T, C]` or `[E, K, C]`, with zeros in the rows of no group.

    Raises:
        TypeError: `scaled` is no ScaledArray, or `dtype` is not supported.
        ValueError: an array of `scaled` has a shape that does not fit its layout.

    Example:
        x = 0.3 * jnp.ones((16, 32))
        quantized = jg.grouped_quantize(x, jnp.array([10, 4]), jg.ScalingMode.TENSOR, columnwise=True)

        restored = jg.grouped_dequantize(quantized.columnwise)

        assert jnp.allclose(restored[:14], 0.3) and not restored[14:].any()
    """
    if not isinstance(scaled, ScaledArray):
        raise TypeError(
            f"scaled must be a ScaledArray (rowwise or columnwise of what was quantized), got {type(scaled).__name__}."
        )
    checks.check_dtype("dtype", dtype)
    layout, sizes = scaled.layout, scaled.group_sizes
    checks.check_scaled(scaled)
    if sizes is None:
        sizes = layout.stack_sizes()
    operands = vary_alike(scaled.data, scaled.scale_inv, sizes)
    if 0 in (layout.tokens, layout.features, layout.num_groups):
        return vary_alike(jnp.zeros(scaled.shape, dtype), operands[0])[0]
    out = bind(DEQUANTIZE, *operands, layout=layout, out_dtype=jnp.dtype(dtype))[0]
    return out.reshape(scaled.shape)
