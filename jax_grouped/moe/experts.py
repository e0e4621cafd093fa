"""The experts' feed-forward networks, two grouped products with an activation in between, as one rule of derivatives.

The rule is that of `grouped_mlp`, whose rows stand already, and of a whole layer, where a `RowMap` makes rows of tokens
and weighted sums of results. Rows that stand are quantized once, for both passes. Otherwise the tokens, the first
product's result and the map wait for the backward pass, and no copy per choice of anything else: the rows of tokens
are made anew in both passes, by the products themselves, by their quantization or, without a recipe, by a copy.

The gradient of a routing weight comes from the activation's result `a` and that one's gradient, as `<a, da>`, so no
expert's result is kept or gathered for it, as in SonicMoE (arXiv:2512.14080). The weight itself multiplies `a` for the
second product's wgrad, and `da` after its dgrad. With a recipe, one pass over the first product's result quantizes the
weighted `a` and the gradient of that result.

On a mesh, the tokens of all devices may be gathered along `expert_axis`, and kernels that are stored in parts along
`fsdp_axis`. XLA runs one collective at a time, and other work during it: optimization barriers decide which work that
is. All that a barrier returns is used in place of its operands, or XLA removes it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec

from jax_grouped.core.groups import Groups, count_not_above
from jax_grouped.core.values import apply_rule, as_array, axis_size, sum_dtype, vary_alike
from jax_grouped.fp8.arrays import ScaledArray, gather_stack
from jax_grouped.fp8.recipes import Recipe, ScalingMode
from jax_grouped.fp8.state import part_of_state
from jax_grouped.kernels.activations import Activation, is_gated
from jax_grouped.kernels.bias import add_bias
from jax_grouped.kernels.exchange import Push, can_push, push_sums
from jax_grouped.kernels.partition import split_axes
from jax_grouped.kernels.product import Gathered, RowsToQuantize, gathers_fp8_fast
from jax_grouped.kernels.routing import chosen
from jax_grouped.kernels.rows import activate, activation_grad, gather, row_tokens, sum_choices, sum_rows
from jax_grouped.moe.exchange import Received, RowForm, Wire, gather_tokens, return_parts, summed
from jax_grouped.moe.permutation import Permutation, checked_shared, permute, unpermute
from jax_grouped.ops import dense, inputs, quantize
from jax_grouped.ops.inputs import DenseSpec, GroupSizes, Partitions, Weights, canonical_weights, vary_inputs

#: Name of the input of the activation, for policies of `jax.checkpoint`.
HIDDEN_NAME = dense.CHECKPOINT_NAMES[2]

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

    With a recipe, the activation and its derivative are fused into quantizations: computed in float32, rounded once, to
    FP8. Without one, the backward pass computes the activation again from the first product's result. Everything else
    is as in `jax_grouped.grouped_dense`: types, rows of no group, gradients, the values kept under
    `jax_grouped.CHECKPOINT_NAMES`, and the fields of `Weights`.

    Under plain `jax.jit` with sharded arrays, both products are split as `jax_grouped.grouped_dense` is. Then, and with
    adapters, activation and quantization are two passes, with a rounding to the type of `x` in between.

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
        precision: of float32 products: "default", "high" or "highest", see `jax_grouped.ragged_dot`. Not with a recipe.
        out_sharding: `NamedSharding` or spec of the result's type, where those of the operands leave a choice.

    Returns:
        `[T, N]` in the type of `x`.

    Raises:
        TypeError, ValueError: an argument has a type or a shape that does not fit.

    Example:
        x, gate_up, down = jnp.ones((16, 32)), jnp.ones((2, 32, 32)), jnp.ones((2, 16, 32))

        y = jg.moe.grouped_mlp(x, gate_up, down, jnp.array([10, 4]))

        assert jnp.allclose(y[:14], 16 * 32 * jax.nn.silu(32.0)) and not y[14:].any()
    """
    x = as_array("x", x)
    network = Network(as_weights("gate_up", gate_up), as_weights("down", down), activation, recipe, precision)
    gate_up, down, spec = _canonical(x, network)
    out_spec = inputs.canonical_out_spec(out_sharding, x, gate_up.kernel, down.kernel)
    last = dataclasses.replace(spec.down, partitions=Partitions(out=out_spec))
    if recipe is None or network.has_lora or dense.is_on_mesh(x, gate_up, spec.up) or dense.is_on_mesh(x, down, last):
        # The activation's input is split as the features of `gate_up` if their axes are free and divide `F`.
        x_sharding, kernel_sharding = jax.typeof(x).sharding, jax.typeof(gate_up.kernel).sharding
        axes = split_axes(kernel_sharding, 2)
        parts = math.prod(kernel_sharding.mesh.shape[axis] for axis in axes)
        is_free = not {*axes} & {*split_axes(x_sharding, 0)} and down.kernel.shape[1] % parts == 0
        hidden_spec = PartitionSpec(x_sharding.spec[0], kernel_sharding.spec[2] if is_free else None)
        product = functools.partial(dense.grouped_dense, group_sizes=group_sizes, recipe=recipe, precision=precision)
        hidden = checkpoint_name(product(x, **gate_up._asdict(), out_sharding=hidden_spec), HIDDEN_NAME)
        y = product(activate(hidden, activation), **down._asdict(), out_sharding=out_sharding)
        return checkpoint_name(y, dense.OUTPUT_NAME)

    groups = inputs.canonical_groups(group_sizes, None, "gate_up", gate_up.kernel.shape[0], capacity=x.shape[0])
    arrays = ExpertsArrays(*vary_inputs(x, gate_up, down, RowMap(groups)))
    y = apply_rule(_experts, arrays, spec)
    return checkpoint_name(y, dense.OUTPUT_NAME)


