"""`jg.nnx.GroupedDense`: the program of `jg.linen.GroupedDense`, in the manner of `flax.nnx.Linear`."""

import inspect
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jax_grouped as jg
from tests.layers.pure import SIZES, E, K, N, filled, layer, tokens
from tests.ops.quantize_cases import assert_same_trees

DELAYED = jg.DelayedScaling(amax_history_len=2)
RECIPES = {
    "none": None,
    "block": jg.Float8BlockScaling(),
    "delayed": DELAYED,
}


def test_parameters_have_linear_shapes_with_a_group_axis() -> None:
    def shapes(**options: Any) -> dict[str, Any]:
        model = nnx.eval_shape(lambda: jg.nnx.GroupedDense(K, N, E, **options, rngs=nnx.Rngs(0)))
        return {name: (leaf.shape, leaf.dtype.name) for name, leaf in nnx.as_pure(nnx.state(model, nnx.Param)).items()}

    assert shapes(param_dtype=jnp.bfloat16) == {"kernel": ((E, K, N), "bfloat16"), "bias": ((E, N), "bfloat16")}
    assert shapes(use_bias=False) == {"kernel": ((E, K, N), "float32")}


@pytest.mark.parametrize("name", ["kernel_init", "bias_init"])
def test_the_default_initialisers_are_those_of_linen(name: str) -> None:
    def program(initialiser: Any) -> str:
        return str(jax.make_jaxpr(lambda key: initialiser(key, (E, K, N), jnp.float32))(jax.random.key(0)))

    default = inspect.signature(jg.nnx.GroupedDense.__init__).parameters[name].default
    assert program(default) == program(getattr(jg.linen.GroupedDense(N, E), name))


@pytest.mark.parametrize("name", RECIPES)
def test_both_apis_are_the_same_program(name: str) -> None:
    def program(api: str) -> str:
        at = layer(api, RECIPES[name])
        leaves, structure = jax.tree.flatten(at.trained)
        # Positions of the parts among the leaves, which the APIs hold in different orders.
        places = jax.tree.leaves(at.parts(jax.tree.unflatten(structure, range(len(leaves)))))

        def loss_and_gradients(*parts: jax.Array) -> Any:
            given = dict(zip(places, parts, strict=True))
            trained = jax.tree.unflatten(structure, [given[place] for place in range(len(leaves))])
            loss, gradients = jax.value_and_grad(lambda trained: at.loss(trained, at.cache, tokens())[0])(trained)
            return loss, at.parts(gradients)

        return jax.jit(loss_and_gradients).lower(*(leaves[place] for place in places)).as_text()

    assert program("linen") == program("nnx")


@pytest.mark.parametrize(
    ("x_dtype", "dtype", "param_dtype", "expected"),
    [("bfloat16", None, "float32", "float32"), ("float32", "bfloat16", "float32", "bfloat16")],
)
def test_types_follow_linear(x_dtype: str, dtype: str | None, param_dtype: str, expected: str) -> None:
    def types(cls: type, *sizes: int) -> Any:
        model = nnx.eval_shape(lambda: cls(K, N, *sizes, dtype=dtype, param_dtype=param_dtype, rngs=nnx.Rngs(0)))
        arguments = (SIZES,) if sizes else ()
        y = nnx.eval_shape(lambda model, x: model(x, *arguments), model, jnp.ones((40, K), x_dtype))
        return y.dtype

    assert types(jg.nnx.GroupedDense, E) == types(nnx.Linear) == expected


