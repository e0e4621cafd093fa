"""Rows of a mesh of devices travel to their experts and back: against NumPy, whatever the sizes."""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jax_grouped.moe import exchange
from tests.meshes import data_mesh

EXPERTS, ROWS, FEATURES = 8, 9, 3
#: Rows per expert of every device, for one device after the other, again from the first where there are more.
SIZES = {
    "uneven": [[1, 0, 3, 0, 0, 2, 1, 0], [0, 4, 0, 0, 1, 0, 0, 1], [0, 0, 0, 2, 0, 0, 7, 0], [1] * 8],
    "full": [[2, 1, 1, 1, 1, 1, 1, 1], [9, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 9], [0, 4, 0, 0, 5, 0, 0, 0]],
    "all to one expert": [[0, 0, 0, 9, 0, 0, 0, 0]],
    "one device has no rows": [[0] * 8, [0, 0, 1, 0, 0, 0, 0, 8]],
    "no rows": [[0] * 8],
}
#: Sizes that no routing makes, and the sizes that they count as.
HOSTILE = {
    "negative": ([[-3, 2, -(2**31), 1, 0, 0, -1, 2]], [[0, 2, 0, 1, 0, 0, 0, 2]]),
    "more than the rows": ([[4, 4, 4, 4, 0, 0, 0, 0]], [[4, 4, 1, 0, 0, 0, 0, 0]]),
    "a sum that wraps": ([[1, 2**31 - 1, 2**31 - 1, 5, 0, 0, 0, 0]], [[1, 8, 0, 0, 0, 0, 0, 0]]),
}
TIGHT = 10
DATA = P("data")


def sizes_of(case: list[list[int]], devices: int) -> np.ndarray:
    return np.array([case[device % len(case)] for device in range(devices)], np.int32)


def tokens(sizes: np.ndarray, rows: int = ROWS, features: int = FEATURES) -> np.ndarray:
    """Returns every device's rows, `[D, R, C]`, all different, with a poisoned tail."""
    x = 1 + np.arange(len(sizes) * rows * features, dtype=np.float32).reshape(len(sizes), rows, features)
    x[np.arange(rows) >= sizes.sum(axis=1)[:, None]] = np.nan
    return x


def exchanged(x: np.ndarray, sizes: np.ndarray, capacity: int) -> dict[str, np.ndarray]:
    """Computes the exchange of `[D, R, C]` rows of `[D, E]` experts, row by row."""
    devices, per_device = len(sizes), sizes.shape[1] // len(sizes)
    starts = np.cumsum(sizes, axis=1) - sizes
    sent = np.zeros((devices, capacity, x.shape[2]), x.dtype)
    returned, group_sizes = np.zeros_like(x), np.zeros((devices, per_device), np.int32)
    for device in range(devices):
        own = sizes[:, device * per_device : (device + 1) * per_device]
        longest = max(n for n in range(x.shape[1] + 1) if np.minimum(own, n).sum() <= capacity)
        end = 0
        for expert, source in np.ndindex(per_device, devices):
            count = min(own[source, expert], longest)
            start = starts[source, device * per_device + expert]
            sent[device, end : end + count] = x[source, start : start + count]
            returned[source, start : start + count] = x[source, start : start + count]
            group_sizes[device, expert] += count
            end += count
    dropped = sizes.sum(axis=1) - np.count_nonzero(returned[:, :, 0], axis=1)
    return {"sent": sent, "returned": returned, "group_sizes": group_sizes, "dropped": dropped}


def there_and_back(
    x: jax.Array, sizes: jax.Array, *, axis_name: Any = "data", capacity: int = TIGHT
) -> dict[str, jax.Array]:
    """Exchanges one device's rows `[1, R, C]` of sizes `[1, E]`; the returned rows are sent with NaN behind them."""
    plan = exchange.plan_exchange(sizes[0], axis_name, num_rows=x.shape[1], capacity=capacity)
    sent = exchange.send_rows(x[0], plan)
    tail = jnp.arange(capacity)[:, None] >= jnp.sum(plan.group_sizes)
    returned = exchange.return_rows(jnp.where(tail, jnp.nan, sent), plan)
    result = {"sent": sent, "returned": returned, "group_sizes": plan.group_sizes, "dropped": plan.dropped}
    return jax.tree.map(lambda x: x[None], result)