class Network(NamedTuple):
    """The experts' weights, and how they compute."""

    gate_up: Weights
    down: Weights
    activation: Activation = "swiglu"
    recipe: Recipe | None = None
    precision: jax.lax.PrecisionLike = None
    #: Mesh axis whose devices have different tokens, and store each a part of the kernels and biases.
    fsdp_axis: Hashable | None = None
    #: See `GemmSpec`.
    expected_tokens: int = 0

    @property
    def has_lora(self) -> bool:
        return self.gate_up.lora is not None or self.down.lora is not None

    def apply(self, rows: jax.Array, group_sizes: jax.Array) -> jax.Array:
        """Computes `grouped_mlp`. Kernels that are stored in parts are gathered as they are."""

        def gather(part: Any) -> Any:
            if isinstance(part, ScaledArray):
                return gather_stack(part, self.fsdp_axis)
            return jax.lax.all_gather(part, self.fsdp_axis, tiled=True)

        def whole(weights: Weights) -> Weights:
            if self.fsdp_axis is None:
                return weights
            kernel, bias, cache, state, _, lora = weights
            kernel, cache = jax.tree.map(gather, (kernel, cache), is_leaf=lambda leaf: isinstance(leaf, ScaledArray))
            # Gradients are summed in the type that is gathered.
            bias, lora = jax.tree.map(lambda part: gather(part.astype(sum_dtype(part.dtype))), (bias, lora))
            return Weights(kernel, bias, cache, state, lora=lora)

        options: Any = dict(activation=self.activation, recipe=self.recipe, precision=self.precision)
        return grouped_mlp(rows, whole(self.gate_up), whole(self.down), group_sizes, **options)


def routed_mlp(
    x: jax.Array,
    network: Network,
    permutation: Permutation,
    weights: jax.Array,
    *,
    shared: jax.Array | None = None,
    expert_axis: Hashable | None = None,
    wire: Wire | None = None,
    received: Received | None = None,
    push: Push | None = None,
) -> jax.Array:
    """Computes `unpermute(grouped_mlp(permute(x, permutation), ...), permutation, weights, shared=shared)`.

    With an `expert_axis`, the permutation is that of the tokens of all its devices, which are there as `received`; not
    with adapters, whose layer is made of these functions.
    """
    if network.has_lora:
        results = network.apply(permute(x, permutation), permutation.group_sizes)
        return unpermute(results, permutation, weights, shared=shared)
    order, inverse = permutation.order, permutation.inverse
    rows = jax.ShapeDtypeStruct((order.shape[0], x.shape[1]), x.dtype)
    # Only rows of groups are summed. jax.debug_nans would find NaN in the others.
    gate_up, down, spec = _canonical(rows, network, zero_other_rows=jax.debug_nans.value)
    experts = spec.up.kernel.shape[0]
    groups = inputs.canonical_groups(permutation.group_sizes, None, "gate_up", experts, capacity=rows.shape[0])
    if shared is not None:
        shared = checked_shared(shared, (x.shape[0], down.kernel.shape[2]))
    spec = spec._replace(
        down=dataclasses.replace(spec.down, bias_dtype=None),
        expert_axis=expert_axis,
        wire=wire or Wire(),
        shared_dtype=None if shared is None else shared.dtype,
    )
    row_map = RowMap(groups, weights, order, inverse, row_tokens(order, inverse), down.bias, push)
    arrays = ExpertsArrays(*vary_inputs(x, gate_up, down._replace(bias=None), row_map, shared))
    return apply_rule(_experts, arrays._replace(received=received), spec).astype(x.dtype)


