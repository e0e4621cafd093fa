"""`MoEMlp` in linen and NNX on one device: against a loop over tokens, and in every form of a Flax model."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jax_grouped as jg
from jax_grouped.kernels.activations import is_gated
from jax_grouped.moe import Parallel, Router
from tests import oracle, quantize_oracle
from tests.activations import GPT_OSS
from tests.exports import exported
from tests.meshes import data_mesh, mesh_of

pytestmark = pytest.mark.slow

TOKENS, K, F, E, TOP_K = 24, 16, 32, 6, 2
ROUTER = Router(TOP_K)
OPTIONS = dict(num_experts=E, hidden_features=F, router=ROUTER, use_bias=True)
BLOCK = jg.Float8BlockScaling()

Params = dict[str, dict[str, jax.Array]]


@functools.cache
def x() -> jax.Array:
    return jax.random.normal(jax.random.key(0), (TOKENS, K))


@functools.cache
def params() -> Params:
    """Returns the parameters of all layers here. Biases are not zero: zeros would hide their use."""
    whole = jax.jit(jg.linen.MoEMlp(**OPTIONS).init)(jax.random.key(1), x())["params"]
    return jax.tree.map(lambda p: p + 0.1 * jax.random.normal(jax.random.key(2), p.shape), whole)


def nnx_layer(of: Params | None = None, **options: Any) -> jg.nnx.MoEMlp:
    layer = jg.nnx.MoEMlp(K, **(OPTIONS | options), rngs=nnx.Rngs(0))
    nnx.update(layer, of or params())
    return layer


@pytest.mark.parametrize(
    ("router", "bias"),
    [(ROUTER, None), (Router(TOP_K, score="sigmoid", scale=2.5), np.array([9.0, 0, 0, 0, 0, 0]))],
    ids=["softmax", "sigmoid with bias and scale"],
)
def test_every_token_gets_the_weighted_sum_of_its_experts(backend: str, router: Router, bias: Any) -> None:
    layer = jg.linen.MoEMlp(**OPTIONS | dict(router=router), precision="highest")

    with jax.default_matmul_precision("highest"):
        y, metrics = jax.jit(layer.apply)({"params": params()}, x(), selection_bias=bias)

    expected = oracle.a_loop_over_tokens(params(), x(), TOP_K, router.score, bias, router.scale)
    assert oracle.relative_error(y, expected) < 1e-5
    assert int(jnp.sum(metrics.expert_load)) == TOKENS * TOP_K
    assert metrics.dropped.tolist() == [0]
    if bias is not None:
        assert int(metrics.expert_load[0]) == TOKENS


@pytest.mark.parametrize("activation", [GPT_OSS, "relu_squared"], ids=str)
def test_both_layers_have_the_activation_that_is_named(backend: str, activation: Any) -> None:
    layer = jg.linen.MoEMlp(**OPTIONS, activation=activation, precision="highest")
    halves = (2,) if is_gated(activation) else ()
    # Numbers at both sides of the limit of clamping.
    at = jax.tree.map(lambda p: 5 * p, params())
    if not halves:
        at["gate_up"] = jax.tree.map(lambda p: p[..., 0, :], at["gate_up"])
    model = nnx_layer(at, activation=activation, precision="highest")

    with jax.default_matmul_precision("highest"):
        y, _ = jax.jit(layer.apply)({"params": at}, x())
        from_nnx, _ = nnx.jit(lambda model, x: model(x))(model, x())

    made = jax.eval_shape(layer.init, jax.random.key(0), x())["params"]["gate_up"]
    assert (made["kernel"].shape, made["bias"].shape) == ((E, K, *halves, F), (E, *halves, F))
    expected = oracle.a_loop_over_tokens(
        at, x(), TOP_K, activation=functools.partial(quantize_oracle.activation, activation)
    )
    assert oracle.relative_error(y, expected) < 1e-5
    assert oracle.relative_error(from_nnx, expected) < 1e-5


def test_both_layers_choose_experts_from_the_best_groups(backend: str) -> None:
    router = Router(TOP_K, groups=3, top_groups=1)
    logits = jnp.matmul(x(), params()["router"]["kernel"], precision="highest")
    chosen = jg.moe.top_k_routing(logits, router).experts
    expected = jnp.zeros(E, jnp.int32).at[chosen].add(1)

    _, metrics = jg.linen.MoEMlp(**OPTIONS | dict(router=router)).apply({"params": params()}, x())
    _, from_nnx = nnx_layer(router=router)(x())

    np.testing.assert_array_equal(chosen[:, 0] // 2, chosen[:, 1] // 2)
    np.testing.assert_array_equal(metrics.expert_load, expected)
    np.testing.assert_array_equal(from_nnx.expert_load, expected)


@pytest.mark.parametrize("recipe", [None, BLOCK], ids=["plain", "block"])
def test_the_shared_expert_of_a_layer_is_a_network_of_its_own(backend: str, recipe: jg.Recipe | None) -> None:
    options = OPTIONS | dict(recipe=recipe, shared_features=2 * F)
    layer, model = jg.linen.MoEMlp(**options), jg.nnx.MoEMlp(K, **options, rngs=nnx.Rngs(3))
    variables = jg.nnx.linen_variables(model)

    def loss(y: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(y))

    def of_parts(params: Any) -> jax.Array:
        kernels = (params[name]["kernel"].reshape(1, K if "up" in name else 2 * F, -1) for name in SHARED)
        shared = jg.moe.grouped_mlp(x(), *kernels, jnp.array([TOKENS]), recipe=recipe)
        own = {name: of for name, of in params.items() if name not in SHARED}
        return loss(jg.linen.MoEMlp(**OPTIONS, recipe=recipe).apply({"params": own}, x(), shared=shared)[0])

    got = jax.value_and_grad(lambda params: loss(layer.apply({"params": params}, x())[0]))(variables["params"])
    from_nnx = nnx.value_and_grad(lambda model: loss(model(x())[0]))(model)

    expected = jax.value_and_grad(of_parts)(variables["params"])
    for value, gradients in (got, (from_nnx[0], nnx.to_pure_dict(from_nnx[1]))):
        np.testing.assert_allclose(value, expected[0], rtol=1e-5)
        jax.tree.map(lambda *of: np.testing.assert_allclose(*of, rtol=1e-4, atol=1e-5), gradients, expected[1])
    with pytest.raises(ValueError, match="shared_features must be a multiple of 16 with a recipe, got 3"):
        jg.linen.MoEMlp(**OPTIONS | dict(recipe=BLOCK, shared_features=3))


SHARED = ("shared_gate_up", "shared_down")


def test_a_selection_bias_is_kept_in_the_layer_and_moved_against_the_load(backend: str) -> None:
    options = OPTIONS | dict(router=Router(TOP_K, use_selection_bias=True))
    layer = jg.linen.MoEMlp(**options)
    state = layer.init(jax.random.key(0), x())[jg.linen.ROUTER_STATE]
    model = jg.nnx.MoEMlp(K, **options, rngs=nnx.Rngs(0))
    jg.nnx.load_variables(model, {"params": params()})

    @jax.jit
    def step(bias: jax.Array) -> tuple[jax.Array, jax.Array]:
        _, metrics = layer.apply({"params": params(), jg.linen.ROUTER_STATE: {"selection_bias": bias}}, x())
        return jg.moe.update_selection_bias(bias, metrics.expert_load, rate=0.05), metrics.expert_load

    _, load = step(state["selection_bias"])
    bias, moved = step(jnp.array([2.0, 0, 0, 0, 0, 0]))
    assert moved[0] == TOKENS
    for _ in range(50):
        bias, moved = step(bias)
    model.selection_bias.set_value(bias)

    assert moved[0] < TOKENS * TOP_K // 4
    np.testing.assert_array_equal(model(x())[1].expert_load, step(bias)[1])
    np.testing.assert_array_equal(model(x(), selection_bias=jnp.zeros(E))[1].expert_load, load)


def test_linen_and_nnx_give_the_same_bits_in_any_leading_shape(backend: str) -> None:
    layer, model = jg.linen.MoEMlp(**OPTIONS), nnx_layer()

    @jax.jit
    def linen_gradients(params: Params, x: jax.Array) -> Any:
        return jax.value_and_grad(lambda p: jnp.sum(layer.apply({"params": p}, x)[0] ** 2))(params)

    @nnx.jit
    def nnx_gradients(model: jg.nnx.MoEMlp, x: jax.Array) -> Any:
        return nnx.value_and_grad(lambda model: jnp.sum(model(x)[0] ** 2))(model)

    loss, gradients = linen_gradients(params(), x())
    other_loss, other = nnx_gradients(model, x().reshape(2, 3, 4, K))

    np.testing.assert_array_equal(loss, other_loss)
    jax.tree.map(np.testing.assert_array_equal, gradients, nnx.to_pure_dict(other))


def test_the_parameters_are_those_of_dense_experts() -> None:
    def shapes(options: dict[str, Any]) -> Any:
        layer = jg.linen.MoEMlp(**OPTIONS | options)
        return jax.tree.map(jnp.shape, jax.eval_shape(layer.init, jax.random.key(0), x())["params"])

    expected = {
        "router": {"kernel": (K, E)},
        "gate_up": {"kernel": (E, K, 2, F), "bias": (E, 2, F)},
        "down": {"kernel": (E, F, K), "bias": (E, K)},
    }
    assert shapes({}) == expected
    assert shapes(dict(parallel=Parallel(experts="no such axis", features="nor this"))) == expected
    assert nnx.to_pure_dict(jax.tree.map(jnp.shape, nnx.state(nnx_layer()))) == expected
    kernel = jg.linen.default_kernel_init(jax.random.key(0), (2, 64, 2, 128))
    np.testing.assert_allclose(kernel.std(), 64**-0.5, rtol=0.05)


def test_what_a_capacity_factor_drops_is_counted_and_adds_nothing(backend: str) -> None:
    model, whole = (
        jg.linen.MoEMlp(**OPTIONS | dict(router=Router(TOP_K, capacity_factor=factor))) for factor in (0.5, 1.0)
    )
    # Every token prefers the first two experts.
    at = params() | {"router": {"kernel": jnp.zeros((K, E)).at[:, :2].set(10 * jnp.sign(x().sum()))}}
    positive = jnp.abs(x()) * jnp.sign(x().sum())

    y, metrics = jax.jit(model.apply)({"params": at}, positive)
    expected, nothing_dropped = jax.jit(whole.apply)({"params": at}, positive)

    assert metrics.expert_load.tolist() == [TOKENS, TOKENS, 0, 0, 0, 0]
    assert (metrics.dropped.tolist(), nothing_dropped.dropped.tolist()) == ([TOKENS], [0])
    assert float(metrics.needed_capacity_factor) == float(nothing_dropped.needed_capacity_factor) == 1
    # Both experts lose every other token.
    kept = jnp.any(y != 0, axis=1)
    assert int(jnp.sum(kept)) == TOKENS // 2
    assert not jnp.any(kept[1:] & kept[:-1])
    np.testing.assert_allclose(y[kept], expected[kept], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("activation", "gate"), [("swiglu", (None,)), ("relu", ())])
def test_parameters_carry_the_names_of_their_axes(activation: str, gate: tuple[None, ...]) -> None:
    added = dict(router=Router(TOP_K, use_bias=True, use_selection_bias=True), shared_features=F)
    options = OPTIONS | added | dict(activation=activation, logical_axes=("expert", "embed", "mlp"))
    expected = {
        "router": {"kernel": P("embed", None), "bias": P(None)},
        "shared_gate_up": {"kernel": P(None, "embed", *gate, "mlp")},
        "shared_down": {"kernel": P(None, "mlp", "embed")},
        "gate_up": {"kernel": P("expert", "embed", *gate, "mlp"), "bias": P("expert", *gate, "mlp")},
        "down": {"kernel": P("expert", "mlp", "embed"), "bias": P("expert", "embed")},
    }

    named = jax.eval_shape(jg.linen.MoEMlp(**options).init, jax.random.key(0), x())
    rules = [("expert", "expert"), ("embed", None), ("mlp", "model")]
    with jax.set_mesh(mesh_of({"expert": 1, "model": 1})), nn.logical_axis_rules(rules):
        model = jg.nnx.MoEMlp(K, **options, rngs=nnx.Rngs(0))
        nnx_state = nnx.state(model, nnx.Param)

    assert nn.get_partition_spec(named)["params"] == expected
    of_state = nn.get_partition_spec(named)[jg.linen.ROUTER_STATE]["selection_bias"]
    assert of_state == P(*model.selection_bias.out_sharding) == P(None)
    nnx_names = {".".join(path): P(*of.out_sharding) for path, of in nnx.to_flat_state(nnx_state)}
    assert nnx_names == {f"{layer}.{name}": spec for layer, of in expected.items() for name, spec in of.items()}


@pytest.mark.parametrize("recipe", [None, BLOCK], ids=["plain", "block"])
def test_kernels_accumulate_into_what_is_given(recipe: jg.Recipe | None) -> None:
    options = dict(OPTIONS, recipe=recipe, shared_features=F)
    whole = jg.linen.MoEMlp(**options)
    given = whole.init(jax.random.key(0), x())["params"] | params()

    def loss(params: Params, into: Any) -> jax.Array:
        return jnp.sum(jnp.sin(whole.apply({"params": params}, x(), accumulate_into=into)[0]))

    def loss_of(layer: jg.nnx.MoEMlp, into: Any) -> jax.Array:
        return jnp.sum(jnp.sin(layer(x(), accumulate_into=into)[0]))

    names = ("gate_up", "down", "shared_gate_up", "shared_down")
    into = {name: jnp.cos(given[name]["kernel"]) for name in names}

    got = jax.jit(jax.grad(loss))(given, into)
    model = jg.nnx.MoEMlp(K, **options, rngs=nnx.Rngs(0))
    jg.nnx.load_variables(model, {"params": given})
    some = {name: into[name] for name in ("down", "shared_down")}
    from_nnx = nnx.jit(nnx.grad(loss_of))(model, some)

    plain = jax.jit(jax.grad(loss))(given, None)
    for name, sums in into.items():
        expected = plain[name]["kernel"] + sums
        np.testing.assert_allclose(got[name]["kernel"], expected, rtol=1e-5, atol=1e-5)
        of_some = (got if name in some else plain)[name]["kernel"]
        np.testing.assert_allclose(from_nnx[name]["kernel"][...], of_some, rtol=1e-5, atol=1e-5)
    for name in ("gate_up", "down"):
        np.testing.assert_array_equal(got[name]["bias"], plain[name]["bias"])


@pytest.mark.parametrize(
    ("into", "message"),
    [
        ({"router": jnp.zeros((K, E))}, r"accumulate_into has gradients of gate_up, down, got \['router'\]"),
        (
            {"down": jnp.zeros((E, K, F))},
            r"accumulate_into must be like the kernel of down, \(\(6, 32, 16\), 'float32'\)",
        ),
    ],
)
def test_what_nothing_can_accumulate_into_is_named(into: dict[str, jax.Array], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        jg.linen.MoEMlp(**OPTIONS).apply({"params": params()}, x(), accumulate_into=into)


def test_an_expert_axis_of_one_device_exchanges_nothing() -> None:
    layer = jg.linen.MoEMlp(**OPTIONS, parallel=Parallel(experts="data"))
    specs = {"params": {name: P() if name == "router" else P("data") for name in params()}}

    def result(variables: Any, x: jax.Array) -> jax.Array:
        return layer.apply(variables, x)[0]

    on_one = jax.jit(jax.shard_map(result, mesh=data_mesh(1), in_specs=(specs, P("data")), out_specs=P("data")))
    assert "all_to_all" not in on_one.lower({"params": params()}, x()).as_text()
    expected = jax.jit(jg.linen.MoEMlp(**OPTIONS).apply)({"params": params()}, x())[0]
    np.testing.assert_allclose(on_one({"params": params()}, x()), expected, rtol=1e-5, atol=1e-5)


def test_an_expert_axis_among_axes_that_shard_map_leaves_alone() -> None:
    def gradients(params: Params, x: jax.Array, *, devices: int, **axes: Any) -> Any:
        def loss(params: Params) -> jax.Array:
            y, metrics = jg.linen.MoEMlp(**OPTIONS, **axes).apply({"params": params}, x)
            return jnp.sum(y**2) + metrics.balance_loss / devices

        return jax.grad(loss)(params)

    split = functools.partial(gradients, devices=2, parallel=Parallel(experts="expert", batch="expert"))
    specs = {name: P() if name == "router" else P("expert") for name in params()}
    mesh = mesh_of({"expert": 2, "other": 2})
    sharded = jax.shard_map(split, mesh=mesh, in_specs=(specs, P("expert")), out_specs=specs, axis_names={"expert"})

    got = jax.jit(sharded)(params(), x())

    expected = jax.jit(functools.partial(gradients, devices=1))(params(), x())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), got, expected)


@pytest.mark.parametrize("name", ["pmap", "shard_map"])
def test_gradients_of_split_experts_without_checks_are_those_of_one_device(name: str) -> None:
    devices = 2
    mesh = data_mesh(devices)
    options = OPTIONS | dict(activation="geglu")
    split = jg.linen.MoEMlp(**options, parallel=Parallel(experts="data", batch="data"))
    own = {name: name != "router" for name in params()}

    def gradients(layer: Any, params: Params, x: jax.Array, *, devices: int) -> Params:
        def loss(params: Params) -> jax.Array:
            y, metrics = layer.apply({"params": params}, x)
            return jnp.sum(y**2) + metrics.balance_loss / devices

        return jax.grad(loss)(params)

    def local(params: Params, x: jax.Array) -> Params:
        local = gradients(split, params, x, devices=devices)
        return local | {"router": jg.reduce_gradients(local["router"], "data", mean=False)}

    def parts(array: jax.Array) -> jax.Array:
        return array.reshape(devices, -1, *array.shape[1:])

    if name == "pmap":
        axes = {name: 0 if is_own else None for name, is_own in own.items()}
        step = jax.pmap(
            local, axis_name="data", in_axes=(axes, 0), out_axes=axes, devices=mesh.devices.ravel().tolist()
        )
        given = {name: jax.tree.map(parts, part) if own[name] else part for name, part in params().items()}
        got = step(given, parts(x()))
    else:
        specs = {name: P("data") if is_own else P() for name, is_own in own.items()}
        step = jax.shard_map(local, mesh=mesh, in_specs=(specs, P("data")), out_specs=specs, check_vma=False)
        got = jax.jit(step)(params(), x())

    expected = jax.jit(functools.partial(gradients, jg.linen.MoEMlp(**options), devices=1))(params(), x())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a.reshape(b.shape), b, rtol=1e-4, atol=1e-4), got, expected)


@pytest.fixture(scope="module")
def cached_step() -> Any:
    """Gives one compiled step for every microbatch: gradients, and the caches after it."""
    layer = jg.linen.MoEMlp(**OPTIONS, dtype=jnp.bfloat16, recipe=BLOCK, cache_kernel=True)

    @jax.jit
    def step(params: Params, cache: Any, x: jax.Array, is_first: jax.Array) -> Any:
        def loss(params: Params) -> Any:
            variables = {"params": params, "kernel_cache": cache}
            (y, _), new = layer.apply(variables, x, is_first_microbatch=is_first, mutable=["kernel_cache"])
            return jnp.sum(y.astype(jnp.float32) ** 2), new["kernel_cache"]

        return jax.value_and_grad(loss, has_aux=True)(params)

    cache = jax.eval_shape(layer.init, jax.random.key(3), x())["kernel_cache"]
    return step, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), cache)


def test_microbatches_share_the_quantized_kernels(cached_step: Any) -> None:
    step, initial = cached_step
    first, later = jnp.array(True), jnp.array(False)

    (loss, cache), gradients = step(params(), initial, x(), first)
    # Later microbatches read what is stored: kernels of NaN change nothing.
    unread = {name: part | {"kernel": part["kernel"] * jnp.nan} for name, part in params().items() if name != "router"}
    (again, same), more = step(params() | unread, cache, x(), later)

    assert jnp.isfinite(loss)
    np.testing.assert_array_equal(again, loss)
    jax.tree.map(np.testing.assert_array_equal, (more, same), (gradients, cache))
    assert set(cache) == {"gate_up", "down"}
    assert step._cache_size() == 1


def test_a_rematerialised_step_is_exported_and_read_back() -> None:
    def loss(layer: type[nn.Module], params: Params, x: jax.Array) -> jax.Array:
        y, metrics = layer(**OPTIONS).apply({"params": params}, x)
        return jnp.mean(y**2) + metrics.balance_loss

    gradients = exported(jax.grad(functools.partial(loss, nn.remat(jg.linen.MoEMlp))), params(), x())(params(), x())

    expected = jax.jit(jax.grad(functools.partial(loss, jg.linen.MoEMlp)))(params(), x())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), gradients, expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(router=Router(E + 1)), "top_k must be at most the 6 experts"),
        (dict(activation="swish"), r"^activation must be one of \(.*\), a jax_grouped.SwiGLU, got 'swish'\.$"),
        (dict(cache_kernel=True), "cache_kernel=True, and that needs a recipe, or a dtype"),
        (dict(recipe=BLOCK, hidden_features=20), "^hidden_features must be a multiple of 16 with a recipe, got 20.$"),
        (dict(parallel=Parallel(experts="expert")), "no mesh axis 'expert' here: put all arrays on one mesh"),
        (dict(logical_axes=("expert", "embed")), "logical_axes must name the axes of experts, K and F, got"),
        (dict(logical_axes=3), "logical_axes must name the axes of experts, K and F, got 3"),
        (dict(parallel=Parallel(features="model")), "no mesh axis 'model' here: put all arrays on one mesh"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_what_does_not_fit_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        jg.nnx.MoEMlp(K, **(OPTIONS | options), rngs=nnx.Rngs(0))(x())
    if not message.startswith("no mesh axis"):
        with pytest.raises(ValueError, match=message):
            jg.linen.MoEMlp(**OPTIONS | options).init(jax.random.key(0), x())
        return
    with pytest.raises(ValueError, match=message):
        jg.linen.MoEMlp(**OPTIONS | options).apply({"params": params()}, x())


def test_functions_take_numbers_of_numpy_and_no_booleans_for_numbers() -> None:
    gate_up, down = params()["gate_up"]["kernel"], params()["down"]["kernel"]
    logits = jax.random.normal(jax.random.key(3), (TOKENS, E))
    moe = functools.partial(jg.moe.moe_mlp, x(), logits, gate_up, down, router=ROUTER)
    experts = jg.moe.top_k_routing(logits, ROUTER).experts

    for got, expected in (
        (moe(num_sequences=np.int64(4)), moe(num_sequences=4)),
        (
            jg.moe.group_by_expert(experts, np.int64(E), capacity=np.uint8(40)),
            jg.moe.group_by_expert(experts, E, capacity=40),
        ),
    ):
        jax.tree.map(np.testing.assert_array_equal, got, expected)
    for call in (
        lambda: moe(num_sequences=True),
        lambda: jg.moe.group_by_expert(experts, True),
        lambda: jg.moe.group_by_expert(experts, E, capacity=True),
    ):
        with pytest.raises(TypeError, match=r"must be an integer, known when .*, got True"):
            call()


@pytest.mark.parametrize(
    "recipe",
    [None, BLOCK, jg.Float8CurrentScaling(), jg.DelayedScaling(margin=1), jg.MXFP8BlockScaling()],
    ids=lambda recipe: type(recipe).__name__,
)
def test_a_step_with_mixed_types_is_traced_where_promotion_is_strict(recipe: jg.Recipe | None) -> None:
    flags = dict.fromkeys(["use_bias", "use_selection_bias", "balance_sequences"], True)
    router = Router(2, score="sigmoid", capacity_factor=0.9, **flags)
    layer = jg.linen.MoEMlp(4, 16, router, recipe=recipe, shared_features=16, use_bias=True)
    tokens = jnp.ones((2, 8, 32), jnp.bfloat16)
    optimizer = jg.overwrite_with_gradient(optax.sgd(0.1), every=2)

    def step(variables: dict[str, Any]) -> Any:
        def loss(trained: dict[str, Any]) -> jax.Array:
            y, metrics = layer.apply(variables | trained, tokens)
            return jnp.sum(y.astype(jnp.float32)) + metrics.balance_loss + metrics.z_loss

        trained = {name: of for name, of in variables.items() if name != "router_state"}
        updates, _ = optimizer.update(jax.grad(loss)(trained), optimizer.init(trained), trained)
        return jg.apply_updates(trained, updates)

    with jax.numpy_dtype_promotion("strict"):
        variables = jax.eval_shape(layer.init, jax.random.key(0), tokens)
        jax.jit(step).lower(variables)
