"""`GroupedDense` of linen and NNX beside `grouped_dense`, Flax's own layers, optimizers and checkpoints."""

from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import jax_grouped as jg
from tests.layers.pure import SIZES, E, K, N, T, filled, layer, tokens
from tests.operands import normal
from tests.ops.quantize_cases import assert_same_trees

DELAYED, BLOCK = jg.DelayedScaling(amax_history_len=2), jg.Float8BlockScaling()


def initialised(module: nn.Module, x: Any) -> Any:
    return jax.jit(module.init)(jax.random.key(0), x, SIZES)


@pytest.mark.parametrize("recipe", [None, BLOCK, DELAYED], ids=["plain", "block", "delayed"])
def test_a_layer_computes_grouped_dense(backend: str, recipe: jg.Recipe | None) -> None:
    layer_class = nn.remat(jg.linen.GroupedDense) if recipe is DELAYED else jg.linen.GroupedDense
    precision = "highest" if recipe is None else None
    module = layer_class(N, E, bias_init=nn.initializers.normal(1.0), recipe=recipe, precision=precision)
    x, variables = tokens(), initialised(module, tokens())
    kernel, bias = variables["params"]["kernel"], variables["params"]["bias"]

    def by_layer(variables: Any) -> Any:
        y = module.apply(variables, x, SIZES)
        return jnp.mean((y - 1) ** 2), y

    def by_function(kernel: jax.Array, bias: jax.Array, state: Any) -> Any:
        y = jg.grouped_dense(x, kernel, SIZES, bias, recipe=recipe, precision=precision, fp8_state=state)
        return jnp.mean((y - 1) ** 2), y

    (_, y), gradients = jax.jit(jax.value_and_grad(by_layer, has_aux=True))(variables)

    initial = jg.Fp8State.initial(recipe, E) if recipe is DELAYED else None
    differentiated = jax.jit(jax.value_and_grad(by_function, (0, 1, 2), has_aux=True))
    (_, expected), (dkernel, dbias, following) = differentiated(kernel, bias, initial)
    np.testing.assert_array_equal(y, expected)
    assert np.all(np.isfinite(dkernel))
    np.testing.assert_allclose(gradients["params"]["kernel"], dkernel, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(gradients["params"]["bias"], dbias, rtol=1e-5, atol=1e-7)
    if recipe is DELAYED:
        state = jg.Fp8State(**gradients[OVERWRITE_WITH_GRADIENT])
        assert_same_trees(jg.Fp8State(**variables[OVERWRITE_WITH_GRADIENT]), initial)
        assert_same_trees(state, following)
        largest = [np.max(np.abs(x[:14])), 0, np.max(np.abs(x[14:34]))]
        np.testing.assert_array_equal(state.input_amax_history[:, 0], largest)
        np.testing.assert_array_equal(state.kernel_amax_history[:, 0], np.max(np.abs(kernel), axis=(1, 2)))
        np.testing.assert_array_equal(state.output_grad_amax_history[:, 0] > 0, [True, False, True])


def test_both_apis_are_the_same_program() -> None:
    def program(api: str, recipe: jg.Recipe | None) -> str:
        at = layer(api, recipe)
        leaves, structure = jax.tree.flatten(at.trained)
        # Positions of the parts among the leaves, which the APIs hold in different orders.
        places = jax.tree.leaves(at.parts(jax.tree.unflatten(structure, range(len(leaves)))))

        def loss_and_gradients(*parts: jax.Array) -> Any:
            given = dict(zip(places, parts, strict=True))
            trained = jax.tree.unflatten(structure, [given[place] for place in range(len(leaves))])
            loss, gradients = jax.value_and_grad(lambda trained: at.loss(trained, at.cache, tokens())[0])(trained)
            return loss, at.parts(gradients)

        return jax.jit(loss_and_gradients).lower(*(leaves[place] for place in places)).as_text()

    for recipe in (None, DELAYED):
        assert program("linen", recipe) == program("nnx", recipe)


@pytest.mark.parametrize("recipe", [None, BLOCK], ids=["plain", "block"])
def test_halves_and_accumulation_give_the_gradients_of_a_call(recipe: jg.Recipe | None) -> None:
    linen = jg.linen.GroupedDense(N, E, recipe=recipe)
    model = jg.nnx.GroupedDense(K, N, E, recipe=recipe, rngs=nnx.Rngs(0))
    x, dy = jnp.nan_to_num(tokens()), normal(1, (T, N))
    variables = {"params": nnx.to_pure_dict(nnx.state(model))}
    into = jnp.full((E, K, N), 2.0)

    def call(variables: Any, x: jax.Array, into: Any = None) -> jax.Array:
        return linen.apply(variables, x, SIZES, accumulate_into=into)

    y, pull_back = jax.vjp(call, variables, x)
    gradients, dx = pull_back(dy)
    expected = gradients["params"]
    for result, residuals in (linen.apply(variables, x, SIZES, method="fwd"), model.fwd(x, SIZES)):
        half, pending = jg.grouped_dense_dgrad(residuals, dy)
        got = result, half, *jg.grouped_dense_wgrad(pending)
        for array, other in zip(got, (y, dx, expected["kernel"], expected["bias"]), strict=True):
            np.testing.assert_allclose(array, other, rtol=1e-5, atol=1e-5)
    total = jax.vjp(lambda variables: call(variables, x, into), variables)[1](dy)[0]["params"]["kernel"]
    nnx_total = nnx.grad(lambda model: jnp.sum(model(x, SIZES, accumulate_into=into) * dy))(model)["kernel"][...]
    for accumulated in (total, nnx_total):
        np.testing.assert_allclose(accumulated, expected["kernel"] + 2, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"^accumulate_into must be like the kernel of Gro.* got float32 \(3, 16\)"):
        model(x, SIZES, accumulate_into=jnp.zeros((E, N)))


def test_parameters_and_types_are_those_of_dense_with_a_group_axis() -> None:
    def described(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype.name), tree)

    for x_dtype, dtype, param_dtype, expected in (
        ("float32", None, "float32", "float32"),
        ("bfloat16", None, "float32", "float32"),
        ("bfloat16", None, "bfloat16", "bfloat16"),
        ("float32", "bfloat16", "float32", "bfloat16"),
        ("bfloat16", "float16", "float32", "float16"),
    ):
        options, x = dict(dtype=dtype, param_dtype=param_dtype), jax.ShapeDtypeStruct((T, K), x_dtype)
        module = jg.linen.GroupedDense(N, E, **options)
        y, variables = jax.eval_shape(module.init_with_output, jax.random.key(0), x, SIZES)

        def loss(variables: Any, x: jax.Array, module: nn.Module = module) -> jax.Array:
            return module.apply(variables, x, SIZES).astype(jnp.float32).sum()

        parameters = {"kernel": ((E, K, N), param_dtype), "bias": ((E, N), param_dtype)}
        assert described(variables["params"]) == parameters
        assert described(jax.eval_shape(jax.grad(loss), variables, x)["params"]) == parameters
        model = nnx.eval_shape(lambda options=options: jg.nnx.GroupedDense(K, N, E, **options, rngs=nnx.Rngs(0)))
        assert described(nnx.to_pure_dict(nnx.state(model))) == parameters
        from_nnx = nnx.eval_shape(lambda model, x: model(x, SIZES), model, x)
        dense = jax.eval_shape(nn.Dense(N, **options).init_with_output, jax.random.key(0), x)[0]
        assert y.dtype == from_nnx.dtype == dense.dtype == expected
    without = jax.eval_shape(jg.linen.GroupedDense(N, E, use_bias=False).init, jax.random.key(0), tokens(), SIZES)
    assert [*without["params"]] == [*nnx.state(jg.nnx.GroupedDense(K, N, E, use_bias=False, rngs=nnx.Rngs(0)))]
    for kernel in (
        initialised(jg.linen.GroupedDense(256, E), jnp.ones((T, 64)))["params"]["kernel"],
        jg.nnx.GroupedDense(64, 256, E, rngs=nnx.Rngs(0)).kernel[...],
    ):
        np.testing.assert_allclose(kernel.std(axis=(1, 2)), 64**-0.5, rtol=0.05)
        assert not np.array_equal(kernel[0], kernel[1])


