"""`grouped_dense`, the functional form of the layer: a grouped product with bias, its quantization, and its derivative.

A pass makes the operands that a product reads (`quantized_tokens`, `quantized_kernels`, `quantized_gradient`), and
multiplies them (`fprop`, `dgrad`, `wgrad`). Scales lie where group sizes put them, so XLA cannot split the quantized
arrays of one device: with a recipe and sharded arrays under plain `jax.jit`, a pass is one operation that XLA splits.
Inside of it each device calls the same functions on its own part, and `x` itself waits for the backward pass.

The forward pass and the two products of the backward pass are functions of their own, too, for schedules that take the
kernel's gradient later than that of the tokens. `jax_grouped.moe.experts` has the rule of two products.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from jax_grouped.core.groups import Groups
from jax_grouped.core.values import added_axes, apply_rule, as_array, canonical_dtype, sum_dtype, vary_alike
from jax_grouped.fp8.arrays import KernelCache, ScaledArray, gather_kernels, short_repr
from jax_grouped.fp8.layout import BLOCK, feature_grain
from jax_grouped.fp8.recipes import DelayedScaling, Float8BlockScaling, Recipe, ScalingMode
from jax_grouped.fp8.state import Fp8State, PerTensor
from jax_grouped.kernels.bias import add_bias, bias_gradient
from jax_grouped.kernels.partition import Operation, Result, Splits, apply, lie_on_mesh, own_groups
from jax_grouped.kernels.product import (
    RESULTS,
    Gathered,
    Operand,
    RowsToQuantize,
    SwiGluSpec,
    gradient_type,
    multiply,
    multiply_with_swiglu,
    part_dtype,
)
from jax_grouped.ops.inputs import (
    DenseSpec,
    GroupSizes,
    Lora,
    Partitions,
    Weights,
    canonical_inputs,
    check_accumulator,
    kernel_spec,
)
from jax_grouped.ops.quantize import Oriented, cache_dimensions, kernels_for_dgrad, quantize_stack, quantize_tokens

#: Names of the residuals: the quantized tokens and kernels, and the input of the activation of
#: `jax_grouped.moe.grouped_mlp`. Pass them to `jax.checkpoint_policies.save_only_these_names(*CHECKPOINT_NAMES)`. An
#: array that a policy does not keep is quantized again, in the one orientation that is read. Without the kernels' name,
#: a step takes less memory, and one more pass over each kernel.
CHECKPOINT_NAMES = ("jax_grouped_x", "jax_grouped_kernel", "jax_grouped_hidden")
#: Name of the results of `jax_grouped.moe.grouped_mlp` and `jax_grouped.moe.moe_mlp`. No backward pass of the library
#: reads them, so a policy keeps them only for what else a checkpointed function computes from them.
OUTPUT_NAME = "jax_grouped_output"

#: Packages and modules whose frames lie between a line of the user and a differentiation rule.
_LIBRARIES = {"jax_grouped", "jax", "flax", "contextlib"}


def grouped_dense(
    x: jax.Array,
    kernel: jax.Array | None,
    group_sizes: GroupSizes,
    bias: jax.Array | None = None,
    *,
    recipe: Recipe | None = None,
    fp8_state: Fp8State | None = None,
    kernel_cache: KernelCache | jax.Array | None = None,
    dkernel_accumulator: jax.Array | None = None,
    lora: Lora | None = None,
    group_offset: ArrayLike | None = None,
    preferred_element_type: DTypeLike | None = None,
    precision: jax.lax.PrecisionLike = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
) -> jax.Array:
    """Applies a linear layer per group: row `i` becomes `x[i] @ kernel[g] + bias[g]`, `g` being the row's group.

    The product is computed in the type of `x`. Gradients come out in each argument's own type: a float32 `kernel` with
    bfloat16 `x` gets a float32 gradient straight from the matmul's accumulator. Rows outside every group are zero in
    the result and in the gradient of `x`, whatever `x` holds there.

    With a recipe, the three products multiply FP8 numbers and accumulate in float32. `x`, `kernel` and the gradient of
    the result are quantized from their own types, each once. Hopper's tensor cores keep about 14 bits of a partial sum,
    so there even a float32 result has a relative error of 1e-4 to 3e-4. With `Float8BlockScaling`, this is the training
    of DeepSeek-V3 (arXiv:2412.19437, section 3.3). The residuals of the backward pass are FP8 too. They carry the names
    of `jax_grouped.CHECKPOINT_NAMES`, for the policies of `jax.checkpoint`. Where XLA splits sharded arrays, `x` and
    `kernel` wait as they are instead, without a name, and each pass quantizes its operands. Gradients are
    straight-through: those of the product of the quantized numbers, as if quantization were the identity. With a recipe
    or an accumulator, only first-order derivatives exist.

    Args:
        x: `[T, K]` tokens, bfloat16, float16 or float32; rows of group 0 first, then group 1, and so on.
        kernel: `[G, K, N]`; without a recipe, converted to the type of `x` if it has another. None if there is a
            `kernel_cache`: weights for inference can be there in FP8 alone.
        group_sizes: `[G]` (`[E]`, `E >= G`, with `group_offset`) integers, rows per group, read on the device only.
            Negative ones count as 0, and rows past `T` do not exist.
        bias: `[G, N]` or None.
        recipe: one of the recipes, with `K` and `N` multiples of 16; None to compute in the type of `x`.
            `Float8BlockScaling` needs Hopper. `MXFP8BlockScaling` needs Blackwell to be fast: on Hopper its products
            are of the same numbers in bfloat16.
        fp8_state: state of `DelayedScaling` from earlier steps; start with `Fp8State.initial(recipe, G)`. Its gradient
            is its next value.
        kernel_cache: `quantize_kernel(kernel, recipe)` or, without a recipe, `kernel.astype(x.dtype)`, which
            microbatches share. `kernel` is then not read, but has the gradient; the cache has none.
        dkernel_accumulator: `[G, K, N]` in the type of `kernel`. The gradient of `kernel` is then the accumulator plus
            the usual gradient. The matmul itself adds, in place if the accumulator's memory can be reused (donate it,
            or carry it through a `jax.lax.scan`). Every use adds the accumulator, so differentiate one use at a time:
            a single call, inside the steps of a `scan`, the `vmap` or the `shard_map`. If the result does not reach the
            loss, JAX asks for no gradient, and it is zero. `grouped_dense_wgrad` takes an accumulator without these
            conditions.
        lora: adapters of low rank, added to the result; see `Lora`. Their two products are in the type of `x`, and read
            rows of `x` that wait for the backward pass as they are. Differentiate `lora` and not the kernel: then
            nothing of the kernel's gradient is computed. A `kernel_cache` in FP8 alone, without `kernel`, serves.
        group_offset: scalar or `[1]` integer: `kernel` holds the groups `[group_offset, group_offset + G)`.
        preferred_element_type: type of the result. Default: the type of `x`.
        precision: of float32 products: "default", "high" or "highest", see `jax_grouped.ragged_dot`. Not with a recipe.
        out_sharding: `NamedSharding` or spec of the result's type, where those of the operands leave a choice.

    Returns:
        `[T, N]`.

    Raises:
        TypeError: an argument, or the recipe, has a type that is not supported.
        ValueError: an argument has a shape that does not fit, `kernel_cache` is of another kernel or recipe, or the
            recipe needs an argument that is missing, or does not take one that is given. Or `x` and `kernel` have types
            that are sharded so that the result's is ambiguous, and there is no `out_sharding`.

    Example:
        x, kernel, bias = jnp.ones((16, 32)), jnp.ones((2, 32, 16)), jnp.ones((2, 16))
        group_sizes = jnp.array([10, 4])

        y = jg.grouped_dense(x, kernel, group_sizes, bias)
        y_fp8 = jg.grouped_dense(x, kernel, group_sizes, bias, recipe=jg.Float8BlockScaling())

        assert y[:14].tolist() == 14 * [16 * [33.0]] and not y[14:].any()
        assert jnp.allclose(y_fp8, y, rtol=1e-3)
    """
    if kernel is None and kernel_cache is not None:
        # `from_cache` refuses a cache that is an array.
        kernel = Weights.from_cache(kernel_cache).kernel  # type: ignore[arg-type]
    # `canonical_inputs` refuses a kernel that is still None.
    arrays, spec = canonical_inputs(
        x,
        Weights(kernel, bias, kernel_cache, fp8_state, dkernel_accumulator, lora),  # type: ignore[arg-type]
        group_sizes,
        group_offset,
        recipe=recipe,
        preferred_element_type=preferred_element_type,
        precision=precision,
        out_sharding=out_sharding,
    )
    x, weights, groups = arrays
    y = apply_rule(_dense, (x, weights._replace(lora=None), groups), spec)
    if weights.lora is None:
        return y
    options: Any = dict(group_sizes=group_sizes, group_offset=group_offset, precision=precision)
    # Types would leave a choice for the sums over features of `x` that `Explicit` axes split.
    hidden_spec = PartitionSpec(jax.typeof(x).sharding.spec[0])
    hidden = grouped_dense(x, weights.lora.a, **options, out_sharding=hidden_spec)
    options |= dict(preferred_element_type=preferred_element_type, out_sharding=out_sharding)
    return y + grouped_dense(hidden, weights.lora.b, **options)


@short_repr
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DenseResiduals:
    """Residuals between the forward pass and dgrad.

    Quantized arrays in it that come from a call with a `group_offset` cannot be dequantized, see `ScaledArray`.

    Attributes:
        x: the tokens, as wgrad reads them.
        kernel: the kernel, as dgrad reads it, or of a cache of one orientation, which dgrad transposes.
        groups: the sizes and the offset.
        fp8_state: the state that the forward pass used, with `DelayedScaling`.
        amax: the largest values for the next state, by tensor; None if there is no state.
        spec: everything static.

    Example:
        y, residuals = jg.grouped_dense_fwd(jnp.ones((16, 32)), jnp.ones((2, 32, 16)), jnp.array([10, 4]))

        assert isinstance(residuals, jg.DenseResiduals)
        dx, _ = jg.grouped_dense_dgrad(residuals, jnp.ones_like(y))
    """

    x: Operand | None
    kernel: Operand | None
    groups: Groups
    fp8_state: Fp8State | None
    amax: dict[str, jax.Array] | None
    spec: DenseSpec = dataclasses.field(metadata=dict(static=True), repr=False)


@short_repr
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PendingWgrad:
    """Residuals between dgrad and wgrad, FP8 with a recipe. On dequantization see `DenseResiduals`.

    Attributes:
        x, dy: the operands that wgrad reads.
        dbias: the gradient of the bias, already computed; None if there is no bias.
        fp8_state: the next state of `DelayedScaling`, already computed; None with other recipes.
        groups: the sizes and the offset.
        spec: everything static.

    Example:
        y, residuals = jg.grouped_dense_fwd(jnp.ones((16, 32)), jnp.ones((2, 32, 16)), jnp.array([10, 4]))
        dx, pending = jg.grouped_dense_dgrad(residuals, jnp.ones_like(y))

        assert isinstance(pending, jg.PendingWgrad)
        dkernel, _ = jg.grouped_dense_wgrad(pending)
    """

    x: Operand | None
    dy: Operand | None
    dbias: jax.Array | None
    fp8_state: Fp8State | None
    groups: Groups
    spec: DenseSpec = dataclasses.field(metadata=dict(static=True), repr=False)


Arrays = tuple[jax.Array, Weights, Groups]


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _dense(arrays: Arrays, spec: DenseSpec) -> jax.Array:
    if spec.recipe is not None and is_on_mesh(arrays[0], arrays[1], spec):
        return _run_on_mesh(arrays, spec)[0]
    return run(arrays, spec, for_gradients=False)[0]


def _forward(primals: Any, spec: DenseSpec) -> tuple[jax.Array, Any]:
    arrays = primal_values(primals)
    if spec.recipe is not None and is_on_mesh(arrays[0], arrays[1], spec):
        y, residuals = _run_on_mesh(arrays, spec)
    else:
        y, residuals = run(arrays, spec, for_gradients=True)
        residuals = named(residuals, arrays[1])
    return y, (residuals, arrays[1].dkernel_accumulator)


def _backward(spec: DenseSpec, saved: tuple[DenseResiduals, jax.Array | None], dy: Any) -> tuple[Any]:
    residuals, accumulator = saved
    if isinstance(dy, jax.custom_derivatives.SymbolicZero):
        return ((None, zero_gradient(residuals, accumulator), None),)
    if spec.recipe is not None and not isinstance(residuals.x, ScaledArray):  # They are those of `_run_on_mesh`.
        return (_run_gradients_on_mesh(residuals, accumulator, dy),)
    scales = given_scales(spec, residuals.fp8_state)
    dx, pending = dgrad(residuals, quantized_gradient(dy, residuals.groups, spec, scales))
    return ((dx, weights_gradient(pending, accumulator), None),)


_dense.defvjp(_forward, _backward, symbolic_zeros=True)


def grouped_dense_fwd(
    x: jax.Array,
    kernel: jax.Array,
    group_sizes: GroupSizes,
    bias: jax.Array | None = None,
    *,
    recipe: Recipe | None = None,
    fp8_state: Fp8State | None = None,
    kernel_cache: KernelCache | jax.Array | None = None,
    group_offset: ArrayLike | None = None,
    preferred_element_type: DTypeLike | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> tuple[jax.Array, DenseResiduals]:
    """Computes the forward pass of `jax_grouped.grouped_dense`, and returns the residuals of its backward pass.

    `grouped_dense_dgrad` and `grouped_dense_wgrad` compute the gradients in two halves, so that a schedule can run the
    second half when nothing else waits for the device. Together they give the gradient of `grouped_dense`, bit for
    bit. JAX does not differentiate these functions themselves; use them in your own differentiation rules. Inside
    `jax.shard_map`, `dkernel` and `dbias` are each device's own, to be summed over the axes over which the kernel is
    replicated: a float32 accumulator keeps a bfloat16 gradient from being rounded before. `fp8_state` is combined
    already, as `jax_grouped.Fp8State` says. With a recipe and sharded arrays, call them inside `jax.shard_map`: under
    plain `jax.jit` XLA gathers the arrays, or an error says so.

    Args:
        x: `[T, K]` tokens, bfloat16, float16 or float32; rows of group 0 first.
        kernel: `[G, K, N]`. An accumulator of its gradient is given to `grouped_dense_wgrad`.
        group_sizes: `[G]` (`[E]`, `E >= G`, with `group_offset`) integers, rows per group.
        bias: `[G, N]` or None.
        recipe: how the products are computed in FP8; None to compute in the type of `x`.
        fp8_state: state of `DelayedScaling`; None with other recipes. Its next value is `pending.fp8_state`.
        kernel_cache: `quantize_kernel(kernel, recipe)` or, without a recipe, `kernel.astype(x.dtype)`.
        group_offset: scalar or `[1]` integer: `kernel` holds the groups `[group_offset, group_offset + G)`.
        preferred_element_type: type of the result. Default: the type of `x`.
        precision: of float32 products: "default", "high" or "highest", see `jax_grouped.ragged_dot`.

    Returns:
        `[T, N]`, and a pytree for `grouped_dense_dgrad`.

    Raises:
        TypeError, ValueError: an argument has a type or a shape that does not fit, or does not go with the recipe.

    Example:
        x, kernel, group_sizes = jnp.ones((16, 32)), jnp.ones((2, 32, 16)), jnp.array([10, 4])

        y, residuals = jg.grouped_dense_fwd(x, kernel, group_sizes)
        dx, pending = jg.grouped_dense_dgrad(residuals, jnp.ones_like(y))
        dkernel, dbias = jg.grouped_dense_wgrad(pending)

        assert dx.shape == x.shape and dkernel.shape == kernel.shape and dbias is None
    """
    arrays, spec = canonical_inputs(
        x,
        Weights(kernel, bias, kernel_cache, fp8_state),
        group_sizes,
        group_offset,
        recipe=recipe,
        preferred_element_type=preferred_element_type,
        precision=precision,
    )
    if bias is not None:
        # These functions return its gradient before devices sum it.
        spec = dataclasses.replace(spec, bias_dtype=as_array("bias", bias).dtype)
    return run(arrays, spec, for_gradients=True)


def grouped_dense_dgrad(residuals: DenseResiduals, dy: jax.Array) -> tuple[jax.Array, PendingWgrad]:
    """Computes the gradient of `x`, and returns the residuals for the gradient of `kernel`.

    With a recipe, `dy` is quantized here, once for both halves. The second half reads FP8 copies: `dy`, and what else
    `residuals` hold, can be freed. Without a recipe, it reads `x` and `dy` themselves.

    Args:
        residuals: from `grouped_dense_fwd`.
        dy: `[T, N]`, the gradient of its result: bfloat16, float16 or float32.

    Returns:
        `[T, K]` in the type of `x`, and a pytree for `grouped_dense_wgrad`. Its `dbias`, and its `fp8_state`, the next
        state of `DelayedScaling`, can be read at once.

    Raises:
        TypeError: an argument has a type that is not supported.
        ValueError: `dy` has another shape than the result, or the forward pass read a cache without gradients.

    Example:
        y, residuals = jg.grouped_dense_fwd(jnp.ones((16, 32)), jnp.ones((2, 32, 16)), jnp.array([10, 4]))
        dx, pending = jg.grouped_dense_dgrad(residuals, jnp.ones_like(y))

        assert dx[:14].tolist() == 14 * [32 * [16.0]] and not dx[14:].any()
    """
    if not isinstance(residuals, DenseResiduals):
        raise TypeError(f"residuals must be those of grouped_dense_fwd, got {type(residuals).__name__}.")
    dy = as_array("dy", dy)
    canonical_dtype("dy's type", dy.dtype)
    spec, groups = residuals.spec, residuals.groups
    if dy.shape != (expected := (spec.tokens, spec.kernel.shape[2])):
        raise ValueError(f"dy must have the result's shape {expected}, got {dy.shape}.")
    dy, scales = vary_alike(dy, groups.sizes)[0], given_scales(spec, residuals.fp8_state)
    return dgrad(residuals, quantized_gradient(dy, groups, spec, scales))


def grouped_dense_wgrad(
    pending: PendingWgrad, *, dkernel_accumulator: jax.Array | None = None
) -> tuple[jax.Array, jax.Array | None]:
    """Computes the gradients of `kernel` and `bias`.

    Args:
        pending: from `grouped_dense_dgrad`.
        dkernel_accumulator: `[G, K, N]` in the type of `kernel`, or float32. The matmul adds the gradient to it, in
            place if its memory can be reused.

    Returns:
        `[G, K, N]` in the type of `kernel`, or of the accumulator, and `[G, N]` in that of `bias`, or None if there was
        no bias.

    Raises:
        TypeError: an argument has a type that does not fit.
        ValueError: the accumulator has another shape than the kernel.

    Example:
        kernel = jnp.ones((2, 32, 16))
        y, residuals = jg.grouped_dense_fwd(jnp.ones((16, 32)), kernel, jnp.array([10, 4]))
        _, pending = jg.grouped_dense_dgrad(residuals, jnp.ones_like(y))
        dkernel, _ = jg.grouped_dense_wgrad(pending, dkernel_accumulator=jnp.ones_like(kernel))

        assert dkernel[:, 0, 0].tolist() == [11.0, 5.0]
    """
    if not isinstance(pending, PendingWgrad):
        raise TypeError(f"pending must be that of grouped_dense_dgrad, got {type(pending).__name__}.")
    if dkernel_accumulator is not None:
        dkernel_accumulator = as_array("dkernel_accumulator", dkernel_accumulator)
        kernel = pending.spec.kernel
        check_accumulator(dkernel_accumulator, kernel.shape, (kernel.dtype, np.dtype(np.float32)))
    return wgrad(pending, dkernel_accumulator), pending.dbias


def run(arrays: Arrays, spec: DenseSpec, *, for_gradients: bool) -> tuple[jax.Array, Any]:
    """Returns the result, and the `DenseResiduals` if `for_gradients`."""
    x, weights, groups = arrays
    scales = given_scales(spec, weights.fp8_state)
    tokens = quantized_tokens(x, groups, spec, scales, columnwise=for_gradients)
    kernels = quantized_kernels(weights, spec, scales, rowwise=for_gradients)
    y = fprop(tokens, kernels, groups, spec, weights.bias)
    return y, make_residuals(tokens, kernels, groups, spec, weights.fp8_state) if for_gradients else None


def primal_values(primals: Any) -> Any:
    """Returns the arrays that `jax.custom_vjp` hands to a forward rule with `symbolic_zeros`.

    Warns if a kernel is differentiated without its state: nothing would then update the state.
    """
    for weights in primals:
        if not isinstance(weights, Weights) or weights.fp8_state is None:
            continue
        state_leaves: Any = jax.tree.leaves(weights.fp8_state)
        kernel: Any = weights.kernel
        if kernel.perturbed and not any(leaf.perturbed for leaf in state_leaves):
            warnings.warn(
                "fp8_state is not differentiated with the kernel, so its scales never change: give jax.grad both (in "
                "linen all variables, in NNX jax_grouped.nnx.TRAINED), and let the state's gradient take its place.",
                stacklevel=stacklevel_of_user(),
            )
    leaves, structure = jax.tree.flatten(primals)
    return jax.tree.unflatten(structure, [leaf.value for leaf in leaves])


def stacklevel_of_user() -> int:
    """Returns the `stacklevel` with which the caller's warning names the innermost line outside of `_LIBRARIES`."""
    level, frame = 0, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES:
        level, frame = level + 1, frame.f_back
    return level


