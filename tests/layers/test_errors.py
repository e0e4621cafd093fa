"""Bad arguments of the layers: each error names the argument and the rule, in linen and in NNX."""

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

E, K, N, F = 4, 32, 16, 16
X, SIZES = jnp.ones((8, K)), jnp.array([3, 0, 2, 2])
BLOCK, ROUTER = jg.Float8BlockScaling(), Router(2)
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
DENSE = ["linen.GroupedDense", "nnx.GroupedDense"]
MIXTURES = ["linen.MoEMlp", "nnx.MoEMlp"]


def call(layer: Any, *arguments: Any) -> Any:
    """Returns the result of a layer that has just been made."""
    if isinstance(layer, nn.Module):
        return jax.eval_shape(layer.init_with_output, jax.random.key(0), *arguments)[0]
    return layer(*arguments)


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_not_made_with_what_is_no_recipe(name: str) -> None:
    for recipe, got in (
        (jg.DelayedScaling, "the class DelayedScaling: pass DelayedScaling()"),
        ("block", "'block'"),
    ):
        message = f"recipe must be a recipe such as Float8BlockScaling(), or None, got {got}."
        with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
            LAYERS[name](recipe=recipe)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("linen.GroupedDense", "features"),
        ("linen.MoEMlp", "hidden_features"),
        ("nnx.GroupedDense", "in_features"),
        ("nnx.GroupedDense", "out_features"),
        ("nnx.MoEMlp", "features"),
        ("nnx.MoEMlp", "hidden_features"),
    ],
)
def test_features_that_a_recipe_does_not_take_are_named(name: str, size: str) -> None:
    with pytest.raises(ValueError, match=rf"^{size} must be a multiple of 16 with a recipe, got 20\.$"):
        LAYERS[name](recipe=BLOCK, **{size: 20})


@pytest.mark.parametrize(
    ("name", "size"),
    [("linen.GroupedDense", "num_groups"), ("nnx.GroupedDense", "out_features"), ("nnx.MoEMlp", "num_experts")],
)
def test_sizes_are_integers(name: str, size: str) -> None:
    with pytest.raises(TypeError, match=rf"^{size} must be an integer, known when the program is traced, got '4'\.$"):
        LAYERS[name](**{size: "4"})


@pytest.mark.parametrize("name", LAYERS)
def test_numbers_of_numpy_become_those_of_python_and_booleans_are_no_numbers(name: str) -> None:
    flags = ["use_bias", "cache_kernel"] if name in MIXTURES else ["use_bias"] if name in DENSE else []
    sizes = dict(num_experts=E, hidden_features=F, shared_features=16) if name in MIXTURES else {}
    options = {field: np.int64(size) for field, size in sizes.items()} | dict.fromkeys(flags, np.False_)

    layer = LAYERS[name](**options)

    assert not any(isinstance(value, np.generic) for value in vars(layer).values())
    if name in MIXTURES:
        assert call(layer, X)[0].shape == X.shape
    for field in options:
        value, kind = (1, "True or False") if field in flags else (True, "an integer")
        with pytest.raises(TypeError, match=f"^{field} must be {kind}"):
            LAYERS[name](**{field: value})


@pytest.mark.parametrize("name", MIXTURES)
def test_options_are_objects(name: str) -> None:
    for field, value, cls in (
        ("router", 2, "Router"),
        ("parallel", "data", "Parallel"),
        ("parallel", None, "Parallel"),
    ):
        with pytest.raises(TypeError, match=rf"^{field} must be a jax_grouped\.moe\.{cls}, got "):
            LAYERS[name](**{field: value})


@pytest.mark.parametrize("name", MIXTURES)
def test_a_router_that_the_loss_does_not_train_is_warned_of_where_it_is_made(name: str) -> None:
    with pytest.warns(UserWarning, match="^top_k=1 with normalize=True makes every token") as warned:
        layer = LAYERS[name](router=Router(1))
    assert [warning.filename for warning in warned] == [__file__]

    if isinstance(layer, nn.Module):  # Calls make copies of it, and need no more warnings.
        layer.apply(layer.init(jax.random.key(0), X), X)
    LAYERS[name](router=Router(1, normalize=False))
    LAYERS[name](router=Router(1), num_experts=1)


@pytest.mark.parametrize("name", [*DENSE, *MIXTURES])
def test_tokens_have_features_and_computations_a_type(name: str) -> None:
    sizes = [SIZES] if name in DENSE else []
    shape = "[T, K]" if name in DENSE else "[..., K]"
    for x, error, message in (
        (1.0, ValueError, f"x must have shape {shape}, got ()."),
        (None, TypeError, "x must be an array, got None."),
    ):
        with pytest.raises(error, match=f"^{re.escape(message)}"):
            call(LAYERS[name](), x, *sizes)
    for dtype, got in (("bf16", "'bf16'"), (jnp.int32, "int32")):
        with pytest.raises(TypeError, match=f"^dtype must be bfloat16, float16 or float32, got {got}."):
            call(LAYERS[name](dtype=dtype), X, *sizes)


