"""Expert parallelism: rows or tokens travel to the devices that hold their experts, and the results travel back.

With block scaling, rows can travel as FP8 numbers and their scales, which take 0.516 of the bytes of bfloat16. Blocks
whose scales are powers of two can be quantized again without another error: the numbers have as few digits, and the
scale is the same or fits them better. Only numbers far below the largest of another block lose digits.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jax_grouped.core.groups import fit_to_capacity, group_rows
from jax_grouped.core.values import as_array, axis_size, check_type, static_size, vary_alike
from jax_grouped.fp8.arrays import ScaledArray, as_stack, exchange_stacks, gather_stack, short_repr
from jax_grouped.fp8.layout import BLOCK, spread
from jax_grouped.fp8.recipes import Float8BlockScaling, Recipe
from jax_grouped.kernels.exchange import Push, can_push, push_rows
from jax_grouped.kernels.quantization import QuantizeSpec
from jax_grouped.kernels.rows import permute_rows, sum_choices
from jax_grouped.moe.permutation import Permutation, checked_shared, group_by_expert
from jax_grouped.ops import inputs
from jax_grouped.ops.inputs import GroupSizes, scaling_options
from jax_grouped.ops.quantize import quantize_stack

#: Counts of the rows of all devices are int32, and so are positions among the rows that one device receives.
_MOST_ROWS = 2**31 - 1

#: Origin of a row without a source: an index past the end of every array.
_NOWHERE = _MOST_ROWS

#: Rows of all devices, as they were sent.
Received = jax.Array | ScaledArray


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Slices:
    """Slices of the rows of an array with `num_rows`: `E / D` that go to each of `D` devices, or come from it."""

    starts: jax.Array
    sizes: jax.Array
    num_rows: int = dataclasses.field(metadata=dict(static=True))


@short_repr
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Exchange:
    """Plan of a row exchange between the `D` devices of a mesh axis; made by `plan_exchange`.

    Attributes:
        group_sizes: `int32[E / D]`, rows per expert of this device after `send_rows`.
        dropped: `int32[]`, number of this device's rows that are not sent.
        outgoing: the slices that `send_rows` sends; internal.
        incoming: the slices that it receives; internal.
        axis_name: the mesh axis; static.

    Example:
        def rows_per_own_expert(group_sizes):
            exchange = jg.moe.plan_exchange(group_sizes, "expert", num_rows=8, capacity=8)
            assert isinstance(exchange, jg.moe.Exchange)
            return exchange.group_sizes

        two_devices = jax.vmap(rows_per_own_expert, axis_name="expert")  # in place of jax.shard_map

        assert two_devices(jnp.array([[3, 4], [1, 2]])).tolist() == [[4], [6]]
    """

    group_sizes: jax.Array
    dropped: jax.Array
    outgoing: _Slices
    incoming: _Slices
    axis_name: Hashable = dataclasses.field(metadata=dict(static=True))


def plan_exchange(group_sizes: GroupSizes, axis_name: Hashable, *, num_rows: int, capacity: int) -> Exchange:
    """Plans how rows reach the devices of their experts; called inside `jax.shard_map`.

    Every device has `num_rows` rows of all `E` experts, sorted by expert. Expert `e` lives on device `e // (E / D)` of
    the axis. A chunk is the rows of one source for one expert. If more than `capacity` rows would go to one device, its
    largest chunks are cut to one length, and their first rows travel. `jax.lax.all_to_all` moves
    `min(num_rows, capacity)` rows from every device to every other one, however many of them are used.

    Args:
        group_sizes: `[E]` integers, `E` a multiple of `D`: this device's rows per expert, read on the device only.
            Negative ones count as 0, and rows past `num_rows` do not exist.
        axis_name: the mesh axis of `D` devices, or a tuple of axes; other axes exchange nothing.
        num_rows: `R`, rows of this device's array, the same on every device. `D * num_rows` is below 2^31.
        capacity: rows that a device has room for after `send_rows`, fewer than 2^31. `D * num_rows` drops none,
            whatever the sizes.

    Returns:
        The plan for `send_rows` and `return_rows`. All devices compute the same plan from the sizes of all.

    Raises:
        TypeError, ValueError: an argument has a type, a shape or a value that does not fit, or no surrounding
            `jax.shard_map` has the axis.

    Example:
        def dropped(group_sizes):
            return jg.moe.plan_exchange(group_sizes, "expert", num_rows=8, capacity=5).dropped

        two_devices = jax.vmap(dropped, axis_name="expert")  # in place of jax.shard_map

        assert two_devices(jnp.array([[3, 4], [1, 2]])).tolist() == [1, 0]
    """
    devices = axis_size(axis_name)
    num_rows, capacity = static_size("num_rows", num_rows), static_size("capacity", capacity)
    for name, value, most in (("num_rows", num_rows, _MOST_ROWS // devices), ("capacity", capacity, _MOST_ROWS)):
        if value > most:
            raise ValueError(
                f"{name} must be at most {most} for the {devices} devices of the axis {axis_name!r}, because their "
                f"rows are counted in int32, got {value}."
            )
    sizes = inputs.canonical_sizes(group_sizes, num_rows)
    experts = sizes.shape[0]
    if experts == 0 or experts % devices:
        raise ValueError(
            f"group_sizes must have a multiple of {devices} entries, the devices of the axis {axis_name!r}, "
            f"got {experts}."
        )
    sizes, me, offset = vary_alike(sizes, jax.lax.axis_index(axis_name), jnp.zeros((1,), jnp.int32))
    sizes = group_rows(sizes, offset, experts, num_rows).sizes

    # Chunks of all devices, by source, destination and expert of the destination.
    chunks = jax.lax.all_gather(sizes, axis_name).reshape(devices, devices, experts // devices)
    kept = jax.vmap(fit_to_capacity, in_axes=(1, None), out_axes=1)(chunks, capacity)
    starts = _starts(chunks)
    # A destination sorts its rows by expert, then by source.
    placed = _starts(kept.transpose(1, 2, 0)).transpose(2, 0, 1)
    return Exchange(
        group_sizes=jnp.sum(kept[:, me], axis=0, dtype=jnp.int32),
        dropped=jnp.sum(chunks[me] - kept[me], dtype=jnp.int32),
        outgoing=_Slices(starts[me], kept[me], num_rows),
        incoming=_Slices(placed[:, me], kept[:, me], capacity),
        axis_name=axis_name,
    )


def send_rows(rows: jax.Array, exchange: Exchange) -> jax.Array:
    """Sends rows to the devices of their experts. Its gradient is `return_rows`, and so on to any order.

    Args:
        rows: `[R, C]` of a floating-point type, sorted by expert. The tail is not sent.
        exchange: the plan, made on the same devices.

    Returns:
        `[capacity, C]`, the rows for this device's experts, sorted by group, then by source, as `grouped_dense` takes
        them with `exchange.group_sizes`. The tail is zero.

    Raises:
        TypeError, ValueError: `rows` has a type or a shape that does not fit the plan, or `exchange` is no plan.

    Example:
        def received(rows, group_sizes):
            return jg.moe.send_rows(rows, jg.moe.plan_exchange(group_sizes, "expert", num_rows=4, capacity=8))

        two_devices = jax.vmap(received, axis_name="expert")  # in place of jax.shard_map
        rows = two_devices(jnp.arange(8.0).reshape(2, 4, 1), jnp.array([[3, 1], [1, 2]]))

        assert rows[1, :4, 0].tolist() == [3, 5, 6, 0]  # the second expert's: one row of device 0, two of device 1
    """
    return _exchanged(rows, exchange, back=False)


def return_rows(rows: jax.Array, exchange: Exchange) -> jax.Array:
    """Sends the results for rows back to the rows' positions before `send_rows`. Its gradient is `send_rows`.

    Args:
        rows: `[capacity, C]` of a floating-point type, laid out as by `send_rows`. The tail is not sent.
        exchange: the plan, made on the same devices.

    Returns:
        `[R, C]`; zeros for rows that were not sent, and in the tail.

    Raises:
        TypeError, ValueError: as `send_rows`.

    Example:
        def there_and_back(rows, group_sizes):
            exchange = jg.moe.plan_exchange(group_sizes, "expert", num_rows=8, capacity=6)
            return jg.moe.return_rows(jg.moe.send_rows(rows, exchange), exchange)

        one_device = jax.vmap(there_and_back, axis_name="expert")  # in place of jax.shard_map
        y = one_device(jnp.ones((1, 8, 1)), jnp.array([[3, 4]]))

        assert y[0, :, 0].tolist() == [1, 1, 1, 1, 1, 1, 0, 0]  # the second expert's last row found no room
    """
    return _exchanged(rows, exchange, back=True)


def _exchanged(rows: jax.Array, exchange: Exchange, *, back: bool) -> jax.Array:
    check_type("exchange", exchange, Exchange)
    rows = as_array("rows", rows)
    if not jnp.issubdtype(rows.dtype, jnp.floating):
        raise TypeError(f"rows must be of a floating-point type, got {rows.dtype.name}.")
    source, target = exchange.outgoing, exchange.incoming
    if back:
        source, target = target, source
    if rows.ndim != 2 or rows.shape[0] != source.num_rows:
        raise ValueError(f"rows must have shape [{source.num_rows}, C] for this exchange, got {rows.shape}.")
    return _move(exchange.axis_name, *vary_alike(rows, source, target))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _move(axis_name: Hashable, rows: jax.Array, source: _Slices, target: _Slices) -> jax.Array:
    """Copies the slices of all devices' rows to their positions in a new array; all other rows of it are zero."""
    if 0 in (*rows.shape, target.num_rows):
        return vary_alike(jnp.zeros((target.num_rows, rows.shape[1]), rows.dtype), rows)[0]
    # The slices of one device are contiguous in its chunk, which has room for all rows that can be sent or received.
    devices, room = source.sizes.shape[0], min(source.num_rows, target.num_rows)
    sent = jax.vmap(functools.partial(_origins, num_rows=room))(_starts(source.sizes), source.sizes, source.starts)
    chunks = rows.at[sent].get(mode="fill", fill_value=0)
    received = jax.lax.all_to_all(chunks, axis_name, 0, 0).reshape(devices * room, -1)
    offsets = room * jnp.arange(devices, dtype=jnp.int32)[:, None] + _starts(target.sizes)
    slices = (x.reshape(-1) for x in (target.starts, target.sizes, offsets))
    return received.at[_origins(*slices, num_rows=target.num_rows)].get(mode="fill", fill_value=0)