def zero_gradient(residuals: DenseResiduals, accumulator: jax.Array | None) -> Weights:
    """Returns the gradient of weights whose result does not reach the loss. None stands for zero."""
    return Weights(accumulator, fp8_state=next_state(residuals, None))  # type: ignore[arg-type]


def weights_gradient(
    pending: PendingWgrad, accumulator: jax.Array | None, stored_over: Hashable | None = None
) -> Weights:
    """Returns the weights' gradient, summed over devices with the same kernels, or with parts stored over an axis."""
    spec = pending.spec
    axes = added_axes(spec.kernel_axes, pending.x, pending.dy, pending.groups)
    if stored_over is None and not axes:
        total = wgrad(pending, accumulator)
    else:
        total = wgrad(pending, None, sum_dtype(spec.kernel.dtype))
        if stored_over is not None:
            total = jax.lax.psum_scatter(total, stored_over, tiled=True)
        if axes:
            total = jax.lax.psum(total, axes)
        if accumulator is not None:
            total += accumulator.astype(total.dtype)
        total = total.astype(spec.kernel.dtype)
    return Weights(total, bias=pending.dbias, fp8_state=pending.fp8_state)


def given_scales(spec: DenseSpec, state: Fp8State | None) -> dict[str, jax.Array]:
    """Returns the scales that delayed scaling has ready, by the fields of `PerTensor`; none with other recipes."""
    if state is None or not isinstance(spec.recipe, DelayedScaling):
        return {}
    return state.scales(spec.recipe)._asdict()


