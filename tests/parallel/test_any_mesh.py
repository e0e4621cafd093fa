"""Whatever is sharded over whatever axis, named to the layer or not, results and gradients are one device's.

Hypothesis draws the function, its sizes and recipe, a mesh, and how each argument is sharded: the same few examples in
every run, others with `JAX_GROUPED_EXAMPLES=250 pytest tests/parallel/test_any_mesh.py --hypothesis-seed=1`.
"""

import functools
import itertools
import math
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import PartitionSpec as P

import jax_grouped as jg
from tests.meshes import TYPES, need_devices, typed_mesh
from tests.parallel.programs import placed

#: Recipes, and the largest error of results and gradients relative to their norm. Sums of another order move numbers
#: to a neighbour in FP8. Current scaling has scales of each device's part: its results on several devices are as far
#: from those on one as these are from float32's, up to 0.25 for the router's gradient. Without a recipe, that gradient
#: is a difference of nearly equal numbers where a choice has an expert twice.
RECIPES = {
    None: (None, 3e-5),
    "block": (jg.Float8BlockScaling(), 0.03),
    "current": (jg.Float8CurrentScaling(), 0.35),
    "delayed": (jg.DelayedScaling(amax_history_len=2), 0.03),
    "mxfp8": (jg.MXFP8BlockScaling(), 0.03),
}
MESHES = (2, 2, 2), (8,), (2, 4), (2, 2), (4,), (2,)
TOP_K = 2
SETS_OF_NUMBERS = 3
EXAMPLES = os.environ.get("JAX_GROUPED_EXAMPLES")
OPERATIONS, LAYERS = ("ragged_dot", "grouped_dense", "grouped_mlp"), ("moe_mlp", "linen", "nnx")
ROLES = "experts", "features", "fsdp", "batch"


class Example(NamedTuple):
    """A function of sharded arrays: its name, the type and sizes of mesh axes `a`, `b`, ..., and `T, E, K, F`.

    `roles` are the axes that `Parallel` names, `methods` the exchanges of two layers one after the other. With
    `cached`, kernels are given quantized or converted. `specs` has the axes over which each dimension is split.
    `routed` tells what chooses the experts: the "logits", these with a "choice" that is forced, or a "routing".
    """

    function: str
    kind: str
    mesh: tuple[int, ...]
    recipe: str | None
    sizes: tuple[int, int, int, int]
    roles: Mapping[str, Any]
    methods: tuple[str, str]
    cached: bool
    specs: Mapping[str, P]
    #: How the first of the layers `moe_mlp` is routed, and whether it has a mask.
    routed: str = "logits"
    masked: bool = False
    #: Whether kernels have adapters.
    adapted: bool = False


def list_shapes(function: str, sizes: tuple[int, int, int, int]) -> dict[str, tuple[int, ...]]:
    T, E, K, F = sizes
    match function:
        case "ragged_dot" | "grouped_dense":
            return dict(x=(T, K), kernel=(E, K, F)) | (dict(bias=(E, F)) if function == "grouped_dense" else {})
        case "grouped_mlp":
            return dict(x=(T, K), gate_up=(E, K, 2 * F), down=(E, F, K))
    router = dict(logits=(T, E)) if function == "moe_mlp" else dict(router=(K, E))
    return dict(x=(T, K), **router, gate_up=(E, K, 2, F), down=(E, F, K))


