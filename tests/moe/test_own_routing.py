"""A routing of one's own, a choice that is forced, and tokens that are masked, against dense sums in plain JAX."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_grouped as jg
from jax_grouped.moe import Router, Routing
from tests import oracle
from tests.meshes import make_mesh, need_devices
from tests.refusals import assert_refused

pytestmark = pytest.mark.slow

T, E, K, F, TOP_K = 40, 6, 16, 16, 3
ROUTER = Router(TOP_K, score="sigmoid")
BLOCK = jg.Float8BlockScaling()
#: Tokens that count.
MASK = np.arange(T) % 5 != 2


@pytest.fixture(autouse=True)
def _backend(backend: str) -> Iterator[None]:
    """Runs every test of this module on every backend, with products of float32 in float32."""
    with jax.default_matmul_precision("highest"):
        yield


def arrays() -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    shapes = dict(x=(T, K), logits=(T, E), gate_up=(E, K, 2 * F), down=(E, F, K), weights=(T, TOP_K), shared=(T, K))
    drawn = {name: jnp.asarray(rng.standard_normal(shape, np.float32)) for name, shape in shapes.items()}
    return drawn | dict(probabilities=jax.nn.softmax(2 * drawn["logits"]))


def own_choice() -> jax.Array:
    """Returns experts of each token, of which some do not exist and some come twice."""
    return jnp.asarray(np.random.default_rng(1).integers(-2, E + 2, (T, TOP_K), dtype=np.int32))


def dense(x: jax.Array, gate_up: jax.Array, down: jax.Array, experts: jax.Array, weights: jax.Array) -> jax.Array:
    """Applies all experts to all tokens, and sums those that are chosen."""
    gate, up = jnp.split(jnp.einsum("tk,ekf->tef", x, gate_up, precision="highest"), 2, axis=-1)
    results = jnp.einsum("tef,efn->ten", jax.nn.silu(gate) * up, down, precision="highest")
    chosen = experts[..., None] == jnp.arange(E)
    return jnp.einsum("tke,tk,ten->tn", chosen, weights, results, precision="highest")


def mixed(y: jax.Array) -> jax.Array:
    return jnp.sum(y * jnp.cos(jnp.arange(y.shape[1])))


def test_a_routing_of_ones_own_is_computed_as_given() -> None:
    given = {name: array for name, array in arrays().items() if name not in ("logits", "shared")}
    experts = own_choice()

    def ours(given: dict[str, jax.Array]) -> Any:
        routing = Routing(experts, given["weights"], given["probabilities"])
        y, metrics = jg.moe.moe_mlp(given["x"], routing, given["gate_up"], given["down"], precision="highest")
        return mixed(y) + metrics.balance_loss, (y, metrics)

    def expected(given: dict[str, jax.Array]) -> Any:
        y = dense(given["x"], given["gate_up"], given["down"], experts, given["weights"])
        load = jnp.sum(experts[..., None] == jnp.arange(E), axis=(0, 1))
        loss = E * jnp.sum(load / experts.size * jnp.mean(given["probabilities"], axis=0))
        return mixed(y) + loss, (y, load)

    got, (y, metrics) = jax.jit(jax.grad(ours, has_aux=True))(given)
    gradients, (expected_y, load) = jax.jit(jax.grad(expected, has_aux=True))(given)

    oracle.assert_trees_close((y, got), (expected_y, gradients), 1e-4)
    np.testing.assert_array_equal(metrics.expert_load, load)
    assert metrics.dropped.tolist() == [0]
    assert metrics.z_loss == 0
    bare = jg.moe.moe_mlp(given["x"], Routing(experts, given["weights"]), given["gate_up"], given["down"])[1]
    assert bare.balance_loss == 0


@pytest.mark.parametrize("recipe", [None, BLOCK], ids=["float32", "block"])
def test_a_forced_choice_has_the_bits_of_a_free_one(backend: str, recipe: Any) -> None:
    given = [arrays()[name] for name in ("x", "logits", "gate_up", "down")]
    x, logits, *kernels = given

    def step(given: list[jax.Array], experts: Any) -> Any:
        def loss(given: list[jax.Array]) -> Any:
            options = dict(router=ROUTER, recipe=recipe, experts=experts, record=True)
            y, metrics = jg.moe.moe_mlp(*given, **options)
            return mixed(y) + metrics.balance_loss + metrics.z_loss, (y, metrics)

        return jax.grad(loss, has_aux=True)(given)

    free = jax.jit(step)(given, None)
    recorded = free[1][1].experts
    forced = jax.jit(step)(given, recorded.astype(jnp.int16))
    # XLA may round the same numbers in another order in another program for CPUs.
    tolerance = 0 if backend == "cuda" else 1e-4
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance), forced, free)
    assert jg.moe.moe_mlp(*given, router=ROUTER)[1].experts is None

    # Weights follow from the live logits, for another choice too.
    choice = own_choice()
    scores = jnp.take_along_axis(jax.nn.sigmoid(logits), jnp.clip(choice, 0, E - 1), axis=1)
    scores = jnp.where((choice >= 0) & (choice < E), scores, 0)
    total = jnp.sum(scores, axis=1, keepdims=True)
    y = jax.jit(step)(given, choice)[1][0]
    expected = dense(x, *kernels, choice, scores / jnp.where(total > 0, total, 1))
    assert oracle.relative_error(y, np.asarray(expected)) < (1e-5 if recipe is None else 0.1)


@pytest.mark.parametrize(
    ("form", "router", "recipe"),
    [
        ("logits", Router(TOP_K, balance_sequences=True), None),
        ("logits", Router(TOP_K, capacity_factor=1.0), None),
        ("routing", Router(TOP_K), jg.Float8CurrentScaling()),
        ("input weights", Router(1, normalize=False, weights_on="input", softcap=2.0), None),
    ],
    ids=["sequences", "room", "routing", "input weights"],
)
def test_masked_tokens_are_as_if_they_were_not_there(form: str, router: Router, recipe: Any) -> None:
    whole = arrays()
    choice = own_choice()
    sequences = 4 if router.balance_sequences else None

    def step(given: dict[str, jax.Array], choice: jax.Array, mask: Any) -> Any:
        def loss(given: dict[str, jax.Array]) -> Any:
            routing: Any = given["logits"]
            if form == "routing":
                routing = Routing(choice, given["weights"], given["probabilities"])
            options: Any = dict(
                router=router, recipe=recipe, mask=mask, num_sequences=sequences, shared=given["shared"]
            )
            y, metrics = jg.moe.moe_mlp(given["x"], routing, given["gate_up"], given["down"], **options)
            return mixed(y) + metrics.balance_loss + metrics.z_loss, (y, metrics)

        return jax.grad(loss, has_aux=True)(given)

    per_token = "x", "logits", "weights", "probabilities", "shared"
    poisoned = {name: jnp.where(MASK[:, None], x, jnp.nan) if name in per_token else x for name, x in whole.items()}
    alone = {name: x[MASK] if name in per_token else x for name, x in whole.items()}
    # Every sequence has the same number of tokens that count. Room is that of all tokens.
    if router.capacity_factor:
        router = Router(TOP_K, capacity_factor=10.0)
    got, (y, metrics) = jax.jit(step)(poisoned, choice, jnp.asarray(MASK))
    expected, (expected_y, expected_metrics) = jax.jit(functools.partial(step, mask=None))(alone, choice[MASK])

    assert not y[~MASK].any()
    oracle.assert_trees_close(y[MASK], expected_y, 1e-4)
    for name, gradient in got.items():
        if name in per_token:
            assert not gradient[~MASK].any(), name
            gradient = gradient[MASK]
        oracle.assert_trees_close(gradient, expected[name], 1e-4)
    for name in ("balance_loss", "expert_load", "dropped", "z_loss"):
        np.testing.assert_allclose(getattr(metrics, name), getattr(expected_metrics, name), rtol=1e-5, err_msg=name)


def test_sequences_without_tokens_have_no_balance_loss() -> None:
    logits = arrays()["logits"]
    routing = jg.moe.top_k_routing(logits, ROUTER)
    sequences = jnp.arange(T) // 10

    def loss(indices: Any) -> jax.Array:
        few = jg.moe.top_k_routing(logits[indices], ROUTER)
        return jg.moe.load_balancing_loss(few)

    mask = (sequences != 1) & ((sequences != 2) | (jnp.arange(T) % 2 == 0))
    got = jg.moe.load_balancing_loss(routing, mask=mask, num_sequences=4)
    expected = [loss(np.flatnonzero(mask & (sequences == i))) for i in (0, 2, 3)]
    np.testing.assert_allclose(got, np.mean(expected), rtol=1e-6)
    assert jg.moe.load_balancing_loss(routing, mask=jnp.zeros(T, bool), num_sequences=4) == 0
    np.testing.assert_allclose(
        jg.moe.router_z_loss(logits, mask=mask), jg.moe.router_z_loss(logits[np.asarray(mask)]), rtol=1e-6
    )


@pytest.mark.parametrize("flavor", ["linen", "nnx"])
def test_layers_take_routers_masks_and_choices(backend: str, flavor: str) -> None:
    given = arrays()
    options: Any = dict(num_experts=E, hidden_features=F, shared_features=F, use_shared_gate=True, sow_metrics=True)
    x = given["x"].reshape(4, T // 4, K)
    mask = jnp.asarray(MASK.reshape(4, T // 4))
    poisoned = jnp.where(mask[..., None], x, jnp.nan)
    scale = jnp.linspace(1, 2, K)

    def own_router(tokens: jax.Array) -> jax.Array:
        return (tokens * scale) @ given["logits"][:K]

    def build(router: Router) -> Any:
        """Returns the parameters, and a function of them that calls the layer and returns what it sows too."""
        make_nnx = functools.partial(jg.nnx.MoEMlp, K, router=router, **options)
        params = jg.nnx.linen_variables(make_nnx(rngs=nnx.Rngs(0)))["params"]
        if flavor == "linen":
            layer = jg.linen.MoEMlp(router=router, **options)
            init = functools.partial(layer.init, routing=None if router.use_kernel else own_router)
            made = jax.eval_shape(init, jax.random.key(0), x)
            assert jax.tree.map(jnp.shape, made) == {"params": jax.tree.map(jnp.shape, params)}

            def call(params: Any, x: jax.Array, **more: Any) -> Any:
                return layer.apply({"params": params}, x, **more, mutable=[jg.linen.MOE_METRICS])
        else:

            def call(params: Any, x: jax.Array, **more: Any) -> Any:
                model = make_nnx(rngs=nnx.Rngs(0))
                jg.nnx.load_variables(model, {"params": params})
                return nnx.capture(model, jg.nnx.SownMetrics)(x, **more)

        return params, call

    params, call = build(ROUTER)

    @jax.jit
    def masked_step(params: Any, x: jax.Array, mask: Any) -> Any:
        def loss(params: Any) -> Any:
            (y, metrics), sown = call(params, x, mask=mask)
            return jnp.sum(jnp.sin(y)) + jg.moe.router_loss(sown, balance=0.5, z=0.25), (y, metrics, sown)

        return jax.value_and_grad(loss, has_aux=True)(params)

    (loss, (y, metrics, sown)), got = masked_step(params, poisoned, mask)
    (alone, (expected_y, *_)), expected = masked_step(params, x[mask], None)
    np.testing.assert_allclose(loss, alone, rtol=1e-5)
    oracle.assert_trees_close((y[mask], got), (expected_y, expected), 1e-4)
    assert not y[~mask].any()
    assert metrics.experts is None

    # The choice that was sown, forced in another pass, gives the same bits; on CPUs, where programs round differently,
    # the same numbers.
    (recorded,) = (leaf for leaf in jax.tree.leaves(sown) if leaf.shape == (T, TOP_K))
    forced = jax.jit(lambda params: call(params, poisoned, mask=mask, experts=recorded.reshape(4, -1, TOP_K))[0][0])
    np.testing.assert_allclose(forced(params), y, rtol=0, atol=0 if backend == "cuda" else 1e-6)

    # A router of one's own, as a function, as its logits and as a routing.
    params, call = build(Router(TOP_K, score="sigmoid", use_kernel=False))
    assert "router" not in params
    logits = own_router(given["x"])
    routing = jg.moe.top_k_routing(logits, ROUTER)
    shaped = jax.tree.map(lambda array: array.reshape(4, T // 4, -1), routing)
    results = [
        jax.jit(lambda params, routing=routing: call(params, x, routing=routing)[0][0])(params)
        for routing in (own_router, logits.reshape(4, -1, E), shaped)
    ]
    np.testing.assert_allclose(results[1], results[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(results[2], results[1], rtol=1e-5, atol=1e-6)
    gate = jax.nn.sigmoid(given["x"] @ params["shared_gate"]["kernel"])
    kernels = (
        params[name]["kernel"].reshape(1, K if "up" in name else F, -1) for name in ("shared_gate_up", "shared_down")
    )
    shared = gate * jg.moe.grouped_mlp(given["x"], *kernels, jnp.array([T]))
    weights = params["gate_up"]["kernel"].reshape(E, K, -1), params["down"]["kernel"]
    expected = dense(given["x"], *weights, routing.experts, routing.weights) + shared
    assert oracle.relative_error(results[0].reshape(T, K), np.asarray(expected)) < 1e-4


def test_the_lightest_pairs_are_dropped_also_of_repeated_experts_and_of_weights_on_the_input() -> None:
    given = arrays()
    kernels = given["gate_up"][:4], given["down"][:4]

    def padded(kernel: jax.Array) -> jax.Array:
        return jnp.pad(kernel, [(0, E - 4), (0, 0), (0, 0)])

    logits = jnp.linspace(3, -3, T)[:, None] * jnp.eye(4)[0] - 20 * (1 - jnp.eye(4)[0])
    router = Router(1, score="sigmoid", normalize=False, weights_on="input", capacity_factor=0.5, drop_by="weight")
    y, metrics = jax.jit(functools.partial(jg.moe.moe_mlp, router=router))(given["x"], logits, *kernels)
    np.testing.assert_array_equal(np.any(y, axis=1), np.arange(T) < T // 2)

    need_devices(4)
    mesh = make_mesh({"a": 4})
    experts = jnp.asarray(np.random.default_rng(3).integers(0, 2, (T, 4)))
    weights = jnp.asarray(np.random.default_rng(4).random((T, 4), np.float32))
    results = []
    for exchange in ("gather", "padded"):
        options: Any = dict(
            router=Router(4, capacity_factor=1.0, drop_by="weight"),
            parallel=jg.moe.Parallel(experts="a", exchange=exchange),
        )
        with jax.set_mesh(mesh):
            results.append(
                jax.jit(functools.partial(jg.moe.moe_mlp, **options))(given["x"], Routing(experts, weights), *kernels)
            )
    (y, metrics), (other_y, other) = results
    oracle.assert_trees_close(y, other_y, 1e-4)
    np.testing.assert_array_equal(metrics.dropped, other.dropped)
    # Each device has one expert, and room for T pairs.
    lowest = [np.sort(weights[experts == expert])[-T] for expert in (0, 1)]
    assert int(metrics.dropped.sum()) == 4 * T - 2 * T
    kept = jnp.where(weights >= jnp.asarray(lowest)[experts], weights, 0)
    expected = dense(given["x"], gate_up=padded(kernels[0]), down=padded(kernels[1]), experts=experts, weights=kept)
    assert oracle.relative_error(y, np.asarray(expected)) < 1e-4

    # No expert has so low an index, whatever it is multiplied by.
    nobody = Routing(jnp.full((T, 2), np.iinfo(np.int32).min), jnp.full((T, 2), jnp.nan))
    options["router"] = Router(2, capacity_factor=0.5)
    options["parallel"] = jg.moe.Parallel(experts="a")
    with jax.set_mesh(mesh):
        y, metrics = jax.jit(functools.partial(jg.moe.moe_mlp, **options))(given["x"], nobody, *kernels)
    assert not y.any()
    assert not metrics.dropped.any()


def test_a_bias_on_logits_chooses_alone() -> None:
    logits, bias = arrays()["logits"], jnp.linspace(-2, 2, E).at[1].set(200)
    for score in ("softmax", "sigmoid"):
        router = Router(TOP_K, score=score, bias_on="logits")
        got = jg.moe.top_k_routing(logits, router, selection_bias=bias)
        np.testing.assert_array_equal(got.experts, jax.lax.top_k(logits + bias, TOP_K)[1])
        scores = jax.nn.softmax(logits) if score == "softmax" else jax.nn.sigmoid(logits)
        expected = jnp.take_along_axis(scores, got.experts, axis=1)
        np.testing.assert_allclose(got.weights, expected / expected.sum(axis=1, keepdims=True), rtol=1e-6)


def test_jitter_changes_what_the_router_sees_and_not_the_experts() -> None:
    x, router = arrays()["x"], Router(E, jitter=0.25)  # All experts, so that weights alone change.
    layer = jg.linen.MoEMlp(E, F, router)
    variables, key = layer.init(jax.random.key(0), x), jax.random.key(7)
    nnx_layer = jg.nnx.MoEMlp(K, num_experts=E, hidden_features=F, router=router, rngs=nnx.Rngs(0))
    jg.nnx.load_variables(nnx_layer, variables)
    noise = jax.random.uniform(key, x.shape, minval=0.75, maxval=1.25)
    logits = jnp.dot(x * noise, variables["params"]["router"]["kernel"])

    got = layer.apply(variables, x, jitter_key=key)[0]

    np.testing.assert_allclose(got, layer.apply(variables, x, routing=logits)[0], rtol=1e-3, atol=1e-4)
    assert np.abs(got - layer.apply(variables, x)[0]).max() > 0.01
    np.testing.assert_array_equal(nnx_layer(x, jitter_key=key)[0], got)
    # Numbers that bfloat16 cannot tell apart.
    fine = layer.clone(router=Router(E, jitter=2**-10))
    narrow = x.astype(jnp.bfloat16)
    assert np.abs(fine.apply(variables, narrow, jitter_key=key)[0] - fine.apply(variables, narrow)[0]).max() > 0
    for arguments in (dict(routing=logits), {}):
        plain = layer if arguments else layer.clone(router=Router(E))
        with pytest.raises(ValueError, match=r"^jitter_key needs a router with jitter, and no routing that is given\."):
            plain.apply(variables, x, jitter_key=key, **arguments)


def test_a_layer_with_a_selection_bias_takes_a_routing() -> None:
    given = arrays()
    options: Any = dict(num_experts=E, hidden_features=F, router=Router(TOP_K, use_selection_bias=True))
    layer, model = jg.linen.MoEMlp(**options), jg.nnx.MoEMlp(K, **options, rngs=nnx.Rngs(0))
    routing = Routing(own_choice(), given["weights"])
    variables = jg.nnx.linen_variables(model)
    y, _ = jax.jit(functools.partial(layer.apply, routing=routing))(variables, given["x"])
    np.testing.assert_allclose(model(given["x"], routing=routing)[0], y, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="selection_bias is for logits"):
        model(given["x"], routing=routing, selection_bias=jnp.zeros(E))


def test_what_is_of_no_expert_has_no_gradient() -> None:
    given = arrays()
    experts, weights = jnp.where(jnp.arange(T) % 2, 1, -1)[:, None], jnp.where(jnp.arange(T) % 2, 2.0, jnp.nan)[:, None]
    router = Router(1, normalize=False, weights_on="input")

    def loss(x: jax.Array, weights: jax.Array) -> jax.Array:
        return jnp.sum(jg.moe.moe_mlp(x, Routing(experts, weights), given["gate_up"], given["down"], router=router)[0])

    for gradient in jax.jit(jax.grad(loss, (0, 1)))(given["x"], weights):
        assert jnp.isfinite(gradient).all()
        assert not gradient[::2].any()


def test_what_does_not_fit_is_refused() -> None:
    given = arrays()
    x, logits, gate_up, down = (given[name] for name in ("x", "logits", "gate_up", "down"))
    experts = own_choice()
    routing = Routing(experts, given["weights"], given["probabilities"])
    without = Routing(experts, given["weights"])
    refused: dict[str, dict[str, Any]] = {
        "router must be a jax_grouped.moe.Router": dict(routing=logits),
        "experts must have shape [T, top_k]": dict(routing=logits, router=ROUTER, experts=experts[:, :2]),
        "experts is for logits": dict(experts=experts),
        "selection_bias is for logits": dict(selection_bias=jnp.zeros(E)),
        "routing.experts must have top_k = 2 of router": dict(router=Router(2)),
        "routing.experts must have shape [T, k]": dict(routing=Routing(experts[1:], given["weights"][1:])),
        "routing.experts and routing.weights must have one": dict(routing=Routing(experts, given["weights"][:, :1])),
        "probabilities must have shape [T, E]": dict(
            routing=Routing(experts, given["weights"], given["probabilities"][1:])
        ),
        "routing must be logits or a jax_grouped.moe.Routing, got a tuple.": dict(routing=(logits, logits)),
        "mask must be of booleans": dict(mask=jnp.ones(T)),
        "mask must have shape [T]": dict(mask=jnp.ones(T - 1, bool)),
        "record must": dict(record=jnp.ones(())),
    }
    assert_refused(jg.moe.moe_mlp, dict(x=x, routing=routing, gate_up=gate_up, down=down), refused)
    assert_refused(
        Router,
        dict(top_k=2),
        {
            'weights_on="input" needs top_k=1': dict(weights_on="input"),
            "softcap must be a positive number": dict(softcap=0.0),
            "group_score must": dict(group_score="mean"),
            "use_bias=True needs use_kernel=True.": dict(use_bias=True, use_kernel=False),
        },
    )
    assert_refused(jg.moe.load_balancing_loss, dict(routing=without), {"load_balancing_loss needs": {}})
    layer = jg.linen.MoEMlp(E, F, Router(2, use_kernel=False))
    assert_refused(
        layer.init,
        dict(rngs=jax.random.key(0), x=x),
        {
            "A router with use_kernel=False": {},
            "mask must have the leading shape of x": dict(routing=logits, mask=jnp.ones((T, 1), bool)),
            "routing must have the leading shape of x": dict(routing=logits.reshape(2, -1, E)),
            "routing.weights must have the leading shape of x": dict(routing=Routing(experts, given["weights"][1:])),
        },
    )