def quantized_tokens(
    x: jax.Array | ScaledArray,
    groups: Groups,
    spec: DenseSpec,
    scales: Mapping[str, jax.Array],
    *,
    rowwise: bool = True,
    columnwise: bool = True,
    row_indices: jax.Array | None = None,
) -> Oriented:
    """Returns the tokens, which may be a stack of quantized blocks, as the products read them."""
    if spec.recipe is None:
        return Oriented(x, x)
    x_spec = spec.quantization(rowwise=rowwise, columnwise=columnwise)
    return quantize_tokens(x, groups, x_spec, row_indices=row_indices, scale=scales.get("input"))


def quantized_kernels(
    weights: Weights,
    spec: DenseSpec,
    scales: Mapping[str, jax.Array],
    *,
    rowwise: bool,
    columnwise: bool = True,
) -> Oriented:
    """Returns the kernels as the products read them, rowwise for dgrad and columnwise for fprop.

    Those of a cache of one orientation are in both fields: `dgrad` transposes them.
    """
    cache = weights.kernel_cache
    if isinstance(cache, KernelCache):
        return Oriented(cache.columnwise if cache.rowwise is None else cache.rowwise, cache.columnwise, cache.amax)
    if spec.recipe is None:
        kernel = weights.kernel.astype(spec.x_dtype) if cache is None else _converted(weights.kernel, cache)
        return Oriented(kernel, kernel)
    both = kernel_spec(weights.kernel.shape, spec.recipe)
    one = dataclasses.replace(both, rowwise=rowwise, columnwise=columnwise)
    return quantize_stack(weights.kernel, one, scale=scales.get("kernel"))


