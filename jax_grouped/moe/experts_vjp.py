"""The experts of a layer, with their routing weights, as one function with its derivative.

The tokens, the first product's result and the routing wait for the backward pass: no copy per choice of anything else.
The rows of tokens are made anew in both passes: by the quantization with a recipe, and otherwise by the products
themselves or by a copy before them. The gradient of a routing weight comes from the activation's result `a` and that
one's gradient, as `<a, da>`, so no expert's result is kept or gathered for it, as in SonicMoE (arXiv:2512.14080). The
weight itself multiplies `a` for the second product's wgrad, and `da` after its dgrad. With a recipe, one pass over the
first product's result quantizes the weighted `a` and the gradient of that result.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jax_grouped.core.groups import count_not_above
from jax_grouped.fp8.arrays import GroupedQuantized
from jax_grouped.fp8.recipes import ScalingMode
from jax_grouped.kernels.activations import Activation
from jax_grouped.kernels.product import Gathered, gathers_fast
from jax_grouped.kernels.rows import gather, sum_of_choices
from jax_grouped.moe.mlp import HIDDEN_NAME
from jax_grouped.moe.token_gather import Received, TokenGather, restored, summed
from jax_grouped.moe.weight_gather import WeightGather
from jax_grouped.ops.dense import (
    Kernels,
    Oriented,
    Saved,
    dgrad,
    fprop,
    given_scales,
    gradients,
    next_state,
    primal_values,
    quantized,
    quantized_gradient,
    quantized_gradient_of_activation,
    quantized_kernels,
    save,
    summed_wgrad,
)
from jax_grouped.ops.inputs import DenseSpec, Inputs, Weights
from jax_grouped.ops.quantize import quantize_permuted
from jax_grouped.ops.residuals import DenseResiduals, PendingWgrad
from jax_grouped.ops.rows import activate, activation_grad, permute_rows, sum_rows

#: Parts in which sums return to the devices of the tokens. More parts start more collectives, of 20 us each.
_CHUNKS = 2


class ExpertsSpec(NamedTuple):
    """The static part: the activation, both products, the gathers if any, and the type of a shared result."""

    activation: Activation
    up: DenseSpec
    down: DenseSpec
    weight_gather: WeightGather | None
    token_gather: TokenGather | None = None
    shared_dtype: np.dtype | None = None


class ExpertsArrays(NamedTuple):
    """The arrays of both products, and the routing.

    Attributes:
        up: with the tokens `[T, K]` and the token of each row, or with the rows `[R, K]`. Once they are gathered, the
            tokens are as they were sent.
        down: without tokens and bias.
        weights: `float32[T, k]` with tokens, `float32[R]` with rows.
        order, inverse: those of the `Permutation`; None with rows.
        bias: `[E, N]` of the second product with tokens, or None.
        shared: `[T, N]`, added to the sums of this device's tokens, or None; not kept for the backward pass.
        received: the tokens of all devices as they were sent, in place of those of `up` once the forward pass has
            begun; or None.
    """

    up: Inputs
    down: Inputs
    weights: jax.Array
    order: jax.Array | None
    inverse: jax.Array | None
    bias: jax.Array | None
    shared: jax.Array | None
    received: Received | None = None

    def combined(self, rows: jax.Array) -> jax.Array:
        """Returns the weighted sum of each token's rows, or the weighted rows, in float32."""
        if self.inverse is None:
            return rows.astype(jnp.float32) * self.weights[:, None]
        sums = sum_of_choices(rows, self.inverse, self.weights)
        return sums if self.bias is None else sums + self.weighted_bias(self.bias, self.weights)

    def weighted_bias(self, bias: jax.Array, weights: jax.Array) -> jax.Array:
        """Returns the sum of each token's biases times these weights, `float32[T, N]`.

        A bias is the same for all rows of an expert, so it need not be added to each of them.
        """
        assert self.inverse is not None
        ends = jnp.cumsum(self.up.groups.sizes, dtype=jnp.int32)
        expert = count_not_above(ends, self.inverse)
        chosen = expert[..., None] == jnp.arange(ends.shape[0], dtype=jnp.int32)
        expert_weights = jnp.sum(jnp.where(chosen, weights[..., None], 0), axis=1)
        return jnp.matmul(expert_weights, bias.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)

    def row_weights(self) -> jax.Array:
        """Returns the weight of each row, `float32[R]`."""
        return self.weights if self.order is None else gather(self.weights.reshape(self.weights.size), self.order)

    def sum_over_choices(self, drows: jax.Array) -> jax.Array:
        """Returns the gradient of `up.x` from that of the rows."""
        return drows if self.inverse is None else sum_of_choices(drows, self.inverse).astype(drows.dtype)

    def choices_gradient(self, dweights: jax.Array) -> jax.Array:
        """Returns the gradient of `weights` from that of the rows' weights."""
        return dweights if self.inverse is None else gather(dweights, self.inverse)


