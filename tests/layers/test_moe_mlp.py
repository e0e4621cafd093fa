"""`MoEMlp` in linen and NNX on one device: against a loop over tokens, and in every form of a Flax model."""

import functools
from collections.abc import Callable
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
from tests.meshes import data_mesh, make_mesh
from tests.operands import normal
from tests.parallel import programs

pytestmark = pytest.mark.slow

TOKENS, K, F, E, TOP_K = 24, 16, 32, 6, 2
ROUTER = Router(TOP_K)
OPTIONS = dict(num_experts=E, hidden_features=F, router=ROUTER, use_bias=True)
BLOCK = jg.Float8BlockScaling()

Params = dict[str, dict[str, jax.Array]]


@functools.cache
def x() -> jax.Array:
    with jax.ensure_compile_time_eval():  # The first call may be inside of a transformation.
        return normal(0, (TOKENS, K))


@functools.cache
def params() -> Params:
    """Returns the parameters of all layers here. Biases are not zero: zeros would hide their use."""
    whole = jax.jit(jg.linen.MoEMlp(**OPTIONS).init)(jax.random.key(1), x())["params"]
    return jax.tree.map(lambda p: p + 0.1 * normal(2, p.shape), whole)


def zeros(shapes: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


def nnx_layer(given: Params | None = None, **options: Any) -> jg.nnx.MoEMlp:
    layer = jg.nnx.MoEMlp(K, **(OPTIONS | options), rngs=nnx.Rngs(0))
    nnx.update(layer, given or params())
    return layer


@pytest.mark.parametrize(
    ("router", "bias", "activation"),
    [
        (ROUTER, None, "swiglu"),
        (Router(TOP_K, score="sigmoid", scale=2.5), np.array([9.0, 0, 0, 0, 0, 0]), GPT_OSS),
        (ROUTER, None, "relu_squared"),
    ],
    ids=["softmax", "sigmoid with bias and scale", "no gate"],
)
def test_every_token_gets_the_weighted_sum_of_its_experts(
    backend: str, router: Router, bias: Any, activation: Any
) -> None:
    options = dict(router=router, activation=activation, precision="highest")
    layer, halves = jg.linen.MoEMlp(**OPTIONS | options), (2,) if is_gated(activation) else ()
    # Numbers at both sides of the limit of clamping.
    at = jax.tree.map(lambda p: 5 * p, params())
    if not halves:
        at["gate_up"] = jax.tree.map(lambda p: p[..., 0, :], at["gate_up"])
    model = nnx_layer(at, **options)

    with jax.default_matmul_precision("highest"):
        y, metrics = jax.jit(layer.apply)({"params": at}, x(), selection_bias=bias)
        from_nnx, _ = nnx.jit(lambda model, x: model(x, selection_bias=bias))(model, x())

    made = jax.eval_shape(layer.init, jax.random.key(0), x())["params"]["gate_up"]
    assert (made["kernel"].shape, made["bias"].shape) == ((E, K, *halves, F), (E, *halves, F))
    apply = functools.partial(quantize_oracle.activation, activation)
    expected = oracle.a_loop_over_tokens(at, x(), TOP_K, router.score, bias, router.scale, apply)
    assert oracle.relative_error(y, expected) < 1e-5
    assert oracle.relative_error(from_nnx, expected) < 1e-5
    assert int(jnp.sum(metrics.expert_load)) == TOKENS * TOP_K
    assert metrics.dropped.tolist() == [0]
    if bias is not None:
        assert int(metrics.expert_load[0]) == TOKENS


SHARED = ("shared_gate_up", "shared_down")


def test_the_shared_expert_of_a_layer_is_a_network_of_its_own(backend: str) -> None:
    options = OPTIONS | dict(shared_features=2 * F)
    layer, model = jg.linen.MoEMlp(**options), jg.nnx.MoEMlp(K, **options, rngs=nnx.Rngs(3))
    variables = jg.nnx.linen_variables(model)

    def whole(params: Any) -> jax.Array:
        return jnp.sum(jnp.sin(layer.apply({"params": params}, x())[0]))

    def in_parts(params: Any) -> jax.Array:
        kernels = (params[name]["kernel"].reshape(1, K if "up" in name else 2 * F, -1) for name in SHARED)
        shared = jg.moe.grouped_mlp(x(), *kernels, jnp.array([TOKENS]))
        own = {name: part for name, part in params.items() if name not in SHARED}
        return jnp.sum(jnp.sin(jg.linen.MoEMlp(**OPTIONS).apply({"params": own}, x(), shared=shared)[0]))

    got = jax.jit(jax.value_and_grad(whole))(variables["params"])
    from_nnx = nnx.jit(lambda model: jnp.sum(jnp.sin(model(x())[0])))(model)

    expected = jax.jit(jax.value_and_grad(in_parts))(variables["params"])
    oracle.assert_trees_close(got, expected, 1e-4)
    np.testing.assert_allclose(from_nnx, expected[0], rtol=1e-4)


def test_a_selection_bias_is_kept_in_the_layer_and_moved_against_the_load(backend: str) -> None:
    options = OPTIONS | dict(router=Router(TOP_K, use_selection_bias=True))
    layer = jg.linen.MoEMlp(**options)
    state = jax.jit(layer.init)(jax.random.key(0), x())[jg.linen.ROUTER_STATE]
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
    biases = None, jnp.zeros(E)
    loads = nnx.jit(lambda model: [model(x(), selection_bias=bias)[1].expert_load for bias in biases])(model)
    np.testing.assert_array_equal(loads, [step(bias)[1], load])


def test_parameters_have_the_shapes_of_dense_experts() -> None:
    expected = {
        "router": {"kernel": (K, E)},
        "gate_up": {"kernel": (E, K, 2, F), "bias": (E, 2, F)},
        "down": {"kernel": (E, F, K), "bias": (E, K)},
    }
    for parallel in (Parallel(), Parallel(experts="no such axis", features="nor this")):
        layer = jg.linen.MoEMlp(**OPTIONS, parallel=parallel)
        assert jax.tree.map(jnp.shape, jax.eval_shape(layer.init, jax.random.key(0), x())["params"]) == expected
    assert nnx.to_pure_dict(jax.tree.map(jnp.shape, nnx.state(nnx_layer()))) == expected
    kernel = jg.linen.default_kernel_init(jax.random.key(0), (2, 64, 2, 128))
    np.testing.assert_allclose(kernel.std(), 64**-0.5, rtol=0.05)
    assert "gate_up" in nnx.tabulate(nnx_layer(), x())


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
    with jax.set_mesh(make_mesh({"expert": 1, "model": 1})), nn.logical_axis_rules(rules):
        model = jg.nnx.MoEMlp(K, **options, rngs=nnx.Rngs(0))

    assert nn.get_partition_spec(named)["params"] == expected
    linen_bias = nn.get_partition_spec(named)[jg.linen.ROUTER_STATE]["selection_bias"]
    assert linen_bias == P(*model.selection_bias.out_sharding) == P(None)
    for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        assert P(*leaf.out_sharding) == expected[path[0]][path[1]], path


def test_kernels_accumulate_into_what_is_given_and_microbatches_share_them() -> None:
    options = dict(OPTIONS, recipe=BLOCK, shared_features=F, dtype=jnp.float32, cache_kernel=True)
    layer, model = jg.linen.MoEMlp(**options), jg.nnx.MoEMlp(K, **options, rngs=nnx.Rngs(0))
    given = jg.nnx.linen_variables(model)["params"] | params()
    jg.nnx.load_variables(model, {"params": given})
    shapes = jax.eval_shape(layer.init, jax.random.key(3), x())["kernel_cache"]
    into = {name: jnp.cos(given[name]["kernel"]) for name in ("gate_up", "down", *SHARED)}
    some = {name: into[name] for name in ("down", "shared_down")}

    @jax.jit
    def step(params: Params, cache: Any, into: Any, is_first: jax.Array) -> Any:
        def loss(params: Params) -> Any:
            variables, more = {"params": params, "kernel_cache": cache}, dict(accumulate_into=into)
            (y, _), new = layer.apply(variables, x(), is_first_microbatch=is_first, mutable=["kernel_cache"], **more)
            return jnp.sum(jnp.sin(y)), new["kernel_cache"]

        return jax.value_and_grad(loss, has_aux=True)(params)

    def nnx_loss(model: jg.nnx.MoEMlp, into: Any) -> jax.Array:
        return jnp.sum(jnp.sin(model(x(), accumulate_into=into)[0]))

    empty = zeros(shapes)
    (loss, cache), got = step(given, empty, into, jnp.array(True))
    # Later microbatches read what is stored: kernels of NaN change nothing.
    unread = {name: part | {"kernel": part["kernel"] * jnp.nan} for name, part in given.items() if name != "router"}
    later = step(given | unread, cache, into, jnp.array(False))
    _, plain = step(given, empty, zeros(into), jnp.array(True))
    from_nnx = nnx.jit(nnx.grad(nnx_loss))(model, some)

    assert jnp.isfinite(loss)
    assert set(cache) == {"gate_up", "down", *SHARED}
    jax.tree.map(np.testing.assert_array_equal, later, ((loss, cache), got))
    for name, sums in into.items():
        np.testing.assert_allclose(got[name]["kernel"], plain[name]["kernel"] + sums, rtol=1e-5, atol=1e-5)
        expected = (got if name in some else plain)[name]["kernel"]
        np.testing.assert_allclose(from_nnx[name]["kernel"][...], expected, rtol=1e-5, atol=1e-5)
    for name in ("gate_up", "down"):
        np.testing.assert_array_equal(got[name]["bias"], plain[name]["bias"])


def gradients(layer: nn.Module, params: Params, x: jax.Array, *, devices: int = 1) -> Any:
    """Returns the gradients of a loss, or of a device's part of it."""

    def loss(params: Params) -> jax.Array:
        y, metrics = layer.apply({"params": params}, x)
        return jnp.sum(y**2) + metrics.balance_loss / devices

    return jax.grad(loss)(params)


@functools.cache
def expected_gradients() -> Any:
    return jax.jit(functools.partial(gradients, jg.linen.MoEMlp(**OPTIONS)))(params(), x())


@pytest.mark.parametrize("form", ["exported", "nnx, other shape", "one device", "other axes", "without checks", "pmap"])
def test_a_step_in_any_form_has_the_same_gradients(form: str) -> None:
    devices = 1 if form == "one device" else 2
    mesh, parallel = data_mesh(devices), Parallel(experts="data", batch="data")
    specs = {name: P() if name == "router" else P("data") for name in params()}
    options: dict[str, Any] = dict(mesh=mesh, in_specs=(specs, P("data")), out_specs=specs)

    def local(params: Params, x: jax.Array) -> Params:
        return gradients(jg.linen.MoEMlp(**OPTIONS, parallel=parallel), params, x, devices=devices)

    def summed(params: Params, x: jax.Array) -> Params:
        parts = local(params, x)
        return parts | {"router": jg.reduce_gradients(parts["router"], "data", mean=False)}

    def split(array: jax.Array) -> jax.Array:
        return array.reshape(devices, -1, *array.shape[1:])

    if form == "exported":
        rematerialised = nn.remat(jg.linen.MoEMlp)(**OPTIONS)
        got = exported(functools.partial(gradients, rematerialised), params(), x())(params(), x())
    elif form == "nnx, other shape":

        def loss(model: jg.nnx.MoEMlp, x: jax.Array) -> jax.Array:
            y, metrics = model(x)
            return jnp.sum(y**2) + metrics.balance_loss

        got = nnx.to_pure_dict(nnx.jit(nnx.grad(loss))(nnx_layer(), x().reshape(2, 3, 4, K)))
    elif form == "pmap":
        axes = {name: None if name == "router" else 0 for name in params()}
        given = {name: part if name == "router" else jax.tree.map(split, part) for name, part in params().items()}
        step = jax.pmap(summed, axis_name="data", in_axes=(axes, 0), out_axes=axes, devices=[*mesh.devices.ravel()])
        got = step(given, split(x()))
    elif form == "without checks":
        got = jax.jit(jax.shard_map(summed, **options, check_vma=False))(params(), x())
    else:
        if form == "other axes":
            options |= dict(mesh=make_mesh({"data": 2, "other": 2}), axis_names={"data"})
        step = jax.jit(jax.shard_map(local, **options))
        if form == "one device":
            assert "all_to_all" not in step.lower(params(), x()).as_text()
        got = step(params(), x())

    def compare(a: jax.Array, b: jax.Array) -> None:
        np.testing.assert_allclose(a.reshape(b.shape), b, rtol=1e-4, atol=1e-4)

    jax.tree.map(compare, got, expected_gradients())


STACK = dict(OPTIONS, recipe=jg.DelayedScaling(amax_history_len=2), cache_kernel=True)


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, is_first: jax.Array) -> tuple[jax.Array, jax.Array]:
        y, metrics = nn.remat(jg.linen.MoEMlp)(**STACK, name="experts")(x, is_first_microbatch=is_first)
        return x + y, metrics.balance_loss


