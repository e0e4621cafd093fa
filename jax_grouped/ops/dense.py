"""`grouped_dense`, the functional form of the layer: a grouped product with bias, its quantization, and its derivative.

The three products are plain functions of arrays and one static value. `jax_grouped.ops.split` exposes them one by one,
and `jax_grouped.moe.mlp` builds another differentiation rule from them.
"""

import dataclasses
import functools
import inspect
import warnings
from collections.abc import Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from jax_grouped.core.groups import Groups
from jax_grouped.core.varying import added_axes, apply_rule, sum_dtype, vary_alike
from jax_grouped.fp8.arrays import GroupedQuantized, KernelCache, ScaledArray
from jax_grouped.fp8.recipes import DelayedScaling, Recipe
from jax_grouped.fp8.state import Fp8State, PerTensor
from jax_grouped.ops import dense_on_mesh
from jax_grouped.ops.bias import add_bias, bias_grad
from jax_grouped.ops.checks import GroupSizes
from jax_grouped.ops.gemm import Operand, gemm, gradient_type
from jax_grouped.ops.inputs import DenseSpec, Inputs, Weights, canonical_inputs
from jax_grouped.ops.quantize import quantize_stack, quantize_tokens, quantize_with_activation
from jax_grouped.ops.quantize_kernel import check_for_gradients, kernel_spec
from jax_grouped.ops.residuals import CHECKPOINT_NAMES, DenseResiduals, PendingWgrad

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
    of `jax_grouped.CHECKPOINT_NAMES`, for the policies of `jax.checkpoint`. Gradients are straight-through: those of
    the product of the quantized numbers, as if quantization were the identity. With a recipe or an accumulator, only
    first-order derivatives exist.

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
        group_offset: scalar or `[1]` integer: `kernel` holds the groups `[group_offset, group_offset + G)`.
        preferred_element_type: type of the result. Default: the type of `x`.
        precision: as in `jax_grouped.ragged_dot`; matters for float32 `x` only. Not with a recipe.
        out_sharding: as in `jax_grouped.ragged_dot`.

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
    inputs, spec = canonical_inputs(
        x,
        Weights(kernel, bias, kernel_cache, fp8_state, dkernel_accumulator),  # type: ignore[arg-type]
        group_sizes,
        group_offset,
        recipe=recipe,
        preferred_element_type=preferred_element_type,
        precision=precision,
        out_sharding=out_sharding,
    )
    return apply_rule(_dense, inputs, spec)


class Oriented(NamedTuple):
    """Operand in the orientations that products read, with the fields of `GroupedQuantized`.

    Without a recipe, both orientations are the array itself.
    """

    rowwise: Operand | None
    columnwise: Operand | None
    amax: jax.Array | None = None
    dbias: jax.Array | None = None


#: Kernels as products read them.
Kernels = Oriented | GroupedQuantized | KernelCache


class Saved(NamedTuple):
    """Residuals of a differentiation rule."""

    residuals: DenseResiduals
    dkernel_accumulator: jax.Array | None


class SavedOnMesh(NamedTuple):
    """Residuals of a pass that XLA splits over devices. Those of `dgrad` have no operands, which are made later."""

    inputs: Inputs
    residuals: DenseResiduals


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _dense(inputs: Inputs, spec: DenseSpec) -> jax.Array:
    if dense_on_mesh.is_split(inputs.x, inputs.weights, spec):
        return dense_on_mesh.fprop(inputs, spec, given_scales(spec, inputs.weights.fp8_state))[0]
    return fprop(inputs, spec, for_gradients=False)[0]


def _forward(primals: Any, spec: DenseSpec) -> tuple[jax.Array, Saved | SavedOnMesh]:
    inputs = primal_values(primals)
    if dense_on_mesh.is_split(inputs.x, inputs.weights, spec):
        state = inputs.weights.fp8_state
        y, amax = dense_on_mesh.fprop(inputs, spec, given_scales(spec, state))
        return y, SavedOnMesh(inputs, DenseResiduals(None, None, inputs.groups, state, amax, spec))
    y, residuals = fprop(inputs, spec, for_gradients=True)
    return y, save(inputs, residuals)