@jax.custom_jvp
def _converted(_: jax.Array, cache: jax.Array) -> jax.Array:
    """Returns the kernel in another type, which is there already, with the derivative of the conversion."""
    return cache


@_converted.defjvp
def _converted_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    cache = _converted(*primals)
    return cache, vary_alike(tangents[0].astype(cache.dtype), cache)[0]


def quantized_gradient(
    dy: jax.Array | ScaledArray,
    groups: Groups,
    spec: DenseSpec,
    scales: Mapping[str, jax.Array],
    *,
    rowwise: bool = True,
    activation_input: jax.Array | None = None,
    row_indices: jax.Array | None = None,
) -> Oriented:
    """Returns the gradient of the result, or of its activation, as dgrad and wgrad read it, and the bias's gradient."""
    if spec.recipe is not None:
        return quantize_tokens(
            dy,
            groups,
            spec.quantization(for_gradient=True, rowwise=rowwise),
            row_indices=row_indices,
            scale=scales.get("output_grad"),
            activation_input=activation_input,
        )
    assert not isinstance(dy, ScaledArray)
    dbias = None
    if spec.bias_dtype is not None:
        dbias = bias_gradient(dy, groups, spec.kernel.shape[0], spec.bias_dtype, spec.partitions.bias)
    dy = dy.astype(gradient_type(spec.x_dtype, dy.dtype))
    return Oriented(dy, dy, dbias=dbias)


