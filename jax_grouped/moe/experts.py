"""The experts' feed-forward networks, two grouped products with an activation in between, as one rule of derivatives.

The rule is that of `grouped_mlp`, whose rows stand already, and of a whole layer, where a `RowMap` makes rows of tokens
and weighted sums of results. Rows that stand are quantized once, for both passes. Otherwise the tokens, the first
product's result and the map wait for the backward pass, and no copy per choice of anything else: the rows of tokens
are made anew in both passes, by the quantization with a recipe, and otherwise by the products themselves or by a copy.

The gradient of a routing weight comes from the activation's result `a` and that one's gradient, as `<a, da>`, so no
expert's result is kept or gathered for it, as in SonicMoE (arXiv:2512.14080). The weight itself multiplies `a` for the
second product's wgrad, and `da` after its dgrad. With a recipe, one pass over the first product's result quantizes the
weighted `a` and the gradient of that result.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec

from jax_grouped.core.groups import Groups, count_not_above
from jax_grouped.core.values import apply_rule, as_array, vary_alike
from jax_grouped.fp8.recipes import Recipe, ScalingMode
from jax_grouped.kernels.activations import Activation, is_gated
from jax_grouped.kernels.bias import add_bias
from jax_grouped.kernels.partition import axes_of
from jax_grouped.kernels.product import Gathered
from jax_grouped.kernels.rows import activate, activation_grad, gather, sum_of_choices, sum_rows, tokens_of
from jax_grouped.moe.gathers import Received, TokenGather, WeightGather, restored, summed
from jax_grouped.moe.permutation import Permutation, checked_shared
from jax_grouped.ops import inputs
from jax_grouped.ops.dense import (
    CHECKPOINT_NAMES,
    OUTPUT_NAME,
    DenseResiduals,
    dgrad,
    fprop,
    given_scales,
    grouped_dense,
    is_on_mesh,
    make_residuals,
    named,
    next_state,
    primal_values,
    quantized_gradient,
    quantized_tokens,
    weights_gradient,
    zero_gradient,
)
from jax_grouped.ops.inputs import DenseSpec, GroupSizes, Partitions, Weights, canonical_weights, vary_inputs
from jax_grouped.ops.quantize import Oriented, quantize_permuted, quantize_with_activation

#: Name of the input of the activation, for policies of `jax.checkpoint`.
HIDDEN_NAME = CHECKPOINT_NAMES[2]

#: Parts in which sums return to the devices of the tokens. More parts start more collectives, of 20 us each.
_CHUNKS = 2


def grouped_mlp(
    x: jax.Array,
    gate_up: jax.Array | Weights,
    down: jax.Array | Weights,
    group_sizes: GroupSizes,
    *,
    activation: Activation = "swiglu",
    recipe: Recipe | None = None,
    precision: jax.lax.PrecisionLike = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
) -> jax.Array:
    """Applies a feed-forward network per group: by default `(silu(x @ gate) * (x @ up)) @ down` (arXiv:2002.05202).

    With a recipe, the activation is fused into the quantization of the second product's input, and its derivative into
    the quantization of the first product's output gradient. Both are computed in float32, rounded once, to FP8, and
    never written in a wider type. Without a recipe they are plain JAX, and the backward pass computes the activation
    again from the first product's result, which is kept in its own type. Everything else is as in
    `jax_grouped.grouped_dense`: types, rows of no group, gradients, the values kept under
    `jax_grouped.CHECKPOINT_NAMES`, and the fields of `Weights`.

    Under plain `jax.jit` with sharded arrays, both products are split as `jax_grouped.grouped_dense` is: activation and
    quantization are then two passes, with a rounding to the type of `x` in between.

    Args:
        x: `[T, K]` tokens, bfloat16, float16 or float32; rows of group 0 first, then group 1, and so on.
        gate_up: `[E, K, 2 F]`, the gate's features first, or `Weights` with such a kernel; `[E, K, F]` with an
            activation that has no gate.
        down: `[E, F, N]`, or `Weights` with such a kernel.
        group_sizes: `[E]` integers, rows per group, read on the device only.
        activation: with a gate "swiglu", "geglu", "reglu" or a `jax_grouped.SwiGLU`; without one "silu", "gelu", "relu"
            or "relu_squared". See `jax_grouped.grouped_quantize`.
        recipe: how both products are computed in FP8, with `K`, `F` and `N` multiples of 16; None to compute in the
            type of `x`.
        precision: as in `jax_grouped.ragged_dot`; matters for float32 `x` only. Not with a recipe.
        out_sharding: as in `jax_grouped.ragged_dot`.

    Returns:
        `[T, N]` in the type of `x`.

    Raises:
        TypeError: an argument, or the recipe, has a type that is not supported.
        ValueError: an argument has a shape that does not fit, or as `jax_grouped.grouped_dense`.

    Example:
        x, gate_up, down = jnp.ones((16, 32)), jnp.ones((2, 32, 32)), jnp.ones((2, 16, 32))

        y = jg.moe.grouped_mlp(x, gate_up, down, jnp.array([10, 4]))

        assert jnp.allclose(y[:14], 16 * 32 * jax.nn.silu(32.0)) and not y[14:].any()
    """
    x = as_array("x", x)
    gate_up, down, spec = _canonical(x, gate_up, down, activation, recipe, precision)
    out_spec = inputs.canonical_out_spec(out_sharding, x, gate_up.kernel, down.kernel)
    last = dataclasses.replace(spec.down, partitions=Partitions(out=out_spec))
    if recipe is None or is_on_mesh(x, gate_up, spec.up) or is_on_mesh(x, down, last):
        dense = functools.partial(grouped_dense, group_sizes=group_sizes, recipe=recipe, precision=precision)
        hidden = dense(x, **gate_up._asdict(), out_sharding=_hidden_spec(x, gate_up.kernel, down.kernel))
        hidden = checkpoint_name(hidden, HIDDEN_NAME)
        y = dense(activate(hidden, activation), **down._asdict(), out_sharding=out_sharding)
        return checkpoint_name(y, OUTPUT_NAME)

    groups = inputs.canonical_groups(group_sizes, None, "gate_up", gate_up.kernel, capacity=x.shape[0])
    arrays = ExpertsArrays(*vary_inputs(x, gate_up, down, RowMap(groups)))
    y = apply_rule(_experts, arrays, spec, "grouped_mlp")
    return checkpoint_name(y, OUTPUT_NAME)


def _hidden_spec(x: jax.Array, gate_up: jax.Array, down: jax.Array) -> PartitionSpec:
    """Returns the spec of the activation's input: features as those of `gate_up` if axes are free and divide `F`."""
    x_sharding, kernel_sharding = jax.typeof(x).sharding, jax.typeof(gate_up).sharding
    axes = axes_of(kernel_sharding, 2)
    parts = math.prod(kernel_sharding.mesh.shape[axis] for axis in axes)
    is_free = not {*axes} & {*axes_of(x_sharding, 0)} and down.shape[1] % parts == 0
    return PartitionSpec(x_sharding.spec[0], kernel_sharding.spec[2] if is_free else None)