def weighted_mlp(rows: jax.Array, network: Network, group_sizes: jax.Array, row_weights: jax.Array) -> jax.Array:
    """Computes `row_weights[:, None] * grouped_mlp(rows, ...)`: `routed_mlp` for rows that are gathered already."""
    if network.has_lora:
        return (row_weights[:, None] * network.apply(rows, group_sizes)).astype(rows.dtype)
    gate_up, down, spec = _canonical(rows, network)
    groups = inputs.canonical_groups(group_sizes, None, "gate_up", spec.up.kernel.shape[0], capacity=rows.shape[0])
    spec = spec._replace(down=dataclasses.replace(spec.down, bias_dtype=None))
    arrays = ExpertsArrays(*vary_inputs(rows, gate_up, down._replace(bias=None), RowMap(groups, row_weights)))
    weighted = apply_rule(_experts, arrays, spec)
    if down.bias is not None:
        zeros, bias, groups, _ = vary_alike(jnp.zeros_like(weighted), down.bias, groups, weighted)
        weighted += row_weights[:, None] * add_bias(zeros, bias, groups)
    return weighted.astype(rows.dtype)


def _canonical(
    rows: jax.Array | jax.ShapeDtypeStruct, network: Network, *, zero_other_rows: bool = True
) -> tuple[Weights, Weights, ExpertsSpec]:
    """Returns both weights as arrays, and the static part of their products with rows such as these."""
    gate_up, down, activation, recipe, precision, fsdp_axis, expected_tokens = network
    inputs.check_activation_name(activation)
    check_shapes(gate_up.kernel.shape, down.kernel.shape, activation)
    features = down.kernel.shape[1]
    if recipe is not None:
        inputs.check_fp8_features("down", down.kernel.shape, features, "F")
    parts = 1
    if fsdp_axis is not None:
        parts = axis_size(fsdp_axis)
        # Biases are gathered in the type in which their gradients are summed.
        up_bias, down_bias = jax.tree.map(
            lambda bias: jax.lax.all_gather(bias.astype(sum_dtype(bias.dtype)), fsdp_axis, tiled=True),
            (gate_up.bias, down.bias),
        )
        gate_up, down = gate_up._replace(bias=up_bias), down._replace(bias=down_bias)
    hidden = jax.ShapeDtypeStruct((rows.shape[0], features), rows.dtype)
    gate_up, up_spec = canonical_weights(rows, gate_up, recipe, None, precision, "gate_up", parts)
    down, down_spec = canonical_weights(hidden, down, recipe, None, precision, "down", parts)
    up_product, down_product = (
        dataclasses.replace(one.fprop, expected_tokens=expected_tokens, zero_other_rows=zero_other_rows)
        for one in (up_spec, down_spec)
    )
    up_spec = dataclasses.replace(up_spec, fprop=up_product, output_activation=activation)
    down_spec = dataclasses.replace(down_spec, fprop=down_product, input_activation=activation)
    return gate_up, down, ExpertsSpec(up_spec, down_spec, fsdp_axis)


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
    """The static part of the rule: both products, the axis of `Network`, and the type of a shared result."""

    up: DenseSpec
    down: DenseSpec
    fsdp_axis: Hashable | None = None
    #: Mesh axis along which each device has other experts, and gathers the tokens of all.
    expert_axis: Hashable | None = None
    wire: Wire = Wire()
    shared_dtype: np.dtype | None = None