class _Saved(NamedTuple):
    arrays: ExpertsArrays
    hidden: jax.Array
    up: Saved
    down: Saved


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def apply_experts(arrays: ExpertsArrays, spec: ExpertsSpec) -> jax.Array:
    """Returns the weighted sum of each token's results, `[T, N]`, or the weighted results of rows, `[R, N]`."""
    return _apply(arrays, spec, for_gradients=False)[0]


def _forward(primals: Any, spec: ExpertsSpec) -> tuple[jax.Array, _Saved]:
    up, down = primal_values(primals.up), primal_values(primals.down)
    arrays = ExpertsArrays(up, down, *jax.tree.map(lambda primal: primal.value, tuple(primals[2:])))
    return _apply(arrays, spec, for_gradients=True)


def _apply(arrays: ExpertsArrays, spec: ExpertsSpec, *, for_gradients: bool) -> tuple[jax.Array, _Saved]:
    kernels, weights = None, arrays.up.weights
    if spec.weight_gather is not None:
        kernels, _ = spec.weight_gather.for_fprop(weights, spec.up, None, rowwise=for_gradients)
    elif spec.token_gather is not None and spec.up.recipe is not None and weights.kernel_cache is None:
        kernels = quantized_kernels(weights, spec.up, rowwise=for_gradients)
    if spec.token_gather is not None:
        # XLA then does this work during the transfer.
        x, kernels, shared = jax.lax.optimization_barrier((arrays.received, kernels, arrays.shared))
        # Only quantization reads tokens that are still as they were sent. The fields of `Inputs` are arrays elsewhere.
        up, choice_weights = arrays.up._replace(x=x), spec.token_gather.routing_weights(arrays.weights)
        arrays = arrays._replace(up=up, weights=choice_weights, shared=shared, received=None)
    hidden, rows, up_part, down_part = _products(arrays, spec, kernels, for_gradients=for_gradients)
    sums = _sums(arrays, rows, spec)
    if arrays.shared is not None:
        sums += arrays.shared.astype(jnp.float32)
        arrays = arrays._replace(shared=None)
    return sums, _Saved(arrays, hidden, save(arrays.up, up_part), save(arrays.down, down_part))


def _sums(arrays: ExpertsArrays, rows: jax.Array, spec: ExpertsSpec) -> jax.Array:
    """Returns the sums for the tokens of this device, in float32.

    Those of several devices are made in two chunks, so that the first one travels while the second one is summed.
    """
    gather = spec.token_gather
    if gather is None or arrays.inverse is None:
        return arrays.combined(rows)
    chunks = [gather.device_chunks(array, _CHUNKS) for array in (arrays.inverse, arrays.weights)]
    received: list[Received] = []
    for inverse, weights in zip(*chunks, strict=True):
        if arrays.bias is None:
            parts = sum_rows(rows, inverse, weights)
        else:
            parts = arrays._replace(inverse=inverse, weights=weights).combined(rows)
        parts = parts.astype(spec.up.x_dtype)
        # XLA runs one collective at a time, in this order.
        parts, rows, received = jax.lax.optimization_barrier((parts, rows, received))
        received.append(gather.results(parts))
    return jnp.concatenate([summed(part) for part in received])