@st.composite
def examples(draw: Callable[..., Any]) -> Example:
    # Hypothesis begins with the first of all choices: that example should be rich.
    function = draw(st.sampled_from([*LAYERS, *OPERATIONS]))
    recipe = None if function == "ragged_dot" else draw(st.sampled_from([*RECIPES]))
    least = 1 if jax.process_count() == 1 else jax.device_count()  # Every process has devices of the mesh.
    mesh = draw(st.sampled_from([mesh for mesh in MESHES if least <= math.prod(mesh) <= max(jax.device_count(), 2)]))
    kind = draw(st.sampled_from(list(TYPES)))
    sizes = draw(st.tuples(*map(st.sampled_from, ((64, 45, 8), (8, 6, 16), (32, 256), (64, 256)))))
    axes = dict(zip("abc", mesh, strict=False))
    roles: dict[str, Any] = {}
    if function in LAYERS:
        for axis, size in axes.items():
            role = draw(st.sampled_from([*ROLES, None]))
            stored = size * math.prod(axes[name] for role in ("experts", "fsdp") for name in roles.get(role, ()))
            divides = sizes[3] % (16 * size) == 0 if role == "features" else sizes[1] % stored == 0
            if role == "features" and divides:
                roles.setdefault(role, axis)
            elif role == "batch" or (role in ("experts", "fsdp") and divides):
                roles[role] = (*roles.get(role, ()), axis)
        roles.pop(None, None)
    # Routing of arrays whose types are sharded needs names: without, it is refused.
    splits = kind == "auto" or bool(roles) or function in OPERATIONS
    specs = {}
    for name, shape in list_shapes(function, sizes).items():
        free = [*axes]
        entries: list[tuple[str, ...]] = []
        for size in shape:
            if kind == "explicit" and function in ("linen", "nnx") and (name == "router" or (name == "x" and entries)):
                free = []  # Flax's own product of both would be ambiguous.
            entry: tuple[str, ...] = ()
            for axis in [*free]:
                parts = math.prod(axes[name] for name in (*entry, axis))
                if splits and size % parts == 0 and not draw(st.booleans()):
                    entry = (*entry, axis)
                    free.remove(axis)
            entries.append(entry)
        specs[name] = P(*(entry or None for entry in entries))
    methods = draw(st.sampled_from([*itertools.permutations(("auto", "padded", "gather"), 2)]))
    takes_cache = function in ("grouped_dense", "grouped_mlp", "moe_mlp")
    if recipe is not None:
        takes_cache &= recipe != "delayed" and "features" not in roles and (function, kind) != ("moe_mlp", "explicit")
    cached = takes_cache and not draw(st.booleans())
    routed = draw(st.sampled_from(["routing", "choice", "logits"])) if function in LAYERS else "logits"
    masked = function in LAYERS and not draw(st.booleans())
    adapted = function in ("grouped_dense", "grouped_mlp", "moe_mlp") and draw(st.booleans())
    return Example(function, kind, mesh, recipe, sizes, roles, methods, cached, specs, routed, masked, adapted)


def numbers(example: Example, seed: int) -> dict[str, np.ndarray]:
    """Returns arrays of these shapes, and the sizes of groups with a tail of NaN behind them."""
    rng = np.random.default_rng(seed)
    T, E, K, _ = example.sizes
    arrays = {}
    for name, shape in list_shapes(example.function, example.sizes).items():
        fan_in = 1 if name in ("x", "logits") else K if name == "router" else shape[1]
        arrays[name] = rng.standard_normal(shape, np.float32) * np.float32(fan_in**-0.5)
    cuts = np.sort(rng.integers(0, T + 1, E))  # Some groups are empty.
    arrays["group_sizes"] = np.diff(cuts, prepend=0).astype(np.int32)
    arrays["dy"] = rng.standard_normal((T, arrays[[*arrays][-2]].shape[-1]), np.float32)
    if example.adapted:
        for name in [name for name in ("kernel", "gate_up", "down") if name in arrays]:
            experts, rows, *features = arrays[name].shape
            arrays[f"{name}_a"] = rng.standard_normal((experts, rows, 4), np.float32) * np.float32(rows**-0.5)
            arrays[f"{name}_b"] = rng.standard_normal((experts, 4, *features), np.float32)
    if "logits" in arrays:
        arrays["logits"] += (seed % 3) * rng.standard_normal(E, np.float32)
    elif "router" not in arrays:
        arrays["x"][cuts[-1] :] = np.nan
    if example.routed != "logits":
        arrays["choice"] = rng.integers(-1, E + 1, (T, TOP_K), np.int32)
        arrays["weights"] = rng.standard_normal((T, TOP_K), np.float32)
    if example.masked:
        arrays["mask"] = rng.random(T) < 0.7
        arrays["x"][~arrays["mask"]] = np.nan
    return arrays