def test_names_of_axes_reach_the_parameters() -> None:
    kernel, bias = ("expert", None, "mlp"), ("expert", "mlp")
    module = jg.linen.GroupedDense(
        N,
        E,
        kernel_init=nn.with_logical_partitioning(nn.initializers.zeros, kernel),
        bias_init=nn.with_logical_partitioning(nn.initializers.zeros, bias),
    )
    with jax.set_mesh(jax.make_mesh((1, 1), bias, axis_types=(jax.sharding.AxisType.Auto,) * 2)):
        model = jg.nnx.GroupedDense(
            K,
            N,
            E,
            kernel_init=nnx.with_partitioning(nnx.initializers.zeros, kernel),
            bias_metadata={"out_sharding": bias},
            rngs=nnx.Rngs(0),
        )
    specs = {"kernel": P(*kernel), "bias": P(*bias)}
    variables = jax.eval_shape(module.init, jax.random.key(0), tokens(), SIZES)
    assert nn.get_partition_spec(variables)["params"] == specs
    assert nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(model))) == specs


def test_only_delayed_scaling_has_variables_beside_parameters() -> None:
    for recipe in (None, BLOCK, jg.Float8CurrentScaling(), jg.MXFP8BlockScaling(), DELAYED):
        module = jg.linen.GroupedDense(N, E, recipe=recipe)
        variables = jax.eval_shape(module.init, jax.random.key(0), tokens(), SIZES)
        assert variables.keys() == {"params"} | ({OVERWRITE_WITH_GRADIENT} if recipe is DELAYED else set()), recipe
    message = f"^DelayedScaling needs the collection {OVERWRITE_WITH_GRADIENT}, which init makes beside params: pass "
    for mutable in (False, True):  # If it is, Flax would make a new state in every step.
        with pytest.raises(ValueError, match=message):
            module.apply({"params": layer("linen", None).trained["params"]}, tokens(), SIZES, mutable=mutable)
    model = nnx.eval_shape(lambda: jg.nnx.GroupedDense(K, N, E, recipe=DELAYED, cache_kernel=True, rngs=nnx.Rngs(0)))
    _, states, parameters, caches = nnx.split(model, jg.nnx.Fp8Variable, nnx.Param, jg.nnx.KernelCacheVariable)
    assert (set(parameters), set(states), set(caches)) == ({"kernel", "bias"}, {"fp8_state"}, {"kernel_cache"})
    assert set(nnx.state(model, jg.nnx.TRAINED)) == {"kernel", "bias", "fp8_state"}


