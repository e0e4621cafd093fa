"""Bad arguments of the layers: each error names the argument and the rule, in linen and in NNX."""

import functools
import re
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jax_grouped as jg
from jax_grouped.moe import Parallel, Router
from tests.meshes import data_mesh
from tests.refusals import assert_refused

E, K, N, F = 4, 32, 16, 16
X, SIZES = jnp.ones((8, K)), jnp.array([3, 0, 2, 2])
ROUTER = Router(2)
#: Splits `F` over two devices.
FEATURES = dict(router=ROUTER, parallel=Parallel(features="data"))

#: Constructor of each layer, by name.
LAYERS: dict[str, Callable[..., Any]] = {
    "linen.GroupedDense": lambda **options: jg.linen.GroupedDense(**dict(features=N, num_groups=E) | options),
    "linen.GroupedKernel": lambda **options: jg.linen.GroupedKernel((E, K, N), **options),
    "linen.MoEMlp": lambda **options: jg.linen.MoEMlp(
        **dict(num_experts=E, hidden_features=F, router=ROUTER) | options
    ),
    "nnx.GroupedDense": lambda **options: jg.nnx.GroupedDense(
        **dict(in_features=K, out_features=N, num_groups=E) | options, rngs=nnx.Rngs(0)
    ),
    "nnx.GroupedKernel": lambda **options: jg.nnx.GroupedKernel((E, K, N), **options, rngs=nnx.Rngs(0)),
    "nnx.MoEMlp": lambda **options: jg.nnx.MoEMlp(
        **dict(features=K, num_experts=E, hidden_features=F, router=ROUTER) | options, rngs=nnx.Rngs(0)
    ),
}  # fmt: skip
MIXTURES = ["linen.MoEMlp", "nnx.MoEMlp"]
MOE_FLAGS = ["use_bias", "cache_kernel", "use_shared_gate", "sow_metrics"]
#: Its options that are features, other sizes, and flags.
FIELDS = {
    "linen.GroupedDense": (["features"], ["num_groups"], ["use_bias"]),
    "linen.MoEMlp": (["hidden_features", "shared_features"], ["num_experts"], MOE_FLAGS),
    "nnx.GroupedDense": (["in_features", "out_features"], [], ["use_bias"]),
    "nnx.MoEMlp": (["features", "hidden_features", "shared_features"], ["num_experts"], MOE_FLAGS),
}


def call(layer: Any, *arguments: Any, **options: Any) -> Any:
    """Returns the result of a layer that has just been made."""
    if isinstance(layer, nn.Module):
        return jax.eval_shape(functools.partial(layer.init_with_output, **options), jax.random.key(0), *arguments)[0]
    return layer(*arguments, **options)


@pytest.mark.parametrize("name", LAYERS)
def test_options_that_a_layer_does_not_take_are_named(name: str) -> None:
    features, sizes, flags = FIELDS.get(name, ([], [], []))
    recipe = "recipe must be a recipe such as Float8BlockScaling(), or None, got "
    refused: dict[str, Any] = {
        f"{recipe}the class DelayedScaling: pass DelayedScaling().": dict(recipe=jg.DelayedScaling),
        f"{recipe}'block'.": dict(recipe="block"),
    }
    for size in features:
        options = {"recipe": jg.Float8BlockScaling(), size: 20}
        refused[f"{size} must be a multiple of 16 with a recipe, got 20."] = options
    for size in features + sizes:
        refused[f"{size} must be an integer, known when the program is traced, got '4'."] = {size: "4"}
        refused[f"{size} must be an integer"] = {size: True}
    for flag in flags:
        refused[f"{flag} must be True or False"] = {flag: 1}
    if name in MIXTURES:
        refused |= {
            "router must be a jax_grouped.moe.Router, got ": dict(router=2),
            "parallel must be a jax_grouped.moe.Parallel, got 'data'": dict(parallel="data"),
            "parallel must be a jax_grouped.moe.Parallel, got None": dict(parallel=None),
            "top_k must be at most the 4 experts": dict(router=Router(E + 1)),
            "activation must be one of (": dict(activation="swish"),
            "logical_axes must name the axes of experts, K and F, got (": dict(logical_axes=("expert", "embed")),
            "logical_axes must name the axes of experts, K and F, got 3": dict(logical_axes=3),
            "cache_kernel=True needs a recipe, or a dtype": dict(cache_kernel=True),
            "use_shared_gate=True needs shared_features.": dict(use_shared_gate=True),
            "There is no mesh axis 'expert' here: put all arrays on": dict(parallel=Parallel(experts="expert")),
            "There is no mesh axis 'model' here: put all arrays on": dict(parallel=Parallel(features="model")),
            "There is no mesh axis 'data' here": dict(parallel=Parallel(batch="data")),
        }

    def made_and_called(**options: Any) -> Any:
        layer = LAYERS[name](**options)
        if name == "linen.MoEMlp" and isinstance(options.get("parallel"), Parallel):
            # The first call needs no axes: there are no parts of parameters yet.
            return jax.eval_shape(layer.apply, jax.eval_shape(LAYERS[name]().init, jax.random.key(0), X), X)
        return call(layer, X) if name in MIXTURES else layer

    assert_refused(made_and_called, {}, refused)