def fprop(
    tokens: Oriented, kernels: Oriented, groups: Groups, spec: DenseSpec, bias: jax.Array | None = None
) -> jax.Array:
    """Returns the result of the layer."""
    y = multiply(tokens.rowwise, kernels.columnwise, groups, spec.fprop, out_spec=spec.partitions.out)
    return y if bias is None else add_bias(y, bias, groups)


def fprop_with_swiglu(
    tokens: Oriented, kernels: Oriented, groups: Groups, spec: DenseSpec, next_spec: DenseSpec, *, keeps_product: bool
) -> tuple[jax.Array | None, Oriented]:
    """Returns the result of `fprop`, and the tokens of the next layer, whose input's activation is SwiGLU."""
    quantization = None if spec.recipe is None else next_spec.quantization(finds_amax=False)
    swiglu = SwiGluSpec(spec.fprop, quantization, keeps_product)
    product, activated = multiply_with_swiglu(tokens.rowwise, kernels.columnwise, groups, swiglu)
    if quantization is None:
        return product, Oriented(activated[0], activated[0])
    data, scale_inv = activated
    layout = quantization.layout((spec.tokens, spec.kernel.shape[2]), columnwise=False)
    return product, Oriented(ScaledArray(data, scale_inv, groups.sizes, layout), None)