def _backward(spec: DenseSpec, saved: Saved | SavedOnMesh, dy: Any) -> tuple[Any]:
    dy = None if isinstance(dy, jax.custom_derivatives.SymbolicZero) else dy
    if not isinstance(saved, SavedOnMesh):
        return (gradients(saved, dy),)
    inputs, residuals = saved
    if dy is None:
        return (gradients(Saved(residuals, inputs.weights.dkernel_accumulator), dy),)
    gradient = dense_on_mesh.gradients(inputs, spec, given_scales(spec, residuals.fp8_state), dy)
    # None stands for a zero gradient, even of arguments that are never None.
    weights = Weights(gradient.kernel, bias=gradient.bias, fp8_state=next_state(residuals, gradient.amax))
    return (Inputs(gradient.x, weights, None),)  # type: ignore[arg-type]  # None is the zero gradient of the groups.


_dense.defvjp(_forward, _backward, symbolic_zeros=True)


def primal_values(primals: Any) -> Inputs:
    """Returns the arrays of the inputs that `jax.custom_vjp` hands to a forward rule with `symbolic_zeros`.

    Warns if a kernel is differentiated without its state: nothing would then update the state.
    """

    def differentiated(tree: Any) -> bool:
        return any(primal.perturbed for primal in jax.tree.leaves(tree))

    weights = primals.weights
    if weights.fp8_state is not None and differentiated(weights.kernel) and not differentiated(weights.fp8_state):
        warnings.warn(
            "fp8_state is not differentiated with the kernel, so its scales never change: give jax.grad both (in linen "
            "all variables, in NNX jax_grouped.nnx.TRAINED), and let the state's gradient take its place.",
            stacklevel=stacklevel_of_user(),
        )
    return jax.tree.map(lambda primal: primal.value, primals)


def stacklevel_of_user() -> int:
    """Returns the `stacklevel` with which the caller's warning names the innermost line outside of `_LIBRARIES`."""
    level, frame = 0, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES:
        level, frame = level + 1, frame.f_back
    return level


def save(inputs: Inputs, residuals: DenseResiduals) -> Saved:
    """Returns the residuals for the backward pass of a rule.

    They are the residuals for the gradients of all inputs, even if some inputs have no gradient. JAX uses one structure
    for all calls of a program that `jax.jit` or `jax.checkpoint` has traced. It removes unread residuals before it
    compiles.
    """
    return Saved(_named(residuals), inputs.weights.dkernel_accumulator)


def gradients(saved: Saved, dy: jax.Array | None, activation_input: jax.Array | None = None) -> Inputs:
    """Returns the gradient of every input, as `dgrad` and `wgrad` give it; None for zero."""
    residuals, accumulator = saved
    if dy is None:
        dx, weights = None, Weights(accumulator, fp8_state=next_state(residuals, None))  # type: ignore[arg-type]
    else:
        dx, pending = dgrad(residuals, quantized_gradient(residuals, dy, activation_input))
        weights = Weights(summed_wgrad(pending, accumulator), bias=pending.dbias, fp8_state=pending.fp8_state)
    # None stands for a zero gradient, even of arguments that are never None.
    return Inputs(dx, weights, None)  # type: ignore[arg-type]


def fprop(
    inputs: Inputs,
    spec: DenseSpec,
    *,
    for_gradients: bool,
    keep_tokens: bool = True,
    tokens: Oriented | GroupedQuantized | None = None,
    kernels: Kernels | None = None,
) -> tuple[jax.Array, DenseResiduals]:
    """Returns the result and the residuals, which hold quantized operands only if `for_gradients`.

    Without `keep_tokens` they lack the tokens, which the backward pass then provides. `tokens` and `kernels` are those
    of the inputs as the product reads them, if the caller has quantized them already.
    """
    x, weights, groups, row_indices = inputs
    keep = for_gradients and keep_tokens
    if tokens is None:
        tokens = quantized(x, groups, spec, weights.fp8_state, columnwise=keep, row_indices=row_indices)
    if kernels is None:
        kernels = quantized_kernels(weights, spec, rowwise=for_gradients)
    assert tokens.rowwise is not None
    assert kernels.columnwise is not None
    out_spec = spec.partitions.out
    y = gemm(tokens.rowwise, kernels.columnwise, groups, spec.gemm("fprop", spec.out_dtype), out_spec=out_spec)
    if weights.bias is not None:
        y = add_bias(y, weights.bias, groups)
    amax = None
    if weights.fp8_state is not None:
        assert tokens.amax is not None
        assert kernels.amax is not None
        amax = {"input": tokens.amax, "kernel": kernels.amax}
    kept = tokens.columnwise if keep else None
    return y, DenseResiduals(kept, kernels.rowwise, groups, weights.fp8_state, amax, spec)