def sharded(function: Callable, mesh: Mesh, spec: P = DATA, **options: Any) -> Callable:
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, **options))


@functools.cache
def program(devices: int, capacity: int) -> Callable:
    return sharded(functools.partial(there_and_back, capacity=capacity), data_mesh(devices))


def assert_same(got: dict[str, jax.Array], expected: dict[str, np.ndarray]) -> None:
    assert got.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(got[name], array, err_msg=name)


@pytest.mark.parametrize("case", SIZES.values(), ids=SIZES)
def test_rows_arrive_by_expert_and_source_and_go_back(case: Any) -> None:
    sizes = sizes_of(case, 4)
    x = tokens(sizes)
    got = program(4, TIGHT)(x, sizes)
    assert_same(got, exchanged(x, sizes, TIGHT))


@pytest.mark.parametrize("case", SIZES.values(), ids=SIZES)
def test_devices_with_room_for_everything_drop_nothing(case: Any) -> None:
    sizes = sizes_of(case, 8)
    x = tokens(sizes)
    got = program(8, 8 * ROWS)(x, sizes)
    assert_same(got, exchanged(x, sizes, 8 * ROWS))
    np.testing.assert_array_equal(got["returned"], np.nan_to_num(x))
    assert got["dropped"].tolist() == [0] * 8


@pytest.mark.parametrize(("case", "counted"), HOSTILE.values(), ids=HOSTILE)
def test_sizes_that_do_not_fit_are_cut(case: Any, counted: Any) -> None:
    x = tokens(sizes_of(counted, 4))
    got = program(4, TIGHT)(x, sizes_of(case, 4))
    assert_same(got, exchanged(x, sizes_of(counted, 4), TIGHT))


def test_gradients_are_the_transposes() -> None:
    sizes = sizes_of(SIZES["uneven"], 4)

    def matrices(identity: jax.Array, sizes: jax.Array) -> tuple[jax.Array, ...]:
        plan = exchange.plan_exchange(sizes[0], "data", num_rows=ROWS, capacity=ROWS)
        sent, send_transpose = jax.vjp(lambda x: exchange.send_rows(x, plan), identity)
        returned, return_transpose = jax.vjp(lambda x: exchange.return_rows(x, plan), identity)
        return sent, returned, *send_transpose(identity), *return_transpose(identity)

    transposed = sharded(matrices, data_mesh(4), check_vma=False)
    sent, returned, send_transpose, return_transpose = transposed(np.eye(4 * ROWS), sizes)
    np.testing.assert_array_equal(send_transpose, sent.T)
    np.testing.assert_array_equal(return_transpose, returned.T)
    np.testing.assert_array_equal(returned, sent.T)
    kept = np.count_nonzero(exchanged(tokens(sizes), sizes, ROWS)["returned"][:, :, 0])
    assert 0 < sent.sum() == kept < sizes.sum()


def test_derivatives_of_both_orders_through_scan_and_remat() -> None:
    sizes = sizes_of(SIZES["uneven"], 4)
    x = np.nan_to_num(tokens(sizes))

    @jax.checkpoint
    def cubes(x: jax.Array, sizes: jax.Array) -> jax.Array:
        plan = exchange.plan_exchange(sizes[0], "data", num_rows=ROWS, capacity=TIGHT)
        return x * exchange.return_rows(exchange.send_rows(x[0], plan) ** 2, plan)

    def loss(x: jax.Array, sizes: jax.Array) -> jax.Array:
        weights = jnp.array([0.0, 1.0])
        total, _ = jax.lax.scan(lambda total, w: (total + w * cubes(x, sizes), None), jnp.zeros_like(x), weights)
        return jnp.sum(total)

    def derivatives(x: jax.Array, sizes: jax.Array) -> tuple[jax.Array, jax.Array]:
        first, pull_back = jax.vjp(lambda x: jax.grad(loss)(x, sizes), x)
        return first, pull_back(jnp.ones_like(x))[0]

    first, second = sharded(derivatives, data_mesh(4))(x, sizes)
    sent = exchanged(x, sizes, TIGHT)["returned"]
    np.testing.assert_allclose(first, 3 * sent**2, rtol=1e-6)
    np.testing.assert_allclose(second, 6 * sent, rtol=1e-6)


