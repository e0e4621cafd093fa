"""Layers under plain `jax.jit`, with arrays on a mesh: training is that of one device, and only what must travels."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_grouped as jg
from tests.meshes import mesh_of, typed_mesh
from tests.parallel import programs
from tests.parallel.programs import BLOCK, DELAYED, FLOAT32_TOLERANCE, FP8_TOLERANCE, assert_close
from tests.parallel.sharded import assert_rounded_once


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "api", "axes", "remat"),
    [
        ("auto", "linen", dict(data=2, expert=2, feature=2), True),
        ("auto", "nnx", dict(fsdp=2, expert=2, feature=2), False),
        ("explicit", "linen", dict(expert=2, stored_features=2), False),
        ("explicit", "nnx", dict(data=2, fsdp=4), True),
    ],
    ids=str,
)
def test_training_is_that_of_one_device(backend: str, kind: str, api: str, axes: dict[str, int], remat: bool) -> None:
    mesh = typed_mesh(kind, axes)
    model = programs.model(api, axes, remat=remat)

    got = programs.under_jit(model, mesh).run()

    assert_close(got, programs.on_one_device(jax.devices()[0], backend), FLOAT32_TOLERANCE)


@pytest.mark.slow
def test_training_with_delayed_scaling_is_that_of_one_device(backend: str) -> None:
    axes, options, steps = dict(data=2, expert=2, feature=2), dict(recipe=DELAYED, use_bias=False), 3
    mesh = typed_mesh("explicit", axes)

    got = programs.under_jit(programs.model("nnx", axes, **options), mesh).run(steps)

    expected = programs.on_one_device(jax.devices()[0], backend, steps=steps, **options)
    assert_close(got, expected, FP8_TOLERANCE[backend])


T, K, F, E, TOP_K = 64, 32, 48, 8, 2
SIZES: dict[str, Any] = dict(num_experts=E, router=jg.moe.Router(TOP_K), hidden_features=F)
PARALLEL = jg.moe.Parallel(experts="expert", batch=("data",))


def put(mesh: Mesh, array: jax.Array, *spec: Any) -> jax.Array:
    return jax.device_put(array, NamedSharding(mesh, P(*spec)))


def arrays() -> list[jax.Array]:
    """Returns tokens, logits, and the kernels of all experts."""
    rng = np.random.default_rng(0)
    shapes = (T, K), (T, E), (E, K, 2, F), (E, F, K)
    return [jnp.asarray(rng.standard_normal(shape, np.float32)) for shape in shapes]


def gathered_shapes(compiled: Any) -> list[tuple[int, ...]]:
    """Returns the shapes of what a compiled program gathers."""
    found = re.findall(r"= \w+\[([\d,]*)\]\S* all-gather\(", compiled.as_text())
    return [tuple(map(int, shape.split(","))) for shape in found]


def test_tokens_travel_between_experts_and_kernels_do_not() -> None:
    mesh = typed_mesh("explicit", dict(data=2, expert=2))
    x, logits, gate_up, down = arrays()
    placed = [put(mesh, array, ("data", "expert")) for array in (x, logits)] + [
        put(mesh, array, "expert") for array in (gate_up, down)
    ]

    def gradients(*arrays: jax.Array) -> Any:
        def loss(*arrays: jax.Array) -> jax.Array:
            y, metrics = jg.moe.moe_mlp(*arrays, router=jg.moe.Router(TOP_K), parallel=PARALLEL)
            return jnp.sum(y**2) + metrics.balance_loss

        return jax.grad(loss, argnums=(0, 1, 2, 3))(*arrays)

    compiled = jax.jit(gradients).lower(*placed).compile()

    # The tokens of both devices along the axis, their choices and weights, and the gradients of their results.
    assert sorted(gathered_shapes(compiled)) == sorted([(T // 2, TOP_K), (T // 2, TOP_K), (T // 2, K), (T // 2, K)])
    for gradient, argument in zip(compiled(*placed), placed, strict=True):
        assert gradient.sharding.is_equivalent_to(argument.sharding, argument.ndim)


@pytest.mark.parametrize(
    ("kind", "recipe"),
    [
        ("auto", jg.Float8BlockScaling()),
        ("explicit", jg.Float8CurrentScaling()),
        ("auto", jg.MXFP8BlockScaling()),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_each_device_quantizes_its_own_kernels(backend: str, kind: str, recipe: jg.Recipe) -> None:
    if backend == "cuda" and isinstance(recipe, jg.MXFP8BlockScaling):
        pytest.skip("products of MXFP8 need Blackwell")
    mesh = typed_mesh(kind, dict(expert=2))
    kernel = arrays()[3]

    def again(kernel: jax.Array, skip: jax.Array) -> Any:
        first = jg.quantize_kernel(kernel, recipe)
        return first, jg.quantize_kernel(2 * kernel, recipe, previous=first, skip=skip)

    placed = put(mesh, kernel, "expert"), put(mesh, jnp.array(False))
    compiled = jax.jit(again).lower(*placed).compile()

    assert "all-gather" not in compiled.as_text()
    expected = jax.jit(again)(kernel, jnp.array(False))
    jax.tree.map(np.testing.assert_array_equal, compiled(*placed), expected)


def test_microbatches_share_kernels_that_stay_on_their_devices(backend: str) -> None:
    del backend
    mesh = typed_mesh("explicit", dict(data=2, expert=2))
    options = dict(**SIZES, recipe=jg.Float8BlockScaling(), cache_kernel=True)
    split = jg.linen.MoEMlp(**options, parallel=PARALLEL)
    x = arrays()[0]
    variables = split.init(jax.random.key(0), x)
    placed = jax.tree.map_with_path(
        lambda path, of: put(mesh, of, "expert" if "router" not in str(path) else None), variables
    )

    @functools.partial(jax.jit, static_argnums=0)
    def results(layer: Any, variables: Any, x: jax.Array) -> Any:
        first, changed = layer.apply(variables, x, is_first_microbatch=True, mutable=[jg.linen.KERNEL_CACHE])
        return first[0], layer.apply({**variables, **changed}, x, is_first_microbatch=False)[0]

    compiled = results.lower(split, placed, put(mesh, x, "data")).compile()

    assert not [shape for shape in gathered_shapes(compiled) if shape[0] == E]
    expected = results(jg.linen.MoEMlp(**options), variables, x)
    for got, of_one in zip(compiled(placed, put(mesh, x, "data")), expected, strict=True):
        np.testing.assert_allclose(got, of_one, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("where", "axes", "recipe"),
    [
        ("auto", dict(data=2, expert=4), BLOCK),
        ("explicit", dict(data=4, feature=2), None),
        ("shard_map", dict(data=2, expert=2, fsdp=2), None),
    ],
    ids=str,
)
def test_gradients_of_bfloat16_experts_are_sums_that_are_rounded_once(
    backend: str, where: str, axes: dict[str, int], recipe: jg.Recipe | None
) -> None:
    del backend
    mesh = typed_mesh("explicit" if where == "explicit" else "auto", axes)
    named = {dict(expert="experts", feature="features").get(name, name): name for name in axes if name != "data"}
    tokens = tuple(name for name in axes if name != "feature")
    feature, stored = named.get("features"), tuple(name for name in tokens if name != "data") or None
    specs = {
        "gate_up": jg.moe.Weights(P(stored, None, None, feature), P(stored, None, feature)),
        "down": jg.moe.Weights(P(stored, feature), P(stored)),
    }
    x, logits, gate_up, down = arrays()
    parameters = {
        "gate_up": jg.moe.Weights(gate_up, jnp.sin(gate_up[:, 0])),
        "down": jg.moe.Weights(down, jnp.sin(down[:, 0])),
    }
    x = x.astype(jnp.bfloat16)

    def gradients(parameters: Any, x: jax.Array, logits: jax.Array) -> Any:
        def loss(parameters: Any) -> jax.Array:
            parallel = jg.moe.Parallel(batch=tokens, **named)
            options = dict(router=jg.moe.Router(TOP_K), parallel=parallel, recipe=recipe)
            return jnp.sum(jnp.sin(jg.moe.moe_mlp(x, logits, **parameters, **options)[0].astype(jnp.float32)))

        return jax.grad(loss)(parameters)

    run = gradients
    if where == "shard_map":
        run = jax.shard_map(gradients, mesh=mesh, in_specs=(specs, P(tokens), P(tokens)), out_specs=specs)

    def placed(parameters: Any) -> Any:
        return jax.tree.map(lambda of, spec: put(mesh, of, *spec), parameters, specs)

    of_tokens = [put(mesh, array, tokens) for array in (x, logits)]
    assert_rounded_once(lambda parameters: jax.jit(run)(placed(parameters), *of_tokens), parameters)


@pytest.mark.parametrize(("where", "recipe"), [("explicit", DELAYED), ("shard_map", BLOCK)], ids=["explicit", "manual"])
def test_parts_of_experts_share_caches_and_accumulate(backend: str, where: str, recipe: jg.Recipe) -> None:
    mesh = typed_mesh("explicit" if where == "explicit" else "auto", dict(expert=2, fsdp=2))
    tokens = P(("expert", "fsdp"))
    options = dict(**SIZES, recipe=recipe, cache_kernel=True)
    parallel = jg.moe.Parallel(experts="expert", fsdp="fsdp", batch=("expert", "fsdp"))
    split = jg.linen.MoEMlp(**options, parallel=parallel)
    x = arrays()[0]
    variables = jg.linen.MoEMlp(**options).init(jax.random.key(0), x)
    del variables[jg.linen.KERNEL_CACHE]
    into = {name: 3 * variables["params"][name]["kernel"] for name in ("gate_up", "down")}

    def gradients(layer: Any, variables: Any, into: Any, x: jax.Array) -> Any:
        _, cache = layer.apply(variables, x, is_first_microbatch=True, mutable=[jg.linen.KERNEL_CACHE])

        def loss(variables: Any) -> jax.Array:
            options = dict(is_first_microbatch=False, accumulate_into=into)
            return jnp.sum(jnp.sin(layer.apply({**variables, **cache}, x, **options)[0]))

        return jax.grad(loss)(variables)

    def spec(path: Any, _: Any) -> P:
        name = programs.name_of(path) if "down" in str(path) or "gate_up" in str(path) else "router"
        return P() if name == "router" else P("expert") if name.endswith(("scale", "history", "mark")) else tokens

    specs = jax.tree.map_with_path(spec, variables), {"gate_up": tokens, "down": tokens}
    placed = jax.tree.map(lambda of, spec: put(mesh, of, *spec), (variables, into), specs)
    step = functools.partial(gradients, split)
    if where == "shard_map":
        step = jax.shard_map(step, mesh=mesh, in_specs=(*specs, tokens), out_specs=specs[0])

    got = jax.jit(step)(*placed, put(mesh, x, ("expert", "fsdp")))

    expected = jax.jit(functools.partial(gradients, jg.linen.MoEMlp(**options)))(variables, into, x)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=10 * FP8_TOLERANCE[backend]), got, expected
    )


def test_what_cannot_be_split_is_named() -> None:
    mesh = mesh_of(dict(data=2, expert=2))
    layer = jg.linen.MoEMlp(**SIZES, parallel=PARALLEL)
    x = arrays()[0]
    variables = layer.init(jax.random.key(0), x)

    router, by_experts = jg.moe.Router(1), jg.moe.Parallel(experts="expert")
    three = x, jnp.ones((len(x), 3)), jnp.ones((3, K, 2 * F)), jnp.ones((3, F, K))
    with pytest.raises(ValueError, match=r"down must have experts in a multiple of 2, the devices along \['expert'"):
        jg.moe.moe_mlp(*(put(mesh, array) for array in three), router=router, parallel=by_experts)
    with pytest.raises(ValueError, match="There is no mesh axis 'data' here: put all arrays on one mesh with this"):
        layer.apply(variables, x)
    split = jax.shard_map(
        layer.apply, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"), axis_names={"data"}, check_vma=False
    )
    with pytest.raises(ValueError, match=r"splits some of the mesh axes \['data', 'expert'\], but not \['expert'\]"):
        jax.jit(split)(variables, x)

    cached = jg.quantize_kernel(jnp.ones((E, K, 2 * F)), recipe := jg.Float8BlockScaling())
    gate_up = jg.moe.Weights(jnp.ones((E, K, 2 * F)), kernel_cache=cached)
    with pytest.raises(ValueError, match="A kernel cache cannot be split over the features axis 'expert'"):
        by_features = dict(router=router, parallel=jg.moe.Parallel(features="expert"))
        jg.moe.moe_mlp(put(mesh, x), arrays()[1], gate_up, arrays()[3], recipe=recipe, **by_features)
    other = jg.Float8BlockScaling(pow2_scales=not recipe.pow2_scales)
    with pytest.raises(ValueError, match=r"recipe.pow2_scales must be"):
        split = dict(router=router, parallel=by_experts)
        jg.moe.moe_mlp(put(mesh, x), arrays()[1], gate_up, arrays()[3], recipe=other, **split)


@pytest.mark.parametrize("spec", [P(None, None, "a"), P(None, "a"), P("a")], ids=str)
def test_kernels_are_quantized_however_they_are_sharded(spec: P) -> None:
    mesh, recipe = mesh_of(dict(a=4)), jg.Float8BlockScaling()
    kernel = np.random.default_rng(0).standard_normal((4, 256, 256), np.float32)

    @jax.jit
    def quantized_and_back(kernel: jax.Array) -> Any:
        cache = jg.quantize_kernel(kernel, recipe)
        # Features are split into blocks. Along two of them, XLA would split over half of the axis.
        return cache, jg.grouped_dequantize(cache.rowwise, jnp.float32).reshape(kernel.shape) * kernel

    got = quantized_and_back(jax.device_put(kernel, NamedSharding(mesh, spec)))

    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(quantized_and_back(kernel)), strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


@pytest.mark.parametrize("spec", [P(None, None, "a"), P(None, "a")], ids=str)
def test_a_cached_kernel_has_its_gradient_where_it_is_stored(spec: P) -> None:
    mesh, recipe = mesh_of(dict(a=4)), jg.Float8BlockScaling()
    x, kernel = (
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, split))
        for shape, split in (((512, 256), P("a")), ((2, 256, 512), spec))
    )

    @jax.jit
    def gradient(x: jax.Array, kernel: jax.Array) -> jax.Array:
        def loss(kernel: jax.Array) -> jax.Array:
            cache = jg.quantize_kernel(kernel, recipe)
            return jnp.sum(jg.grouped_dense(x, kernel, np.int32([256, 256]), recipe=recipe, kernel_cache=cache) ** 2)

        return jax.grad(loss)(kernel)

    program = gradient.lower(x, kernel).compile()

    assert program.output_shardings.spec == spec
    assert "reduce-scatter(" in program.as_text()


def test_axes_that_split_two_things_are_refused() -> None:
    mesh = mesh_of(dict(data=2, expert=2))
    x, *others = (put(mesh, array) for array in arrays())

    with pytest.raises(ValueError, match="The features axis 'expert' must be none of experts, fsdp and batch"):
        jg.moe.Parallel(features="expert", batch=("data", "expert"))
    with pytest.raises(ValueError, match="fsdp must be another axis than experts, got 'expert' for both"):
        jg.moe.Parallel(experts="expert", fsdp="expert")
    with pytest.raises(TypeError, match=r"fsdp must be the name of one mesh axis, got \('data', 'expert'\)"):
        # The type checker would refuse several names too.
        jg.moe.Parallel(fsdp=("data", "expert"))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="batch must be a sequence of names of mesh axes, got 3"):
        # The type checker would refuse a number too.
        jg.moe.Parallel(batch=3)  # type: ignore[arg-type]
    router, by_experts = jg.moe.Router(1), jg.moe.Parallel(experts="expert")
    layer = functools.partial(jg.moe.moe_mlp, router=router, parallel=jg.moe.Parallel(fsdp="data"))
    split = jax.shard_map(layer, mesh=mesh, in_specs=(P(), P(), P("data"), P("data")), out_specs=P("data"))
    with pytest.raises(ValueError, match=r"x must be split over the mesh axis 'data' \(in_specs"):
        jax.eval_shape(split, x, *others)
    mixed = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto, AxisType.Explicit))
    with pytest.raises(ValueError, match="The axes of the mesh must be all Auto or all Explicit"):
        jg.moe.moe_mlp(*(put(mixed, array) for array in arrays()), router=router, parallel=by_experts)
    accumulating = jg.moe.Weights(others[2], dkernel_accumulator=others[2])
    with pytest.raises(ValueError, match=r"dkernel_accumulator cannot be added to where mesh axes \['data'\] split"):
        jg.moe.moe_mlp(x, *others[:2], accumulating, router=router, parallel=jg.moe.Parallel(batch="data"))


@pytest.mark.slow
def test_a_shared_expert_and_biases_of_the_router_are_those_of_one_device() -> None:
    mesh = typed_mesh("auto", dict(data=2, expert=2))
    options = dict(
        num_experts=E,
        hidden_features=F,
        router=jg.moe.Router(TOP_K, score="sigmoid", use_bias=True, use_selection_bias=True, balance_sequences=True),
        precision="highest",
        shared_features=24,
    )
    split = jg.linen.MoEMlp(**options, parallel=PARALLEL)
    x = arrays()[0].reshape(8, 8, K)
    variables = jax.tree.map(
        lambda of: of + 0.1 * jnp.sin(jnp.arange(of.size)).reshape(of.shape), split.init(jax.random.key(0), x)
    )

    def results(layer: Any, variables: Any, x: jax.Array) -> Any:
        def loss(params: Any, x: jax.Array) -> Any:
            y, metrics = layer.apply({**variables, "params": params}, x)
            return jnp.sum(jnp.sin(y)) + metrics.balance_loss + metrics.z_loss, (y, metrics.expert_load)

        return jax.value_and_grad(loss, (0, 1), has_aux=True)(variables["params"], x)

    placed = jax.tree.map(lambda of: put(mesh, of), variables), put(mesh, x, "data")
    got = jax.jit(results, static_argnums=0)(split, *placed)

    expected = results(jg.linen.MoEMlp(**options), variables, x)
    jax.tree.map(lambda *of: np.testing.assert_allclose(*of, rtol=1e-4, atol=1e-5), got, expected)
    with pytest.raises(ValueError, match="num_sequences must be a multiple of the 4 devices that the tokens are split"):
        jax.jit(results, static_argnums=0)(split, placed[0], put(mesh, x.reshape(2, 32, K)))


def test_no_tokens_are_sent_nowhere() -> None:
    mesh = mesh_of(dict(expert=2))
    x, logits, *kernels = (put(mesh, array) for array in arrays())
    router = jg.moe.Router(TOP_K)

    def loss(x: jax.Array, logits: jax.Array) -> jax.Array:
        return jg.moe.moe_mlp(x, logits, *kernels, router=router, parallel=jg.moe.Parallel(experts="expert"))[0].sum()

    assert jax.jit(jax.grad(loss))(x[:0], logits[:0]).shape == (0, K)


def test_arrays_without_a_sharding_are_split_over_the_mesh_that_is_set() -> None:
    mesh = mesh_of(dict(expert=2))
    x, logits, *kernels = arrays()

    def result(*arrays: jax.Array, **axes: Any) -> jax.Array:
        parallel = jg.moe.Parallel(**axes)
        return jg.moe.moe_mlp(*arrays, router=jg.moe.Router(TOP_K), parallel=parallel, precision="highest")[0]

    with jax.set_mesh(mesh):
        compiled = jax.jit(lambda *arrays: result(*arrays, experts="expert")).lower(x, logits, *kernels).compile()

    assert "all-to-all" in compiled.as_text()
    np.testing.assert_allclose(compiled(x, logits, *kernels), result(x, logits, *kernels), rtol=1e-5, atol=1e-4)


def test_experts_are_split_without_the_name_of_an_axis() -> None:
    mesh = mesh_of(dict(data=2, expert=2))
    x, logits, *kernels = arrays()
    placed = [put(mesh, array, "data") for array in (x, logits)] + [put(mesh, kernel, "expert") for kernel in kernels]

    def step(*arrays: jax.Array) -> Any:
        def loss(*arrays: jax.Array) -> Any:
            y, _ = jg.moe.moe_mlp(*arrays, router=jg.moe.Router(TOP_K), precision="highest")
            return jnp.sum(jnp.sin(y)), y

        return jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True)(*arrays)

    got, expected = jax.jit(step)(*placed), jax.jit(step)(x, logits, *kernels)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-3), got, expected)
