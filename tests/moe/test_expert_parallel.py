"""Experts on several devices: both ways in which tokens reach them, against one device."""

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_grouped as jg
from jax_grouped.moe import Parallel, Router
from jax_grouped.moe.layer import are_kept, group_in_room
from tests import oracle
from tests.meshes import data_mesh, typed_mesh

T, K, F, E, TOP_K = 32, 32, 16, 4, 2
DEVICES = 2
SPLIT = (P("data"),) * 4
ROUTER = Router(TOP_K)
LAYER = dict(router=ROUTER, precision="highest", activation="geglu")


def arrays(dtype: Any = jnp.float32) -> list[jax.Array]:
    """Returns tokens, logits, and the kernels of all experts."""
    rng = np.random.default_rng(0)
    shapes = (T, K), (T, E), (E, K, 2 * F), (E, F, K)
    x, logits, gate_up, down = (jnp.asarray(rng.standard_normal(shape, np.float32)) for shape in shapes)
    return [x.astype(dtype), logits, gate_up.astype(dtype), down.astype(dtype)]


def on_devices(function: Any) -> Any:
    return jax.jit(jax.shard_map(function, mesh=data_mesh(DEVICES), in_specs=SPLIT, out_specs=P("data")))


def test_results_and_gradients_are_those_of_one_device() -> None:
    weights = jnp.cos(jnp.arange(K, dtype=jnp.float32))

    def loss(x: jax.Array, logits: jax.Array, *kernels: jax.Array, **options: Any) -> tuple[jax.Array, Any]:
        y, metrics = jg.moe.moe_mlp(x, logits, *kernels, shared=x, **LAYER, **options)
        return jnp.sum(y * weights), (y, metrics.expert_load, metrics.balance_loss[None])

    def gradients(*arrays: jax.Array, **options: Any) -> Any:
        return jax.grad(functools.partial(loss, **options), argnums=(0, 1, 2, 3), has_aux=True)(*arrays)

    expected, (expected_y, expected_load, expected_loss) = jax.jit(gradients)(*arrays())
    for method in ("gather", "padded"):
        split = on_devices(functools.partial(gradients, parallel=Parallel(experts="data", exchange=method)))
        got, (y, load, balance_loss) = split(*arrays())
        for a, b in zip((y, *got), (expected_y, *expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4, err_msg=method)
        assert load.reshape(DEVICES, E).sum(axis=0).tolist() == expected_load.tolist()
        np.testing.assert_allclose(balance_loss, expected_loss.repeat(DEVICES), rtol=1e-6)
        # Products expect an even share of the rows, whatever their capacity.
        share = TOP_K * T // DEVICES
        assert str(jax.make_jaxpr(split)(*arrays())).count(f"expected_tokens={share}") == 6, method


@pytest.mark.parametrize("method", ["gather", "padded"])
def test_second_derivatives_are_those_of_one_device(method: str) -> None:
    weights = jnp.cos(jnp.arange(K, dtype=jnp.float32))

    def loss(*arrays: jax.Array, **options: Any) -> jax.Array:
        return jnp.sum(jnp.sin(jg.moe.moe_mlp(*arrays, **LAYER, **options)[0]) * weights)

    def norm_of_gradients(*arrays: jax.Array, **options: Any) -> jax.Array:
        gradients = jax.grad(functools.partial(loss, **options), argnums=(0, 1, 2, 3))(*arrays)
        squares = sum(jnp.sum(gradient**2) for gradient in gradients)
        return jax.lax.psum(squares, "data") if options else squares

    def second(*arrays: jax.Array, **options: Any) -> Any:
        return jax.grad(functools.partial(norm_of_gradients, **options), argnums=(0, 1, 2, 3))(*arrays)

    split = on_devices(functools.partial(second, parallel=Parallel(experts="data", exchange=method)))
    for got, expected in zip(split(*arrays()), jax.jit(second)(*arrays()), strict=True):
        assert jnp.linalg.norm(got - expected) <= 1e-5 * jnp.linalg.norm(expected)


@pytest.mark.parametrize("method", ["gather", "padded"])
def test_the_lightest_are_dropped_also_of_weights_on_the_input(method: str) -> None:
    options: dict[str, Any] = dict(capacity_factor=0.5, drop_by="weight", weights_on="input")
    router = Router(1, score="sigmoid", normalize=False, **options)
    layer = LAYER | dict(router=router, parallel=Parallel(experts="data", exchange=method))
    x, logits, *kernels = arrays()

    y = on_devices(lambda *arrays: jg.moe.moe_mlp(*arrays, **layer)[0])(x, logits, *kernels)

    scores, device = np.max(logits, axis=1), np.argmax(logits, axis=1) // (E // DEVICES)
    for each in range(DEVICES):
        tokens = np.flatnonzero(device == each)
        heaviest = tokens[np.argsort(-scores[tokens])[: T // DEVICES // 2]]
        assert {*np.flatnonzero(np.any(y != 0, axis=1) & (device == each))} == {*heaviest}


def test_devices_may_have_the_same_tokens() -> None:
    def result(*arrays: jax.Array, **options: Any) -> Any:
        y, metrics = jg.moe.moe_mlp(*arrays, **LAYER, **options)
        return y, metrics.balance_loss[None]

    mesh, parallel = typed_mesh("auto", {"a": 2, "b": 2}), Parallel(experts="b", batch="a")
    specs, local = (P("a"), P("a"), P("b"), P("b")), functools.partial(result, parallel=parallel)
    split = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(("b", "a")))

    for got, expected in zip(jax.jit(split)(*arrays()), jax.jit(result)(*arrays()), strict=True):
        for copy in jnp.split(got, 4 if got.shape == (4,) else 2):
            np.testing.assert_allclose(copy, expected, rtol=1e-5, atol=1e-4)


def test_shard_map_outside_of_jit_gives_what_it_gives_inside() -> None:
    def result(*arrays: jax.Array) -> jax.Array:
        options = dict(router=ROUTER, parallel=Parallel(experts="data"), recipe=jg.Float8CurrentScaling())
        return jg.moe.moe_mlp(*arrays, **options)[0]

    split = jax.shard_map(result, mesh=data_mesh(DEVICES), in_specs=SPLIT, out_specs=P("data"))

    np.testing.assert_allclose(split(*arrays()), jax.jit(split)(*arrays()), rtol=1e-6, atol=1e-6)


def test_debug_nans_finds_none_in_rows_of_no_expert() -> None:
    def residuals(x: jax.Array, *rest: jax.Array) -> Any:
        y, pull_back = jax.vjp(lambda x: jg.moe.moe_mlp(x, *rest, parallel=Parallel(experts="data"), **LAYER)[0], x)
        return y, jax.tree.leaves(pull_back)

    def whole() -> Any:
        options = dict(mesh=data_mesh(DEVICES), in_specs=SPLIT, out_specs=P("data"), check_vma=False)
        return jax.jit(jax.shard_map(residuals, **options))(*arrays())

    if jax.default_backend() == "cpu":  # Elsewhere these rows may hold anything.
        assert any(jnp.isnan(x).any() for x in jax.tree.leaves(whole()) if x.dtype == jnp.float32)
    with jax.debug_nans(True):
        jax.block_until_ready(whole())


def test_parts_of_sums_are_added_in_float32() -> None:
    def result(*arrays: jax.Array, **options: Any) -> jax.Array:
        return jg.moe.moe_mlp(*arrays, **LAYER, **options)[0]

    on_one = jax.jit(result)
    exact = on_one(*arrays()).astype(jnp.bfloat16)
    got = on_devices(functools.partial(result, parallel=Parallel(experts="data", exchange="gather")))(
        *arrays(jnp.bfloat16)
    )

    def error(y: jax.Array) -> float:
        return float(jnp.linalg.norm((y - exact).astype(jnp.float32)))

    # A sum of two parts in bfloat16 would round a third time.
    assert error(got) < 1.3 * error(on_one(*arrays(jnp.bfloat16)))


@pytest.mark.parametrize(("method", "drop_by"), [("gather", "weight"), ("padded", "even")])
def test_who_is_dropped_does_not_depend_on_the_device_that_a_token_is_on(method: str, drop_by: str) -> None:
    devices, tokens, experts, top_k = 8, 8 * 96, 16, 4
    rng = np.random.default_rng(0)
    x, logits, gate_up, down = (
        rng.standard_normal(shape, np.float32)
        for shape in ((tokens, 16), (tokens, experts), (experts, 16, 32), (experts, 16, 16))
    )
    logits += 0.5 * rng.standard_normal(experts, np.float32)

    def on_mesh(*arrays: jax.Array, capacity_factor: float) -> Any:
        router = Router(top_k, drop_by=drop_by, capacity_factor=capacity_factor)
        return jg.moe.moe_mlp(*arrays, router=router, parallel=Parallel(experts="data", exchange=method))[1]

    mesh = data_mesh(devices)
    placed = [jax.device_put(array, NamedSharding(mesh, P("data"))) for array in (x, logits, gate_up, down)]
    metrics = jax.jit(functools.partial(on_mesh, capacity_factor=1.1))(*placed)
    factor = float(metrics.needed_capacity_factor)
    if drop_by == "even":
        for other, drops in ((factor, False), (factor - 0.01, True)):
            with_other = jax.jit(lambda *arrays, other=other: on_mesh(*arrays, capacity_factor=other).dropped)
            assert bool(jnp.any(with_other(*placed) > 0)) == drops, other

    assert metrics.dropped.shape == (devices,)
    assert 0.5 * metrics.dropped.mean() < metrics.dropped.min() <= metrics.dropped.max() < 2 * metrics.dropped.mean()
    # A device with few pairs drops none; one with too many keeps all of its rows, but for a remainder of the cut.
    wanted = metrics.expert_load.reshape(devices, -1).sum(axis=1)
    capacity = math.ceil(1.1 * tokens * top_k / devices)
    unused = 0 if drop_by == "weight" else devices * experts // devices
    surplus = int(jnp.sum(jnp.maximum(wanted - capacity, 0)))
    assert surplus <= int(metrics.dropped.sum()) <= surplus + unused * int(jnp.sum(wanted > capacity))


def test_the_smallest_weights_are_dropped_first() -> None:
    tokens, experts, top_k, capacity = 64, 8, 2, 20
    rng = np.random.default_rng(0)
    choices = np.argsort(rng.random((tokens, experts)), axis=1)[:, :top_k].astype(np.int32)
    weights = rng.random((tokens, top_k), np.float32).round(1)  # with ties

    permutation = group_in_room(
        jnp.asarray(choices), jnp.asarray(weights), experts, capacity=capacity, sources=1, drop_by="weight"
    )
    options = dict(num_experts=experts, capacity=capacity, axis_name="data", drop_by="weight")
    kept_on_device = functools.partial(are_kept, **options)
    whole = jax.shard_map(kept_on_device, mesh=data_mesh(4), in_specs=P("data"), out_specs=P("data"))
    for devices, kept in ((1, permutation.inverse < capacity), (4, jax.jit(whole)(choices, weights))):
        for device in range(devices):
            own = choices // (experts // devices) == device
            assert np.sum(kept & own) == min(capacity, np.sum(own)), (devices, device)
            assert weights[own & kept].min() >= weights[own & ~kept].max(initial=0), (devices, device)


@pytest.mark.parametrize(
    ("kind", "tokens", "options"),
    [
        ("explicit", 1, dict(parallel=Parallel(experts="b", batch="a", exchange="padded"))),
        ("auto", 1, dict(parallel=Parallel(fsdp="b", batch="a"), router=Router(TOP_K, capacity_factor=8.0))),
    ],
    ids=["exchanged rows", "fsdp"],
)
def test_devices_need_not_divide_the_tokens(kind: str, tokens: int, options: dict[str, Any]) -> None:
    rng = np.random.default_rng(1)
    x, logits = (rng.standard_normal((tokens, features), np.float32) for features in (K, E))
    kernels = [0.2 * kernel for kernel in arrays()[2:]]  # Sines of large numbers would differ.
    mesh = typed_mesh(kind, {"a": 2, "b": 4})

    def step(*arrays: jax.Array, **options: Any) -> Any:
        def loss(*arrays: jax.Array) -> Any:
            y, metrics = jg.moe.moe_mlp(*arrays, shared=arrays[0], **LAYER | options)
            return jnp.sum(jnp.sin(y)) + metrics.balance_loss + 0.1 * metrics.z_loss, (y, metrics.expert_load)

        return jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True)(*arrays)

    placed = [jax.device_put(array, NamedSharding(mesh, P())) for array in (x, logits, *kernels)]
    got = jax.jit(functools.partial(step, **options))(*placed)

    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(jax.jit(step)(x, logits, *kernels)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())


@pytest.mark.parametrize(("kind", "role"), [("auto", "experts"), ("explicit", "fsdp")])
def test_a_stage_of_a_pipeline_splits_its_experts(kind: str, role: str) -> None:
    mesh = typed_mesh(kind, {"stage": 2, "b": 4})
    rng = np.random.default_rng(1)
    stages = [0.3 * jnp.stack([array, jnp.asarray(rng.permutation(array))]) for array in arrays()]

    def stage(*arrays: jax.Array, **options: Any) -> jax.Array:
        y, metrics = jg.moe.moe_mlp(*(array[0] for array in arrays), **LAYER, **options)
        return (y + metrics.balance_loss)[None]

    def gradients(run: Callable[..., jax.Array], *arrays: jax.Array) -> Any:
        return jax.jit(jax.value_and_grad(lambda *arrays: jnp.sum(jnp.sin(run(*arrays))), argnums=(0, 1, 2, 3)))(
            *arrays
        )

    split = jax.shard_map(
        functools.partial(stage, parallel=Parallel(**{role: "b"})),
        mesh=mesh,
        in_specs=P("stage"),
        out_specs=P("stage"),
        axis_names={"stage"},
    )
    placed = [jax.device_put(array, NamedSharding(mesh, P("stage"))) for array in stages]
    got = gradients(split, *placed)

    expected = gradients(
        lambda *arrays: jnp.concatenate([stage(*(a[i : i + 1] for a in arrays)) for i in range(2)]), *stages
    )
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert oracle.relative_error(a, b) < 1e-5


@pytest.mark.parametrize("method", ["gather", "padded"])
def test_a_quantized_exchange_rounds_as_it_says(method: str) -> None:
    features = 256  # Two blocks.
    rng = np.random.default_rng(1)
    x, gate_up, down = (
        jnp.asarray(rng.standard_normal(shape, np.float32) * magnitude, jnp.bfloat16)
        for shape, magnitude in (
            ((T, features), 10.0 ** rng.uniform(-3, 3, (T, 1))),
            ((E, features, 2 * F), 1),
            ((E, F, features), 1),
        )
    )

    def exchanged(**types: str) -> tuple[list[np.ndarray], int]:
        """Returns the result and gradients of a layer with block scaling, and the bytes that its devices send."""

        def results(x: jax.Array, logits: jax.Array, *kernels: jax.Array) -> Any:
            def layer(x: jax.Array, *kernels: jax.Array) -> jax.Array:
                parallel, recipe = Parallel(experts="data", exchange=method, **types), jg.Float8BlockScaling()
                return jg.moe.moe_mlp(x, logits, *kernels, router=ROUTER, parallel=parallel, recipe=recipe)[0]

            y, pull = jax.vjp(layer, x, *kernels)
            # A gradient of the result that does not depend on how the result was rounded.
            return y, *pull(jnp.cos(x))

        lowered = on_devices(results).lower(x, arrays()[1], gate_up, down)
        found = re.findall(
            r"(?:all_gather|all_to_all)[\"(].*-> tensor<((?:\d+x)+)(ui8|i32|f32|bf16)>", lowered.as_text()
        )
        sizes = [([*map(int, shape.split("x")[:-1])], dict(ui8=1, bf16=2).get(dtype, 4)) for shape, dtype in found]
        # Arrays of the routing have few columns.
        sent = sum(math.prod(shape) * width for shape, width in sizes if shape[-1] > E)
        step = lowered.compile()
        return [np.asarray(one, np.float32) for one in step(x, arrays()[1], gate_up, down)], sent

    (wide_y, wide_dx, *wide_dkernels), wide_bytes = exchanged(dispatch="input")
    (y, dx, *dkernels), one_way_bytes = exchanged()
    (narrow_y, narrow_dx, *narrow_dkernels), both_ways_bytes = exchanged(combine="fp8")

    # Dispatch in FP8 loses nothing: products of tokens quantize the same blocks again.
    np.testing.assert_array_equal(y, wide_y)
    np.testing.assert_array_equal(dx, wide_dx)
    for got, wide in zip(dkernels, wide_dkernels, strict=True):
        assert oracle.relative_error(got, wide) < 0.05
    # A float8_e4m3fn has three bits after the first: its largest error is 1/16, its root mean square about 1/40.
    assert 0.005 < oracle.relative_error(narrow_y, y) < 0.04
    assert 0.005 < oracle.relative_error(narrow_dx, dx) < 0.04
    for got, wide in zip(narrow_dkernels, dkernels, strict=True):
        np.testing.assert_array_equal(got, wide)
    # Without `combine`, sums return in bfloat16.
    assert one_way_bytes - wide_bytes / 2 < 0.53 * wide_bytes / 2
    assert both_ways_bytes < 0.53 * wide_bytes