def targets(x: jax.Array) -> jax.Array:
    return jg.ragged_dot(x, normal(2, (E, K, N)), SIZES)


def test_a_plain_train_state_replaces_delayed_scalings_variables(backend: str) -> None:
    module, x = jg.linen.GroupedDense(N, E, recipe=DELAYED), jnp.nan_to_num(tokens())
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.03))
    state = TrainState.create(apply_fn=module.apply, params=initialised(module, x), tx=optimizer)
    assert len([leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim]) == 2 * len(state.params["params"])

    @jax.jit
    def step(state: TrainState) -> tuple[TrainState, jax.Array, Any]:
        def loss(variables: Any) -> jax.Array:
            return jnp.mean((state.apply_fn(variables, x, SIZES) - targets(x)) ** 2)

        value, gradients = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=gradients), value, gradients

    losses = []
    for _ in range(200):
        state, value, gradients = step(state)
        losses.append(float(value))
        assert_same_trees(state.params[OVERWRITE_WITH_GRADIENT], gradients[OVERWRITE_WITH_GRADIENT])
    assert losses[-1] < 0.02 * losses[0]


def nnx_model() -> jg.nnx.GroupedDense:
    graph, shapes = nnx.split(nnx.eval_shape(lambda: jg.nnx.GroupedDense(K, N, E, recipe=DELAYED, rngs=nnx.Rngs(0))))
    return nnx.merge(graph, filled(shapes))


def test_an_optimizer_of_nnx_replaces_states_and_updates_parameters(backend: str) -> None:
    model, x = nnx_model(), jnp.nan_to_num(tokens())
    optimizer = nnx.Optimizer(model, jg.overwrite_with_gradient(optax.adam(0.03)), wrt=jg.nnx.TRAINED)
    assert len([leaf for leaf in jax.tree.leaves(nnx.state(optimizer)) if leaf.ndim]) == 2 * 2

    @nnx.jit
    def step(model: Any, optimizer: nnx.Optimizer) -> tuple[jax.Array, nnx.State]:
        def loss(model: Any) -> jax.Array:
            return jnp.mean((model(x, SIZES) - targets(x)) ** 2)

        value, gradients = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, jg.nnx.TRAINED))(model)
        optimizer.update(model, gradients)
        return value, gradients

    losses = []
    for _ in range(100):
        value, gradients = step(model, optimizer)
        losses.append(float(value))
        assert_same_trees(model.fp8_state.get_value(), gradients["fp8_state"].get_value())
    assert losses[-1] < 0.05 * losses[0]


def test_checkpoints_are_read_on_another_backend_and_by_nnx(backend: str, tmp_path: Path) -> None:
    at = layer("linen", DELAYED)
    variables = at.trained | {
        OVERWRITE_WITH_GRADIENT: jax.tree.map(lambda leaf: leaf + 8, at.trained[OVERWRITE_WITH_GRADIENT])
    }
    model = nnx_model()
    state = jax.tree.map(lambda leaf: leaf + 1, nnx.state(model, jg.nnx.TRAINED))

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "variables", variables)
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "variables", jax.eval_shape(lambda: variables))
        nnx.update(model, checkpointer.restore(tmp_path / "state", jax.eval_shape(lambda: state)))

    assert_same_trees(restored, variables)
    y = jax.jit(lambda variables: at.apply(variables, {}, tokens())[0])(variables)
    with jg.config.override(backend="xla"):
        again = jax.jit(lambda variables: at.apply(variables, {}, tokens())[0])(restored)
    np.testing.assert_allclose(again, y, rtol=1e-3, atol=1e-3)
    assert_same_trees(nnx.state(model, jg.nnx.TRAINED), state)
    assert isinstance(model.fp8_state.get_value(), jg.Fp8State)