def _move_forward(
    axis_name: Hashable, rows: jax.Array, source: _Slices, target: _Slices
) -> tuple[jax.Array, tuple[_Slices, _Slices]]:
    return _move(axis_name, rows, source, target), (source, target)


def _move_backward(axis_name: Hashable, slices: tuple[_Slices, _Slices], dy: jax.Array) -> tuple[Any, ...]:
    source, target = slices
    return _move(axis_name, dy, target, source), None, None


_move.defvjp(_move_forward, _move_backward)


def _starts(sizes: jax.Array) -> jax.Array:
    """Returns the exclusive prefix sum in memory order, which restarts for every index of the first axis."""
    flat = sizes.reshape(sizes.shape[0], -1)
    return (jnp.cumsum(flat, axis=1, dtype=jnp.int32) - flat).reshape(sizes.shape)


def _origins(starts: jax.Array, sizes: jax.Array, origins: jax.Array, *, num_rows: int) -> jax.Array:
    """Returns the source row of each of `num_rows` rows: row `starts[i] + j` of slice `i` is row `origins[i] + j`."""
    row = jnp.arange(num_rows, dtype=jnp.int32)[:, None]
    inside = (row >= starts) & (row < starts + sizes)
    return jnp.min(jnp.where(inside, origins + row - starts, _NOWHERE), axis=1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HostExchange:
    """Exchange of equal numbers of rows between all devices of a mesh axis, as `plan_host_exchange` makes it."""

    axis_name: Hashable = dataclasses.field(metadata=dict(static=True))


def plan_host_exchange(wanted: jax.Array, room: int, axis_name: Hashable) -> tuple[Permutation, HostExchange]:
    """Plans how tokens reach each host of an axis once that wants them: `room` to each, in order of the tokens.

    Of more tokens, `wanted` by a host as `bool[T, H]`, it gets some at equal distances. The rows of the permutation are
    those for each host, `[H * room]`.
    """
    tokens, hosts = wanted.shape
    own = jax.vmap(lambda chosen: group_by_expert(chosen[:, None], 1, capacity=room))(jnp.where(wanted.T, 0, 1))
    host = jnp.arange(hosts, dtype=jnp.int32)
    order = jnp.where(own.order < tokens, own.order * hosts + host[:, None], tokens * hosts).reshape(-1)
    slots = own.inverse[:, :, 0].T
    inverse = jnp.where(slots < room, slots + room * host, hosts * room)
    permutation = Permutation(order, inverse, own.group_sizes[:, 0], jnp.sum(own.dropped, dtype=jnp.int32))
    return permutation, HostExchange(axis_name)


class RowForm(NamedTuple):
    """Recipe and FP8 type with which rows are quantized for a transfer."""

    recipe: Float8BlockScaling
    dtype: DTypeLike


class Wire(NamedTuple):
    """Forms in which tokens and results travel, and their gradients back; None for rows in their own type."""

    tokens: RowForm | None = None
    results: RowForm | None = None
    dresults: RowForm | None = None
    dtokens: RowForm | None = None

    @classmethod
    def make(cls, recipe: Recipe | None, *, dispatch: bool, combine: bool) -> Self:
        """Returns FP8 forms, if the recipe scales blocks by powers of two."""
        if not isinstance(recipe, Float8BlockScaling) or not recipe.pow2_scales:
            return cls()
        forms = RowForm(recipe, recipe.fwd_dtype), RowForm(recipe, recipe.grad_dtype)
        tokens, dresults = forms if dispatch else (None, None)
        results, dtokens = forms if combine else (None, None)
        return cls(tokens, results, dresults, dtokens)


def gather_tokens(
    x: jax.Array,
    axis_name: Hashable,
    form: RowForm | None,
    push: Push | None = None,
) -> Received:
    """Gathers `[T, C]` to `[D T, C]`, or pushes the tokens that devices need; then others are undefined."""
    if form is None or 0 in x.shape:
        if push is not None and can_push(x):
            return push_rows(push.peers, push.destinations, x).reshape(-1, x.shape[1])
        return jax.lax.all_gather(x, axis_name, tiled=True)
    own = _quantized(x[None], form)
    if push is None:
        return gather_stack(own, axis_name)
    scale_inv = push_rows(push.peers, jnp.full(own.scale_inv.shape[1], ~np.uint32(0)), own.scale_inv[0])
    return as_stack(push_rows(push.peers, push.destinations, own.data[0]), scale_inv, own.layout)


def return_parts(parts: jax.Array, axis_name: Hashable, form: RowForm | None) -> Received:
    """Sends each device what this one has for its tokens: `[D T, C]` to `[D, T, C]`, the parts from all devices."""
    devices = jax.lax.axis_size(axis_name)
    device_rows = parts.reshape(devices, parts.shape[0] // devices, parts.shape[1])
    if form is None or 0 in parts.shape:
        return jax.lax.all_to_all(device_rows, axis_name, 0, 0)
    return exchange_stacks(_quantized(device_rows, form), axis_name)


def summed(parts: Received, sources: jax.Array | None = None) -> jax.Array:
    """Sums over the devices in float32, as `jax.lax.psum_scatter` would not: `[D, T, C]` to `[T, C]`.

    With `sources`, `uint32[T]`, only parts from devices whose bits a token has.
    """
    if sources is not None:
        assert not isinstance(parts, ScaledArray)
        has_part = (sources >> jnp.arange(parts.shape[0], dtype=jnp.uint32)[:, None]) & 1 > 0
        parts = jnp.where(has_part[..., None], parts, 0)
    if isinstance(parts, ScaledArray):
        tokens = parts.data.shape[1]
        scales = jnp.swapaxes(parts.scale_inv, 1, 2)[:, :tokens]
        return functools.reduce(jnp.add, map(_dequantized, parts.data, scales))
    return functools.reduce(jnp.add, (part.astype(jnp.float32) for part in parts))


def send_tokens(
    x: jax.Array, permutation: Permutation, exchange: Exchange | HostExchange, wire: Wire | None = None
) -> jax.Array:
    """Computes `send_rows(permute(x, permutation), exchange)`, with each token quantized at most once for the way."""
    wire = wire or Wire()
    way = _Way(to_experts=True, form=wire.tokens, gradient_form=wire.dtokens)
    return _travel(way, *vary_alike(x, (permutation, exchange)))


def sum_returned(
    rows: jax.Array,
    permutation: Permutation,
    exchange: Exchange | HostExchange,
    wire: Wire,
    shared: jax.Array | None,
) -> jax.Array:
    """Computes `unpermute(return_rows(rows, exchange), permutation, shared=shared)`: `[capacity, C]` to `[T, C]`."""
    way = _Way(to_experts=False, form=wire.results, gradient_form=wire.dresults)
    sums = _travel(way, *vary_alike(rows, (permutation, exchange)))
    if shared is not None:
        sums += checked_shared(shared, sums.shape).astype(jnp.float32)
    return sums.astype(rows.dtype)


class _Way(NamedTuple):
    """Direction in which rows travel, their form, and the form of their gradients on the way back."""

    to_experts: bool
    form: RowForm | None
    gradient_form: RowForm | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _travel(way: _Way, x: jax.Array, plan: tuple[Permutation, Exchange | HostExchange]) -> jax.Array:
    """Sends the rows of tokens to their experts; or sends rows back, and sums those of each token in float32."""
    permutation, exchange = plan

    def move(words: jax.Array) -> jax.Array:
        if isinstance(exchange, HostExchange):
            blocks = words.reshape(axis_size(exchange.axis_name), -1, words.shape[1])
            return jax.lax.all_to_all(blocks, exchange.axis_name, 0, 0).reshape(words.shape)
        slices = exchange.outgoing, exchange.incoming
        return _move(exchange.axis_name, words, *(slices if way.to_experts else slices[::-1]))

    words = _words(x, way.form)
    if way.to_experts:
        return _rows(move(permute_rows(words, permutation.order, permutation.inverse)), x, way.form)
    return sum_choices(_rows(move(words), x, way.form), permutation.inverse)


def _travel_forward(way: _Way, x: jax.Array, plan: Any) -> tuple[jax.Array, Any]:
    return _travel(way, x, plan), (x[:0], plan)


def _travel_backward(way: _Way, residuals: Any, gradient: jax.Array) -> tuple[Any, ...]:
    # The gradients of sums travel in the type of the rows.
    no_rows, plan = residuals
    back = _Way(to_experts=not way.to_experts, form=way.gradient_form, gradient_form=way.form)
    return _travel(back, gradient.astype(no_rows.dtype), plan).astype(no_rows.dtype), None


_travel.defvjp(_travel_forward, _travel_backward)


def _words(x: jax.Array, form: RowForm | None) -> jax.Array:
    """Quantizes rows `[T, C]` to `int32[T, C / 4 + blocks]`: their numbers, then their scales."""
    if form is None or 0 in x.shape:
        return x
    quantized = _quantized(x[None], form)
    tokens, features = x.shape
    numbers = jax.lax.bitcast_convert_type(quantized.data.reshape(tokens, features // 4, 4), jnp.int32)
    scales = jax.lax.bitcast_convert_type(quantized.scale_inv[0, :, :tokens].T, jnp.int32)
    return jnp.concatenate([numbers, scales], axis=1)


def _rows(words: jax.Array, like: jax.Array, form: RowForm | None) -> jax.Array:
    """Returns the rows of `_words`, with features and type like these."""
    if form is None or 0 in like.shape:
        return words
    features = like.shape[1]
    numbers, scales = jnp.split(words, [features // 4], axis=1)
    data = jax.lax.bitcast_convert_type(numbers, form.dtype).reshape(-1, features)
    return _dequantized(data, jax.lax.bitcast_convert_type(scales, jnp.float32)).astype(like.dtype)


def _quantized(x: jax.Array, form: RowForm) -> ScaledArray:
    """Quantizes a stack of rows, `[D, T, C]`, rowwise."""
    options = scaling_options(form.recipe)
    spec = QuantizeSpec(form.recipe.token_mode, form.dtype, num_groups=x.shape[0], stack_rows=x.shape[1], **options)
    rowwise = quantize_stack(x, spec).rowwise
    assert rowwise is not None
    return rowwise


def _dequantized(data: jax.Array, scale_inv: jax.Array) -> jax.Array:
    """Computes the float32 values of rows `[T, C]` with scales `[T, blocks]`, for XLA to fuse with what reads them."""
    return data.astype(jnp.float32) * spread(scale_inv, BLOCK, data.shape[1], axis=1)