def _products(
    arrays: ExpertsArrays, spec: ExpertsSpec, kernels: Kernels | None, *, for_gradients: bool
) -> tuple[jax.Array, jax.Array, DenseResiduals, DenseResiduals]:
    """Returns the results of both products, and the residuals of both without tokens."""
    up, down = arrays.up, arrays.down
    options: dict[str, Any] = dict(for_gradients=for_gradients, keep_tokens=False)
    (rows,), row_indices = _gathered([up.x], arrays, spec)
    tokens = _quantized_once(arrays, spec)
    up = up._replace(x=rows, row_indices=row_indices)
    down_part = None
    if spec.weight_gather is not None:
        down_part, kernels = spec.weight_gather.for_fprop(down.weights, spec.down, kernels, rowwise=for_gradients)
    hidden, up_residuals = fprop(up, spec.up, tokens=tokens, kernels=kernels, **options)
    hidden = checkpoint_name(hidden, HIDDEN_NAME)
    activated = activate(hidden, spec.activation) if spec.down.recipe is None else hidden
    results, down_residuals = fprop(down._replace(x=activated), spec.down, kernels=down_part, **options)
    return hidden, results, up_residuals, down_residuals


def _gathered(
    token_arrays: list[jax.Array], arrays: ExpertsArrays, spec: ExpertsSpec
) -> tuple[list[Any], jax.Array | None]:
    """Returns the rows of arrays of tokens; with a recipe the arrays, and the indices by which quantization gathers."""
    if spec.up.recipe is not None or arrays.order is None or arrays.inverse is None:
        return token_arrays, arrays.up.row_indices
    return [Gathered(x, arrays.order, arrays.inverse) for x in token_arrays], None


def _quantized_once(arrays: ExpertsArrays, spec: ExpertsSpec) -> Oriented | None:
    """Quantizes the first product's tokens in a pass that reads each once.

    Returns None without a recipe, if the rows are there already, or if scales would have to be found first. Scales of
    blocks do not depend on a token's expert, and delayed scaling gives one per expert.
    """
    recipe, order, inverse = spec.up.recipe, arrays.order, arrays.inverse
    if recipe is None or order is None or inverse is None:
        return None
    scales = given_scales(spec.up, arrays.up.weights.fp8_state)
    if recipe.token_mode != ScalingMode.BLOCK_1D and scales is None:
        return None
    given = None if scales is None else scales.input
    row_spec = spec.up.x_spec(columnwise=False)
    rowwise, amax = quantize_permuted(arrays.up.x, arrays.up.groups, order, inverse, given, spec=row_spec)
    return Oriented(rowwise, None, amax)


