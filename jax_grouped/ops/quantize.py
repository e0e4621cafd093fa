"""Quantization to FP8: `grouped_quantize`, `grouped_dequantize`, and `quantize_kernel`, which microbatches share."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from jax_grouped.core.groups import Groups, stack_sizes
from jax_grouped.core.values import as_array, as_int32, canonical_dtype, shown, static_bool, vary_alike
from jax_grouped.fp8.arrays import GroupedQuantized, KernelCache, ScaledArray
from jax_grouped.fp8.recipes import FP8_MAX, DelayedScaling, Recipe, ScalingMode, canonical_epsilon, recipe_error
from jax_grouped.kernels.activations import Activation
from jax_grouped.kernels.partition import Operation, Result, Splits, apply
from jax_grouped.kernels.primitive import bind
from jax_grouped.kernels.product import Operand
from jax_grouped.kernels.quantization import DEQUANTIZE, QUANTIZE_PERMUTED, QuantizeSpec, quantize
from jax_grouped.kernels.rows import row_tokens
from jax_grouped.ops import inputs
from jax_grouped.ops.inputs import GroupSizes, check_cache, kernel_spec


class Oriented(NamedTuple):
    """An operand as products read it, None if it is not made; with a recipe quantized, or as `RowsToQuantize`."""

    rowwise: Any
    columnwise: Any
    amax: jax.Array | None = None
    dbias: jax.Array | None = None


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
            `"swiglu"`, `silu(gate) * up` (arXiv:2002.05202), `"geglu"` with `gelu` or `"reglu"` with `relu`;
            or a `SwiGLU` with numbers of its own.
        activation_input: the input of `activation`, in the type of `x`. Then `x` is the gradient of the activation's
            result, and the gradient of its input is quantized and summed into `dbias`.

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
    canonical_dtype("x's type", x.dtype)
    if group_sizes is None and x.ndim != 3:
        raise ValueError(f"x must have shape [E, K, C] where group_sizes is None, got {x.shape}.")
    if group_sizes is not None and x.ndim != 2:
        raise ValueError(f"x must have shape [T, C] where group_sizes is given, got {x.shape}.")
    if not isinstance(mode, ScalingMode):
        raise TypeError(f"mode must be a ScalingMode ({', '.join(map(str, ScalingMode))}), got {shown(mode)}.")
    rowwise, columnwise = static_bool("rowwise", rowwise), static_bool("columnwise", columnwise)
    if not (rowwise or columnwise):
        raise ValueError("rowwise or columnwise must be true, or nothing is quantized.")
    if scale is not None and mode != ScalingMode.TENSOR:
        raise ValueError(f"scale is for ScalingMode.TENSOR, the other modes find their own; got {mode}.")
    inputs.check_activation(activation, x, activation_input)
    if row_indices is not None:
        if group_sizes is None or activation is not None:
            raise ValueError("row_indices is for x [T, C] with group_sizes and without an activation.")
        row_indices = as_int32("row_indices", row_indices)
        if row_indices.ndim != 1:
            raise ValueError(f"row_indices must have shape [R], got {row_indices.shape}.")

    if group_sizes is None:
        num_groups, stack_rows, features = x.shape
        x, sizes = x.reshape(num_groups * stack_rows, features), stack_sizes(num_groups, stack_rows)
    else:
        capacity = x.shape[0] if row_indices is None else row_indices.shape[0]
        sizes, stack_rows = inputs.canonical_sizes(group_sizes, capacity), None
        num_groups = sizes.shape[0]
    spec = QuantizeSpec(
        mode,
        canonical_dtype("dtype", dtype, FP8_MAX),
        num_groups=num_groups,
        stack_rows=stack_rows,
        rowwise=rowwise,
        columnwise=columnwise,
        dbias=static_bool("dbias", dbias),
        pow2_scales=static_bool("pow2_scales", pow2_scales),
        amax_epsilon=canonical_epsilon(amax_epsilon),
        activation=activation,
        given=() if activation_input is None else ("activation_input",),
    )
    inputs.check_fp8_features("x", x.shape, spec.features(x.shape[1]))
    if activation_input is not None:
        activation_input = activation_input.reshape(x.shape[0], activation_input.shape[-1])
    quantized = quantize_tokens(
        x,
        Groups(sizes, jnp.zeros((1,), jnp.int32)),
        spec,
        row_indices=row_indices,
        scale=None if scale is None else inputs.canonical_scale(scale, spec.num_groups),
        activation_input=activation_input,
    )
    assert quantized.amax is not None
    return GroupedQuantized(quantized.rowwise, quantized.columnwise, quantized.amax, quantized.dbias)


def quantize_tokens(
    x: jax.Array | ScaledArray,
    groups: Groups,
    spec: QuantizeSpec,
    previous: Sequence[jax.Array] = (),
    **operands: jax.Array | None,
) -> Oriented:
    """Quantizes `x [T, C]`, or a rowwise stack of `BLOCK_1D` as such, with those of `OPERANDS` that are not None."""
    data, x_scale = rows_and_scales(x)
    spec, results = quantize(data, groups, spec, previous, x_scale=x_scale, **operands)
    return _scaled_arrays(results, data.shape, groups, spec)


def rows_and_scales(x: jax.Array | ScaledArray) -> tuple[jax.Array, jax.Array | None]:
    """Returns `[T, C]` and, of a stack of quantized blocks, their scales."""
    return (x.data.reshape(-1, x.layout.features), x.scale_inv) if isinstance(x, ScaledArray) else (x, None)


def quantize_with_activation(
    x: jax.Array, groups: Groups, spec: QuantizeSpec, **operands: jax.Array | None
) -> tuple[Oriented, Oriented, jax.Array]:
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
) -> Oriented:
    """Returns the results with their layouts."""
    sizes = groups.sizes if spec.stack_rows is None else None
    row, column = [
        ScaledArray(
            results[f"{side}_data"],
            results[f"{side}_scale"],
            sizes,
            spec.layout(x_shape, columnwise=side == "column"),
        )
        if f"{side}_data" in results
        else None
        for side in ("row", "column")
    ]
    return Oriented(row, column, results["amax"], results.get("dbias"))


def quantize_permuted(
    x: jax.Array | ScaledArray,
    groups: Groups,
    order: jax.Array,
    inverse: jax.Array,
    scale: jax.Array | None = None,
    *,
    spec: QuantizeSpec,
) -> tuple[ScaledArray, jax.Array | None]:
    """Returns the rowwise copy of the rows of a permutation, reading each token once, and amax if scales are given."""
    data, x_scale = rows_and_scales(x)
    operands = {"x_scale": x_scale, "scale": scale}
    given = {name: operand for name, operand in operands.items() if operand is not None}
    arrays = vary_alike(data, order, inverse, *groups, *given.values())
    if 0 in (*data.shape, *order.shape, spec.num_groups):
        made = quantize_tokens(x, groups, spec, row_indices=row_tokens(order, inverse), scale=scale)
        return made.rowwise, None if scale is None else made.amax
    spec = dataclasses.replace(spec, given=tuple(given), gathered_rows=order.shape[0])
    rows, scale_inv, *amax = bind(QUANTIZE_PERMUTED, *arrays, spec=spec)
    rowwise = ScaledArray(rows, scale_inv, groups.sizes, spec.layout(data.shape, columnwise=False))
    return rowwise, amax[0] if amax else None


def quantize_stack(
    kernel: jax.Array, spec: QuantizeSpec, previous: Sequence[jax.Array] = (), **operands: jax.Array | None
) -> Oriented:
    """Quantizes kernels `[E, K, N]`, as `quantize_tokens` does tokens."""
    groups, rows, features = kernel.shape
    stack = Groups(stack_sizes(groups, rows), jnp.zeros((1,), jnp.int32))
    return quantize_tokens(kernel.reshape(groups * rows, features), stack, spec, previous, **operands)


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
    dtype = canonical_dtype("dtype", dtype)
    layout, sizes = scaled.layout, scaled.group_sizes
    inputs.check_scaled(scaled)
    if sizes is None:
        sizes = layout.stack_sizes()
    operands = vary_alike(scaled.data, scaled.scale_inv, sizes)
    if 0 in (layout.tokens, layout.features, layout.num_groups):
        return vary_alike(jnp.zeros(scaled.shape, dtype), operands[0])[0]
    out = bind(DEQUANTIZE, *operands, layout=layout, out_dtype=jnp.dtype(dtype))[0]
    return out.reshape(scaled.shape)


def quantize_kernel(
    kernel: jax.Array,
    recipe: Recipe,
    *,
    previous: KernelCache | None = None,
    skip: ArrayLike | None = None,
    scale: jax.Array | None = None,
    for_gradients: bool = True,
) -> KernelCache:
    """Quantizes a stack of kernels in both orientations, as fprop and dgrad read them.

    Microbatches share the result. With `previous` and a `skip` on the device, a step that is traced or captured once
    quantizes again only when the weights have changed. The result has no gradient. `grouped_dense` takes both the
    kernel and the cache, and gives `kernel` its gradient.

    Args:
        kernel: `[E, K, N]`, bfloat16, float16 or float32; `K` and `N` multiples of 16.
        recipe: how to scale, and to which type (`fwd_dtype`).
        previous: the result of an earlier call with the same shapes and recipe. Inside `jit` its memory is reused.
        skip: boolean scalar on the device: if true, `kernel` is not read, and the result is `previous`.
        scale: `float32[E]`, for `DelayedScaling` only, which needs it: `fp8_state.scales(recipe).kernel`.
        for_gradients: whether to make the orientation that the gradient of the tokens needs. Without it, the result
            takes half the memory of kernels in bfloat16. It serves inference, where `grouped_dense` needs no `kernel`.

    Returns:
        Both orientations and the largest values; `rowwise` is None without `for_gradients`.

    Raises:
        TypeError: an argument has a type that is not supported.
        ValueError: an argument has a shape that does not fit, the recipe needs a `scale` that is missing or takes none,
            of `previous` and `skip` only one is given, or `previous` is of another kernel or recipe.

    Example:
        kernel, group_sizes = jnp.ones((2, 32, 16)), jnp.array([10, 4])
        recipe = jg.Float8BlockScaling()

        cache = jg.quantize_kernel(kernel, recipe)
        y = jg.grouped_dense(jnp.ones((16, 32)), kernel, group_sizes, recipe=recipe, kernel_cache=cache)

        assert jnp.allclose(y[:14], 32, rtol=1e-3)
    """
    kernel = jax.lax.stop_gradient(as_array("kernel", kernel))
    canonical_dtype("kernel's type", kernel.dtype)
    if kernel.ndim != 3:
        raise ValueError(f"kernel must have shape [E, K, N], got {kernel.shape}.")
    if not isinstance(recipe, Recipe):
        raise recipe_error(recipe, optional=False)
    if (previous is None) != (skip is None):
        raise ValueError("previous and skip must be given together: skip says whether to return previous.")
    if (scale is not None) != isinstance(recipe, DelayedScaling):
        needs = "needs" if isinstance(recipe, DelayedScaling) else "takes no"
        raise ValueError(f"{type(recipe).__name__} {needs} scale, one per kernel.")
    inputs.check_fp8_kernel("kernel", kernel.shape)

    rowwise = static_bool("for_gradients", for_gradients)
    spec = dataclasses.replace(kernel_spec(kernel.shape, recipe), rowwise=rowwise)
    operands, kept = {}, []
    if scale is not None:
        operands["scale"] = inputs.canonical_scale(scale, spec.num_groups)
    if previous is not None:
        check_cache("previous", previous, "the result", kernel.shape, recipe)
        if (previous.rowwise is not None) != rowwise:
            raise ValueError("previous must have been made with the same for_gradients.")
        operands["skip"], kept = inputs.canonical_flag("skip", skip), _arrays(previous)
    spec = dataclasses.replace(spec, given=tuple(operands))
    orientations = cache_dimensions(spec)[0 if rowwise else 1 :]
    dimensions = [*itertools.chain(*orientations), "e"]
    operation = Operation(
        _quantize_part,
        spec,
        operands=("e k n", *["e" if name == "scale" else "f" for name in operands], *dimensions[: len(kept)]),
        results=(
            *itertools.chain(*[(Result(data), Result(scale, kept_whole=True)) for data, scale in orientations]),
            Result("e"),
        ),
        splittable=("e",),
    )
    *arrays, amax = apply(operation, kernel, *operands.values(), *kept)
    tokens = kernel.shape[0] * kernel.shape[1], kernel.shape[2]
    *row_arrays, data, scale_inv = arrays
    column = ScaledArray(data, scale_inv, None, spec.layout(tokens, columnwise=True))
    row = None
    if rowwise:
        row = ScaledArray(row_arrays[0], row_arrays[1], None, spec.layout(tokens, columnwise=False))
    return KernelCache(row, column, amax, recipe)


def _quantize_part(spec: QuantizeSpec, splits: Splits, kernel: jax.Array, *more: jax.Array) -> list[jax.Array]:
    spec = dataclasses.replace(spec, num_groups=spec.num_groups // splits["e"].parts)
    return _arrays(quantize_stack(kernel, spec, **spec.named(more)))


def _arrays(cache: KernelCache | Oriented) -> list[Any]:
    """Returns the arrays of a cache, in the order of the operation's results."""
    orientations = (scaled for scaled in (cache.rowwise, cache.columnwise) if scaled is not None)
    return [*itertools.chain.from_iterable((scaled.data, scaled.scale_inv) for scaled in orientations), cache.amax]