def linen_stack() -> tuple[Any, Any, Callable[..., Any]]:
    """Two layers under `scan`: what is trained, the caches, and a function to the results and the next caches."""
    axes = {"params": 0, "_overwrite_with_gradient": 0, "kernel_cache": 0}
    stack = nn.scan(LinenBlock, variable_axes=axes, split_rngs={"params": True}, length=2, in_axes=nn.broadcast)()
    shapes = jax.eval_shape(stack.init, jax.random.key(0), x(), jnp.array(True))
    cache = {"kernel_cache": shapes.pop("kernel_cache")}

    def apply(trained: Any, cache: Any, x: jax.Array, is_first: jax.Array) -> Any:
        return stack.apply(trained | cache, x, is_first, mutable=["kernel_cache"])

    return programs.filled(shapes), zeros(cache), apply


def nnx_stack() -> tuple[Any, Any, Callable[..., Any]]:
    @nnx.split_rngs(splits=2)
    @nnx.vmap
    def stacked(rngs: nnx.Rngs) -> jg.nnx.MoEMlp:
        return jg.nnx.MoEMlp(K, **STACK, rngs=rngs)

    @nnx.scan(in_axes=(0, nnx.Carry, None), out_axes=(nnx.Carry, 0))
    @nnx.remat
    def scanned(layer: jg.nnx.MoEMlp, x: jax.Array, is_first: jax.Array) -> tuple[jax.Array, jax.Array]:
        y, metrics = layer(x, is_first_microbatch=is_first)
        return x + y, metrics.balance_loss

    model = nnx.eval_shape(lambda: stacked(nnx.Rngs(0)))
    graph, trained, cache = nnx.split(model, jg.nnx.TRAINED, jg.nnx.KernelCacheVariable)

    def apply(trained: Any, cache: Any, x: jax.Array, is_first: jax.Array) -> Any:
        model = nnx.merge(graph, trained, cache, copy=True)
        return scanned(model, x, is_first), nnx.state(model, jg.nnx.KernelCacheVariable)

    return programs.filled(trained), zeros(cache), apply