class RowMap(NamedTuple):
    """Map between tokens and the rows of the experts. With `groups` alone, the rows stand already, unweighted."""

    groups: Groups
    #: `float32[T, k]` of tokens, or `float32[R]` of rows that stand.
    weights: jax.Array | None = None
    #: Those of the `Permutation`, and the token of each row, `int32[R]`.
    order: jax.Array | None = None
    inverse: jax.Array | None = None
    row_indices: jax.Array | None = None
    #: `[E, N]` of the second product, whose weights then have none.
    bias: jax.Array | None = None
    #: If devices write into each other's memory.
    push: Push | None = None

    def rows(self, x: Any, recipe: Recipe | None) -> Any:
        """Returns the rows of an array of tokens; with a recipe the array, as quantization gathers by `row_indices`."""
        if recipe is not None or self.order is None or self.inverse is None:
            return x
        return Gathered(x, self.order, self.inverse)

    def rows_to_quantize(
        self, x: jax.Array | ScaledArray, spec: DenseSpec, *, for_gradient: bool = False
    ) -> RowsToQuantize | None:
        """Returns the rows of tokens, or of a result's gradient, if a product that quantizes them takes less time."""
        if self.order is None or self.inverse is None or spec.recipe is None:
            return None
        data, x_scale = quantize.rows_and_scales(x)
        if spec.recipe.token_mode != ScalingMode.BLOCK_1D:
            return None  # Scales depend on groups.
        if x_scale is None and self.order.shape[0] < x.shape[0]:
            return None  # Most of all devices' tokens have no row on this one.
        experts, *features = spec.kernel.shape
        tokens = spec.fprop.expected_tokens or spec.tokens
        if not gathers_fp8_fast(features[0 if for_gradient else 1], tokens, experts):
            return None
        quantization = spec.quantization(
            for_gradient=for_gradient, columnwise=False, dbias=False, gathered_rows=self.order.shape[0]
        )
        return RowsToQuantize(Gathered(data, self.order, self.inverse), quantization, x_scale)

    def pushes(self, rows: jax.Array, form: RowForm | None) -> bool:
        """Tells whether sums of rows go straight into the memory of the tokens' devices."""
        return self.push is not None and self.bias is None and form is None and can_push(rows, sums=True)

    def pushed_sums(self, rows: jax.Array, weights: jax.Array | None) -> jax.Array:
        """Returns the sums for this device's tokens, in float32."""
        assert self.push is not None
        assert self.push.needed is not None
        assert self.inverse is not None
        parts = push_sums(self.push.peers, self.push.needed, rows, self.inverse, weights)
        return summed(parts, self.push.destinations)

    def weighted_bias(self, bias: jax.Array, weights: jax.Array) -> jax.Array:
        """Returns the sum of each token's biases, one per expert, times these weights, `float32[T, N]`."""
        assert self.inverse is not None
        ends = jnp.cumsum(self.groups.sizes, dtype=jnp.int32)
        expert = count_not_above(ends, self.inverse)
        expert_weights = jnp.sum(jnp.where(chosen(expert, ends.shape[0]), weights[..., None], 0), axis=1)
        return jnp.matmul(expert_weights, bias.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)


class ExpertsArrays(NamedTuple):
    """The arrays of the rule; `x` are tokens `[T, K]`, or the rows `[R, K]` if they stand already."""

    x: jax.Array
    up: Weights
    down: Weights
    row_map: RowMap
    #: `[T, N]`, added to the sums of this device's tokens.
    shared: jax.Array | None = None
    #: The tokens of all devices as they were sent, which the products read in place of `x`.
    received: Received | None = None