def routed_mlp(
    x: jax.Array,
    gate_up: Weights,
    down: Weights,
    permutation: Permutation,
    weights: jax.Array,
    activation: Activation = "swiglu",
    recipe: Recipe | None = None,
    precision: jax.lax.PrecisionLike = None,
    shared: jax.Array | None = None,
    expected_rows: int = 0,
    token_gather: TokenGather | None = None,
    received: Received | None = None,
    weight_gather: WeightGather | None = None,
) -> jax.Array:
    """Computes `unpermute(grouped_mlp(permute(x, permutation), ...), permutation, weights, shared=shared)`."""
    order, inverse = permutation.order, permutation.inverse
    rows = jax.ShapeDtypeStruct((order.shape[0], x.shape[1]), x.dtype)
    gate_up, down, spec = _canonical(rows, gate_up, down, activation, recipe, precision, expected_rows, weight_gather)
    groups = inputs.canonical_groups(permutation.group_sizes, None, "gate_up", spec.up.kernel, capacity=rows.shape[0])
    if shared is not None:
        shared = checked_shared(shared, (x.shape[0], down.kernel.shape[2]))
    row_map = RowMap(groups, weights, order, inverse, tokens_of(order, inverse), down.bias)
    # Only rows of groups are summed. jax.debug_nans would find NaN in the others.
    others = dict(zero_other_rows=jax.debug_nans.value)
    spec = spec._replace(
        token_gather=token_gather or TokenGather(),
        shared_dtype=None if shared is None else shared.dtype,
        up=dataclasses.replace(spec.up, **others),
        down=dataclasses.replace(spec.down, bias_dtype=None, **others),
    )
    arrays = ExpertsArrays(*vary_inputs(x, gate_up, down._replace(bias=None), row_map, shared))
    return apply_rule(_experts, arrays._replace(received=received), spec, "moe_mlp").astype(x.dtype)