def loop_of_layers() -> tuple[Any, Any, Callable[..., Any]]:
    trained, cache, _ = linen_stack()

    def apply(trained: Any, cache: Any, x: jax.Array, is_first: jax.Array) -> Any:
        balance_losses = []
        for i in range(2):
            own = {name: jax.tree.map(lambda leaf, i=i: leaf[i], part["experts"]) for name, part in trained.items()}
            y, metrics = jg.linen.MoEMlp(**STACK | dict(cache_kernel=False)).apply(own, x)
            x = x + y
            balance_losses.append(metrics.balance_loss)
        return (x, jnp.stack(balance_losses)), cache

    return trained, cache, apply


def test_rematerialised_layers_under_scan_are_a_loop_with_a_cache_and_a_state_each(backend: str) -> None:
    def gradients_and_cache(stack: Callable[[], Any]) -> Any:
        trained, cache, apply = stack()

        @jax.jit
        def step(trained: Any, cache: Any, x: jax.Array, is_first: jax.Array) -> Any:
            def loss(trained: Any, x: jax.Array) -> Any:
                (y, balance_losses), after = apply(trained, cache, x, is_first)
                return jnp.mean(y**2) + jnp.sum(balance_losses), after

            return jax.grad(loss, (0, 1), has_aux=True)(trained, x)

        (gradients, dx), after = step(trained, cache, x(), jnp.array(True))
        if stack is not loop_of_layers:
            # Kernels that are NaN are not read again; the router's has no cache.
            unread = jax.tree.map_with_path(
                lambda path, leaf: leaf * np.nan if leaf.ndim > 3 and "kernel" in str(path[-2:]) else leaf, trained
            )
            (kept, _), _ = step(unread, after, x(), jnp.array(False))
            jax.tree.map(np.testing.assert_array_equal, kept, gradients)
        return programs.by_name({"experts": gradients} if stack is nnx_stack else gradients) | {"x": np.asarray(dx)}

    expected = gradients_and_cache(loop_of_layers)
    # The gradients of three kernels and two biases, the states of two kernels, and the gradient of the tokens.
    assert len(expected) == 5 + 2 * 9 + 1
    for stack in (linen_stack, nnx_stack):
        got = gradients_and_cache(stack)
        assert got.keys() == expected.keys()
        for name, array in expected.items():
            error = np.linalg.norm(got[name] - array)
            assert error <= programs.FP8_TOLERANCE[backend] * np.linalg.norm(array), name


