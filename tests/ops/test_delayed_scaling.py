"""`DelayedScaling`: products with the scales of earlier steps, and the state that gives them."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.linen import fp8_ops
from jax.sharding import PartitionSpec as P

import jax_grouped as jg
from tests import oracle, quantize_oracle
from tests.exports import exported
from tests.meshes import data_mesh
from tests.ops.dense_cases import DELAYED, HISTORY, SHAPE, SIZES, assert_close, operands, some_state
from tests.ops.quantize_cases import assert_same_trees
from tests.states import NAMES, fp8_state

GROUPS = SHAPE.num_groups
FP8_MAX = {"input": np.float32(448), "kernel": np.float32(448), "output_grad": np.float32(57344)}


def numpy_scale(state: jg.Fp8State, name: str) -> np.ndarray:
    amax = np.asarray(getattr(state, f"{name}_amax_history")).max(axis=1)
    with np.errstate(divide="ignore"):
        scale = FP8_MAX[name] / (amax * np.float32(2))
    return np.where(amax > 0, scale, np.asarray(getattr(state, f"{name}_scale")))


def step(state: jg.Fp8State, x: Any, kernel: Any, bias: Any, dy: Any, cache: Any = None, recipe: Any = DELAYED) -> Any:
    """Computes `y`, the gradients, and the next state."""

    def dense(state: jg.Fp8State, x: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
        return jg.grouped_dense(x, kernel, SIZES, bias, recipe=recipe, fp8_state=state, kernel_cache=cache)

    y, vjp = jax.vjp(dense, state, *(jnp.asarray(array) for array in (x, kernel, bias)))
    next_state, *gradients = vjp(jnp.asarray(dy))
    return y, tuple(gradients), next_state


@functools.cache
def jitted(backend: str) -> jax.stages.Wrapped:
    """Jits `step` once per backend."""
    del backend
    return jax.jit(step)


def test_products_use_the_scales_of_the_state(backend: str) -> None:
    state = some_state()
    x, kernel, bias, dy = operands()
    y, (dx, dkernel, dbias), _ = jitted(backend)(state, x, kernel, bias, dy)
    scales = {name: numpy_scale(state, name) for name in NAMES}
    qx = quantize_oracle.quantize(x, SIZES, jg.ScalingMode.TENSOR, scale=scales["input"])
    qkernel = quantize_oracle.quantize(kernel, None, jg.ScalingMode.TENSOR, scale=scales["kernel"])
    qdy = quantize_oracle.quantize(dy, SIZES, jg.ScalingMode.TENSOR, dtype="float8_e5m2", scale=scales["output_grad"])
    product = oracle.fprop(qx.rowwise.dequantized, qkernel.columnwise.dequantized, SIZES)
    oracle.assert_groups_close(y, oracle.add_bias(product, bias, SIZES), SIZES, GROUPS, 1e-2)
    expected = oracle.dgrad(qdy.rowwise.dequantized, qkernel.rowwise.dequantized, SIZES)
    oracle.assert_groups_close(dx, expected, SIZES, GROUPS, 5e-3)
    expected = oracle.wgrad(qx.columnwise.dequantized, qdy.columnwise.dequantized, SIZES, GROUPS)
    oracle.assert_kernels_close(dkernel, expected, oracle.fp8_tolerance())
    oracle.assert_kernels_close(dbias, oracle.bias_grad(dy, SIZES, GROUPS), 1e-5)


def test_the_gradient_of_the_state_is_its_next_value(backend: str) -> None:
    state = some_state()
    x, kernel, bias, dy = operands()
    _, _, after = jitted(backend)(state, x, kernel, bias, dy)
    ends = np.cumsum(SIZES)
    for name, array in (("input", x), ("kernel", kernel), ("output_grad", dy)):
        groups = array if name == "kernel" else np.split(array[: ends[-1]], ends[:-1])
        amax = [np.max(np.abs(np.asarray(group, np.float32)), initial=0) for group in groups]
        before = np.asarray(getattr(state, f"{name}_amax_history"))
        expected = np.concatenate([np.array(amax, np.float32)[:, None], before[:, :-1]], axis=1)
        np.testing.assert_array_equal(getattr(after, f"{name}_amax_history"), expected)
        np.testing.assert_array_equal(getattr(after, f"{name}_scale"), numpy_scale(state, name))


def test_the_state_alone_gets_its_next_value_too(backend: str) -> None:
    state = some_state()
    x, kernel, bias, dy = operands()

    def loss(state: jg.Fp8State) -> jax.Array:
        y = jg.grouped_dense(jnp.asarray(x), jnp.asarray(kernel), SIZES, recipe=DELAYED, fp8_state=state)
        return jnp.sum(jnp.where(jnp.isnan(dy), 0, y * dy))

    after = jax.jit(jax.grad(loss))(state)
    assert_same_trees(after, jitted(backend)(state, x, kernel, bias, dy)[2])


def test_scales_follow_the_history_within_a_step(backend: str) -> None:
    x, kernel, bias, dy = operands()
    state = jg.Fp8State.initial(DELAYED, GROUPS)
    assert all(np.all(np.asarray(scale) == 1) for scale in state.scales(DELAYED))
    for factor in (1, 4, 1):
        _, _, state = jitted(backend)(state, factor * jnp.asarray(x), kernel, bias, dy)
    history = np.asarray(state.input_amax_history)
    np.testing.assert_array_equal(history[:, 1], 4 * history[:, 0])
    np.testing.assert_array_equal(history[:, 2], history[:, 0])
    # Before the third step, the largest of two steps was that of the second.
    present = SIZES > 0
    np.testing.assert_array_equal(state.input_scale[present], np.float32(448) / (2 * history[present, 1]))
    np.testing.assert_array_equal(state.scales(DELAYED).input, state.input_scale)
    latest = jg.DelayedScaling(amax_history_len=HISTORY, amax_compute_algo="most_recent")
    np.testing.assert_array_equal(state.scales(latest).input[present], np.float32(448) / history[present, 0])


def test_what_gives_no_scale_keeps_the_last_one() -> None:
    largest = [0.0, np.nan, np.inf, 3e38, 7.0, 0.0, 0.0, 0.0, 1e-37]
    last = [8.0, 8.0, 8.0, 8.0, 8.0, 0.0, -np.inf, np.nan, 8.0]
    state = jg.Fp8State.initial(DELAYED, len(last))
    history = jnp.tile(jnp.array(largest)[:, None], (1, HISTORY))
    fields = {**vars(state), "kernel_amax_history": history, "kernel_scale": jnp.array(last)}
    scales = jax.jit(lambda s: s.scales(DELAYED).kernel)(fp8_state(**fields))
    np.testing.assert_array_equal(scales, np.float32([8, 8, 8, 8, 32, 1, 1, 1, 2.0**126]))


def test_a_cache_with_the_scale_of_the_state_gives_the_same_bits(backend: str) -> None:
    state = some_state()
    x, kernel, bias, dy = operands()
    cache = jg.quantize_kernel(jnp.asarray(kernel), DELAYED, scale=state.scales(DELAYED).kernel)
    got = jitted(backend)(state, x, np.full_like(kernel, np.nan), bias, dy, cache)
    assert_same_trees(got, jitted(backend)(state, x, kernel, bias, dy))


def test_microbatches_combine_by_maximum(backend: str) -> None:
    state = some_state()
    x, kernel, bias, dy = operands()
    xs = jnp.stack([jnp.asarray(x), 3 * jnp.asarray(x), jnp.asarray(x) / 2])

    def total(state: jg.Fp8State) -> jax.Array:
        shared = state.astype(fp8_ops.fp32_max_grad)

        def microbatch(total: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
            y = jg.grouped_dense(x, jnp.asarray(kernel), SIZES, recipe=DELAYED, fp8_state=shared)
            return total + jnp.sum(jnp.where(jnp.isnan(dy), 0, y * dy).astype(jnp.float32)), None

        return jax.lax.scan(microbatch, jnp.zeros(()), xs)[0]

    states = [jitted(backend)(state, x, kernel, bias, dy)[2] for x in xs]
    expected = jax.tree.map(lambda *leaves: functools.reduce(jnp.maximum, leaves), *states)
    assert_same_trees(jax.jit(jax.grad(total))(state), expected)


def test_devices_combine_by_maximum(backend: str) -> None:
    devices = min(2, jax.device_count())
    mesh = data_mesh(devices)
    state = some_state()
    _, kernel, bias, _ = operands()
    batches = [operands(seed) for seed in range(devices)]
    xs, dys = (np.concatenate([batch[i] for batch in batches]) for i in (0, 3))
    specs = P("data"), (P("data"), P(), P()), P()
    sharded = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data"), P(), P(), P("data")), out_specs=specs)
    _, _, after = jax.jit(sharded)(state, xs, kernel, bias, dys)
    states = [jitted(backend)(state, x, kernel, bias, dy)[2] for x, _, _, dy in batches]
    assert_same_trees(after, jax.tree.map(lambda *leaves: functools.reduce(jnp.maximum, leaves), *states))


def test_devices_with_states_of_their_own_can_share_everything_else(backend: str) -> None:
    devices = min(2, jax.device_count())
    mesh = data_mesh(devices)
    states = [some_state(seed) for seed in range(devices)]
    x, kernel, bias, dy = (jnp.asarray(array) for array in operands())

    def own(states: jg.Fp8State, *arrays: jax.Array) -> jg.Fp8State:
        _, vjp = jax.vjp(
            lambda state, x, kernel: jg.grouped_dense(x, kernel, SIZES, bias, recipe=DELAYED, fp8_state=state),
            jax.tree.map(lambda leaf: leaf[0], states),
            *arrays[:2],
        )
        after = vjp(jax.lax.pcast(arrays[2], "data", to="varying"))[0]
        return jax.tree.map(lambda leaf: leaf[None], after)

    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    in_specs = (P("data"), P(), P(), P())
    after = jax.jit(jax.shard_map(own, mesh=mesh, in_specs=in_specs, out_specs=P("data")))(stacked, x, kernel, dy)
    for i, state in enumerate(states):
        expected = jitted(backend)(state, x, kernel, bias, dy)[2]
        assert_same_trees(jax.tree.map(lambda leaf, i=i: leaf[i], after), expected)


def test_rematerialized_steps_give_the_same_bits(backend: str) -> None:
    state = some_state()
    x, kernel, bias, dy = operands()

    @jax.checkpoint
    def dense(state: jg.Fp8State, x: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
        return jg.grouped_dense(x, kernel, SIZES, bias, recipe=DELAYED, fp8_state=state)

    def again(*arguments: jax.Array) -> Any:
        y, vjp = jax.vjp(dense, *arguments)
        after, *gradients = vjp(jnp.asarray(dy))
        return y, tuple(gradients), after

    got = jax.jit(again)(state, *(jnp.asarray(array) for array in (x, kernel, bias)))
    assert_same_trees(got, jitted(backend)(state, x, kernel, bias, dy))


def test_an_exported_step_takes_a_state_and_a_cache(backend: str) -> None:
    state = some_state()
    x, kernel, bias, dy = (jnp.asarray(array) for array in operands())
    cache = jg.quantize_kernel(kernel, DELAYED, scale=state.scales(DELAYED).kernel)
    arguments = state, x, kernel, bias, dy, cache
    assert_same_trees(exported(step, *arguments)(*arguments), jitted(backend)(*arguments))


def test_vmap_gives_every_element_a_state(backend: str) -> None:
    states = [some_state(seed) for seed in range(2)]
    batches = [operands(seed) for seed in range(2)]
    _, kernel, bias, _ = operands()
    xs, dys = (np.stack([batch[i] for batch in batches]) for i in (0, 3))
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    got = jax.jit(jax.vmap(step, (0, 0, None, None, 0)))(stacked, xs, kernel, bias, dys)
    for i in range(2):
        y, gradients, after = jitted(backend)(states[i], xs[i], kernel, bias, dys[i])
        assert_same_trees(jax.tree.map(lambda leaf, i=i: leaf[i], got[2]), after)
        assert_close(
            [got[0][i], *(gradient[i] for gradient in got[1])], (y, *gradients), oracle.fp8_tolerance("bfloat16")
        )