@pytest.mark.parametrize("name", LAYERS)
def test_numbers_of_numpy_become_those_of_python(name: str) -> None:
    features, sizes, flags = FIELDS.get(name, ([], [], []))
    values = dict(features=K, in_features=K, num_experts=E, num_groups=E)
    options = {field: np.int64(values.get(field, 16)) for field in features + sizes} | dict.fromkeys(flags, np.False_)

    layer = LAYERS[name](**options)

    assert not any(isinstance(value, np.generic) for value in vars(layer).values())
    if name in MIXTURES:
        assert call(layer, X)[0].shape == X.shape


def test_functions_take_no_booleans_for_numbers() -> None:
    moe = functools.partial(jg.moe.moe_mlp, X, X[:, :E], jnp.ones((E, K, 2 * F)), jnp.ones((E, F, K)), router=ROUTER)
    group = functools.partial(jg.moe.group_by_expert, jnp.ones((8, 2), jnp.int32))
    for wrong in (lambda: moe(num_sequences=True), lambda: group(True), lambda: group(E, capacity=True)):
        with pytest.raises(TypeError, match=r"must be an integer, known when .*, got True"):
            wrong()


def test_arguments_of_moe_mlp_that_do_not_fit_are_named() -> None:
    assert_refused(
        jg.moe.moe_mlp,
        dict(x=X, routing=X[:, :E], gate_up=jnp.ones((E, K, 2 * F)), down=jnp.ones((E, F, K)), router=ROUTER),
        {
            "A router with balance_sequences needs num_sequences, got None.": dict(
                router=Router(2, balance_sequences=True)
            ),
            f"logits must have shape [T, E] for x {X.shape}, got ({X.shape[0] - 1}, {E}).": dict(routing=X[1:, :E]),
            "gate_up must hold its part of the experts, for logits (": dict(routing=X[:, : E - 1]),
            "gate_up must have shape [E, K, 2 F] or [E, K, 2, F] for swiglu, got (4, 32, 16, 2).": dict(
                gate_up=jnp.ones((E, K, F, 2))
            ),
        },
    )


@pytest.mark.parametrize("name", MIXTURES)
def test_a_router_that_the_loss_does_not_train_is_warned_of_where_it_is_made(name: str) -> None:
    with pytest.warns(UserWarning, match="^top_k=1 with normalize=True makes every token") as warned:
        layer = LAYERS[name](router=Router(1))
    assert [warning.filename for warning in warned] == [__file__]

    if isinstance(layer, nn.Module):  # Calls make copies of it, and need no more warnings.
        layer.apply(layer.init(jax.random.key(0), X), X)
    LAYERS[name](router=Router(1, normalize=False))
    LAYERS[name](router=Router(1), num_experts=1)


@pytest.mark.parametrize("name", FIELDS)
def test_arguments_of_a_call_that_do_not_fit_are_named(name: str) -> None:
    shape = "[..., K]" if name in MIXTURES else "[T, K]"
    refused: dict[str, Any] = {
        f"x must have shape {shape}, got ().": dict(x=1.0),
        "x must be an array, got None.": dict(x=None),
        "dtype must be bfloat16, float16 or float32, got 'bf16'": dict(dtype="bf16"),
        "dtype must be bfloat16, float16 or float32, got int32": dict(dtype=jnp.int32),
    }
    if name in MIXTURES:
        refused |= {
            "shared must have the shape of x, (2, ": dict(x=X.reshape(2, -1, K), shared=X),
            "accumulate_into must be a mapping such as {'down': gradient}, got": dict(accumulate_into=X),
            "accumulate_into takes gradients of gate_up, down, got ['router'].": dict(
                accumulate_into={"router": jnp.zeros((K, E))}
            ),
            "accumulate_into must be like the kernel of down, float32 (4, 16, 32)": dict(
                accumulate_into={"down": jnp.zeros((E, K, F))}
            ),
        }
    if name == "nnx.MoEMlp":
        refused["gate_up.shape[1] must equal x.shape[1] (K), got gate_up (4, 32, 32)"] = dict(x=X[:, :16])

    def made_and_called(x: Any, dtype: Any, **options: Any) -> Any:
        return call(LAYERS[name](dtype=dtype), x, *([] if name in MIXTURES else [SIZES]), **options)

    assert_refused(made_and_called, dict(x=X, dtype=None), refused)