def can_fuse_swiglu(tokens: Oriented, kernels: Oriented, spec: DenseSpec) -> bool:
    """Tells whether `fprop_with_swiglu` computes a layer of this kind."""
    x, kernel = tokens.rowwise, kernels.columnwise
    fits = spec.bias_dtype is None and spec.kernel.shape[2] % (2 * BLOCK) == 0
    if not fits or 0 in (spec.tokens, *spec.kernel.shape) or spec.fprop.out_dtype == jnp.float32:
        return False
    rows = x.rows if isinstance(x, RowsToQuantize) else x
    if isinstance(rows, Gathered) and 0 in rows.x.shape:
        return False
    if isinstance(x, Gathered):
        return x.dtype == kernel.dtype == spec.fprop.out_dtype
    return spec.recipe is not None and spec.recipe.token_mode == ScalingMode.BLOCK_1D


def dgrad(residuals: DenseResiduals, gradient: Oriented) -> tuple[jax.Array, PendingWgrad]:
    """Returns the gradient of `x`, and the inputs of wgrad, from the result of `quantized_gradient`."""
    spec, groups = residuals.spec, residuals.groups
    assert residuals.kernel is not None
    kernels = kernels_for_dgrad(residuals.kernel)
    product = dataclasses.replace(spec.fprop, product="dgrad", out_dtype=spec.x_dtype)
    dx = multiply(gradient.rowwise, kernels, groups, product, out_spec=spec.partitions.x)
    dbias = None if gradient.dbias is None else gradient.dbias.astype(spec.bias_dtype)
    state = next_state(residuals, gradient.amax)
    return dx, PendingWgrad(residuals.x, gradient.columnwise, dbias, state, groups, spec)


def wgrad(pending: PendingWgrad, accumulator: jax.Array | None, dtype: np.dtype | None = None) -> jax.Array:
    """Returns the gradient of `kernel` in its own type or in `dtype`, or the accumulator with it added."""
    if dtype is None:
        dtype = pending.spec.kernel.dtype if accumulator is None else accumulator.dtype
    assert pending.x is not None
    assert pending.dy is not None
    product = dataclasses.replace(pending.spec.fprop, product="wgrad", out_dtype=dtype)
    return multiply(pending.x, pending.dy, pending.groups, product, accumulator, pending.spec.partitions.kernel)


def make_residuals(
    tokens: Oriented, kernels: Oriented, groups: Groups, spec: DenseSpec, state: Fp8State | None
) -> DenseResiduals:
    """Returns the residuals from the operands of `fprop`, for the gradients of all inputs.

    Those of a gradient that nobody reads cost nothing: JAX removes them, and what makes them, before it compiles.
    """
    amax = None
    if state is not None:
        assert tokens.amax is not None
        assert kernels.amax is not None
        amax = {"input": tokens.amax, "kernel": kernels.amax}
    return DenseResiduals(tokens.columnwise, kernels.rowwise, groups, state, amax, spec)