def weighted_mlp(
    rows: jax.Array,
    gate_up: Weights,
    down: Weights,
    group_sizes: jax.Array,
    row_weights: jax.Array,
    activation: Activation = "swiglu",
    recipe: Recipe | None = None,
    precision: jax.lax.PrecisionLike = None,
    expected_rows: int = 0,
    weight_gather: WeightGather | None = None,
) -> jax.Array:
    """Computes `row_weights[:, None] * grouped_mlp(rows, ...)`: `routed_mlp` for rows that are gathered already."""
    gate_up, down, spec = _canonical(rows, gate_up, down, activation, recipe, precision, expected_rows, weight_gather)
    groups = inputs.canonical_groups(group_sizes, None, "gate_up", spec.up.kernel, capacity=rows.shape[0])
    spec = spec._replace(down=dataclasses.replace(spec.down, bias_dtype=None))
    arrays = ExpertsArrays(*vary_inputs(rows, gate_up, down._replace(bias=None), RowMap(groups, row_weights)))
    weighted = apply_rule(_experts, arrays, spec, "moe_mlp")
    if down.bias is not None:
        zeros, bias, *varying_groups, _ = vary_alike(jnp.zeros_like(weighted), down.bias, *groups, weighted)
        weighted += row_weights[:, None] * add_bias(zeros, bias, Groups(*varying_groups))
    return weighted.astype(rows.dtype)


def _canonical(
    rows: jax.Array | jax.ShapeDtypeStruct,
    gate_up: jax.Array | Weights,
    down: jax.Array | Weights,
    activation: Activation,
    recipe: Recipe | None,
    precision: jax.lax.PrecisionLike,
    expected_rows: int = 0,
    weight_gather: WeightGather | None = None,
) -> tuple[Weights, Weights, "ExpertsSpec"]:
    """Returns both weights as arrays, and the static part of their products with rows such as these."""
    weight_gather = weight_gather or WeightGather()
    gate_up, down = as_weights("gate_up", gate_up), as_weights("down", down)
    inputs.check_activation_name(activation)
    check_shapes(gate_up.kernel.shape, down.kernel.shape, activation)
    features = down.kernel.shape[1]
    if recipe is not None:
        inputs.check_fp8_features("down", down.kernel.shape, features, "F")
    hidden = jax.ShapeDtypeStruct((rows.shape[0], features), rows.dtype)
    gate_up, up = canonical_weights(rows, gate_up, recipe, None, precision, "gate_up", weight_gather.parts)
    down, spec = canonical_weights(hidden, down, recipe, None, precision, "down", weight_gather.parts)
    return (
        gate_up,
        down,
        ExpertsSpec(
            activation,
            up=dataclasses.replace(up, output_activation=activation, expected_tokens=expected_rows),
            down=dataclasses.replace(spec, input_activation=activation, expected_tokens=expected_rows),
            weight_gather=weight_gather,
        ),
    )


def as_weights(name: str, weights: jax.Array | Weights) -> Weights:
    """Returns `Weights`, also from a bare kernel. Raises TypeError unless the kernel is an array."""
    if not isinstance(weights, Weights):
        weights = Weights(weights)
    return weights._replace(kernel=as_array(name, weights.kernel))


