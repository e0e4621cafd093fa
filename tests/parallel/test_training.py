"""Training a mixture of experts on several devices is training on one, whatever is split over them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jax_grouped as jg
from tests import oracle, quantize_oracle
from tests.meshes import mesh_of
from tests.parallel import programs
from tests.parallel.programs import BLOCK, DELAYED, FLOAT32_TOLERANCE, FP8_TOLERANCE, assert_close, by_name
from tests.programs import custom_calls

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("api", "axes", "methods", "remat"),
    [
        ("linen", dict(expert=8), ("gather", "padded"), False),
        ("nnx", dict(expert=2, feature=2), ("padded", "gather"), False),
        ("nnx", dict(expert=2, stored_features=2), ("gather", "padded"), True),
        ("linen", dict(fsdp=2, expert=2), ("gather", "padded"), True),
    ],
    ids=str,
)
def test_sharded_training_is_that_of_one_device(
    backend: str, api: str, axes: dict[str, int], methods: tuple[str, str], remat: bool
) -> None:
    mesh = mesh_of(axes)
    model = programs.model(api, axes, methods=methods, remat=remat)

    got = programs.sharded(model, mesh).run()

    assert_close(got, programs.on_one_device(jax.devices()[0], backend), FLOAT32_TOLERANCE)


#: Recipes, the number of steps, and the largest difference of a loss or parameter after them. Current scaling rounds by
#: scales of each device's part, which makes a difference of 0.05 in two steps.
RECIPES = {
    "block": (BLOCK, 3, FP8_TOLERANCE),
    "current": (jg.Float8CurrentScaling(), 2, dict.fromkeys(FP8_TOLERANCE, 0.1)),
    "delayed": (DELAYED, 3, FP8_TOLERANCE),
    "mxfp8": (jg.MXFP8BlockScaling(), 3, FP8_TOLERANCE),
}


@pytest.mark.parametrize(
    ("recipe", "axes", "is_manual"),
    [
        ("block", dict(expert=4), True),
        ("current", dict(fsdp=2, expert=2), True),
        ("delayed", dict(expert=2, feature=2), False),
        ("mxfp8", dict(data=2, expert=2), False),
    ],
    ids=str,
)
def test_training_in_fp8_is_that_of_one_device(
    backend: str, recipe: str, axes: dict[str, int], is_manual: bool
) -> None:
    chosen, steps, tolerance = RECIPES[recipe]
    options: dict[str, Any] = dict(recipe=chosen, use_bias=False)
    mesh = mesh_of(axes)
    model = programs.model("linen", axes, **options)

    got = (programs.sharded if is_manual else programs.under_jit)(model, mesh).run(steps)

    expected = programs.on_one_device(jax.devices()[0], backend, steps=steps, **options)
    assert_close(got, expected, tolerance[backend])


def test_training_under_pmap_is_that_of_one_device(backend: str) -> None:
    # As many as split the batch evenly.
    devices = 2 ** (jax.device_count().bit_length() - 1)
    model = programs.model("nnx", {"data": devices})

    got = programs.with_pmap(model, devices).run()

    assert_close(got, programs.on_one_device(jax.devices()[0], backend), FLOAT32_TOLERANCE)


def test_states_are_those_of_one_device_however_experts_are_split(backend: str) -> None:
    axes, options, steps = dict(expert=2, fsdp=2), dict(recipe=DELAYED, use_bias=False), 3
    mesh = mesh_of(axes)
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


def test_block_scaling_of_split_experts_and_features_has_the_blocks_of_one_device(backend: str) -> None:
    mesh = mesh_of(dict(expert=2, feature=2))
    # Blocks of 128 rows hold rows of both devices; every device has whole blocks of features.
    experts, rows, K, N = 4, 160, 32, 256
    sizes = np.int32([[90, 0, 37, 33], [100, 1, 0, 40]])
    rng = np.random.default_rng(0)
    # Rows of other magnitudes, which count as much in the kernel's gradient: it matters which of them share a block.
    magnitudes = np.float32(10) ** rng.uniform(-2, 2, (2 * rows, 1)).astype(np.float32)
    x = rng.standard_normal((2 * rows, K), np.float32) * magnitudes
    dy = rng.standard_normal((2 * rows, N), np.float32) / magnitudes
    graph, shapes = nnx.split(
        nnx.eval_shape(lambda: jg.nnx.GroupedDense(K, N, experts, use_bias=False, recipe=BLOCK, rngs=nnx.Rngs(0)))
    )
    variables = jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape, np.float32), shapes)

    def local(variables: Any, x: jax.Array, sizes: jax.Array, dy: jax.Array) -> Any:
        plan = jg.moe.plan_exchange(sizes[0], "expert", num_rows=rows, capacity=2 * rows)

        def exchanged(variables: Any, x: jax.Array) -> jax.Array:
            layer = nnx.merge(graph, variables, copy=True)
            return jg.moe.return_rows(layer(jg.moe.send_rows(x, plan), plan.group_sizes), plan)

        y, vjp = jax.vjp(exchanged, variables, x)
        return y, *vjp(dy)

    parts = P("expert", None, "feature")
    in_specs = parts, P("expert"), P("expert"), P("expert", "feature")
    out_specs = P("expert", "feature"), parts, P("expert")
    split = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs))

    y, gradients, dx = split(variables, x, sizes, dy)

    # By expert, and those of an expert by device, as they were.
    order = np.argsort(
        np.concatenate([np.repeat(np.arange(experts), device_sizes) for device_sizes in sizes]), kind="stable"
    )
    sizes, (kernel,), (dkernel,) = sizes.sum(axis=0), jax.tree.leaves(variables), jax.tree.leaves(gradients)
    qx, qdy = (quantize_oracle.quantize(rows[order], sizes, BLOCK.token_mode, pow2_scales=True) for rows in (x, dy))
    qkernel = quantize_oracle.quantize(kernel, None, BLOCK.kernel_mode, pow2_scales=True)
    expected_y = oracle.fprop(qx.rowwise.dequantized, qkernel.columnwise.dequantized, sizes)
    expected_dx = oracle.dgrad(qdy.rowwise.dequantized, qkernel.rowwise.dequantized, sizes)
    expected_dkernel = oracle.wgrad(qx.columnwise.dequantized, qdy.columnwise.dequantized, sizes, experts)
    tolerance = oracle.fp8_tolerance()
    oracle.assert_groups_close(np.asarray(y)[order], expected_y, sizes, experts, tolerance)
    oracle.assert_groups_close(np.asarray(dx)[order], expected_dx, sizes, experts, tolerance)
    oracle.assert_kernels_close(dkernel, expected_dkernel, tolerance)


def test_what_finds_no_room_on_a_device_is_counted_and_adds_nothing(backend: str) -> None:
    axes = dict(expert=4)
    mesh = mesh_of(axes)
    # Room for half of what is sent if all devices send everything to one of them.
    router = jg.moe.Router(programs.TOP_K, capacity_factor=2.0)
    model = programs.model("linen", axes, methods=("gather",), router=router)
    x = np.abs(programs.batches(1)[0][0][0])
    tokens = len(x) // 4

    def local(variables: Any, x: jax.Array) -> Any:
        y, metrics = model.apply(variables, x)
        return y, jax.lax.psum((jnp.sum(metrics.dropped), metrics.expert_load), "expert")

    def with_router(variables: Any, kernel: Any) -> Any:
        return jax.tree.map_with_path(
            lambda path, leaf: kernel if programs.name_of(path) == "experts/router/kernel" else leaf, variables
        )

    specs = programs.specs(axes, model.variables), P("expert")
    split = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(P("expert"), P())))
    crowded = with_router(model.variables, np.float32([1, 1, 0, 0, 0, 0, 0, 0]) * np.ones((programs.K, 1), np.float32))
    with jax.default_matmul_precision("highest"):
        y, (dropped, load) = split(model.variables, x)
        crowded_y, (crowded_dropped, crowded_load) = split(crowded, x)

    def expected(variables: Any) -> np.ndarray:
        params = variables["params"]
        embedded = x + params["embed"]["bias"]
        return embedded + oracle.a_loop_over_tokens(params["experts"], embedded)

    assert (int(dropped), int(crowded_dropped)) == (0, len(x))
    assert len({*load.tolist()}) > 1
    assert crowded_load.tolist() == [len(x)] * 2 + [0] * 6
    np.testing.assert_allclose(y, expected(model.variables), rtol=1e-5, atol=1e-5)
    # Both experts of the crowded device take every other one of each device's tokens.
    kept = np.any(crowded_y != x + crowded["params"]["embed"]["bias"], axis=1)
    assert kept.reshape(4, tokens).sum(axis=1).tolist() == [tokens // 2] * 4
    np.testing.assert_allclose(crowded_y[kept], expected(crowded)[kept], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(crowded_y[~kept], (x + crowded["params"]["embed"]["bias"])[~kept])


def test_a_step_for_gpus_stays_on_them() -> None:
    axes = dict(expert=4)
    training = programs.sharded(
        programs.model("nnx", axes, methods=("gather",), recipe=BLOCK, use_bias=False), mesh_of(axes)
    )
    step = training.step.trace(*training.start, training.place(programs.batches(1)[0]))

    text = step.lower(lowering_platforms=("cuda",)).as_text()

    calls = custom_calls(text)
    assert sum("@jax_grouped_gemm(" in call for call in calls) == 6
    # Forward the tokens, both kernels and the activation; backward both gradients, one with the activation, and tokens.
    assert sum("@jax_grouped_quantize(" in call for call in calls) == 8
    assert "callback" not in text