def next_state(residuals: DenseResiduals, output_grad: jax.Array | None) -> Fp8State | None:
    """Returns the state after this step, None without one."""
    if residuals.fp8_state is None:
        return None
    assert residuals.amax is not None
    assert isinstance(residuals.spec.recipe, DelayedScaling)
    last = {} if output_grad is None else {"output_grad": output_grad}
    return residuals.fp8_state.after(residuals.spec.recipe, residuals.amax | last)


def named(residuals: DenseResiduals, weights: Weights) -> DenseResiduals:
    """Returns the residuals with the results of quantization named by `CHECKPOINT_NAMES`.

    A cache has no name: `jax.lax.scan` keeps a copy of a residual unless it is an argument itself.
    """
    if residuals.spec.recipe is None:
        return residuals
    x_name, kernel_name, _ = CHECKPOINT_NAMES

    def name_kernel(array: Any) -> Any:
        return checkpoint_name(array, kernel_name) if weights.kernel_cache is None else array

    # Name the largest values too: they come from the same passes, and without a name a policy would run these again.
    amax = residuals.amax
    if amax is not None:
        amax = {"input": checkpoint_name(amax["input"], x_name), "kernel": name_kernel(amax["kernel"])}
    x, kernel = checkpoint_name(residuals.x, x_name), name_kernel(residuals.kernel)
    return dataclasses.replace(residuals, x=x, kernel=kernel, amax=amax)


def is_on_mesh(x: jax.Array, weights: Weights, spec: DenseSpec) -> bool:
    """Tells whether the passes, with a recipe, are operations that are split over a mesh."""
    return lie_on_mesh(x, weights.kernel, like=[spec.partitions.out])


def _run_on_mesh(arrays: Arrays, spec: DenseSpec) -> tuple[jax.Array, DenseResiduals]:
    """Returns the result, and residuals whose tokens and kernels are not quantized yet."""
    x, weights, groups = arrays
    cache, state = weights.kernel_cache, weights.fp8_state
    assert isinstance(cache, KernelCache | None)
    kernel, maxima = weights.kernel if cache is None else cache.columnwise, []
    if state is not None:
        maxima = [Result("e", over=over, how="max") for over in (("t k", "k n") if cache is None else ("t k",))]
    scales = {name: scale for name, scale in given_scales(spec, state).items() if name != "output_grad"}
    results = (RESULTS["fprop"], *maxima)
    y, *amax = _apply_pass(_fprop_part, spec, x, kernel, groups, scales, results, [spec.partitions.out])
    if weights.bias is not None:
        y = add_bias(y, weights.bias, groups)
    tokens = Oriented(None, x, amax[0] if amax else None)
    kernels = Oriented(weights.kernel, None, *amax[1:])
    if cache is not None:
        kernels = quantized_kernels(weights, spec, {}, rowwise=True)
    return y, make_residuals(tokens, kernels, groups, spec, state)


def _run_gradients_on_mesh(residuals: DenseResiduals, accumulator: jax.Array | None, dy: jax.Array) -> Any:
    """Returns the gradients of the arrays of the rule."""
    spec, x = residuals.spec, residuals.x
    assert isinstance(x, jax.Array)
    assert residuals.kernel is not None
    kernel = kernels_for_dgrad(residuals.kernel)
    assert isinstance(kernel, ScaledArray | jax.Array)
    scales = given_scales(spec, residuals.fp8_state)
    results = [RESULTS["dgrad"], RESULTS["wgrad"]]
    like = [spec.partitions.x, spec.partitions.kernel]
    if spec.bias_dtype is not None:
        results.append(Result("e n", over="t"))
        like.append(spec.partitions.bias)
    if scales:
        results.append(Result("e", over="t n", how="max"))
    more = {"dy": ("t n", dy)} | ({} if accumulator is None else {"accumulator": ("e k n", accumulator)})
    dx, dkernel, *optional = _apply_pass(
        _gradients_part, spec, x, kernel, residuals.groups, scales, tuple(results), like, **more
    )
    dbias = None if spec.bias_dtype is None else optional.pop(0).astype(spec.bias_dtype)
    state = next_state(residuals, optional.pop() if optional else None)
    return dx, Weights(dkernel, bias=dbias, fp8_state=state), None