def dgrad(residuals: DenseResiduals, gradient: Oriented | GroupedQuantized) -> tuple[jax.Array, PendingWgrad]:
    """Returns the gradient of `x`, and the inputs of wgrad, from the result of `quantized_gradient`."""
    spec, groups = residuals.spec, residuals.groups
    assert gradient.rowwise is not None
    check_for_gradients(residuals.kernel)
    assert residuals.kernel is not None
    out_spec = spec.partitions.x
    dx = gemm(gradient.rowwise, residuals.kernel, groups, spec.gemm("dgrad", spec.x_dtype), out_spec=out_spec)
    dbias = None if gradient.dbias is None else gradient.dbias.astype(spec.bias_dtype)
    state = next_state(residuals, gradient.amax)
    return dx, PendingWgrad(residuals.x, gradient.columnwise, dbias, state, groups, spec)


def wgrad(pending: PendingWgrad, accumulator: jax.Array | None, dtype: DTypeLike | None = None) -> jax.Array:
    """Returns the gradient of `kernel` in its own type or in `dtype`, or the accumulator with it added."""
    if dtype is None:
        dtype = pending.spec.kernel.dtype if accumulator is None else accumulator.dtype
    assert pending.x is not None
    assert pending.dy is not None
    product, out_spec = pending.spec.gemm("wgrad", dtype), pending.spec.partitions.kernel
    return gemm(pending.x, pending.dy, pending.groups, product, accumulator, out_spec)


def summed_wgrad(
    pending: PendingWgrad, accumulator: jax.Array | None, stored_over: Hashable | None = None
) -> jax.Array:
    """Returns what `wgrad` does, summed over devices that have the same kernels but other tokens, and rounded once.

    The devices of the mesh axis `stored_over`, if there is one, have equal parts of the kernels, and get those of the
    sum.
    """
    spec = pending.spec
    axes = added_axes(spec.kernel_axes, pending.x, pending.dy, pending.groups)
    if stored_over is None and not axes:
        return wgrad(pending, accumulator)
    total = wgrad(pending, None, sum_dtype(spec.kernel.dtype))
    if stored_over is not None:
        total = jax.lax.psum_scatter(total, stored_over, tiled=True)
    if axes:
        total = jax.lax.psum(total, axes)
    if accumulator is not None:
        total += accumulator.astype(total.dtype)
    return total.astype(spec.kernel.dtype)


def next_state(residuals: DenseResiduals, output_grad: jax.Array | None) -> Fp8State | None:
    """Returns the state after this step, None without one."""
    if residuals.fp8_state is None:
        return None
    assert residuals.amax is not None
    assert isinstance(residuals.spec.recipe, DelayedScaling)
    last = {} if output_grad is None else {"output_grad": output_grad}
    return residuals.fp8_state.after(residuals.spec.recipe, residuals.amax | last)


def given_scales(spec: DenseSpec, state: Fp8State | None) -> PerTensor | None:
    """Returns the scales that delayed scaling has ready, None with other recipes."""
    if not isinstance(spec.recipe, DelayedScaling):
        return None
    assert state is not None
    return state.scales(spec.recipe)


def quantized(
    x: jax.Array | ScaledArray,
    groups: Groups,
    spec: DenseSpec,
    state: Fp8State | None,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
    row_indices: jax.Array | None = None,
) -> Oriented | GroupedQuantized:
    """Returns the tokens as the products read them. `row_indices` are those of `grouped_quantize`.

    With block scaling, the tokens may be a stack that is quantized already.
    """
    if spec.recipe is None:
        assert not isinstance(x, ScaledArray)
        return Oriented(x, x)
    scales = given_scales(spec, state)
    scale = None if scales is None else scales.input
    x_spec = spec.x_spec(rowwise=rowwise, columnwise=columnwise)
    return quantize_tokens(x, groups, x_spec, row_indices=row_indices, scale=scale)


