"""Expert parallelism: rows travel to the devices that hold their experts, and the results travel back."""

import dataclasses
import functools
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp

from jax_grouped.core.groups import fit_to_capacity, group_rows
from jax_grouped.core.values import as_array, axis_size, vary_alike
from jax_grouped.fp8.arrays import short_repr
from jax_grouped.moe.options import check_instance
from jax_grouped.ops import inputs
from jax_grouped.ops.inputs import GroupSizes

#: Counts of the rows of all devices are int32, and so are positions among the rows that one device receives.
_MOST_ROWS = 2**31 - 1

#: Origin of a row without a source: an index past the end of every array.
_NOWHERE = _MOST_ROWS


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Slices:
    """Slices of an array's rows that go to each device, or come from it: `n = E / D` slices per device.

    Attributes:
        starts: `int32[D, n]`, first rows of the slices on this device.
        sizes: `int32[D, n]`, numbers of rows of the slices.
        num_rows: rows of this device's array; static.
    """

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
        from jax.sharding import AxisType, PartitionSpec as P

        mesh = jax.make_mesh((1,), ("expert",), (AxisType.Auto,), devices=jax.devices()[:1])

        def rows_per_own_expert(group_sizes):
            exchange = jg.moe.plan_exchange(group_sizes, "expert", num_rows=8, capacity=8)
            assert isinstance(exchange, jg.moe.Exchange)
            return exchange.group_sizes

        sharded = jax.shard_map(rows_per_own_expert, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"))

        assert jax.jit(sharded)(jnp.array([3, 4])).tolist() == [3, 4]
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
    largest chunks are cut to one length, and their first rows travel.

    Rows travel by `jax.lax.all_to_all`: `min(num_rows, capacity)` rows from every device to every other one, however
    many of them are used.

    Args:
        group_sizes: `[E]` integers, this device's rows per expert, read on the device only. Negative ones count as 0,
            and rows past `num_rows` do not exist.
        axis_name: the mesh axis of `D` devices, or a tuple of axes; other axes exchange nothing.
        num_rows: `R`, rows of this device's array, the same on every device. `D * num_rows` is below 2^31.
        capacity: rows that a device has room for after `send_rows`, fewer than 2^31. `D * num_rows` drops none,
            whatever the sizes.

    Returns:
        The plan for `send_rows` and `return_rows`. All devices compute the same plan from the sizes of all.

    Raises:
        TypeError: `group_sizes`, `num_rows` or `capacity` is not of an integer type.
        ValueError: `group_sizes` is not `[E]` with `E` a multiple of `D`, `num_rows` or `capacity` is negative or too
            large, or `axis_name` is no axis of a surrounding `jax.shard_map`.

    Example:
        from jax.sharding import AxisType, PartitionSpec as P

        mesh = jax.make_mesh((1,), ("expert",), (AxisType.Auto,), devices=jax.devices()[:1])

        def dropped(group_sizes):
            exchange = jg.moe.plan_exchange(group_sizes, "expert", num_rows=8, capacity=6)
            return jax.lax.psum(exchange.dropped, "expert")

        sharded = jax.shard_map(dropped, mesh=mesh, in_specs=P("expert"), out_specs=P())

        assert int(jax.jit(sharded)(jnp.array([3, 4]))) == 1
    """
    devices = axis_size(axis_name)
    num_rows, capacity = inputs.static_size("num_rows", num_rows), inputs.static_size("capacity", capacity)
    for name, value, most in (("num_rows", num_rows, _MOST_ROWS // devices), ("capacity", capacity, _MOST_ROWS)):
        if value > most:
            raise ValueError(
                f"{name} must be at most {most} for the {devices} devices of the axis {axis_name!r}, because their "
                f"rows are counted in int32, got {value}."
            )
    sizes = inputs.canonical_sizes_of(group_sizes, num_rows)
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
        TypeError: `rows` is not of a floating-point type, or `exchange` is no plan.
        ValueError: `rows` is not `[R, C]` with the `num_rows` of the plan.

    Example:
        from jax.sharding import AxisType, PartitionSpec as P

        mesh = jax.make_mesh((1,), ("expert",), (AxisType.Auto,), devices=jax.devices()[:1])

        def there_and_back(rows, group_sizes):
            exchange = jg.moe.plan_exchange(group_sizes, "expert", num_rows=8, capacity=8)
            received = jg.moe.send_rows(rows, exchange)  # for own experts
            return jg.moe.return_rows(2 * received, exchange)

        sharded = jax.shard_map(there_and_back, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"))
        y = jax.jit(sharded)(jnp.ones((8, 2)), jnp.array([3, 4]))

        assert y[:7].tolist() == 7 * [[2.0, 2.0]] and not y[7:].any()
    """
    check_instance("exchange", exchange, Exchange)
    return _exchanged(rows, exchange, exchange.outgoing, exchange.incoming)


def return_rows(rows: jax.Array, exchange: Exchange) -> jax.Array:
    """Sends the results for rows back to the rows' positions before `send_rows`. Its gradient is `send_rows`.

    Args:
        rows: `[capacity, C]` of a floating-point type, laid out as by `send_rows`. The tail is not sent.
        exchange: the plan, made on the same devices.

    Returns:
        `[R, C]`; zeros for rows that were not sent, and in the tail.

    Raises:
        TypeError: `rows` is not of a floating-point type, or `exchange` is no plan.
        ValueError: `rows` is not `[capacity, C]` with the `capacity` of the plan.

    Example:
        from jax.sharding import AxisType, PartitionSpec as P

        mesh = jax.make_mesh((1,), ("expert",), (AxisType.Auto,), devices=jax.devices()[:1])

        def there_and_back(rows, group_sizes):
            exchange = jg.moe.plan_exchange(group_sizes, "expert", num_rows=8, capacity=6)
            return jg.moe.return_rows(jg.moe.send_rows(rows, exchange), exchange)

        sharded = jax.shard_map(there_and_back, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"))
        y = jax.jit(sharded)(jnp.ones((8, 1)), jnp.array([3, 4]))

        assert y[:, 0].tolist() == [1, 1, 1, 1, 1, 1, 0, 0]  # the second expert's last row found no room
    """
    check_instance("exchange", exchange, Exchange)
    return _exchanged(rows, exchange, exchange.incoming, exchange.outgoing)


def _exchanged(rows: jax.Array, exchange: Exchange, source: _Slices, target: _Slices) -> jax.Array:
    rows = as_array("rows", rows)
    if not jnp.issubdtype(rows.dtype, jnp.floating):
        raise TypeError(f"rows must be of a floating-point type, got {rows.dtype.name}.")
    if rows.ndim != 2 or rows.shape[0] != source.num_rows:
        raise ValueError(f"rows must have shape [{source.num_rows}, C] for this exchange, got {rows.shape}.")
    return _vary_and_move(rows, exchange, source, target)


def move_rows(rows: jax.Array, exchange: Exchange) -> jax.Array:
    """Sends rows of any type, as `send_rows` does; without a gradient."""
    return _vary_and_move(rows, exchange, exchange.outgoing, exchange.incoming)


def move_rows_back(rows: jax.Array, exchange: Exchange) -> jax.Array:
    """Returns rows of any type, as `return_rows` does; without a gradient."""
    return _vary_and_move(rows, exchange, exchange.incoming, exchange.outgoing)


def _vary_and_move(rows: jax.Array, exchange: Exchange, source: _Slices, target: _Slices) -> jax.Array:
    arrays, structure = jax.tree.flatten((rows, source, target))
    return _move(exchange.axis_name, *jax.tree.unflatten(structure, vary_alike(*arrays)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _move(axis_name: Hashable, rows: jax.Array, source: _Slices, target: _Slices) -> jax.Array:
    """Copies the slices of all devices' rows to their positions in a new array; all other rows of it are zero."""
    if 0 in (*rows.shape, target.num_rows):
        return vary_alike(jnp.zeros((target.num_rows, rows.shape[1]), rows.dtype), rows)[0]
    # The slices of one device are contiguous in its chunk, which has room for all rows that can be sent or received.
    devices, room = source.sizes.shape[0], min(source.num_rows, target.num_rows)
    sent = jax.vmap(functools.partial(_origins, num_rows=room))(_starts(source.sizes), source.sizes, source.starts)
    received = jax.lax.all_to_all(_take(rows, sent), axis_name, 0, 0).reshape(devices * room, -1)
    offsets = room * jnp.arange(devices, dtype=jnp.int32)[:, None] + _starts(target.sizes)
    slices = (x.reshape(-1) for x in (target.starts, target.sizes, offsets))
    return _take(received, _origins(*slices, num_rows=target.num_rows))


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


def _take(rows: jax.Array, index: jax.Array) -> jax.Array:
    """Returns `rows[index]`, zeros where the index is past the end."""
    return rows.at[index].get(mode="fill", fill_value=0)
