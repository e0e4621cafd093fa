"""`grouped_dense` in three calls, for schedules that take the kernel's gradient later than that of the tokens."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jax_grouped.core.values import as_array, vary_alike
from jax_grouped.fp8.arrays import KernelCache
from jax_grouped.fp8.recipes import Recipe
from jax_grouped.fp8.state import Fp8State
from jax_grouped.ops import inputs
from jax_grouped.ops.dense import DenseResiduals, PendingWgrad, dgrad, given_scales, quantized_gradient, run, wgrad
from jax_grouped.ops.inputs import GroupSizes, Weights, canonical_inputs, check_accumulator


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
    already, as `jax_grouped.Fp8State` says.

    Args:
        x: `[T, K]`; this and the others as in `jax_grouped.grouped_dense`.
        kernel: `[G, K, N]`. An accumulator of its gradient is given to `grouped_dense_wgrad`.
        group_sizes: `[G]`.
        bias: `[G, N]` or None.
        recipe: how the products are computed in FP8, or None.
        fp8_state: with `DelayedScaling`. Its next value is `pending.fp8_state`.
        kernel_cache: as in `grouped_dense`.
        group_offset: offset of the kernels among the groups.
        preferred_element_type: type of the result.
        precision: for float32 `x`.

    Returns:
        `[T, N]`, and a pytree for `grouped_dense_dgrad`.

    Raises:
        TypeError: as `jax_grouped.grouped_dense`.
        ValueError: as `jax_grouped.grouped_dense`.

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
        spec = dataclasses.replace(spec, bias_dtype=jnp.result_type(bias))
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
        ValueError: `dy` has another shape than the result.

    Example:
        y, residuals = jg.grouped_dense_fwd(jnp.ones((16, 32)), jnp.ones((2, 32, 16)), jnp.array([10, 4]))
        dx, pending = jg.grouped_dense_dgrad(residuals, jnp.ones_like(y))

        assert dx[:14].tolist() == 14 * [32 * [16.0]] and not dx[14:].any()
    """
    if not isinstance(residuals, DenseResiduals):
        raise TypeError(f"residuals must be those of grouped_dense_fwd, got {type(residuals).__name__}.")
    dy = as_array("dy", dy)
    inputs.check_dtype("dy's type", dy.dtype)
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
