"""All that the devices send in a step of the whole layer under plain `jax.jit`, read from compiled programs."""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_grouped as jg
from tests.meshes import typed_mesh
from tests.parallel.sharded import Collective, sent

T, K, F, E, TOP_K = 64, 32, 256, 8, 2
BLOCK, CURRENT, DELAYED, MX = (
    jg.Float8BlockScaling(),
    jg.Float8CurrentScaling(),
    jg.DelayedScaling(),
    jg.MXFP8BlockScaling(),
)
#: With at most `TOP_K` devices along `expert`, tokens are gathered; with more, rows are exchanged.
GATHERED, EVERYTHING, EXCHANGED = (
    dict(expert=2, stored_features=2),
    dict(expert=2, feature=2, stored_features=2),
    dict(data=2, expert=4),
)
#: Weights are gathered by the layer along `fsdp`, and by XLA along `stored_features`.
STORED, STORED_FEATURES = dict(expert=2, fsdp=2), dict(expert=2, feature=2, fsdp=2)
STORED_EXCHANGED = dict(expert=4, fsdp=2)


@pytest.mark.parametrize(
    ("kind", "axes", "recipe"),
    [
        ("auto", GATHERED, DELAYED),
        ("auto", STORED, CURRENT),
        ("auto", STORED_FEATURES, DELAYED),
        ("auto", EXCHANGED, BLOCK),
        ("auto", STORED_EXCHANGED, MX),
        ("explicit", EVERYTHING, BLOCK),
        ("explicit", STORED, None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, jg.Recipe) else str(value),
)
def test_a_step_of_a_layer_sends_what_is_promised(kind: str, axes: dict[str, int], recipe: jg.Recipe | None) -> None:
    got, expected = by_rows(sent(compiled_step(kind, axes, recipe))), promised(axes, recipe)

    if jax.__version_info__ < (0, 11) and "fsdp" in axes:
        # Before JAX 0.11, XLA for CPUs removes barriers before it merges equal gathers of the two passes.
        assert {part: count for part, count in got.items() if part.kind != "all-gather"} == {
            part: count for part, count in expected.items() if part[0] != "all-gather"
        }
        assert got.keys() == expected.keys()
        assert got <= expected
    else:
        assert got == expected


def test_weights_of_a_rematerialised_layer_are_gathered_in_each_pass() -> None:
    got = sent(compiled_step("auto", GATHERED, None, remat=True))

    for shape in ((E // 2, K, 2, F), (E // 2, F, K)):
        assert got[Collective("all-gather", shape, "f32")] == 2


def test_weights_that_microbatches_share_are_gathered_in_fp8() -> None:
    mesh, both = typed_mesh("auto", GATHERED), P(("expert", "stored_features"))
    parallel = jg.moe.Parallel(experts="expert", batch=("stored_features",))
    options: dict[str, Any] = dict(recipe=jg.Float8BlockScaling(), cache_kernel=True, parallel=parallel)
    layer = jg.linen.MoEMlp(E, F, jg.moe.Router(TOP_K), **options)

    def loss(params: Any, cache: Any, x: jax.Array) -> Any:
        variables = {"params": params, "kernel_cache": cache}
        (y, _), updated = layer.apply(variables, x, is_first_microbatch=True, mutable=["kernel_cache"])
        return jnp.mean(y**2), updated

    x = jax.ShapeDtypeStruct((T, K), jnp.float32)
    shapes = jax.eval_shape(layer.init, jax.random.key(0), x)

    def on_mesh(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return leaf.update(sharding=NamedSharding(mesh, P() if "router" in jax.tree_util.keystr(path) else both))

    arguments = jax.tree.map_with_path(on_mesh, (shapes["params"], shapes["kernel_cache"], x))
    got = sent(jax.jit(jax.grad(loss, argnums=(0, 2), has_aux=True)).lower(*arguments).compile())

    weights = {part for part in got if part.kind == "all-gather" and math.prod(part.shape) >= E // 2 * K * F}
    # XLA for CPUs gathers FP8 numbers as float16.
    assert {part.dtype for part in weights} <= {"f16", "f8e4m3fn"}
    half = E // 2
    assert {part.shape for part in weights} == {(half, 2 * F, K), (half, K, F), (half, K, 2 * F), (half, F, K)}


def compiled_step(kind: str, axes: Mapping[str, int], recipe: jg.Recipe | None, *, remat: bool = False) -> Any:
    """Returns the gradients of parameters, states and tokens as one program; the axes are those of `programs`."""
    mesh = typed_mesh(kind, axes)
    names = "expert", "feature", "stored_features", "fsdp"
    expert, feature, stored_features, fsdp = (name if name in axes else None for name in names)
    stored = tuple(name for name in (expert, fsdp) if name is not None)
    tokens = tuple(name for name in axes if name != "feature")
    exchange: Any = "padded" if axes["expert"] > TOP_K else "auto"
    parallel = jg.moe.Parallel(experts=expert, features=feature, fsdp=fsdp, batch=tokens, exchange=exchange)
    make = nn.remat(jg.linen.MoEMlp) if remat else jg.linen.MoEMlp
    layer = make(E, F, jg.moe.Router(TOP_K), parallel=parallel, recipe=recipe)

    def on_mesh(leaf: Any, spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    def variable(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        kernels = {
            "router": P(),
            "gate_up": P(stored, stored_features, None, feature),
            "down": P(stored, feature, stored_features),
        }
        *_, name, last = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        return on_mesh(leaf, kernels[name] if last == "kernel" else P(expert))

    def loss(variables: Any, x: jax.Array) -> jax.Array:
        y, metrics = layer.apply(variables, x)
        return jnp.mean(y**2) + metrics.balance_loss

    x = jax.ShapeDtypeStruct((T, K), jnp.float32)
    variables = jax.tree.map_with_path(variable, jax.eval_shape(layer.init, jax.random.key(0), x))
    arguments = variables, on_mesh(x, P(tokens))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, arguments)
    return jax.jit(jax.grad(loss, argnums=(0, 1)), out_shardings=shardings).lower(*arguments).compile()


def by_rows(sent: Counter[Collective]) -> Counter[Collective]:
    """Counts rows of what all-to-alls send: XLA lists a part per device, and the layer may send in several pieces."""
    rows: Counter[Collective] = Counter()
    for part, count in sent.items():
        if part.kind == "all-to-all":
            rows[part._replace(shape=part.shape[-1:])] += count * math.prod(part.shape[:-1])
        else:
            rows[part] += count
    return rows


def promised(axes: Mapping[str, int], recipe: jg.Recipe | None) -> Counter[Any]:
    """Returns what docs/parallelism.md says that a device gets, in both passes."""
    devices, features = axes["expert"], F // axes.get("feature", 1)
    experts, tokens = E // devices, T * axes.get("feature", 1) // math.prod(axes.values())
    kernels = (experts, K, 2 * features), (experts, features, K)
    # The sums of the balance loss, and the router's gradient, transposed.
    sums: list[tuple[int, ...]] = [(E,), (E, K)]
    parts_of_sums = []
    gathers: list[tuple[tuple[int, ...], str]] = []
    rows: dict[tuple[int, str], int] = {}
    if "stored_features" in axes:  # Weights, once for both passes.
        gathers += [((experts, K, 2, features), "f32"), ((experts, features, K), "f32")]
    if "fsdp" in axes:  # Weights, those of each pass, and parts of the sums of their gradients.
        gathers += [part for shape in kernels for part in stored(shape, recipe)]
        parts_of_sums = [(shape[0] // axes["fsdp"], *shape[1:]) for shape in kernels]
    else:
        sums += kernels
    if "feature" in axes:  # Results, and gradients of tokens and of routing weights.
        sums += [(tokens, K), (tokens, K), (tokens, TOP_K)]
    if isinstance(recipe, jg.DelayedScaling):  # Largest values of tokens, of gradients, and of kernels in parts.
        sums += (6 if {"feature", "fsdp"} & {*axes} else 4) * [(experts,)]
        if jax.__version_info__ < (0, 11) and [*axes] == ["expert", "stored_features"]:
            # XLA does not see that all devices have found the same largest values of one of the kernels.
            sums.append((experts,))
    if devices <= TOP_K:  # Choices and weights; tokens and gradients of results.
        gathers += [((devices * tokens, TOP_K), "s32"), ((devices * tokens, TOP_K), "f32")]
        if isinstance(recipe, jg.Float8BlockScaling):
            gathers += 2 * [((devices, tokens, K), "u8"), ((devices, 1, tokens), "f32")]
        else:
            gathers += 2 * [((devices * tokens, K), "f32")]
        # Parts of the results and of the tokens' gradients; gradients of weights.
        rows = {(K, "f32"): 2 * devices * tokens, (TOP_K, "f32"): devices * tokens}
    else:  # Group sizes; rows, results and their gradients; weights and their gradients.
        gathers += [((devices, E), "s32")]
        sent = devices * tokens * TOP_K
        # Four FP8 numbers make a word, and so does the scale of up to 128.
        there = (K // 4 + 1, "s32") if isinstance(recipe, jg.Float8BlockScaling) else (K, "f32")
        rows = {(K, "f32"): 2 * sent, (1, "f32"): 2 * sent}
        rows[there] = rows.get(there, 0) + 2 * sent
    listed = Counter([*(("all-reduce", shape, "f32") for shape in sums), *(("all-gather", *part) for part in gathers)])
    listed += Counter(("reduce-scatter", shape, "f32") for shape in parts_of_sums)
    return listed + Counter({("all-to-all", (columns,), dtype): count for (columns, dtype), count in rows.items()})


def stored(shape: tuple[int, ...], recipe: jg.Recipe | None) -> list[tuple[tuple[int, ...], str]]:
    """Returns what gives a device the kernels of this shape, for the forward and for the backward pass."""
    if recipe is None:
        return 2 * [(shape, "f32")]
    scale = jax.ShapeDtypeStruct(shape[:1], jnp.float32) if isinstance(recipe, jg.DelayedScaling) else None
    kernel = jax.ShapeDtypeStruct(shape, jnp.float32)
    cache = jax.eval_shape(lambda kernel, scale: jg.quantize_kernel(kernel, recipe, scale=scale), kernel, scale)
    arrays = [cache.columnwise.data, cache.columnwise.scale_inv, cache.rowwise.data, cache.rowwise.scale_inv]
    if scale is not None:  # Largest values, for the next state.
        arrays.append(cache.amax)
    return [(array.shape, "u8" if array.dtype.itemsize == 1 else "f32") for array in arrays]