def kernels_for_dgrad(kernels: Operand) -> Operand:
    """Returns kernels as dgrad reads them. Those of a cache of one orientation are transposed, data and scales.

    Raises ValueError where the other orientation has other scales.
    """
    if not isinstance(kernels, ScaledArray) or not kernels.layout.columnwise:
        return kernels
    layout = dataclasses.replace(kernels.layout, columnwise=False)
    if layout.mode not in (ScalingMode.TENSOR, ScalingMode.BLOCK_2D):
        raise ValueError("kernel_cache has no orientation for gradients: make it with for_gradients=True.")
    scale_inv = kernels.scale_inv
    if layout.mode == ScalingMode.BLOCK_2D:
        scale_inv = layout.lay_out_scales(kernels.layout.read_scales(scale_inv))
    return ScaledArray(kernels.data.swapaxes(1, 2), scale_inv, None, layout)


def cache_dimensions(spec: QuantizeSpec) -> tuple[tuple[str, str], tuple[str, str]]:
    """Returns the dimensions of the data and scales of both orientations of kernels, as an `Operation` names them."""
    scales = {ScalingMode.TENSOR: ("e", "e"), ScalingMode.MX: ("e r", "e c")}.get(spec.mode, ("e r s", "e c d"))
    return ("e k n", scales[0]), ("e n k", scales[1])
