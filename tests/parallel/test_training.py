"""Training a mixture of experts on several devices is training on one, whatever is split over them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_grouped as jg
from tests import oracle
from tests.meshes import make_mesh, typed_mesh
from tests.parallel import programs
from tests.parallel.programs import DELAYED, FLOAT32_TOLERANCE, FP8_TOLERANCE, assert_close, by_name

pytestmark = pytest.mark.slow


IN_FP8 = dict(use_bias=False)


@pytest.mark.parametrize(
    ("how", "api", "axes", "options"),
    [
        ("shard_map", "nnx", dict(expert=2, feature=2), dict(methods=("padded", "gather"))),
        ("shard_map", "linen", dict(fsdp=2, expert=2), dict(remat=True)),
        ("auto", "nnx", dict(fsdp=2, expert=2, feature=2), dict(remat=True)),
        ("explicit", "linen", dict(expert=2, stored_features=2), {}),
        ("explicit", "nnx", dict(data=2, expert=2, feature=2), IN_FP8 | dict(recipe=DELAYED)),
    ],
    ids=str,
)
def test_training_is_that_of_one_device(
    backend: str, how: str, api: str, axes: dict[str, int], options: dict[str, Any]
) -> None:
    steps, tolerance = (3, FP8_TOLERANCE[backend]) if "recipe" in options else (programs.STEPS, FLOAT32_TOLERANCE)
    mesh = typed_mesh("explicit" if how == "explicit" else "auto", axes)
    model = programs.model(api, axes, **options)

    got = (programs.sharded if how == "shard_map" else programs.under_jit)(model, mesh).run(steps)

    # However tokens are exchanged, and whether layers are computed again, changes nothing there.
    same = {name: value for name, value in options.items() if name not in ("methods", "remat")}
    assert_close(got, programs.on_one_device(jax.devices()[0], backend, steps=steps, **same), tolerance)


def test_states_are_those_of_one_device_however_experts_are_split(backend: str) -> None:
    axes, options, steps = dict(expert=2, fsdp=2), IN_FP8 | dict(recipe=DELAYED), 3
    mesh = make_mesh(axes)
    model = programs.model("linen", axes, **options)

    got = programs.sharded(model, mesh).run(steps)

    expected = programs.on_one_device(jax.devices()[0], backend, steps=steps, **options)
    assert_close(got, expected, FP8_TOLERANCE[backend])
    first, expected_first = by_name(got[1][0]), by_name(expected[1][0])
    states = {name for name in first if name.endswith(("scale", "history", "mark"))}
    assert len(states) == 36
    for name in states:
        # The first step quantized copies of tokens and parameters here, results of sums elsewhere.
        copied = name.startswith("experts/gate_up/input") or "/kernel_" in name
        tolerance = 0 if copied or name.endswith("scale") else 10 * FP8_TOLERANCE[backend]
        assert not name.endswith("history") or np.all(first[name][:, 0] > 0), name
        np.testing.assert_allclose(first[name], expected_first[name], rtol=tolerance, err_msg=name)


def test_what_finds_no_room_on_a_device_is_counted_and_adds_nothing(backend: str) -> None:
    # Room for half of what is sent if all devices send everything to one of them.
    router = jg.moe.Router(programs.TOP_K, capacity_factor=2.0)
    parallel = jg.moe.Parallel(experts="expert", batch="expert", exchange="gather")
    layer = jg.linen.MoEMlp(programs.E, programs.F, router, parallel=parallel, use_bias=True, precision="highest")
    x = np.abs(programs.batches(1)[0][0][0])
    params = programs.filled(jax.eval_shape(layer.init, jax.random.key(0), x))["params"]
    crowded = params | {"router": {"kernel": np.float32([[1, 1, 0, 0, 0, 0, 0, 0]] * programs.K)}}

    def local(params: Any, x: jax.Array) -> Any:
        y, metrics = layer.apply({"params": params}, x)
        return y, jax.lax.psum((jnp.sum(metrics.dropped), metrics.expert_load), "expert")

    specs = {"router": P(), "gate_up": P("expert"), "down": P("expert")}, P("expert")
    split = jax.jit(jax.shard_map(local, mesh=make_mesh(dict(expert=4)), in_specs=specs, out_specs=(P("expert"), P())))
    with jax.default_matmul_precision("highest"):
        y, (dropped, load) = split(params, x)
        crowded_y, (crowded_dropped, crowded_load) = split(crowded, x)

    assert (int(dropped), int(crowded_dropped)) == (0, len(x))
    assert len({*load.tolist()}) > 1
    assert crowded_load.tolist() == [len(x)] * 2 + [0] * 6
    np.testing.assert_allclose(y, oracle.a_loop_over_tokens(params, x), rtol=1e-5, atol=1e-5)
    # Both experts of the crowded device take every other one of each device's tokens.
    kept = np.any(crowded_y != 0, axis=1)
    assert kept.reshape(4, -1).sum(axis=1).tolist() == [len(x) // 8] * 4
    expected = oracle.a_loop_over_tokens(crowded, x)
    np.testing.assert_allclose(crowded_y[kept], expected[kept], rtol=1e-5, atol=1e-5)