def check_shapes(gate_up: tuple[int, ...], down: tuple[int, ...], activation: Activation) -> None:
    """Raises ValueError unless kernels of these shapes follow each other."""
    halves, features = (2, "2 F") if is_gated(activation) else (1, "F")
    if len(gate_up) != 3 or len(down) != 3 or gate_up[0] != down[0] or gate_up[2] != halves * down[1]:
        raise ValueError(
            f"gate_up and down must have shapes [E, K, {features}] and [E, F, N] for {activation}, got {gate_up} and "
            f"{down}."
        )


class ExpertsSpec(NamedTuple):
    """The static part: the activation, both products, the gathers, and the type of a shared result."""

    activation: Activation
    up: DenseSpec
    down: DenseSpec
    weight_gather: WeightGather = WeightGather()
    token_gather: TokenGather = TokenGather()
    shared_dtype: np.dtype | None = None


class RowMap(NamedTuple):
    """Map between tokens and the rows of the experts. With `groups` alone, the rows stand already, and have no weights.

    Attributes:
        groups: the rows of each expert.
        weights: `float32[T, k]` of tokens, or `float32[R]` of rows that stand.
        order, inverse: those of the `Permutation`.
        row_indices: `int32[R]`, the token of each row.
        bias: `[E, N]` of the second product, or None.
    """

    groups: Groups
    weights: jax.Array | None = None
    order: jax.Array | None = None
    inverse: jax.Array | None = None
    row_indices: jax.Array | None = None
    bias: jax.Array | None = None

    def rows(self, x: Any, recipe: Recipe | None) -> Any:
        """Returns the rows of an array of tokens; with a recipe the array, as quantization gathers by `row_indices`."""
        if recipe is not None or self.order is None or self.inverse is None:
            return x
        return Gathered(x, self.order, self.inverse)

    def combined(self, rows: jax.Array) -> jax.Array:
        """Returns the weighted sum of each token's rows, or the weighted rows, in float32; without weights the rows."""
        if self.weights is None:
            return rows
        if self.inverse is None:
            return rows.astype(jnp.float32) * self.weights[:, None]
        sums = sum_of_choices(rows, self.inverse, self.weights)
        return sums if self.bias is None else sums + self.weighted_bias(self.bias, self.weights)

    def weighted_bias(self, bias: jax.Array, weights: jax.Array) -> jax.Array:
        """Returns the sum of each token's biases, one per expert, times these weights, `float32[T, N]`."""
        assert self.inverse is not None
        ends = jnp.cumsum(self.groups.sizes, dtype=jnp.int32)
        expert = count_not_above(ends, self.inverse)
        chosen = expert[..., None] == jnp.arange(ends.shape[0], dtype=jnp.int32)
        expert_weights = jnp.sum(jnp.where(chosen, weights[..., None], 0), axis=1)
        return jnp.matmul(expert_weights, bias.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)

    def row_weights(self) -> jax.Array:
        """Returns the weight of each row, `float32[R]`."""
        assert self.weights is not None
        return self.weights if self.order is None else gather(self.weights.reshape(self.weights.size), self.order)


class ExpertsArrays(NamedTuple):
    """The arrays of the rule.

    Attributes:
        x: the tokens `[T, K]`, or the rows `[R, K]` if they stand already.
        up, down: the weights. With a `bias` of the map, `down` has none.
        row_map: the map between tokens and rows.
        shared: `[T, N]`, added to the sums of this device's tokens, or None; not kept for the backward pass.
        received: the tokens of all devices as they were sent, which the products read in place of `x`; or None.
    """

    x: jax.Array
    up: Weights
    down: Weights
    row_map: RowMap
    shared: jax.Array | None = None
    received: Received | None = None