@pytest.mark.parametrize("axis_names", [{"data", "expert"}, {"expert"}], ids=["all axes", "some axes"])
def test_other_axes_of_the_mesh_exchange_nothing(axis_names: set[str]) -> None:
    data_mesh(4)  # Skips where there are fewer devices.
    mesh = jax.make_mesh((2, 2), ("data", "expert"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    sizes = sizes_of(SIZES["uneven"], 4)
    x = tokens(sizes)
    step = functools.partial(there_and_back, axis_name="expert")
    if "data" not in axis_names:
        x, sizes = x[:2], sizes[:2]
    spec = P(tuple(name for name in mesh.axis_names if name in axis_names))

    got = sharded(step, mesh, spec, axis_names=axis_names)(x, sizes)
    rows = [exchanged(x[i : i + 2], sizes[i : i + 2], TIGHT) for i in range(0, len(x), 2)]
    assert_same(got, jax.tree.map(lambda *parts: np.concatenate(parts), *rows))


def test_an_exchange_over_two_axes_is_one_over_all_their_devices() -> None:
    data_mesh(4)  # Skips where there are fewer devices.
    axes = ("data", "expert")
    mesh = jax.make_mesh((2, 2), axes, axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    sizes = sizes_of(SIZES["uneven"], 4)
    got = sharded(functools.partial(there_and_back, axis_name=axes), mesh, P(axes))(tokens(sizes), sizes)
    assert_same(got, exchanged(tokens(sizes), sizes, TIGHT))


def test_one_device_keeps_its_rows() -> None:
    sizes = sizes_of(SIZES["uneven"], 1)
    got = program(1, TIGHT)(tokens(sizes), sizes)
    assert_same(got, exchanged(tokens(sizes), sizes, TIGHT))


def test_pmap_exchanges_rows() -> None:
    data_mesh(4)  # Skips where there are fewer devices.
    sizes = sizes_of(SIZES["uneven"], 4)
    step = jax.pmap(there_and_back, axis_name="data", devices=jax.devices()[:4])
    got = step(tokens(sizes)[:, None], sizes[:, None])
    assert_same(jax.tree.map(lambda x: x[:, 0], got), exchanged(tokens(sizes), sizes, TIGHT))


def test_replicated_rows_get_the_sum_of_all_devices_gradients() -> None:
    sizes = np.array([SIZES["uneven"][0]], np.int32)

    def gradient(x: jax.Array, sizes: jax.Array) -> jax.Array:
        plan = exchange.plan_exchange(sizes[0], "data", num_rows=ROWS, capacity=4 * ROWS)
        return jax.grad(lambda x: jnp.sum(exchange.send_rows(x[0], plan)))(x)

    got = sharded(gradient, data_mesh(4), P())(np.nan_to_num(tokens(sizes)), sizes)
    np.testing.assert_array_equal(got[0], np.where(np.arange(ROWS)[:, None] < sizes.sum(), 4.0, 0.0).repeat(3, axis=1))


def test_rows_keep_their_type() -> None:
    sizes = sizes_of(SIZES["uneven"], 4)
    x = jnp.asarray(tokens(sizes), jnp.bfloat16)

    def send(x: jax.Array, sizes: jax.Array) -> jax.Array:
        plan = exchange.plan_exchange(sizes[0], "data", num_rows=ROWS, capacity=TIGHT)
        return exchange.send_rows(x[0], plan)[None]

    got = sharded(send, data_mesh(4))(x, sizes)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got.astype(jnp.float32), exchanged(np.asarray(x, np.float32), sizes, TIGHT)["sent"])


@pytest.mark.parametrize(("rows", "capacity"), [(0, TIGHT), (ROWS, 0)], ids=["no rows", "no room"])
def test_nothing_travels_without_rows_or_room(rows: int, capacity: int) -> None:
    sizes = np.minimum(sizes_of(SIZES["uneven"], 4), rows)
    x = np.ones((4, rows, FEATURES), np.float32)
    got = sharded(functools.partial(there_and_back, capacity=capacity), data_mesh(4))(x, sizes)
    assert_same(got, exchanged(x, sizes, capacity))


def test_as_many_rows_as_int32_can_count_are_planned_exactly() -> None:
    devices = 4
    rows = (2**31 - 1) // devices
    # All rows of all devices go to the last one's first expert.
    sizes = np.array([[0, 0, 0, 0, 0, 0, rows, 0]] * devices, np.int32)

    def totals(sizes: jax.Array, capacity: int) -> tuple[jax.Array, ...]:
        made = exchange.plan_exchange(sizes[0], "data", num_rows=rows, capacity=capacity)
        return made.group_sizes[None], made.dropped[None], made.incoming.starts.reshape(1, -1)

    def planned(capacity: int) -> Any:
        plan = sharded(functools.partial(totals, capacity=capacity), data_mesh(devices))
        return [array.tolist() for array in jax.device_get(plan(sizes))]

    group_sizes, dropped, starts = planned(2**31 - 1)
    assert group_sizes == [[0, 0]] * 3 + [[devices * rows, 0]]
    assert dropped == [0] * devices
    assert [start for start in starts[-1] if start < devices * rows] == [0, rows, 2 * rows, 3 * rows]
    group_sizes, dropped, _ = planned(1000)
    assert group_sizes == [[0, 0]] * 3 + [[1000, 0]]
    assert dropped == [rows - 250] * devices


def test_only_sizes_and_rows_travel() -> None:
    sizes = sizes_of(SIZES["uneven"], 4)
    step = sharded(there_and_back, data_mesh(4))
    text = step.trace(tokens(sizes), sizes).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count('"stablehlo.all_to_all"(') == 2
    assert text.count('"stablehlo.all_gather"(') == 1, "only the sizes are gathered"
    assert "ragged_all_to_all" not in text
    assert "scatter" not in text


def plan(sizes: Any = (1,) * EXPERTS, axis_name: str = "data", **options: Any) -> exchange.Exchange:
    return exchange.plan_exchange(jnp.asarray(sizes), axis_name, **(dict(num_rows=ROWS, capacity=TIGHT) | options))


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (ValueError, "a multiple of 2 entries, the devices of the axis 'data', got 5", lambda: plan([1] * 5)),
        (ValueError, "a multiple of 2 entries, the devices of the axis 'data', got 0", lambda: plan(jnp.ones(0, int))),
        (ValueError, "group_sizes must have shape [E], got (2, 2)", lambda: plan([[1, 1], [1, 1]])),
        (TypeError, "group_sizes must be of an integer type, got float32", lambda: plan([1.0, 2.0])),
        (ValueError, "capacity must be at least 0, got -1", lambda: plan(capacity=-1)),
        (ValueError, "num_rows must be at least 0, got -2", lambda: plan(num_rows=-2)),
        (
            ValueError,
            "num_rows must be at most 1073741823 for the 2 devices of the axis 'data', because their rows are counted "
            "in int32, got 1073741824.",
            lambda: plan(num_rows=2**30),
        ),
        (ValueError, "capacity must be at most 2147483647 for the 2 devices", lambda: plan(capacity=2**31)),
        (TypeError, "capacity must be an integer, known when the program is traced", lambda: plan(capacity=1.5)),
        (ValueError, "no mesh axis 'model' here: call it inside jax.shard_map", lambda: plan(axis_name="model")),
        (
            ValueError,
            "shape [9, C] for this exchange, got (8, 4)",
            lambda: exchange.send_rows(jnp.ones((8, 4)), plan()),
        ),
        (ValueError, "[10, C] for this exchange, got (10,)", lambda: exchange.return_rows(jnp.ones(10), plan())),
        (
            TypeError,
            "exchange must be a jax_grouped.moe.Exchange, got 3.",
            lambda: exchange.send_rows(jnp.ones((ROWS, 4)), 3),
        ),
        (TypeError, "got int32", lambda: exchange.send_rows(jnp.ones((ROWS, 4), jnp.int32), plan())),
    ],
    ids=lambda value: re.sub(r"\W+", " ", value) if isinstance(value, str) else "",
)
def test_arguments_that_do_not_fit_are_refused(error: type[Exception], message: str, call: Callable) -> None:
    mesh = data_mesh(2)
    with pytest.raises(error, match=re.escape(message)):
        jax.eval_shape(jax.shard_map(lambda: jax.tree.leaves(call())[0], mesh=mesh, in_specs=(), out_specs=P("data")))


def test_a_plan_outside_of_shard_map_is_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("call it inside jax.shard_map")):
        plan()
