"""Layers under plain `jax.jit`, with arrays on a mesh: training is that of one device, and only what must travels."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_grouped as jg
from tests.meshes import make_mesh, typed_mesh
from tests.oracle import assert_trees_close
from tests.parallel import programs
from tests.parallel.programs import BLOCK, DELAYED, FP8_TOLERANCE
from tests.parallel.sharded import assert_rounded_once

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


@pytest.mark.parametrize(
    ("where", "axes", "recipe"),
    [("auto", dict(data=2, expert=4), BLOCK), ("shard_map", dict(data=2, expert=2, fsdp=2), None)],
    ids=str,
)
def test_gradients_of_bfloat16_experts_are_sums_that_are_rounded_once(
    backend: str, where: str, axes: dict[str, int], recipe: jg.Recipe | None
) -> None:
    del backend
    mesh, tokens, stored = make_mesh(axes), tuple(axes), tuple(name for name in axes if name != "data")
    named = {dict(expert="experts").get(name, name): name for name in stored}
    specs = dict.fromkeys(("gate_up", "down"), jg.moe.Weights(P(stored), P(stored)))
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

    def run_on_mesh(parameters: Any) -> Any:
        placed = jax.tree.map(lambda leaf, spec: put(mesh, leaf, *spec), parameters, specs)
        return jax.jit(run)(placed, *(put(mesh, array, tokens) for array in (x, logits)))

    assert_rounded_once(run_on_mesh, parameters)


@pytest.mark.parametrize(("where", "recipe"), [("explicit", DELAYED), ("shard_map", BLOCK)], ids=["explicit", "manual"])
def test_parts_of_experts_share_caches_and_accumulate(backend: str, where: str, recipe: jg.Recipe) -> None:
    mesh = typed_mesh("explicit" if where == "explicit" else "auto", dict(expert=2, fsdp=2))
    tokens = P(("expert", "fsdp"))
    options = dict(**SIZES, recipe=recipe, cache_kernel=True)
    parallel = jg.moe.Parallel(experts="expert", fsdp="fsdp", batch=("expert", "fsdp"))
    split = jg.linen.MoEMlp(**options, parallel=parallel)
    x = arrays()[0]
    variables = jax.jit(jg.linen.MoEMlp(**options).init)(jax.random.key(0), x)
    del variables[jg.linen.KERNEL_CACHE]
    into = {name: 3 * variables["params"][name]["kernel"] for name in ("gate_up", "down")}

    def gradients(layer: Any, variables: Any, into: Any, x: jax.Array) -> Any:
        _, cache = layer.apply(variables, x, is_first_microbatch=True, mutable=[jg.linen.KERNEL_CACHE])

        def loss(variables: Any) -> jax.Array:
            options = dict(is_first_microbatch=False, accumulate_into=into)
            return jnp.sum(jnp.sin(layer.apply({**variables, **cache}, x, **options)[0]))

        return jax.grad(loss)(variables)

    def spec(path: Any, _: Any) -> P:
        name = programs.find_name(path) if "down" in str(path) or "gate_up" in str(path) else "router"
        return P() if name == "router" else P("expert") if name.endswith(("scale", "history", "mark")) else tokens

    specs = jax.tree.map_with_path(spec, variables), {"gate_up": tokens, "down": tokens}
    placed = jax.tree.map(lambda leaf, spec: put(mesh, leaf, *spec), (variables, into), specs)
    step = functools.partial(gradients, split)
    if where == "shard_map":
        step = jax.shard_map(step, mesh=mesh, in_specs=(*specs, tokens), out_specs=specs[0])

    got = jax.jit(step)(*placed, put(mesh, x, ("expert", "fsdp")))

    expected = jax.jit(functools.partial(gradients, jg.linen.MoEMlp(**options)))(variables, into, x)
    assert_trees_close(got, expected, 10 * FP8_TOLERANCE[backend])


@pytest.mark.parametrize("spec", [P(None, None, "a"), P(None, "a")], ids=str)
def test_kernels_are_quantized_however_they_are_sharded_and_have_their_gradients_there(spec: P) -> None:
    mesh = make_mesh(dict(a=4))
    x, kernel = (np.random.default_rng(0).standard_normal(shape, np.float32) for shape in ((512, 256), (2, 256, 512)))

    @jax.jit
    def results(x: jax.Array, kernel: jax.Array, skip: jax.Array) -> Any:
        def loss(kernel: jax.Array) -> Any:
            cache = jg.quantize_kernel(kernel, BLOCK)
            later = jg.quantize_kernel(2 * kernel, BLOCK, previous=cache, skip=skip)
            y = jg.grouped_dense(x, kernel, np.int32([256, 256]), recipe=BLOCK, kernel_cache=cache)
            # Features are split into blocks. Along two of them, XLA would split over half of the axis.
            again = jg.grouped_dequantize(cache.rowwise, jnp.float32).reshape(kernel.shape)
            return jnp.sum(y**2), (cache, later, jax.lax.stop_gradient(again * kernel))

        gradient, quantized = jax.grad(loss, has_aux=True)(kernel)
        return quantized, gradient

    placed = put(mesh, x, "a"), put(mesh, kernel, *spec), put(mesh, jnp.array(False))
    program = results.lower(*placed).compile()
    quantized, gradient = program(*placed)

    assert gradient.sharding.spec == spec
    assert "reduce-scatter(" in program.as_text()
    expected, expected_gradient = results(x, kernel, jnp.array(False))
    jax.tree.map(np.testing.assert_array_equal, quantized, expected)
    assert_trees_close(gradient, expected_gradient, 1e-3)


def test_what_cannot_be_split_is_named() -> None:
    with pytest.raises(ValueError, match="The features axis 'expert' must be none of experts, fsdp and batch"):
        jg.moe.Parallel(features="expert", batch=("data", "expert"))
    with pytest.raises(ValueError, match="fsdp must be another axis than experts, got 'expert' for both"):
        jg.moe.Parallel(experts="expert", fsdp="expert")
    with pytest.raises(ValueError, match="fsdp must be another axis than experts, got 'b' for both"):
        jg.moe.Parallel(experts=("a", "b"), fsdp=("b", "c"))
    with pytest.raises(ValueError, match=r"experts must be different axes, got \('a', 'a'\)"):
        jg.moe.Parallel(experts=("a", "a"))
    # The type checker would refuse these too.
    with pytest.raises(TypeError, match=r"features must be the name of one mesh axis, got \('data', 'expert'\)"):
        jg.moe.Parallel(features=("data", "expert"))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="batch must be the name of a mesh axis or a sequence of names, got 3"):
        jg.moe.Parallel(batch=3)  # type: ignore[arg-type]
    assert jg.moe.Parallel(experts=("a",), fsdp=()) == jg.moe.Parallel(experts="a")
    assert jg.moe.Parallel(experts=("a", "b"), fsdp="c", batch="d").token_axes == ("d", "c", "a", "b")

    mesh = make_mesh(dict(data=2, expert=2))
    mixed = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto, AxisType.Explicit))
    x, logits, gate_up, down = (put(mesh, array) for array in arrays())
    cached = jg.moe.Weights(gate_up, kernel_cache=jg.quantize_kernel(jnp.ones((E, K, 2 * F)), BLOCK))
    accumulating = jg.moe.Weights(down, dkernel_accumulator=down)
    other = jg.Float8BlockScaling(pow2_scales=not BLOCK.pow2_scales)
    three = x, jnp.ones((T, 3)), jnp.ones((3, K, 2 * F)), jnp.ones((3, F, K))
    by_experts: dict[str, Any] = dict(experts="expert")
    for given, axes, recipe, message in (
        (three, by_experts, None, r"down must have experts in a multiple of 2, the devices along \['expert'"),
        ((x, logits, cached, down), dict(features="expert"), BLOCK, "A kernel cache cannot be split over the features"),
        ((x, logits, cached, down), by_experts, other, r"recipe.pow2_scales must be"),
        ([put(mixed, array) for array in arrays()], by_experts, None, "The axes of the mesh must be all Auto or all"),
        (
            (x, logits, gate_up, accumulating),
            dict(batch="data"),
            None,
            r"dkernel_accumulator cannot be added to where mesh axes \['data'\] split",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            jg.moe.moe_mlp(*given, router=jg.moe.Router(1), parallel=jg.moe.Parallel(**axes), recipe=recipe)

    layer = functools.partial(jg.moe.moe_mlp, router=jg.moe.Router(1), parallel=jg.moe.Parallel(fsdp="data"))
    split = jax.shard_map(layer, mesh=mesh, in_specs=(P(), P(), P("data"), P("data")), out_specs=P("data"))
    with pytest.raises(ValueError, match=r"x must be split over the mesh axis 'data' \(in_specs"):
        jax.eval_shape(split, x, logits, gate_up, down)
    layer = functools.partial(jg.moe.moe_mlp, router=jg.moe.Router(1), parallel=PARALLEL)
    options = dict(in_specs=P("data"), out_specs=P("data"), axis_names={"data"}, check_vma=False)
    with pytest.raises(ValueError, match=r"splits some of the mesh axes \['data', 'expert'\], but not \['expert'\]"):
        jax.eval_shape(jax.shard_map(layer, mesh=mesh, **options), x, logits, gate_up, down)


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
    layer, split = jg.linen.MoEMlp(**options), jg.linen.MoEMlp(**options, parallel=PARALLEL)
    x = arrays()[0].reshape(8, 8, K)
    variables = jax.tree.map(
        lambda leaf: 0.3 * np.sin(np.arange(leaf.size, dtype=np.float32)).reshape(leaf.shape),
        jax.eval_shape(layer.init, jax.random.key(0), x),
    )

    def results(layer: Any, variables: Any, x: jax.Array) -> Any:
        def loss(params: Any, x: jax.Array) -> Any:
            y, metrics = layer.apply({**variables, "params": params}, x)
            return jnp.sum(jnp.sin(y)) + metrics.balance_loss + metrics.z_loss, (y, metrics.expert_load)

        return jax.value_and_grad(loss, (0, 1), has_aux=True)(variables["params"], x)

    placed = jax.tree.map(lambda leaf: put(mesh, leaf), variables), put(mesh, x, "data")
    got = jax.jit(results, static_argnums=0)(split, *placed)

    expected = jax.jit(results, static_argnums=0)(layer, variables, x)
    assert_trees_close(got, expected, 1e-4)
    with pytest.raises(ValueError, match="num_sequences must be a multiple of the 4 devices that the tokens are split"):
        jax.jit(results, static_argnums=0)(split, placed[0], put(mesh, x.reshape(2, 32, K)))


def test_arrays_without_a_sharding_and_no_tokens_are_split_over_the_mesh_that_is_set() -> None:
    x, logits, *kernels = arrays()

    def result(*arrays: jax.Array, **axes: Any) -> jax.Array:
        parallel = jg.moe.Parallel(**axes)
        return jg.moe.moe_mlp(*arrays, router=jg.moe.Router(TOP_K), parallel=parallel, precision="highest")[0]

    on_mesh = functools.partial(result, experts="expert")
    with jax.set_mesh(make_mesh(dict(expert=2))):
        compiled = jax.jit(on_mesh).lower(x, logits, *kernels).compile()
        empty = jax.jit(jax.grad(lambda *arrays: on_mesh(*arrays).sum()))(x[:0], logits[:0], *kernels)

    assert "all-to-all" in compiled.as_text()
    np.testing.assert_allclose(compiled(x, logits, *kernels), result(x, logits, *kernels), rtol=1e-5, atol=1e-4)
    assert empty.shape == (0, K)


def test_experts_are_split_without_the_name_of_an_axis() -> None:
    mesh = make_mesh(dict(data=2, expert=2))
    x, logits, *kernels = arrays()
    placed = [put(mesh, array, "data") for array in (x, logits)] + [put(mesh, kernel, "expert") for kernel in kernels]

    def step(*arrays: jax.Array) -> Any:
        def loss(*arrays: jax.Array) -> Any:
            y, _ = jg.moe.moe_mlp(*arrays, router=jg.moe.Router(TOP_K), precision="highest")
            return jnp.sum(jnp.sin(y)), y

        return jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True)(*arrays)

    got, expected = jax.jit(step)(*placed), jax.jit(step)(x, logits, *kernels)
    assert_trees_close(got, expected, 1e-3)