class _Saved(NamedTuple):
    """Residuals; `x` is None if the products' own residuals hold the rows."""

    x: Any
    row_map: RowMap
    hidden: jax.Array
    up: DenseResiduals
    down: DenseResiduals
    accumulators: tuple[jax.Array | None, jax.Array | None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _experts(arrays: ExpertsArrays, spec: ExpertsSpec) -> jax.Array:
    """Returns the weighted sum of each token's results, `[T, N]`, or the results of rows that stand, `[R, N]`."""
    return _run(arrays, spec, for_gradients=False)[0]


def _forward(primals: Any, spec: ExpertsSpec) -> tuple[jax.Array, _Saved]:
    return _run(primal_values(primals), spec, for_gradients=True)


def _run(arrays: ExpertsArrays, spec: ExpertsSpec, *, for_gradients: bool) -> tuple[jax.Array, _Saved]:
    x, up, down, row_map, shared, received = arrays
    groups, keeps = row_map.groups, for_gradients and row_map.weights is None
    kernels, _ = spec.weight_gather.for_fprop(up, spec.up, None, rowwise=for_gradients)
    # Kernels that a gather or a quantization makes are made while the tokens travel.
    is_made = spec.weight_gather.axis_name is not None or not (spec.up.recipe is None or up.kernel_cache is not None)
    x, made, shared = spec.token_gather.tokens_while(x, received, kernels if is_made else None, shared)
    kernels = kernels if made is None else made
    row_map = row_map._replace(weights=spec.token_gather.routing_weights(row_map.weights))
    tokens = _quantized_once(x, row_map, spec, up)
    down_kernels, kernels = spec.weight_gather.for_fprop(down, spec.down, kernels, rowwise=for_gradients)
    if tokens is None:
        rows, scales = row_map.rows(x, spec.up.recipe), given_scales(spec.up, up.fp8_state)
        indices = row_map.row_indices
        tokens = quantized_tokens(rows, groups, spec.up, scales, columnwise=keeps, row_indices=indices)
    hidden = checkpoint_name(fprop(tokens, kernels, groups, spec.up, up.bias), HIDDEN_NAME)
    activated = activate(hidden, spec.activation) if spec.down.recipe is None else hidden
    scales = given_scales(spec.down, down.fp8_state)
    down_tokens = quantized_tokens(activated, groups, spec.down, scales, columnwise=keeps)
    sums = _sums(row_map, fprop(down_tokens, down_kernels, groups, spec.down, down.bias), spec)
    if shared is not None:
        sums += shared.astype(jnp.float32)
    if not keeps:
        tokens, down_tokens = tokens._replace(columnwise=None), down_tokens._replace(columnwise=None)
    return sums, _Saved(
        None if keeps else x,
        row_map,
        hidden,
        named(make_residuals(tokens, kernels, groups, spec.up, up.fp8_state)),
        named(make_residuals(down_tokens, down_kernels, groups, spec.down, down.fp8_state)),
        (up.dkernel_accumulator, down.dkernel_accumulator),
    )


def _quantized_once(x: Any, row_map: RowMap, spec: ExpertsSpec, up: Weights) -> Oriented | None:
    """Quantizes the first product's tokens in a pass that reads each once.

    Returns None without a recipe, if the rows stand already, or if scales would have to be found first. Scales of
    blocks do not depend on a token's expert, and delayed scaling gives one per expert.
    """
    recipe, order, inverse = spec.up.recipe, row_map.order, row_map.inverse
    if recipe is None or order is None or inverse is None:
        return None
    scales = given_scales(spec.up, up.fp8_state)
    if recipe.token_mode != ScalingMode.BLOCK_1D and not scales:
        return None
    row_spec = spec.up.quantization()
    rowwise, amax = quantize_permuted(x, row_map.groups, order, inverse, scales.get("input"), spec=row_spec)
    return Oriented(rowwise, None, amax)


def _sums(row_map: RowMap, rows: jax.Array, spec: ExpertsSpec) -> jax.Array:
    """Returns the sums for this device's tokens, in float32; one chunk travels while the next one is summed."""
    gather = spec.token_gather
    if gather.axis_name is None or row_map.inverse is None or row_map.weights is None:
        return row_map.combined(rows)
    chunks = [gather.device_chunks(array, _CHUNKS) for array in (row_map.inverse, row_map.weights)]
    received: list[Received] = []
    for inverse, weights in zip(*chunks, strict=True):
        if row_map.bias is None:
            parts = sum_rows(rows, inverse, weights)
        else:
            parts = row_map._replace(inverse=inverse, weights=weights).combined(rows)
        parts = parts.astype(spec.up.x_dtype)
        # XLA runs one collective at a time, in this order.
        parts, rows, received = jax.lax.optimization_barrier((parts, rows, received))
        received.append(gather.results(parts))
    return jnp.concatenate([summed(part) for part in received])


def _backward(spec: ExpertsSpec, saved: _Saved, dy: Any) -> tuple[ExpertsArrays]:
    x, row_map, hidden, up, down, (up_accumulator, down_accumulator) = saved
    groups, indices, recipe = row_map.groups, row_map.row_indices, spec.up.recipe
    zero: Any = None
    if isinstance(dy, jax.custom_derivatives.SymbolicZero):
        dup, ddown = zero_gradient(up, up_accumulator), zero_gradient(down, down_accumulator)
        return (ExpertsArrays(zero, dup, ddown, zero),)
    up_scales, down_scales = given_scales(spec.up, up.fp8_state), given_scales(spec.down, down.fp8_state)
    dshared = None if spec.shared_dtype is None else dy.astype(spec.shared_dtype)
    stored_over = spec.weight_gather.axis_name

    up, down, dy = spec.weight_gather.for_dgrad(up, down, dy)
    tokens = up.x
    if tokens is None:
        # Without the barrier, XLA would find that the forward pass has made these rows, and keep them until now.
        x, dy = jax.lax.optimization_barrier((x, dy.astype(spec.up.x_dtype)))
        rows = row_map.rows(x, recipe)
        tokens = quantized_tokens(rows, groups, spec.up, up_scales, rowwise=False, row_indices=indices).columnwise
    dy, tokens = spec.token_gather.dresults_while(dy, tokens, spec.up)
    dbias = bias_dweights = None
    if row_map.bias is not None:
        _, pull_back = jax.vjp(row_map.weighted_bias, row_map.bias, row_map.weights)
        dbias, bias_dweights = pull_back(restored(dy, spec.up.x_dtype).astype(jnp.float32))

    results_gradient = quantized_gradient(row_map.rows(dy, recipe), groups, spec.down, down_scales, row_indices=indices)
    dactivated, pending = dgrad(down, results_gradient)
    activated: Any
    dweights: Any = None
    if recipe is None:
        if row_map.order is None or spec.up.zero_other_rows:
            weights, order = row_map.row_weights(), None
        else:
            assert row_map.weights is not None
            weights, order = row_map.weights.reshape(row_map.weights.size), row_map.order
        dhidden, activated, dweights = activation_grad(hidden, dactivated, weights, spec.activation, order)
        gradient = quantized_gradient(dhidden, groups, spec.up, up_scales)
    elif row_map.weights is None:
        activated = down.x
        gradient = quantized_gradient(dactivated, groups, spec.up, up_scales, activation_input=hidden)
    else:
        gradient, weighted, dweights = quantize_with_activation(
            dactivated,
            groups,
            spec.up.quantization(for_gradient=True, inner_products=True, activated=True),
            scale=up_scales.get("output_grad"),
            activation_input=hidden,
            row_weights=row_map.row_weights(),
            activated_scale=down_scales.get("input"),
        )
        activated = weighted.columnwise
        if down.amax is not None and weighted.amax is not None:
            # The forward pass has quantized the activation's result without its weights.
            amax = down.amax | {"input": jnp.maximum(down.amax["input"], weighted.amax)}
            state = next_state(dataclasses.replace(down, amax=amax), results_gradient.amax)
            pending = dataclasses.replace(pending, fp8_state=state)
    ddown = weights_gradient(dataclasses.replace(pending, x=activated), down_accumulator, stored_over)
    if dweights is not None and row_map.inverse is not None:
        dweights = gather(dweights, row_map.inverse)
    if bias_dweights is not None:
        dweights += bias_dweights

    drows, pending = dgrad(up, gradient)
    pending = dataclasses.replace(pending, x=tokens)
    if row_map.inverse is None:
        dx = drows
    else:
        dx, dweights, pending = spec.token_gather.dtokens_while(drows, dweights, row_map.inverse, pending)
    dup = weights_gradient(pending, up_accumulator, stored_over)
    return (ExpertsArrays(dx, dup, ddown, RowMap(zero, dweights, bias=dbias), dshared),)


_experts.defvjp(_forward, _backward, symbolic_zeros=True)
