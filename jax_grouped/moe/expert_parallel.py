"""Experts on the devices of a mesh axis: tokens travel to them, and results travel back.

There are two ways. The devices exchange a row for each pair of a token and a choice, `T k (D - 1) / D` rows per device
on average. Or they gather the tokens of all devices, `T (D - 1)` rows per device, and each applies its own experts to
them: fewer rows if there are fewer devices than choices, because most tokens then have several experts on one device.
"""

import dataclasses
import functools
from collections.abc import Hashable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_grouped.backends.spec import QuantizeSpec
from jax_grouped.core.varying import vary_alike
from jax_grouped.fp8.arrays import ScaledArray
from jax_grouped.fp8.recipes import Float8BlockScaling
from jax_grouped.moe.exchange import plan_exchange, return_rows, send_rows
from jax_grouped.moe.experts import routed_mlp, weighted_mlp
from jax_grouped.moe.permutation import Permutation, add_shared, group_by_expert, permute, unpermute
from jax_grouped.ops.quantize import grouped_dequantize, quantize_stack
from jax_grouped.ops.quantize_kernel import scaling_options

#: Way in which tokens reach the devices of their experts.
ExchangeMethod = Literal["auto", "gather", "ragged", "padded"]


def check_method(method: ExchangeMethod) -> None:
    """Raises ValueError if there is no such method."""
    if method not in get_args(ExchangeMethod):
        raise ValueError(f"exchange_method must be one of {get_args(ExchangeMethod)}, got {method!r}.")


def gathers(method: ExchangeMethod, devices: int, top_k: int) -> bool:
    """Tells whether tokens are gathered: "auto" does where that moves at most as many rows as an exchange of rows."""
    return method == "gather" or (method == "auto" and devices <= top_k)


def mlp_of_gathered_tokens(
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    axis_name: Hashable,
    *,
    capacity: int | None,
    quantized: bool,
    shared: jax.Array | None,
    **network: Any,
) -> tuple[jax.Array, jax.Array]:
    """Gathers the tokens of all devices, applies this device's experts to them, and sums each token's results.

    A device rounds its part of a token's sum to the type of `x`. The parts are summed in float32. Gradients likewise.

    Args:
        x: `[T, K]`, the tokens of this device.
        experts: `int32[T, k]`, the experts of its tokens, numbered over all devices.
        weights: `float32[T, k]`, the factor of each choice.
        axis_name: mesh axis of `D` devices.
        capacity: most rows of this device's experts; None drops none.
        quantized: whether tokens, and gradients of sums, travel in FP8 if the recipe scales blocks by powers of two.
        shared: `[T, N]`, added to the sums, or None.
        network: `gate_up`, `down`, `activation`, `recipe`, `precision` and `expected_rows` of `routed_mlp`.

    Returns:
        `[T, N]` in the type of `x`, and `int32[]`, the number of this device's pairs that were dropped.
    """
    tokens, own = x.shape[0], network["gate_up"].kernel.shape[0]
    me = jax.lax.axis_index(axis_name)
    # Mark x and the weights as varying over feature_axis too: their gradients are then summed over it after the sum of
    # parts, which leaves fewer bytes.
    x, weights, *_ = vary_alike(x, weights, network["gate_up"].kernel, me)
    experts, me = vary_alike(experts, me)
    experts = jax.lax.all_gather(experts, axis_name, tiled=True) - own * me
    permutation = group_by_expert(experts, own, capacity=capacity)
    recipe, of_tokens, of_gradients = network["recipe"], None, None
    if quantized and isinstance(recipe, Float8BlockScaling) and recipe.pow2_scales:
        of_tokens, of_gradients = (
            _stack_spec(recipe, dtype, tokens) for dtype in (recipe.fwd_dtype, recipe.grad_dtype)
        )
    gathered = _gather(x, axis_name, of_tokens), _gather(weights, axis_name, None)
    parts = routed_mlp(gathered[0], permutation=permutation, weights=gathered[1], **network)
    y = add_shared(_sum_of_parts(parts, axis_name, of_gradients), shared).astype(x.dtype)
    if capacity is None:
        return y, jnp.zeros((), jnp.int32)
    is_own = (experts >= 0) & (experts < own)
    dropped = is_own & (permutation.inverse >= permutation.order.shape[0])
    of_sources = jnp.sum(dropped.reshape(-1, tokens * experts.shape[1]), axis=1, dtype=jnp.int32)
    return y, jax.lax.psum_scatter(of_sources, axis_name)