def apply(
    example: Example, options: Mapping[str, Any], roles: Mapping[str, Any], arrays: Mapping[str, jax.Array], state: Any
) -> Any:
    """Returns the function's result, and what else it returns."""
    recipe, _ = RECIPES[example.recipe]
    x, sizes, *_ = arrays["x"], arrays["group_sizes"]
    same: dict[str, Any] = dict(recipe=recipe, precision="highest" if recipe is None else None)

    def weights(name: str) -> jg.moe.Weights:
        kernel, cache = arrays[name], None
        if example.cached:
            cache = kernel if recipe is None else jg.quantize_kernel(kernel.reshape(*kernel.shape[:2], -1), recipe)
        lora = jg.Lora(arrays[f"{name}_a"], arrays[f"{name}_b"]) if example.adapted else None
        return jg.moe.Weights(kernel, arrays.get("bias"), cache, state, lora=lora)

    if example.function == "ragged_dot":
        return jg.ragged_dot(x, arrays["kernel"], sizes, precision="highest", **options), ()
    if example.function == "grouped_dense":
        return jg.grouped_dense(x, group_sizes=sizes, **weights("kernel")._asdict(), **same, **options), ()
    if example.function == "grouped_mlp":
        return jg.moe.grouped_mlp(x, weights("gate_up"), weights("down"), sizes, **same, **options), ()
    parallels = [jg.moe.Parallel(**roles, exchange=method, dispatch="input") for method in example.methods]
    router = jg.moe.Router(TOP_K)
    routing: dict[str, Any] = dict(mask=arrays.get("mask"))
    if example.routed == "choice":
        routing["experts"] = arrays["choice"]
    if example.routed == "routing":
        probabilities = jax.nn.softmax(arrays["logits"]) if "logits" in arrays else None
        routing["routing"] = jg.moe.Routing(arrays["choice"], arrays["weights"], probabilities)
    if example.function == "moe_mlp":
        loads, kernels = [], dict(gate_up=weights("gate_up"), down=weights("down"))
        for parallel in parallels:
            options = dict(routing=arrays["logits"]) | routing
            y, metrics = jg.moe.moe_mlp(x, **options, **kernels, router=router, parallel=parallel, **same)
            x = jnp.where(jnp.isnan(x), 0, x) + 0.5 * y
            loads.append((metrics.expert_load, metrics.balance_loss, metrics.z_loss, metrics.mean_probabilities))
        return x, loads
    same |= dict(num_experts=sizes.size, hidden_features=example.sizes[3], router=router, parallel=parallels[0])
    if example.function == "linen":
        variables = {"params": {name: {"kernel": arrays[name]} for name in ("router", "gate_up", "down")}}
        if state is not None:
            variables |= {"_overwrite_with_gradient": dict.fromkeys(("gate_up", "down"), vars(state))}
        y, metrics = jg.linen.MoEMlp(**same).apply(variables, x, **routing)
    else:
        layer = nnx.eval_shape(lambda: jg.nnx.MoEMlp(x.shape[1], **same, rngs=nnx.Rngs(0)))
        layer.router.kernel = nnx.Param(arrays["router"])
        for name in ("gate_up", "down"):
            kernel = getattr(layer, name)
            kernel.kernel = nnx.Param(arrays[name])
            if state is not None:
                kernel.fp8_state = type(kernel.fp8_state)(state)
        y, metrics = layer(x, **routing)
    return y, (metrics.expert_load, metrics.balance_loss, metrics.z_loss, metrics.mean_probabilities)


def step(
    example: Example, options: Mapping[str, Any], roles: Mapping[str, Any], arrays: dict[str, jax.Array], state: Any
) -> Any:
    """Returns the result, the gradients of all arrays, the next states, and the metrics."""
    fixed = {name: arrays[name] for name in ("group_sizes", "dy", "choice", "mask") if name in arrays}

    def loss(arrays: dict[str, jax.Array], state: Any) -> tuple[jax.Array, Any]:
        y, more = apply(example, options, roles, arrays | fixed, state)
        return jnp.sum(jnp.where(jnp.isnan(y), 0, y) * fixed["dy"]), (y, more)

    differentiated = {name: array for name, array in arrays.items() if name not in fixed}
    gradients, (y, more) = jax.grad(loss, (0, 1), has_aux=True)(differentiated, state)
    return y, gradients, more


@pytest.mark.slow
@settings(
    max_examples=int(EXAMPLES or 8),
    derandomize=EXAMPLES is None,
    deadline=None,
    database=None,
    phases=[Phase.generate],  # Without shrinking: each of its steps would compile two programs.
    print_blob=False,
    suppress_health_check=list(HealthCheck),
)
@given(example=examples())
def test_sharded_arrays_give_what_one_device_gives(backend: str, example: Example) -> None:
    need_devices(2)
    mesh = typed_mesh(example.kind, dict(zip("abc", example.mesh, strict=False)))
    options: dict[str, Any] = {}
    if example.kind == "explicit" and example.function in OPERATIONS:
        options["out_sharding"] = P()
    on_mesh = jax.jit(functools.partial(step, example, options, example.roles))
    on_one = jax.jit(functools.partial(step, example, {}, {}))
    recipe, bound = RECIPES[example.recipe]
    bound += 1e-4 * (backend == "cuda")
    state = jg.Fp8State.initial(recipe, example.sizes[1]) if isinstance(recipe, jg.DelayedScaling) else None
    for seed in range(SETS_OF_NUMBERS):
        arrays = numbers(example, seed)
        split = {name: placed(mesh, array, example.specs.get(name, P())) for name, array in arrays.items()}
        got = on_mesh(split, jax.tree.map(lambda leaf: placed(mesh, leaf, P()), state))
        expected = on_one({name: jnp.asarray(array) for name, array in arrays.items()}, state)
        for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(expected), strict=True):
            whole = a if jax.process_count() == 1 else process_allgather(a, tiled=True)
            a, b = np.asarray(whole, np.float64), np.asarray(b, np.float64)
            error, size = np.linalg.norm(a - b), np.linalg.norm(b)
            assert error <= bound * size + 1e-6, f"{jax.tree_util.keystr(path)}: {error} of {size}, numbers {seed}"