def test_tokens_of_another_size_are_refused_by_a_mixture_of_nnx() -> None:
    with pytest.raises(
        ValueError, match=re.escape("gate_up.shape[1] must equal x.shape[1] (K), got gate_up (4, 32, 32)")
    ):
        LAYERS["nnx.MoEMlp"]()(X[:, :16])


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
    step = jax.shard_map(
        lambda *arguments: apply(*arguments)[0], mesh=data_mesh(2), in_specs=(P(), tokens), out_specs=tokens
    )
    part = "(2, 32, 2, 16), got (4, 32, 2, 16)" if axis == "experts" else "(4, 32, 2, 8), got (4, 32, 2, 16)"
    message = (
        f"gate_up's kernel must be this device's part, of shape {part}: in_specs of jax.shard_map must split it over "
        "['data']."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        jax.eval_shape(step, variables, X)


def test_a_whole_bias_beside_a_part_of_its_kernel_says_what_splits_it() -> None:
    layer = LAYERS["linen.MoEMlp"](use_bias=True, parallel=Parallel(experts="data"))
    variables = jax.eval_shape(layer.init, jax.random.key(0), X)
    split = {"kernel": P("data"), "bias": P()}
    specs = {"params": {"router": P(), "gate_up": split, "down": split}}
    step = jax.shard_map(
        lambda *arguments: layer.apply(*arguments)[0],
        mesh=data_mesh(2),
        in_specs=(specs, P("data")),
        out_specs=P("data"),
    )
    with pytest.raises(ValueError, match=r"^gate_up's bias must be this device's part, of shape "):
        jax.eval_shape(step, variables, X)


@pytest.mark.parametrize("whole", ["gate_up", "down"])
def test_whole_kernels_that_would_be_summed_over_their_features_are_refused(whole: str) -> None:
    gate_up, down = jnp.ones((E, K, 2 * F)), jnp.ones((E, F, K))
    specs = {"gate_up": P(None, None, "data"), "down": P(None, "data")} | {whole: P()}
    if whole == "gate_up":  # Its part has this many features.
        gate_up = gate_up[:, :, :F]
    else:
        down = down[:, : F // 2]

    def step(x: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
        return jg.moe.moe_mlp(x, x[:, :E], gate_up, down, **FEATURES)[0]

    sharded = jax.shard_map(step, mesh=data_mesh(2), in_specs=(P(), specs["gate_up"], specs["down"]), out_specs=P())
    with pytest.raises(ValueError, match=rf"^{whole} must be split over the mesh axis 'data' \(in_specs of"):
        jax.eval_shape(sharded, X, gate_up, down)


def test_parts_of_a_shared_result_are_refused() -> None:
    def step(x: jax.Array, gate_up: jax.Array, down: jax.Array, shared: jax.Array) -> jax.Array:
        return jg.moe.moe_mlp(x, x[:, :E], gate_up, down, **FEATURES, shared=shared[0])[0]

    kernels = jnp.ones((E, K, 2 * F)), jnp.ones((E, F, K))
    specs = P(), P(None, None, "data"), P(None, "data"), P("data")
    sharded = jax.shard_map(step, mesh=data_mesh(2), in_specs=specs, out_specs=P())
    message = f"shared must be the same on every device of the mesh axis 'data', got {X.shape}, which varies over it: "
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        jax.eval_shape(sharded, X, *kernels, jnp.stack([X, X]))


@pytest.mark.parametrize("name", MIXTURES)
def test_a_shared_result_has_the_shape_of_the_tokens(name: str) -> None:
    def apply(shared: jax.Array) -> Any:
        layer, x = LAYERS[name](), X.reshape(2, -1, K)
        if name == "nnx.MoEMlp":
            return layer(x, shared=shared)
        return layer.init_with_output(jax.random.key(0), x, shared=shared)[0]

    assert apply(X.reshape(2, -1, K))[0].shape == (2, X.shape[0] // 2, K)
    with pytest.raises(ValueError, match=f"^{re.escape('shared must have the shape of x, (2, ')}"):
        apply(X)


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


def test_one_axis_of_the_batch_is_no_sequence_of_letters() -> None:
    layer = LAYERS["nnx.MoEMlp"](parallel=Parallel(batch="data"))
    with pytest.raises(ValueError, match=r"^There is no mesh axis 'data' here"):
        layer(X)