def _backward(spec: ExpertsSpec, saved: _Saved, dy: Any) -> tuple[ExpertsArrays]:
    arrays, _, up, down = saved
    zero: Any = None
    if isinstance(dy, jax.custom_derivatives.SymbolicZero):
        up_part, down_part = (gradients(residuals, None)._replace(x=zero) for residuals in (up, down))
        return (ExpertsArrays(up_part, down_part, *(zero,) * 6),)
    dshared = None if spec.shared_dtype is None else dy.astype(spec.shared_dtype)
    if spec.weight_gather is not None:
        up, down, dy = spec.weight_gather.for_dgrad(up, down, dy)
        saved = saved._replace(up=up, down=down)
    # Without the barrier, XLA would find that the forward pass has made the rows of tokens, and keep them until now.
    x, dy = jax.lax.optimization_barrier((arrays.up.x, dy.astype(spec.up.x_dtype)))
    (x,), row_indices = _gathered([x], arrays, spec)
    tokens = quantized(
        x, arrays.up.groups, spec.up, up.residuals.fp8_state, rowwise=False, row_indices=row_indices
    ).columnwise
    if spec.token_gather is not None:
        if isinstance(tokens, Gathered) and not gathers_fast("wgrad", spec.up.out_shape[1]):
            tokens = permute_rows(*tokens, zero_tail=spec.up.zero_other_rows)
        dy, tokens = jax.lax.optimization_barrier((spec.token_gather.dresults(dy), tokens))
    dbias = bias_dweights = None
    if arrays.bias is not None:
        _, pull_back = jax.vjp(arrays.weighted_bias, arrays.bias, arrays.weights)
        dbias, bias_dweights = pull_back(restored(dy, spec.up.x_dtype).astype(jnp.float32))
    (dy,), _ = _gathered([dy], arrays, spec)
    if spec.down.recipe is None:
        pending, gradient, dweights = _backward_of_down(saved, dy, spec)
    else:
        pending, gradient, dweights = _backward_of_quantized_down(saved, dy, row_indices)
    stored_over = None if spec.weight_gather is None else spec.weight_gather.axis_name
    dkernel = summed_wgrad(pending, down.dkernel_accumulator, stored_over)
    ddown = Weights(dkernel, fp8_state=pending.fp8_state)
    dweights = arrays.choices_gradient(dweights)
    if bias_dweights is not None:
        dweights += bias_dweights
    drows, pending = dgrad(up.residuals, gradient)
    pending = dataclasses.replace(pending, x=tokens)
    if spec.token_gather is None:
        dx = arrays.sum_over_choices(drows)
    else:
        # XLA runs one collective at a time: this one during dgrad, and that of dx during wgrad.
        dweights = summed(spec.token_gather.routing_weight_gradients(dweights))
        drows, dweights = jax.lax.optimization_barrier((drows, dweights))
        assert arrays.inverse is not None
        parts = sum_rows(drows, arrays.inverse)
        parts, operands = jax.lax.optimization_barrier((parts, (pending.x, pending.dy)))
        pending = dataclasses.replace(pending, x=operands[0], dy=operands[1])
        dx = summed(spec.token_gather.dtokens(parts)).astype(parts.dtype)
    dkernel = summed_wgrad(pending, up.dkernel_accumulator, stored_over)
    dup = Weights(dkernel, bias=pending.dbias, fp8_state=pending.fp8_state)
    return (
        ExpertsArrays(Inputs(dx, dup, zero), Inputs(zero, ddown, zero), dweights, zero, zero, dbias, dshared, zero),
    )


apply_experts.defvjp(_forward, _backward, symbolic_zeros=True)


def _backward_of_down(
    saved: _Saved, dy: jax.Array, spec: ExpertsSpec
) -> tuple[PendingWgrad, Oriented | GroupedQuantized, jax.Array]:
    """Returns the inputs of the second product's wgrad, the gradient of `hidden`, and that of the weights of rows."""
    arrays, hidden, up, down = saved
    dactivated, pending = dgrad(down.residuals, quantized_gradient(down.residuals, dy))
    if arrays.order is None or spec.up.zero_other_rows:
        weights, order = arrays.row_weights(), None
    else:
        weights, order = arrays.weights.reshape(arrays.weights.size), arrays.order
    dhidden, activated, dweights = activation_grad(hidden, dactivated, weights, spec.activation, order)
    return dataclasses.replace(pending, x=activated), quantized_gradient(up.residuals, dhidden), dweights


def _backward_of_quantized_down(
    saved: _Saved, dy: jax.Array, row_indices: jax.Array | None
) -> tuple[PendingWgrad, Oriented | GroupedQuantized, jax.Array]:
    """Returns the same with a recipe, whose quantization gathers the rows of `dy` by indices, if there are any."""
    arrays, hidden, up, down = saved
    gradient_of_results = quantized_gradient(down.residuals, dy, row_indices=row_indices)
    dactivated, pending = dgrad(down.residuals, gradient_of_results)
    gradient, activated, inner_products = quantized_gradient_of_activation(
        up.residuals, down.residuals, dactivated, hidden, arrays.row_weights()
    )
    if down.residuals.amax is not None:
        # The forward pass has quantized the activation's result without its weights.
        largest = jnp.maximum(down.residuals.amax["input"], activated.amax)
        amax = {**down.residuals.amax, "input": largest}
        state = next_state(dataclasses.replace(down.residuals, amax=amax), gradient_of_results.amax)
        pending = dataclasses.replace(pending, fp8_state=state)
    return dataclasses.replace(pending, x=activated.columnwise), gradient, inner_products
