"""Gradients that are next values: of microbatches, of devices, and in an optimizer's updates."""

import dataclasses
import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT, fp32_max_grad
from jax.sharding import PartitionSpec as P

import jax_grouped as jg
from tests.layers.pure import APIS, layer, tokens
from tests.meshes import data_mesh
from tests.ops.quantize_cases import assert_same_trees

DELAYED = jg.DelayedScaling(amax_history_len=2)


class OwnVariable(nnx.Variable):
    overwrite_with_gradient = True


def a_tree(weight: float, state: float) -> dict[str, Any]:
    """Returns a parameter, and next values of every kind."""
    leaf = jnp.full((2,), state, jnp.float32)
    fp8_state = jg.Fp8State(*(leaf for _ in dataclasses.fields(jg.Fp8State)))
    return {
        "params": {"kernel": jnp.full((2,), weight, jnp.float32)},
        OVERWRITE_WITH_GRADIENT: {"layer": {"input_scale": leaf}},
        "state": fp8_state,
        "nnx": nnx.State({"fp8_state": jg.nnx.Fp8Variable(fp8_state), "own": OwnVariable({"scale": leaf})}),
    }


@functools.cache
def gradient(api: str, backend: str) -> jax.stages.Wrapped:
    del backend
    at = layer(api, DELAYED)
    return jax.jit(jax.grad(lambda trained, x: at.loss(trained, at.cache, x)[0]))


def expected_gradients(api: str, backend: str, xs: np.ndarray) -> tuple[Any, Any]:
    """Returns the sum of the parameters' gradients, and the next state."""
    at = layer(api, DELAYED)
    each = [at.parts(gradient(api, backend)(at.trained, x)) for x in xs]
    dkernel = np.sum([np.asarray(parts[0]) for parts in each], axis=0)
    return dkernel, jax.tree.map(lambda *leaves: functools.reduce(np.maximum, leaves), *(parts[2] for parts in each))


def test_accumulation_adds_gradients_and_takes_the_larger_next_values() -> None:
    assert_same_trees(jg.accumulate_gradients(a_tree(1, 5), a_tree(2, 3)), a_tree(3, 5))
    assert_same_trees(jg.accumulate_gradients(a_tree(0, 0), a_tree(-2, 3)), a_tree(-2, 3))


def test_devices_without_checks_combine_means_or_sums_and_maxima() -> None:
    devices = 3
    trees = [a_tree(2 * i, i) for i in range(devices)]
    in_16_bits = jnp.array([[1.0], [1 / 128], [1 / 128]], jnp.bfloat16)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees), in_16_bits

    def reduced(tree: Any) -> tuple[Any, Any]:
        own = jax.tree.map(lambda leaf: leaf[0], tree)
        return jg.reduce_gradients(own, "data"), jg.reduce_gradients(own, ("data",), mean=False)

    sharded = jax.shard_map(reduced, mesh=data_mesh(devices), in_specs=P("data"), out_specs=P(), check_vma=False)
    results = jax.jit(sharded)(stacked)

    for (tree, rounded), weight, total in zip(results, (2, 6), (65 / 192, 65 / 64), strict=True):
        assert_same_trees(tree, a_tree(weight, devices - 1))
        # Rounded once: sums of bfloat16 would be 1.
        assert_same_trees(rounded, jnp.array([total], jnp.bfloat16))


def test_what_is_not_to_be_summed_is_named() -> None:
    def sharded(function: Any) -> Any:
        sharded = jax.shard_map(function, mesh=data_mesh(2), in_specs=(P(), P("data")), out_specs=P())
        return jax.jit(sharded)(jnp.ones(2), jnp.arange(4.0))

    def gradients(kernel: jax.Array, x: jax.Array) -> Any:
        return jg.reduce_gradients({"kernel": jax.grad(lambda kernel: jnp.sum(kernel * x))(kernel)}, "data")

    # shard_map has summed the gradient of a kernel that is the same on all devices.
    with pytest.raises(ValueError, match=r"The gradient \['kernel'\] does not vary over \['data'\]"):
        sharded(gradients)
    own = sharded(lambda kernel, x: gradients(jax.lax.pcast(kernel, "data", to="varying"), x))
    np.testing.assert_array_equal(own["kernel"], [1, 2])
    with pytest.raises(ValueError, match=r"^The gradient does not vary over \['data'\]: jax.shard_map with its checks"):
        sharded(lambda kernel, _: jg.reduce_gradients(kernel, "data"))
    for axis in ("data", ("data", "model")):
        with pytest.raises(ValueError, match=r"^There is no mesh axis 'data' here: call it inside jax"):
            jg.reduce_gradients(jnp.ones(2), axis)