class _Saved(NamedTuple):
    """Residuals; `x` is None if those of the products hold the rows."""

    x: Any
    row_map: RowMap
    hidden: jax.Array | None  # None without gradients.
    up: dense.DenseResiduals
    down: dense.DenseResiduals
    accumulators: tuple[jax.Array | None, jax.Array | None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _experts(arrays: ExpertsArrays, spec: ExpertsSpec) -> jax.Array:
    """Returns the weighted sum of each token's results, `[T, N]`, or the results of rows that stand, `[R, N]`."""
    return _forward(arrays, spec, for_gradients=False)[0]


def _forward(primals: Any, spec: ExpertsSpec, *, for_gradients: bool = True) -> tuple[jax.Array, _Saved]:
    x, up, down, row_map, shared, received = dense.primal_values(primals) if for_gradients else primals
    groups, weights, order, inverse, row_indices, bias, _ = row_map
    recipe, fsdp_axis, expert_axis = spec.up.recipe, spec.fsdp_axis, spec.expert_axis
    up_scales, down_scales = dense.given_scales(spec.up, up.fp8_state), dense.given_scales(spec.down, down.fp8_state)
    # Rows that stand are quantized once, for both passes.
    with_wgrad_rows = for_gradients and weights is None

    up_kernels, _ = _kernels_for_fprop(up, spec.up, fsdp_axis, None, with_dgrad=for_gradients)
    if expert_axis is not None:
        if fsdp_axis is not None or (recipe is not None and up.kernel_cache is None):
            # The gather or the quantization of these kernels runs while the tokens travel.
            x, up_kernels, shared = jax.lax.optimization_barrier((received, up_kernels, shared))
        else:
            x, shared = jax.lax.optimization_barrier((received, shared))
        weights = jax.lax.all_gather(weights, expert_axis, tiled=True)
        row_map = row_map._replace(weights=weights)
    if (rows_to_quantize := row_map.rows_to_quantize(x, spec.up)) is not None:
        tokens = quantize.Oriented(rows_to_quantize, None)
    elif inverse is not None and recipe is not None and (recipe.token_mode == ScalingMode.BLOCK_1D or up_scales):
        # Read each token once, as its scales are known or depend on the token alone.
        row_spec = spec.up.quantization()
        rowwise, amax = quantize.quantize_permuted(x, groups, order, inverse, up_scales.get("input"), spec=row_spec)
        tokens = quantize.Oriented(rowwise, None, amax)
    else:
        rows = row_map.rows(x, recipe)
        tokens = dense.quantized_tokens(
            rows, groups, spec.up, up_scales, columnwise=with_wgrad_rows, row_indices=row_indices
        )
    down_kernels, up_kernels = _kernels_for_fprop(down, spec.down, fsdp_axis, up_kernels, with_dgrad=for_gradients)

    activation = spec.down.input_activation
    # The fused product makes no columnwise copy, which rows that stand need.
    if activation == "swiglu" and not with_wgrad_rows and dense.can_fuse_swiglu(tokens, up_kernels, spec.up):
        hidden, down_tokens = dense.fprop_with_swiglu(
            tokens, up_kernels, groups, spec.up, spec.down, keeps_product=for_gradients
        )
        hidden = checkpoint_name(hidden, HIDDEN_NAME)
    else:
        hidden = checkpoint_name(dense.fprop(tokens, up_kernels, groups, spec.up, up.bias), HIDDEN_NAME)
        activated = activate(hidden, activation) if recipe is None else hidden
        down_tokens = dense.quantized_tokens(activated, groups, spec.down, down_scales, columnwise=with_wgrad_rows)
    y = dense.fprop(down_tokens, down_kernels, groups, spec.down, down.bias)

    if weights is not None and inverse is None:
        y = y.astype(jnp.float32) * weights[:, None]
    elif expert_axis is not None:
        y = _sums_of_devices(y, row_map, spec)
    elif weights is not None and inverse is not None:
        y = sum_choices(y, inverse, weights)
        if bias is not None:
            y += row_map.weighted_bias(bias, weights)
    if shared is not None:
        y += shared.astype(jnp.float32)

    if not with_wgrad_rows:
        tokens, down_tokens = tokens._replace(columnwise=None), down_tokens._replace(columnwise=None)
    return y, _Saved(
        None if with_wgrad_rows else x,
        row_map,
        hidden,
        dense.named(dense.make_residuals(tokens, up_kernels, groups, spec.up, up.fp8_state), up),
        dense.named(dense.make_residuals(down_tokens, down_kernels, groups, spec.down, down.fp8_state), down),
        (up.dkernel_accumulator, down.dkernel_accumulator),
    )


def _kernels_for_fprop(
    weights: Weights, spec: DenseSpec, fsdp_axis: Hashable | None, after: Any, *, with_dgrad: bool
) -> tuple[quantize.Oriented, Any]:
    """Returns the kernels that fprop reads, gathered once `after` is there, and those of dgrad in parts."""
    state = weights.fp8_state
    if fsdp_axis is not None and state is not None:
        state = part_of_state(state, fsdp_axis, weights.kernel.shape[0])
    kernels = dense.quantized_kernels(weights, spec, dense.given_scales(spec, state), rowwise=with_dgrad)
    if fsdp_axis is None:
        return kernels, after
    if state is not None:
        assert kernels.amax is not None
        kernels = kernels._replace(amax=jax.lax.all_gather(kernels.amax, fsdp_axis, tiled=True))
    columnwise, after = _gathered_kernels(kernels.columnwise, fsdp_axis, after)
    return kernels._replace(columnwise=columnwise), after


def _gathered_kernels(parts: Any, fsdp_axis: Hashable, after: Any) -> tuple[Any, Any]:
    """Gathers kernels once `after` is there: XLA would start the gathers of all kernels before the first product."""
    parts, after = jax.lax.optimization_barrier((parts, after))
    if isinstance(parts, ScaledArray):
        return gather_stack(parts, fsdp_axis), after
    return jax.lax.all_gather(parts, fsdp_axis, tiled=True), after


def _sums_of_devices(rows: jax.Array, row_map: RowMap, spec: ExpertsSpec) -> jax.Array:
    """Returns the sums for this device's tokens, in float32. Without pushes, chunks travel while others are summed."""
    if row_map.pushes(rows, spec.wire.results):
        return row_map.pushed_sums(rows, row_map.weights)

    def chunks(tokens: Any) -> list[jax.Array]:
        """Splits `[D T, C]` into arrays that have a part of each device's tokens."""
        device_rows = tokens.reshape(axis_size(spec.expert_axis), -1, tokens.shape[1])
        parts = jnp.array_split(device_rows, _CHUNKS, axis=1)
        return [part.reshape(-1, tokens.shape[1]) for part in parts if part.shape[1] > 0]

    received: list[Received] = []
    for inverse, weights in zip(chunks(row_map.inverse), chunks(row_map.weights), strict=True):
        if row_map.bias is None:
            parts = sum_rows(rows, inverse, weights)
        else:
            bias = row_map._replace(inverse=inverse).weighted_bias(row_map.bias, weights)
            parts = sum_choices(rows, inverse, weights) + bias
        parts = parts.astype(spec.up.x_dtype)
        # XLA runs one collective at a time, in this order.
        parts, rows, received = jax.lax.optimization_barrier((parts, rows, received))
        received.append(return_parts(parts, spec.expert_axis, spec.wire.results))
    return jnp.concatenate([summed(part) for part in received])


def _backward(spec: ExpertsSpec, saved: _Saved, dy: Any) -> tuple[ExpertsArrays]:
    x, row_map, hidden, up, down, (up_accumulator, down_accumulator) = saved
    groups, weights, order, inverse, row_indices, bias, push = row_map
    recipe, fsdp_axis, expert_axis = spec.up.recipe, spec.fsdp_axis, spec.expert_axis
    zero: Any = None
    if isinstance(dy, jax.custom_derivatives.SymbolicZero):
        dup, ddown = dense.zero_gradient(up, up_accumulator), dense.zero_gradient(down, down_accumulator)
        return (ExpertsArrays(zero, dup, ddown, zero),)
    up_scales, down_scales = dense.given_scales(spec.up, up.fp8_state), dense.given_scales(spec.down, down.fp8_state)
    dshared = None if spec.shared_dtype is None else dy.astype(spec.shared_dtype)

    if fsdp_axis is not None:
        # Gather the kernels of `down` once `dy` is there, and during its products those of `up`.
        down_kernels, dy = _gathered_kernels(down.kernel, fsdp_axis, dy)
        up_kernels, down_kernels = _gathered_kernels(up.kernel, fsdp_axis, down_kernels)
        up, down = dataclasses.replace(up, kernel=up_kernels), dataclasses.replace(down, kernel=down_kernels)
    tokens = up.x
    if tokens is None:
        # Without the barrier, XLA would find that the forward pass has made these rows, and keep them until now.
        x, dy = jax.lax.optimization_barrier((x, dy.astype(spec.up.x_dtype)))
    if expert_axis is not None:
        push = push if bias is None else None  # The gradient of the bias reads all tokens.
        dy = gather_tokens(dy, expert_axis, spec.wire.dresults, push)
        if push is not None and isinstance(dy, ScaledArray):
            # Quantization of tokens fills every SM. Start it after the scales have arrived, so that the push of the FP8
            # numbers has its SMs by then.
            x, scale_inv = jax.lax.optimization_barrier((x, dy.scale_inv))
            dy = dataclasses.replace(dy, scale_inv=scale_inv)
    if tokens is None:
        rows = row_map.rows(x, recipe)
        tokens = dense.quantized_tokens(
            rows, groups, spec.up, up_scales, rowwise=False, row_indices=row_indices
        ).columnwise
    if expert_axis is not None:
        # The rows of tokens are made while gradients of results travel.
        if isinstance(tokens, Gathered):
            features = spec.up.kernel.shape[2]
            tokens = tokens.copied_unless_fast("wgrad", features, zero_tail=spec.up.fprop.zero_other_rows)
        dy, tokens = jax.lax.optimization_barrier((dy, tokens))

    rows_to_quantize = row_map.rows_to_quantize(dy, spec.down, for_gradient=True)
    results_gradient = dense.quantized_gradient(
        row_map.rows(dy, recipe),
        groups,
        spec.down,
        down_scales,
        rowwise=rows_to_quantize is None,
        row_indices=row_indices,
    )
    if rows_to_quantize is not None:
        results_gradient = results_gradient._replace(rowwise=rows_to_quantize)
    dactivated, pending = dense.dgrad(down, results_gradient)
    row_weights, row_pairs = weights, None
    if weights is not None and order is not None:
        row_weights, row_pairs = weights.reshape(weights.size), order
        if recipe is not None or spec.up.fprop.zero_other_rows:
            row_weights, row_pairs = gather(row_weights, order), None
    activated: Any
    dweights: Any = None
    if row_weights is None:
        assert recipe is not None  # Without one, `grouped_mlp` applies the activation itself.
        activated = down.x
        gradient = dense.quantized_gradient(dactivated, groups, spec.up, up_scales, activation_input=hidden)
    elif recipe is None:
        dhidden, activated, dweights = activation_grad(
            hidden, dactivated, row_weights, spec.down.input_activation, row_pairs
        )
        gradient = dense.quantized_gradient(dhidden, groups, spec.up, up_scales)
    else:
        gradient, weighted, dweights = quantize.quantize_with_activation(
            dactivated,
            groups,
            spec.up.quantization(for_gradient=True, inner_products=True, activated=True),
            scale=up_scales.get("output_grad"),
            activation_input=hidden,
            row_weights=row_weights,
            activated_scale=down_scales.get("input"),
        )
        activated = weighted.columnwise
        if down.amax is not None and weighted.amax is not None:
            # The forward pass has quantized the activation's result without its weights.
            amax = down.amax | {"input": jnp.maximum(down.amax["input"], weighted.amax)}
            state = dense.next_state(dataclasses.replace(down, amax=amax), results_gradient.amax)
            pending = dataclasses.replace(pending, fp8_state=state)
    ddown = dense.weights_gradient(dataclasses.replace(pending, x=activated), down_accumulator, fsdp_axis)
    if dweights is not None and inverse is not None:
        dweights = gather(dweights, inverse)
    dbias = None
    if bias is not None:
        _, pull_back = jax.vjp(row_map.weighted_bias, bias, weights)
        if isinstance(dy, ScaledArray):
            dy = quantize.grouped_dequantize(dy, spec.up.x_dtype).reshape(-1, dy.layout.features)
        dbias, bias_dweights = pull_back(dy.astype(jnp.float32))
        dweights += bias_dweights

    drows, pending = dense.dgrad(up, gradient)
    pending = dataclasses.replace(pending, x=tokens)
    if inverse is None:
        dx = drows
    elif expert_axis is None:
        dx = sum_choices(drows, inverse).astype(drows.dtype)
    else:
        # Gradients of routing weights travel during dgrad, and those of tokens during wgrad.
        dweights = summed(return_parts(dweights, expert_axis, None))
        drows, dweights = jax.lax.optimization_barrier((drows, dweights))
        if row_map.pushes(drows, spec.wire.dtokens):
            dx = row_map.pushed_sums(drows, None).astype(drows.dtype)
        else:
            parts = sum_rows(drows, inverse)
            parts, (wgrad_x, wgrad_dy) = jax.lax.optimization_barrier((parts, (pending.x, pending.dy)))
            dx = summed(return_parts(parts, expert_axis, spec.wire.dtokens)).astype(parts.dtype)
            pending = dataclasses.replace(pending, x=wgrad_x, dy=wgrad_dy)
    dup = dense.weights_gradient(pending, up_accumulator, fsdp_axis)
    return (ExpertsArrays(dx, dup, ddown, RowMap(zero, dweights, bias=dbias), dshared),)


_experts.defvjp(_forward, _backward, symbolic_zeros=True)