@pytest.mark.parametrize(
    ("name", "own", "what"),
    [
        ("linen.GroupedDense", {}, "the layer does not add: pass use_bias=True"),
        ("linen.MoEMlp", dict(router=Router(2, use_bias=True)), "gate_up does not add: pass use_bias=True"),
        ("linen.MoEMlp", {}, r"the router does not add: pass jg\.moe\.Router\(use_bias=True"),
    ],
)
def test_a_bias_that_a_linen_layer_would_leave_out_is_refused(name: str, own: dict[str, Any], what: str) -> None:
    router = {} if "Dense" in name else dict(router=Router(2, use_bias=True))
    arguments = [X] if "MoE" in name else [X, SIZES]
    variables = jax.jit(LAYERS[name](use_bias=True, **router).init)(jax.random.key(0), *arguments)
    with pytest.raises(ValueError, match=f"params has a bias that {what}"):
        LAYERS[name](**own | dict(use_bias=False)).apply(variables, *arguments)


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("axis", ["experts", "features"])
def test_whole_parameters_where_a_part_is_expected_say_what_splits_them(name: str, axis: str) -> None:
    layer = LAYERS[name](use_bias=True, parallel=Parallel(**{axis: "data"}))
    variables: Any
    if name == "linen.MoEMlp":
        variables = jax.eval_shape(layer.init, jax.random.key(0), X)
        apply = layer.apply
    else:
        graph, variables = nnx.split(layer)

        def apply(variables: Any, x: jax.Array) -> Any:
            return nnx.merge(graph, variables)(x)

    tokens = P("data") if axis == "experts" else P()
    cases: list[Any] = [P()]
    if name == "linen.MoEMlp" and axis == "experts":
        split = {"kernel": P("data"), "bias": P()}
        cases.append({"params": {"router": P(), "gate_up": split, "down": split}})
    part = "(2, 32, 2, 16)" if axis == "experts" else "(4, 32, 2, 8)"
    whole = f"kernel must be this device's part, of shape {part}, got (4, 32, 2, 16): in_specs of jax.shard_map must"
    for specs, message in zip(
        cases, (f"{whole} split it over ['data'], in this order.", "bias must be this device's"), strict=False
    ):
        step = jax.shard_map(
            lambda *arguments: apply(*arguments)[0], mesh=data_mesh(2), in_specs=(specs, tokens), out_specs=tokens
        )
        with pytest.raises(ValueError, match=f"^gate_up's {re.escape(message)}"):
            jax.eval_shape(step, variables, X)


def test_whole_kernels_and_parts_of_a_shared_result_that_would_be_summed_are_refused() -> None:
    def step(x: jax.Array, gate_up: jax.Array, down: jax.Array, shared: jax.Array) -> jax.Array:
        return jg.moe.moe_mlp(x, x[:, :E], gate_up, down, **FEATURES, shared=shared[0])[0]

    gate_up, down, split = (E, K, 2 * F), (E, F, K), (P(None, None, "data"), P(None, "data"))
    message = f"shared must be the same on every device of the mesh axis 'data', got {X.shape}, which varies over it: "
    for shapes, specs, shared, error in (
        # A kernel that is whole has as many features as a part.
        (((E, K, F), down), (P(), split[1]), P(), "gate_up must be split over the mesh axis 'data' (in_specs of"),
        ((gate_up, (E, F // 2, K)), (split[0], P()), P(), "down must be split over the mesh axis 'data' (in_specs of"),
        ((gate_up, down), split, P("data"), message),
    ):
        sharded = jax.shard_map(step, mesh=data_mesh(2), in_specs=(P(), *specs, shared), out_specs=P())
        with pytest.raises(ValueError, match=f"^{re.escape(error)}"):
            jax.eval_shape(sharded, X, *map(jnp.ones, shapes), jnp.stack([X, X]))


@pytest.mark.parametrize("name", ["pmap", "shard_map"])
def test_the_gradient_over_split_features_needs_the_checks_of_shard_map(name: str) -> None:
    mesh = data_mesh(2)
    x, gate_up, down = jnp.ones((2, 8, K)), jnp.ones((2, E, K, F)), jnp.ones((2, E, F // 2, K))

    def loss(x: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
        return jg.moe.moe_mlp(x, x[:, :E], gate_up, down, **FEATURES)[0].sum()

    def each(function: Callable[..., Any]) -> Callable[..., Any]:
        if name == "pmap":
            return jax.pmap(function, axis_name="data", devices=mesh.devices.ravel().tolist())
        return jax.shard_map(jax.vmap(function), mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)

    assert jax.eval_shape(each(loss), x, gate_up, down).shape == (2,)
    message = (
        "The features axis 'data' has gradients only inside jax.shard_map with its checks on (check_vma=True), because"
    )
    for argument in range(3):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
            jax.eval_shape(each(jax.grad(loss, argnums=argument)), x, gate_up, down)