def quantized_kernels(weights: Weights, spec: DenseSpec, *, rowwise: bool) -> Kernels:
    """Returns the kernels as the products read them; those that dgrad reads only if `rowwise`."""
    cache = weights.kernel_cache
    if isinstance(cache, KernelCache):
        return cache
    if spec.recipe is None:
        kernel = weights.kernel.astype(spec.x_dtype) if cache is None else _converted(weights.kernel, cache)
        return Oriented(kernel, kernel)
    scales = given_scales(spec, weights.fp8_state)
    both = kernel_spec(weights.kernel.shape, spec.recipe)
    scale = None if scales is None else scales.kernel
    return quantize_stack(weights.kernel, dataclasses.replace(both, rowwise=rowwise), scale=scale)


@jax.custom_jvp
def _converted(kernel: jax.Array, cache: jax.Array) -> jax.Array:
    """Returns the kernel in another type, which is there already, with the derivative of the conversion."""
    del kernel
    return cache


@_converted.defjvp
def _converted_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    cache = _converted(*primals)
    return cache, vary_alike(tangents[0].astype(cache.dtype), cache)[0]


def quantized_gradient(
    residuals: DenseResiduals,
    dy: jax.Array | ScaledArray,
    activation_input: jax.Array | None = None,
    *,
    row_indices: jax.Array | None = None,
) -> Oriented | GroupedQuantized:
    """Returns the gradient of the result as dgrad and wgrad read it, and the sums of its rows for a bias.

    If the spec has an `output_activation`, `dy` is the gradient of that activation's result, and `activation_input` is
    the product's result. `row_indices` are those of `jax_grouped.grouped_quantize`.
    """
    spec = residuals.spec
    if spec.recipe is None:
        assert not isinstance(dy, ScaledArray)
        dbias = None
        if spec.bias_dtype is not None:
            out_spec = spec.partitions.bias
            dbias = bias_grad(dy, residuals.groups, spec.num_groups, jnp.dtype(spec.bias_dtype), out_spec)
        dy = dy.astype(gradient_type(jnp.dtype(spec.x_dtype), dy.dtype))
        return Oriented(dy, dy, dbias=dbias)
    scales = given_scales(spec, residuals.fp8_state)
    return quantize_tokens(
        dy,
        residuals.groups,
        spec.dy_spec(),
        row_indices=row_indices,
        scale=None if scales is None else scales.output_grad,
        activation_input=activation_input,
    )


def quantized_gradient_of_activation(
    residuals: DenseResiduals,
    following: DenseResiduals,
    dy: jax.Array,
    activation_input: jax.Array,
    row_weights: jax.Array,
) -> tuple[GroupedQuantized, GroupedQuantized, jax.Array]:
    """Returns the result of `quantized_gradient`, the tokens of the following product, and inner products.

    The tokens are columnwise, for the following product's wgrad: the activation's result times `row_weights`. The inner
    products are those of each row of that result with `dy`. One pass over the activation's input makes all.
    """
    assert residuals.spec.recipe == following.spec.recipe
    own, next_scales = (given_scales(each.spec, each.fp8_state) for each in (residuals, following))
    return quantize_with_activation(
        dy,
        residuals.groups,
        residuals.spec.dy_spec(inner_products=True, activated=True),
        scale=None if own is None else own.output_grad,
        activation_input=activation_input,
        row_weights=row_weights,
        activated_scale=None if next_scales is None else next_scales.input,
    )


def _named(residuals: DenseResiduals) -> DenseResiduals:
    """Returns the residuals with the results of quantization named by `CHECKPOINT_NAMES`."""

    def name(value: Any, name: str) -> Any:
        return jax.tree.map(lambda leaf: checkpoint_name(leaf, name), value)

    if residuals.spec.recipe is None:
        return residuals
    x_name, kernel_name, _ = CHECKPOINT_NAMES
    # Name the largest values too: they come from the same passes, and without a name a policy would run these again.
    amax = residuals.amax
    if amax is not None:
        amax = {"input": name(amax["input"], x_name), "kernel": name(amax["kernel"], kernel_name)}
    x, kernel = name(residuals.x, x_name), name(residuals.kernel, kernel_name)
    return dataclasses.replace(residuals, x=x, kernel=kernel, amax=amax)