@pytest.mark.parametrize("api", ["linen", "nnx"])
def test_a_scan_over_layers_keeps_caches_and_tokens_once(api: str) -> None:
    options: Any = OPTIONS | dict(recipe=BLOCK, cache_kernel=True, dtype=jnp.bfloat16)
    if api == "linen":
        layer = jg.linen.MoEMlp(**options)
        variables = jax.eval_shape(layer.init, jax.random.key(0), x(), is_first_microbatch=True)
        apply = functools.partial(layer.apply, is_first_microbatch=False)
    else:
        graph, variables = nnx.split(nnx.eval_shape(lambda: jg.nnx.MoEMlp(K, **options, rngs=nnx.Rngs(0))))

        def apply(variables: Any, x: jax.Array) -> Any:
            return nnx.merge(graph, variables)(x, is_first_microbatch=False)

    def loss(x: jax.Array, stack: Any) -> jax.Array:
        return jnp.sum(jax.lax.scan(lambda x, own: (x + apply(own, x)[0], None), x, stack)[0])

    stack = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((3, *leaf.shape), leaf.dtype), variables)
    step = jax.make_jaxpr(jax.grad(loss))(x().astype(jnp.bfloat16), stack)

    forward = next(equation for equation in step.eqns if equation.primitive.name == "scan")
    kept = {(out.aval.shape[1:], out.aval.dtype.name) for out in forward.outvars}
    assert ((TOKENS, K), "bfloat16") in kept
    assert ((TOKENS, K), "float32") not in kept  # The router's.
    assert not any(dtype.startswith("float8") for _, dtype in kept)