def test_sharding_names_reach_the_parameters() -> None:
    mesh = jax.make_mesh((1, 1), ("expert", "mlp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        model = jg.nnx.GroupedDense(
            K,
            N,
            E,
            kernel_init=nnx.with_partitioning(nnx.initializers.zeros, ("expert", None, "mlp")),
            bias_metadata={"out_sharding": ("expert", "mlp")},
            rngs=nnx.Rngs(0),
        )
    specs = nnx.get_partition_spec(nnx.state(model))
    assert specs["kernel"].get_value() == P("expert", None, "mlp")
    assert specs["bias"].get_value() == P("expert", "mlp")


def test_filters_tell_states_and_caches_from_parameters() -> None:
    model = nnx.eval_shape(lambda: jg.nnx.GroupedDense(K, N, E, recipe=DELAYED, cache_kernel=True, rngs=nnx.Rngs(0)))
    _, states, parameters, caches = nnx.split(model, jg.nnx.Fp8Variable, nnx.Param, jg.nnx.KernelCacheVariable)
    assert (set(parameters), set(states), set(caches)) == ({"kernel", "bias"}, {"fp8_state"}, {"kernel_cache"})
    assert set(nnx.state(model, jg.nnx.TRAINED)) == {"kernel", "bias", "fp8_state"}


def copied_state(model: nnx.Module) -> Any:
    return jax.tree.map(jnp.copy, nnx.as_pure(nnx.state(model)))


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.experts = jg.nnx.GroupedDense(K, N, E, recipe=DELAYED, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.experts(x, SIZES)


def a_model() -> Model:
    graph, shapes = nnx.split(nnx.eval_shape(lambda: Model(nnx.Rngs(0))))
    return nnx.merge(graph, filled(shapes))


@nnx.jit
def value_and_gradients(model: Model, x: jax.Array, targets: jax.Array) -> tuple[jax.Array, nnx.State]:
    def loss(model: Model) -> jax.Array:
        return jnp.mean((model(x) - targets) ** 2)

    return nnx.value_and_grad(loss, argnums=nnx.DiffState(0, jg.nnx.TRAINED))(model)


def test_models_with_a_mixture_are_tabulated() -> None:
    layer = jg.nnx.MoEMlp(16, num_experts=4, router=jg.moe.Router(2), hidden_features=16, rngs=nnx.Rngs(0))

    table = nnx.tabulate(layer, jnp.ones((8, 16)))

    assert "gate_up" in table


def test_an_optimizer_replaces_states_and_updates_parameters(backend: str) -> None:
    x = jnp.nan_to_num(tokens())
    targets = jg.ragged_dot(x, jnp.asarray(tokens(2))[:K, :N] * jnp.ones((E, 1, 1)), SIZES)
    model, by_hand = a_model(), a_model()
    optimizer = nnx.Optimizer(model, jg.overwrite_with_gradient(optax.adam(0.03)), wrt=jg.nnx.TRAINED)
    parameters = nnx.All(nnx.Param, nnx.Not(jg.nnx.Fp8Variable))
    of_parameters = nnx.Optimizer(by_hand, optax.adam(0.03), wrt=parameters)

    @nnx.jit
    def update(model: Model, optimizer: nnx.Optimizer, gradients: nnx.State) -> None:
        optimizer.update(model, gradients)

    losses = []
    for _ in range(100):
        value, gradients = value_and_gradients(model, x, targets)
        update(model, optimizer, gradients)
        losses.append(float(value))
        assert_same_trees(model.experts.fp8_state.get_value(), gradients["experts"]["fp8_state"].get_value())
        if len(losses) <= 2:
            _, gradients = value_and_gradients(by_hand, x, targets)
            update(by_hand, of_parameters, gradients)
            nnx.update(by_hand, nnx.filter_state(gradients, jg.nnx.Fp8Variable))
            assert_same_trees(nnx.as_pure(nnx.state(by_hand)), nnx.as_pure(nnx.state(model)))
    assert losses[-1] < 0.05 * losses[0]
    moments = [leaf for leaf in jax.tree.leaves(nnx.state(optimizer)) if leaf.ndim]
    assert len(moments) == 2 * len(jax.tree.leaves(nnx.state(model, parameters)))


def test_an_optimizer_waits_for_the_last_microbatch() -> None:
    model = a_model()
    transformation = jg.overwrite_with_gradient(optax.sgd(1.0), every=2)
    optimizer = nnx.Optimizer(model, transformation, wrt=jg.nnx.TRAINED)
    update = nnx.jit(lambda model, optimizer, gradients: optimizer.update(model, gradients) and None)
    before = copied_state(model)
    for step, factor in enumerate([3, 1, 2, 2]):
        update(
            model, optimizer, jax.tree.map(lambda leaf, factor=factor: factor * jnp.ones_like(leaf), nnx.state(model))
        )
        after = copied_state(model)
        if step in (0, 2):
            assert_same_trees(after, before)
        else:
            largest = {1: 3, 3: 2}[step]
            assert all(np.all(leaf == largest) for leaf in jax.tree.leaves(after["experts"]["fp8_state"]))
            np.testing.assert_allclose(after["experts"]["kernel"], before["experts"]["kernel"] - 2, rtol=1e-6)
        before = after


def test_checkpoints_hold_parameters_and_states(tmp_path: Path) -> None:
    model = a_model()
    state = jax.tree.map(lambda leaf: leaf + 1, nnx.state(model, jg.nnx.TRAINED))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", jax.eval_shape(lambda: state))

    nnx.update(model, restored)

    assert_same_trees(nnx.state(model, jg.nnx.TRAINED), state)
    assert isinstance(model.experts.fp8_state.get_value(), jg.Fp8State)