def test_sharded_linen_layers_have_the_next_state_of_one_device(backend: str) -> None:
    devices = min(4, jax.device_count())
    at, xs = layer("linen", DELAYED), tokens(shape=(devices,))

    def own(trained: Any, x: jax.Array) -> Any:
        return jax.grad(lambda trained: at.loss(trained, at.cache, x[0])[0])(trained)

    sharded = jax.shard_map(own, mesh=data_mesh(devices), in_specs=(P(), P("data")), out_specs=P())
    dkernel, _, state = at.parts(jax.jit(sharded)(at.trained, xs))

    expected, expected_state = expected_gradients("linen", backend, xs)
    np.testing.assert_allclose(dkernel, expected, rtol=1e-5, atol=1e-6)
    assert_same_trees(state, expected_state)


def test_nnx_layers_under_pmap_have_the_next_state_of_one_device(backend: str) -> None:
    devices = min(4, jax.device_count())
    at, xs = layer("nnx", DELAYED), tokens(shape=(devices,))

    def own(trained: Any, x: jax.Array) -> Any:
        gradients = jax.grad(lambda trained: at.loss(trained, at.cache, x)[0])(trained)
        return jg.reduce_gradients(gradients, "data", mean=False)

    mapped = jax.pmap(own, axis_name="data", in_axes=(None, 0), devices=jax.devices()[:devices])
    gradients = mapped(at.trained, xs)

    # Linen's layer has the same bits, and its program is already compiled.
    expected, expected_state = expected_gradients("linen", backend, xs)
    for device in (0, devices - 1):
        dkernel, _, state = at.parts(jax.tree.map(lambda leaf, device=device: leaf[device], gradients))
        np.testing.assert_allclose(dkernel, expected, rtol=1e-5, atol=1e-6)
        assert_same_trees(state, expected_state)


def test_microbatches_have_one_next_state_however_they_are_combined(backend: str) -> None:
    at, xs, count = layer("linen", DELAYED), tokens(shape=(3,)), 3
    optimizer = optax.adam(0.1)
    run = gradient("linen", backend)

    def adam(params: Any, gradients: Any) -> Any:
        return optax.apply_updates(params, optimizer.update(gradients, optimizer.init(params))[0])

    def in_a_scan(trained: Any) -> jax.Array:
        state = {name: jax.lax.convert_element_type(leaf, fp32_max_grad) for name, leaf in states(trained).items()}
        shared = trained | {OVERWRITE_WITH_GRADIENT: state}
        # A mean would give the result other gradients, with other largest values.
        return jax.lax.scan(lambda total, x: (total + at.loss(shared, {}, x)[0], None), 0.0, xs)[0]

    scanned = jax.jit(jax.grad(in_a_scan))(at.trained)
    total = jax.tree.map(jnp.zeros_like, at.trained)
    for x in xs:
        total = jg.accumulate_gradients(total, run(at.trained, x))
    transformation = jg.overwrite_with_gradient(optimizer, every=count)

    @jax.jit
    def step(trained: Any, state: Any, gradients: Any) -> tuple[Any, ...]:
        updates, state = transformation.update(gradients, state, trained)
        return jg.apply_updates(trained, updates), optax.apply_updates(trained, updates), state

    trained, state = at.trained, jax.jit(transformation.init)(at.trained)
    for x in [*xs, *xs]:
        before = trained
        trained, with_optax, state = step(trained, state, run(trained, x))
        assert_same_trees(with_optax, trained)
        if int(state.inner.mini_step) != 0:
            assert_same_trees(trained, before)
        elif int(state.inner.gradient_step) == 1:
            first = trained

    assert_same_trees(states(scanned), states(total))
    assert_same_trees(states(first), states(total))
    for summed in (scanned["params"], total["params"]):
        params = jax.jit(adam)(at.trained["params"], jax.tree.map(lambda leaf: leaf / count, summed))
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-4), first["params"], params)
    # The second step's history goes on from the first one's.
    history = states(trained)["input_amax_history"]
    np.testing.assert_array_equal(history[:, 0], states(first)["input_amax_history"][:, 0])
    np.testing.assert_array_equal(history[:, 1], history[:, 0])


