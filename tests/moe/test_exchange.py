"""Rows of a mesh of devices travel to their experts and back: against NumPy, whatever the sizes."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jax_grouped.moe import exchange
from tests.meshes import data_mesh, make_mesh
from tests.refusals import assert_refused

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


def repeat_sizes(case: list[list[int]], devices: int) -> np.ndarray:
    return np.array([case[device % len(case)] for device in range(devices)], np.int32)


def tokens(sizes: np.ndarray) -> np.ndarray:
    """Returns every device's rows, `[D, R, C]`, all different and exact in bfloat16, with a poisoned tail."""
    x = 1 + np.arange(len(sizes) * ROWS * FEATURES, dtype=np.float32).reshape(len(sizes), ROWS, FEATURES)
    x[np.arange(ROWS) >= sizes.sum(axis=1)[:, None]] = np.nan
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


def assert_same(got: dict[str, jax.Array], expected: dict[str, np.ndarray], case: object = "") -> None:
    assert got.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(got[name], array, err_msg=f"{name}, {case}")


def test_rows_arrive_by_expert_and_source_and_go_back() -> None:
    for devices, capacity in ((1, TIGHT), (2, 0), (4, TIGHT), (8, 8 * ROWS)):
        dtype = "bfloat16" if devices == 8 else "float32"
        program = sharded(functools.partial(there_and_back, capacity=capacity), data_mesh(devices))
        for name, (case, counted) in ({name: (case, case) for name, case in SIZES.items()} | HOSTILE).items():
            sizes = repeat_sizes(counted, devices)
            x = tokens(sizes)
            got = program(x.astype(dtype), repeat_sizes(case, devices))
            assert got["sent"].dtype == got["returned"].dtype == dtype
            assert_same(got, exchanged(x, sizes, capacity), (devices, name))
            if capacity == devices * ROWS:
                np.testing.assert_array_equal(got["returned"], np.nan_to_num(x), err_msg=name)


def test_derivatives_of_both_orders_through_scan_and_remat() -> None:
    sizes = repeat_sizes(SIZES["uneven"], 4)
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


def test_an_exchange_over_some_axes_leaves_the_others_alone() -> None:
    sizes = repeat_sizes(SIZES["uneven"], 4)
    x = tokens(sizes)
    mesh = make_mesh({"data": 2, "expert": 2})
    halves = [exchanged(x[i : i + 2], sizes[i : i + 2], TIGHT) for i in (0, 2)]
    both = jax.tree.map(lambda *parts: np.concatenate(parts), *halves)
    over_expert = functools.partial(there_and_back, axis_name="expert")
    assert_same(sharded(over_expert, mesh, P(("data", "expert")))(x, sizes), both)
    assert_same(sharded(over_expert, mesh, P("expert"), axis_names={"expert"})(x[:2], sizes[:2]), halves[0])

    over_two = functools.partial(there_and_back, axis_name=("data", "expert"))
    whole = exchanged(x, sizes, TIGHT)
    assert_same(sharded(over_two, mesh, P(("data", "expert")))(x, sizes), whole)
    mapped = jax.pmap(there_and_back, axis_name="data", devices=jax.devices()[:4])(x[:, None], sizes[:, None])
    assert_same(jax.tree.map(lambda x: x[:, 0], mapped), whole, "pmap")


def test_replicated_rows_get_the_sum_of_all_devices_gradients() -> None:
    sizes = np.array([SIZES["uneven"][0]], np.int32)

    def gradient(x: jax.Array, sizes: jax.Array) -> jax.Array:
        plan = exchange.plan_exchange(sizes[0], "data", num_rows=ROWS, capacity=4 * ROWS)
        return jax.grad(lambda x: jnp.sum(exchange.send_rows(x[0], plan)))(x)

    got = sharded(gradient, data_mesh(4), P())(np.nan_to_num(tokens(sizes)), sizes)
    np.testing.assert_array_equal(got[0], np.where(np.arange(ROWS)[:, None] < sizes.sum(), 4.0, 0.0).repeat(3, axis=1))