def _apply_pass(
    part: Callable[..., Sequence[jax.Array]],
    spec: DenseSpec,
    x: jax.Array,
    kernel: jax.Array | ScaledArray,
    groups: Groups,
    scales: Mapping[str, jax.Array],
    results: tuple[Result, ...],
    like: Sequence[PartitionSpec | None],
    **more: tuple[str, jax.Array],
) -> list[jax.Array]:
    """Applies a pass as one operation: t tokens, e kernels, k and n their features. `more` has further operands.

    An accumulator is the last one: without it, where gradients are summed over devices, the others keep their places.
    """
    assert spec.recipe is not None
    operands = {"x": ("t k", x)}
    if isinstance(kernel, ScaledArray):
        both = cache_dimensions(kernel_spec(spec.kernel.shape, spec.recipe))
        data, scale_inv = both[int(kernel.layout.columnwise)]
        operands |= {"data": (data, kernel.data), "scale_inv": (scale_inv, kernel.scale_inv)}
    else:
        operands["kernels"] = "e k n", kernel
    operands |= {"sizes": ("g", groups.sizes), "offset": ("o", groups.offset)}
    operands |= {name: ("e", scale) for name, scale in scales.items() if name != "kernel" or "kernels" in operands}
    operands |= more
    # The scales of a part of the features are those of the whole, unless they depend on all of a kernel.
    by_features = isinstance(spec.recipe, Float8BlockScaling | DelayedScaling)
    grain = feature_grain(spec.recipe.token_mode)
    operation = Operation(
        part,
        (spec, tuple(operands)),
        tuple(dimensions for dimensions, _ in operands.values()),
        results,
        splittable=("t", "e", "n", "k") if "kernels" in operands else ("t", "e"),
        added=(len(operands) - 1, 1) if "accumulator" in operands else None,
        gathered=(1, ("e", "k", "n") if by_features else ("e",)) if "kernels" in operands else None,
        grains=(("k", grain), ("n", grain)),
    )
    return apply(operation, *(array for _, array in operands.values()), like=like)


class _Part(NamedTuple):
    """One device's part of a pass: its operands by name, its groups, spec and scales, and the kernels of its groups."""

    operands: Mapping[str, jax.Array]
    groups: Groups
    spec: DenseSpec
    scales: Mapping[str, jax.Array]
    kernels: Oriented


def _read_part(
    static: tuple[DenseSpec, tuple[str, ...]], splits: Splits, arrays: Sequence[jax.Array], *, columnwise: bool
) -> _Part:
    """Returns the part of one device, with kernels in one orientation, gathered if they are stored in parts."""
    whole, names = static
    operands = dict(zip(names[: len(arrays)], arrays, strict=True))
    rows = operands["x"].shape[0]
    shape = tuple(size // splits[name].parts for name, size in zip("ekn", whole.kernel.shape, strict=True))
    kernel = jax.ShapeDtypeStruct(shape, whole.kernel.dtype)
    product = dataclasses.replace(whole.fprop, num_groups=shape[0])
    spec = dataclasses.replace(whole, fprop=product, tokens=rows, kernel=kernel, partitions=Partitions())
    assert spec.recipe is not None
    groups = own_groups(Groups(operands["sizes"], operands["offset"]), splits, rows=rows, num_groups=shape[0])
    scales = {name: operands[name] for name in PerTensor._fields if name in operands}
    layout = kernel_spec(shape, spec.recipe).layout((shape[0] * shape[1], shape[2]), columnwise=columnwise)
    if "data" in operands:
        scaled = ScaledArray(operands["data"], operands["scale_inv"], None, layout)
        return _Part(operands, groups, spec, scales, Oriented(scaled, scaled))
    stored, own_scales, experts = operands["kernels"], scales, splits["e"].stored
    if experts and "kernel" in scales:
        start = stored.shape[0] * jax.lax.axis_index(experts)
        own_scales = {"kernel": jax.lax.dynamic_slice_in_dim(scales["kernel"], start, stored.shape[0])}
    own = quantized_kernels(Weights(stored), spec, own_scales, rowwise=not columnwise, columnwise=columnwise)
    storage = [splits[name].stored for name in ("enk" if columnwise else "ekn")]
    if any(storage):
        amax = own.amax
        if scales and amax is not None:
            if features_over := tuple(itertools.chain(*storage[1:])):
                amax = jax.lax.pmax(amax, features_over)
            amax = jax.lax.all_gather(amax, experts, tiled=True) if experts else amax
        gathered = gather_kernels(own.columnwise if columnwise else own.rowwise, storage, layout)
        own = Oriented(gathered, gathered, amax)
    return _Part(operands, groups, spec, scales, own)


def _fprop_part(static: Any, splits: Splits, *arrays: jax.Array) -> list[jax.Array]:
    operands, groups, spec, scales, kernels = _read_part(static, splits, arrays, columnwise=True)
    tokens = quantized_tokens(operands["x"], groups, spec, scales, columnwise=False)
    amax = [largest for largest in (tokens.amax, kernels.amax) if scales and largest is not None]
    return [fprop(tokens, kernels, groups, spec), *amax]


def _gradients_part(static: Any, splits: Splits, *arrays: jax.Array) -> list[jax.Array]:
    operands, groups, spec, scales, kernels = _read_part(static, splits, arrays, columnwise=False)
    tokens = quantized_tokens(operands["x"], groups, spec, scales, rowwise=False)
    gradient = quantized_gradient(operands["dy"], groups, spec, scales)
    dx, pending = dgrad(make_residuals(tokens, kernels, groups, spec, None), gradient)
    dkernel = wgrad(pending, operands.get("accumulator"), part_dtype(spec.kernel.dtype, splits))
    optional = pending.dbias, gradient.amax if scales else None
    return [dx, dkernel, *(result for result in optional if result is not None)]