def states(trained: Any) -> Any:
    return trained[OVERWRITE_WITH_GRADIENT]


@pytest.mark.parametrize("every", [1, 2])
def test_the_optimizer_sees_only_parameters(every: int) -> None:
    seen = []

    def init(params: Any) -> optax.EmptyState:
        seen.append(params)
        return optax.EmptyState()

    def update(updates: Any, state: Any, params: Any = None, *, factor: float = 1.0) -> tuple[Any, Any]:
        seen.extend([updates, params])
        return jax.tree.map(lambda leaf: -factor * leaf, updates), state

    optimizer = optax.GradientTransformationExtraArgs(init, update)
    transformation = jg.overwrite_with_gradient(optimizer, every=every)
    params = a_tree(10, 0.1)
    state = transformation.init(params)
    for _ in range(every):
        # Traced, so that nothing looks at the numbers of this tree, which no layer would give.
        updates, state = jax.jit(transformation.update)(a_tree(2, 1e-9), state, params, factor=3.0)

    assert [len(jax.tree.leaves(tree)) for tree in seen] == [1] * len(seen)
    for applied in (jg.apply_updates(params, updates), optax.apply_updates(params, updates)):
        # 0.1 + (1e-9 - 0.1) is another number in float32.
        assert_same_trees(applied, a_tree(4, 1e-9))
    next_values = a_tree(-6, 1e-9)
    assert_same_trees(jg.apply_updates(params, next_values), a_tree(4, 1e-9))


@pytest.mark.parametrize(("api", "every"), [(APIS[0], 1), (APIS[1], 2)])
def test_gradients_of_zero_keep_the_state(api: str, every: int) -> None:
    trained = jax.tree.map(lambda leaf: leaf + 3, layer(api, DELAYED).trained)
    optimizer = jg.overwrite_with_gradient(optax.sgd(0.1), every=every)
    zeros, state, params = jax.tree.map(jnp.zeros_like, trained), optimizer.init(trained), trained
    for _ in range(every):
        updates, state = optimizer.update(zeros, state, params)
        params = optax.apply_updates(params, updates)
    assert_same_trees(params, trained)
    assert_same_trees(jg.apply_updates(trained, zeros), trained)


def test_a_state_is_kept_for_the_groups_that_no_scale_came_for() -> None:
    ones = jax.tree.map(jnp.ones_like, jg.Fp8State.initial(DELAYED, 3))
    scale = jnp.array([0.0, jnp.nan, 5.0])
    following = dataclasses.replace(jax.tree.map(lambda leaf: 5 * leaf, ones), input_scale=scale)
    params = {"a_scale": jnp.ones(2, jnp.bfloat16), "state": ones}
    kept = jg.apply_updates(params, {"a_scale": jnp.ones(2), "state": following})
    assert kept["a_scale"].tolist() == [2, 2]
    assert kept["a_scale"].dtype == jnp.bfloat16
    assert kept["state"].kernel_amax_history.tolist() == [[1, 1], [5, 5], [5, 5]]
    np.testing.assert_array_equal(kept["state"].input_scale, [1, np.nan, 5])


def test_what_does_not_fit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for every in (0, -1, 1.5, None):
        with pytest.raises((TypeError, ValueError), match=r"^every must be (an integer|at least 1)"):
            jg.overwrite_with_gradient(optax.sgd(0.1), every=every)
    transformation = jg.overwrite_with_gradient(optax.sgd(0.1))
    with pytest.raises(ValueError, match="needs params"):
        transformation.update(a_tree(1, 1), transformation.init(a_tree(1, 1)))
    monkeypatch.setitem(sys.modules, "optax", None)
    with pytest.raises(ModuleNotFoundError, match="needs Optax: python3 -m pip install"):
        jg.overwrite_with_gradient(optax.sgd(0.1))