def test_as_many_rows_as_int32_can_count_are_planned_exactly() -> None:
    devices = 4
    rows = (2**31 - 1) // devices
    # All rows of all devices go to the last one's first expert.
    sizes = np.array([[0, 0, 0, 0, 0, 0, rows, 0]] * devices, np.int32)

    def totals(sizes: jax.Array) -> list[tuple[jax.Array, ...]]:
        plans = [
            exchange.plan_exchange(sizes[0], "data", num_rows=rows, capacity=most) for most in (2**31 - 1, devices * 9)
        ]
        return [(plan.group_sizes[None], plan.dropped[None], plan.incoming.starts.reshape(1, -1)) for plan in plans]

    (whole, dropped, starts), (cut, too_many, _) = jax.device_get(sharded(totals, data_mesh(devices))(sizes))
    assert whole.tolist() == [[0, 0]] * 3 + [[devices * rows, 0]]
    assert dropped.tolist() == [0] * devices
    assert [start for start in starts[-1] if start < devices * rows] == [0, rows, 2 * rows, 3 * rows]
    assert cut.tolist() == [[0, 0]] * 3 + [[devices * 9, 0]]
    assert too_many.tolist() == [rows - 9] * devices


def test_arguments_that_do_not_fit_are_refused() -> None:
    def exchange_rows(rows: Any, plan: Any = None, back: bool = False, **options: Any) -> None:
        def step() -> jax.Array:
            sizes = jnp.asarray(options.pop("sizes", [1] * EXPERTS))
            made = exchange.plan_exchange(sizes, **dict(axis_name="data", num_rows=ROWS, capacity=TIGHT) | options)
            return (exchange.return_rows if back else exchange.send_rows)(rows, plan or made)

        jax.eval_shape(jax.shard_map(step, mesh=data_mesh(2), in_specs=(), out_specs=P("data")))

    entries = "group_sizes must have a multiple of 2 entries, the devices of the axis 'data', got"
    int32 = "for the 2 devices of the axis 'data', because their rows are counted in int32, got"
    refused: dict[str, dict[str, Any]] = {
        f"{entries} 5.": dict(sizes=[1] * 5),
        f"{entries} 0.": dict(sizes=jnp.ones(0, int)),
        "group_sizes must have shape [E], got (2, 2)": dict(sizes=[[1, 1], [1, 1]]),
        "group_sizes must be of an integer type, got float32": dict(sizes=[1.0, 2.0]),
        "capacity must be at least 0, got -1": dict(capacity=-1),
        "num_rows must be at least 0, got -2": dict(num_rows=-2),
        f"num_rows must be at most 1073741823 {int32} 1073741824.": dict(num_rows=2**30),
        f"capacity must be at most 2147483647 {int32}": dict(capacity=2**31),
        "capacity must be an integer, known when the program is traced": dict(capacity=1.5),
        "There is no mesh axis 'model' here: call it inside jax.shard_map": dict(axis_name="model"),
        "rows must have shape [9, C] for this exchange, got (8, 4)": dict(rows=jnp.ones((8, 4))),
        "rows must have shape [10, C] for this exchange, got (10,)": dict(rows=jnp.ones(10), back=True),
        "exchange must be a jax_grouped.moe.Exchange, got 3.": dict(plan=3),
        "rows must be of a floating-point type, got int32.": dict(rows=jnp.ones((ROWS, 4), jnp.int32)),
    }
    assert_refused(exchange_rows, dict(rows=jnp.ones((ROWS, 4))), refused)
    plan = dict(group_sizes=jnp.ones(EXPERTS, int), axis_name="data", num_rows=ROWS, capacity=TIGHT)
    assert_refused(exchange.plan_exchange, plan, {"There is no mesh axis 'data' here: call it inside": {}})