def test_a_step_with_mixed_types_is_traced_where_promotion_is_strict() -> None:
    flags = dict.fromkeys(["use_bias", "use_selection_bias", "balance_sequences"], True)
    router = Router(2, score="sigmoid", capacity_factor=0.9, **flags)
    tokens = jnp.ones((2, 8, 32), jnp.bfloat16)
    optimizer = jg.overwrite_with_gradient(optax.sgd(0.1), every=2)

    def step(layer: nn.Module, variables: dict[str, Any]) -> Any:
        def loss(trained: dict[str, Any]) -> jax.Array:
            y, metrics = layer.apply(variables | trained, tokens)
            return jnp.sum(y.astype(jnp.float32)) + metrics.balance_loss + metrics.z_loss

        trained = {name: part for name, part in variables.items() if name != "router_state"}
        updates, _ = optimizer.update(jax.grad(loss)(trained), optimizer.init(trained), trained)
        return jg.apply_updates(trained, updates)

    for recipe in (None, jg.DelayedScaling(margin=1), jg.MXFP8BlockScaling()):
        layer = jg.linen.MoEMlp(4, 16, router, recipe=recipe, shared_features=16, use_bias=True)
        with jax.numpy_dtype_promotion("strict"):
            variables = jax.eval_shape(layer.init, jax.random.key(0), tokens)
            jax.jit(functools.partial(step, layer)).lower(variables)