def mlp_of_exchanged_rows(
    x: jax.Array,
    permutation: Permutation,
    weights: jax.Array,
    axis_name: Hashable,
    *,
    capacity: int,
    method: ExchangeMethod,
    shared: jax.Array | None,
    **network: Any,
) -> tuple[jax.Array, jax.Array]:
    """Sends the rows of each token to their experts' devices, and sums the results that are sent back.

    Args:
        x: as in `mlp_of_gathered_tokens`.
        permutation: of this device's tokens to the rows of the experts of all devices.
        weights: as in `mlp_of_gathered_tokens`.
        axis_name: likewise.
        capacity: as in `plan_exchange`.
        method: likewise.
        shared: as in `mlp_of_gathered_tokens`.
        network: likewise.

    Returns:
        As `mlp_of_gathered_tokens`.
    """
    assert method != "gather"
    rows = permute(x, permutation)
    exchange = plan_exchange(
        permutation.group_sizes, axis_name, num_rows=rows.shape[0], capacity=capacity, method=method
    )
    rows = send_rows(rows, exchange)
    row_weights = send_rows(_weights_of_rows(weights, permutation), exchange)[:, 0]
    rows = weighted_mlp(rows, group_sizes=exchange.group_sizes, row_weights=row_weights, **network)
    return unpermute(return_rows(rows, exchange), permutation, shared=shared), exchange.dropped


def _weights_of_rows(weights: jax.Array, permutation: Permutation) -> jax.Array:
    """Returns the weight of each row, `float32[R, 1]`."""
    of_pairs = dataclasses.replace(permutation, inverse=permutation.inverse.reshape(weights.size, 1))
    return permute(weights.reshape(weights.size, 1), of_pairs)


def _stack_spec(recipe: Float8BlockScaling, dtype: DTypeLike, rows: int) -> QuantizeSpec:
    """Returns the quantization of the rows of one device, as a stack of one."""
    return QuantizeSpec(recipe.token_mode, dtype, num_groups=1, stack_rows=rows, **scaling_options(recipe))


# JAX's gradient of a gather is a sum in the type of the parts. This one is in float32, and sends as many bytes.


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(x: jax.Array, axis_name: Hashable, spec: QuantizeSpec | None) -> jax.Array:
    """Returns the rows of all devices, `[T, C]` to `[D T, C]`; with a spec, they are quantized for the way.

    Blocks whose scales are powers of two can be quantized again without another error: the numbers have as few digits,
    and the scale is the same or fits them better. Only numbers far below the largest of another block lose digits.
    """
    if spec is None or 0 in x.shape:
        return jax.lax.all_gather(x, axis_name, tiled=True)
    quantized = quantize_stack(x[None], spec=spec).rowwise
    assert quantized is not None
    data = jax.lax.all_gather(jax.lax.bitcast_convert_type(quantized.data, jnp.uint8), axis_name, tiled=True)
    scale_inv = jax.lax.all_gather(quantized.scale_inv, axis_name, tiled=True)
    layout = dataclasses.replace(quantized.layout, num_groups=data.shape[0], tokens=data.shape[0] * data.shape[1])
    received = ScaledArray(jax.lax.bitcast_convert_type(data, quantized.dtype), scale_inv, None, layout)
    return grouped_dequantize(received, x.dtype).reshape(-1, x.shape[1])


def _gather_forward(x: jax.Array, axis_name: Hashable, spec: QuantizeSpec | None) -> tuple[jax.Array, None]:
    return _gather(x, axis_name, spec), None


def _gather_backward(axis_name: Hashable, spec: QuantizeSpec | None, _: None, gradient: jax.Array) -> tuple[jax.Array]:
    del spec
    return (_sum_of_parts(gradient, axis_name, None).astype(gradient.dtype),)


_gather.defvjp(_gather_forward, _gather_backward)


def _sum_of_parts(parts: jax.Array, axis_name: Hashable, of_gradient: QuantizeSpec | None) -> jax.Array:
    """Returns the sums for this device's rows of what all devices have for them, `[D T, C]` to `float32[T, C]`."""
    return _summed(parts.dtype, parts, axis_name, of_gradient)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 2, 3))
def _summed(dtype: DTypeLike, parts: jax.Array, axis_name: Hashable, of_gradient: QuantizeSpec | None) -> jax.Array:
    """Sums parts of this type. Their gradient is quantized for the way as the spec says."""
    del dtype, of_gradient
    devices = jax.lax.axis_size(axis_name)
    of_devices = parts.reshape(devices, parts.shape[0] // devices, parts.shape[1])
    received = jax.lax.all_to_all(of_devices, axis_name, 0, 0)
    return functools.reduce(jnp.add, (received[device].astype(jnp.float32) for device in range(devices)))


def _summed_forward(
    dtype: DTypeLike, parts: jax.Array, axis_name: Hashable, of_gradient: QuantizeSpec | None
) -> tuple[jax.Array, None]:
    return _summed(dtype, parts, axis_name, of_gradient), None


def _summed_backward(
    dtype: DTypeLike, axis_name: Hashable, of_gradient: QuantizeSpec | None, _: None, gradient: jax.Array
) -> tuple[jax.Array]:
    return (_gather(gradient.astype(dtype), axis_name, of_gradient),)


_summed.defvjp(_summed_forward, _summed_backward)
